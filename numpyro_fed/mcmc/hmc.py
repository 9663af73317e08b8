"""Hamiltonian Monte Carlo as a kernel of :class:`numpyro.infer.MCMC`.

Its mathematics is in :mod:`numpyro_fed.mcmc.trajectory` and :mod:`numpyro_fed.mcmc.leapfrog`.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.util import is_prng_key

from numpyro_fed._typing import ModelArgs
from numpyro_fed.data.silos import Silos
from numpyro_fed.density.check import check_factorization
from numpyro_fed.density.nested import NestedUnits
from numpyro_fed.mcmc._base import FederatedKernel, check_start
from numpyro_fed.mcmc.checks import units_of
from numpyro_fed.mcmc.options import Whitened, check_init_from, gaussian_of
from numpyro_fed.mcmc.setup import factors_of
from numpyro_fed.mcmc.trajectory import (
    NO_START,
    HMCConfig,
    HMCState,
    Near,
    first_state,
    is_finite,
    one_draw,
)
from numpyro_fed.rounds.federated import Cost, Ledger


class HMC(FederatedKernel):
    r"""Hamiltonian Monte Carlo over silos, a kernel for :class:`numpyro.infer.MCMC`.

    **Law and bias.** Draws follow the posterior without bias: the kernel is pooled HMC, to
    rounding. The posterior needs no Gaussian shape, and latents may depend on each other within a
    silo in any way.

    **Communication.** A leapfrog step is a round. Each silo receives theta, and returns its
    gradient and the change of its energy, ``d + 1`` numbers for each chain. Its latents stay. A
    draw of all chains takes up to 128 rounds. FSGLD and conducive rounds need far fewer.

    With ``chain_method="vectorized"`` all chains share rounds, and what the warm-up learns.

    **Latents integrated out.** With ``marginal=True`` silos integrate their latents out, by
    quadrature around the modes at each position, and the draws are of the global sites alone. A
    draw of all chains then takes few rounds: three to five where that was measured. Its bias is
    that of the quadrature, which is least for one or two latents of an element.

    :param model: a NumPyro model with silo plates.
    :param trajectory_length: mean length of a trajectory, in posterior sds. Longer ones give draws
        that are less correlated, and cost more rounds.
    :param target_accept_prob: mean acceptance probability that the warm-up aims at. Raise it where
        trajectories diverge.
    :param marginal: whether silos integrate their latents out. Elements of a plate have to be
        independent given the global sites, or nested within those of another plate.
    :param init_from: the result of a variational fit. Chains start at draws of its q(theta), whose
        covariance scales their steps.
    :param validate: check before the first round that the factors sum to the pooled model.
    :raises ValueError: for a value out of its range, and at the run for a start whose density is
        not finite.

    **References.** Neal: MCMC using Hamiltonian dynamics, 2011. Hoffman, Gelman: The No-U-Turn
    sampler, JMLR 2014 (the warm-up).

    **Example**::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_fed as fed
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with fed.silo_plate("patients", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> silos = fed.Silos({"oslo": {"y": jnp.ones(3)}, "rome": {"y": jnp.zeros(3)}})
        >>> mcmc = numpyro.infer.MCMC(
        ...     fed.HMC(model), num_warmup=200, num_samples=300, num_chains=4,
        ...     chain_method="vectorized", progress_bar=False
        ... )
        >>> mcmc.run(jax.random.key(0), silos)
        >>> bool(abs(mcmc.get_samples()["mu"].mean() - 0.5) < 0.1)
        True
    """

    is_ensemble_kernel = True

    def __init__(
        self,
        model: Callable,
        *,
        trajectory_length: float = 2.0,
        target_accept_prob: float = 0.8,
        marginal: bool = False,
        init_from: Whitened | None = None,
        validate: bool = True,
    ) -> None:
        super().__init__(model)
        check_init_from(init_from)
        for name, value, most in (
            ("trajectory_length", trajectory_length, math.inf),
            ("target_accept_prob", target_accept_prob, 1.0),
        ):
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0 < value < most
            ):
                least = "0 < x" if most == math.inf else "0 < x < 1"
                raise ValueError(f"{name}: expected a number {least}, got {value!r}")
        self._length, self._target = float(trajectory_length), float(target_accept_prob)
        self._marginal, self._init_from, self._validate = marginal, init_from, validate
        self.near: Near | None = None

    @property
    def default_fields(self) -> tuple[str, ...]:
        """Fields of :class:`HMCState` that :class:`numpyro.infer.MCMC` collects."""
        return "z", "diverging", "accept_prob", "num_steps"

    def _arguments(
        self, model_args: tuple, model_kwargs: ModelArgs | None
    ) -> tuple[Silos, ModelArgs]:
        if model_kwargs:  # silos keep gradients, which conditioning on other sites would change
            raise ValueError(
                f"arguments {sorted(model_kwargs)}: HMC is no block of Gibbs; expected all "
                "arguments of the model in the silos, or fed.FSGLD as the block"
            )
        return super()._arguments(model_args, model_kwargs)

    def _settle(self, silos: Silos, extra: ModelArgs) -> None:
        factors = factors_of(self._model, silos, extra, ())
        if self._validate:
            check_factorization(factors, silos.with_shared(**extra))
        units = units_of(factors, silos) if self._marginal else None
        if units is not None and units.group is None and not isinstance(units, NestedUnits):
            raise ValueError(
                "marginal=True: latents of a silo depend on each other, and have no quadrature; "
                "expected marginal=False, where they move"
            )
        start = gaussian_of(self._init_from, factors)
        self.near = None if start is None else (jnp.asarray(start[0]), jnp.asarray(start[1]))
        self._config = HMCConfig(factors, self._length, self._target, 0, units)

    @property
    def config(self) -> HMCConfig:
        """Static facts of the kernel, which its setup makes."""
        return self._config

    def set_warmup(self, num_warmup: int) -> None:
        """Set the number of draws of the warm-up."""
        self._config = self._config._replace(num_warmup=num_warmup)

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: Mapping[str, Array] | None = None,
        model_args: tuple = (),
        model_kwargs: ModelArgs | None = None,
    ) -> HMCState:
        """Check model and data, once per data set, and return the first state.

        :param init_params: unconstrained values of all latent sites, local ones in pooled order; by
            default uniform on (-1, 1), or nearer to zero where the density is not finite.
        """
        silos, extra = self._arguments(model_args, model_kwargs)
        self.set_up(silos, extra)
        self.set_warmup(num_warmup)
        z, single = self._given(init_params, model_args, extra), is_prng_key(rng_key)
        num_chains = None if single else len(rng_key)
        given = (self._config, num_chains, rng_key if single else rng_key[0])
        if z is not None:
            shapes = jax.eval_shape(partial(first_state, *given), None, silos).z
            check_start({k: v.shape for k, v in z.items()}, {k: v.shape for k, v in shapes.items()})
        self._sample_fn = self.sample
        for reach in (1.0, 0.3, 0.1, 0.01):  # nearer to zero where the density is not finite
            state = first_state(*given, z, silos.with_shared(**extra), self.near, reach)
            if is_finite((state.here, [x.there for x in state.local])):
                return state
        raise ValueError(NO_START)

    def sample(
        self, state: HMCState, model_args: tuple, model_kwargs: ModelArgs | None
    ) -> HMCState:
        """Make a trajectory of all chains."""
        silos, extra = self._arguments(model_args, model_kwargs)
        return one_draw(self._config, state, silos.with_shared(**extra))

    def _diagnostics(self, state: HMCState) -> str:
        accept = float(np.mean(np.asarray(state.accept_prob)))
        steps = int(np.ravel(np.asarray(state.num_steps))[0])
        return f"{steps} steps of size {float(state.step_size):.2e}, acc. {accept:.2f}"

    def ledger(self, state: HMCState) -> Ledger:
        """Return rounds, gradient evaluations and bytes of each silo, over all chains.

        :param state: the state up to which to count, for example ``mcmc.last_state``.
        :raises ValueError: before the kernel has run.
        """
        if self._config is None or self._prepared_for is None:
            raise ValueError("expected a kernel that has run; call mcmc.run(rng_key, silos) first")
        rounds, chains = int(np.sum(np.asarray(state.rounds))), state.accepted.shape[-1]
        numbers, item = chains * (self._config.factors.dim + 1), state.here.at.dtype.itemsize
        each = Cost(1, chains, item * numbers, item * numbers).times(rounds)
        names = self._prepared_for.names
        return Ledger(names, *zip(*[each] * len(names), strict=True))
