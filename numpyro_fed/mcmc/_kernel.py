"""Base class of the Langevin kernels as :class:`numpyro.infer.mcmc.MCMCKernel`.

It connects setup and rounds to MCMC and holds no mathematics.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.util import is_prng_key

from numpyro_fed._typing import ModelArgs
from numpyro_fed.data.silos import Silos
from numpyro_fed.mcmc._base import FederatedKernel, check_start
from numpyro_fed.mcmc.adaptation import Adaptation, begin, check_seen, look_cost
from numpyro_fed.mcmc.config import LangevinConfig
from numpyro_fed.mcmc.options import Options
from numpyro_fed.mcmc.setup import make_setup
from numpyro_fed.mcmc.visit import (
    LangevinState,
    chain_axes,
    first_state,
    first_states,
    one_round,
)
from numpyro_fed.rounds.federated import Cost, Ledger


class LangevinKernel(FederatedKernel):
    """Base class of the Langevin kernels.

    :class:`~numpyro_fed.SGLD`, :class:`~numpyro_fed.DSGLD` and :class:`~numpyro_fed.FSGLD`
    document the parameters.
    """

    is_ensemble_kernel = False
    pooled: ClassVar[bool] = False

    def __init__(self, model: Callable, options: Options) -> None:
        super().__init__(model)
        self._options = options.checked()
        if options.step.learned and not self.pooled:
            raise ValueError(
                'step_size="adaptive" measures the noise of single steps, but a visit keeps its '
                'silo\'s noise for num_local_steps; expected "auto", whose pilot measures whole '
                "visits"
            )

    @property
    def config(self) -> LangevinConfig:
        """Static facts of the kernel, which its setup makes."""
        return self._config

    @property
    def default_fields(self) -> tuple[str, ...]:
        """Fields of :class:`LangevinState` that :class:`numpyro.infer.MCMC` collects."""
        fields = (
            "z",
            "diverging",
            "silo",
            "cut_rate",
            "local_accept_prob",
            "local_stuck",
            "step_size",
            "inflation",
        )
        return (*fields, "residual") if self._options.separates else fields

    def _reset(self) -> None:
        super()._reset()
        self._merged: tuple[Silos, Silos] | None = None

    def _settle(self, silos: Silos, extra: ModelArgs) -> None:
        setup = make_setup(self._model, silos, extra, self._options)
        self._config, self._tuning, self._surrogates, self._setup_cost = setup

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: Mapping[str, Array] | None = None,
        model_args: tuple = (),
        model_kwargs: ModelArgs | None = None,
    ) -> LangevinState:
        """Prepare the kernel for the data, and return the first state.

        The kernel checks the model and the data, and fits surrogates, local map and step size. It
        does so once per data set.

        :param init_params: unconstrained values of all latent sites, local ones in pooled order; by
            default draws of the surrogate posterior (without surrogates: uniform on (-2, 2)).
        """
        silos, extra = self._arguments(model_args, model_kwargs)
        self.set_up(silos, extra)
        silos = silos.with_shared(**extra)
        adaptation = self._adaptation(num_warmup)
        start = partial(first_state, self._config)
        z = self._given(init_params, model_args, extra)
        if z is not None:
            chains = () if is_prng_key(rng_key) else (len(rng_key),)
            template = jax.eval_shape(
                start,
                random.key(0),
                random.key(0),
                None,
                jnp.zeros(()),
                self._tuning,
                silos,
                adaptation,
            ).z
            check_start(
                {k: v.shape for k, v in z.items()},
                {k: (*chains, *v.shape) for k, v in template.items()},
            )
        if is_prng_key(rng_key):
            self._sample_fn = self._one
            state = start(*random.split(rng_key), z, jnp.zeros(()), self._tuning, silos, adaptation)
        else:
            axes = chain_axes(adaptation is not None)
            self._sample_fn = jax.vmap(self._one, in_axes=(axes, None, None), out_axes=axes)
            distinct = self._options.distinct
            state = first_states(
                self._config, distinct, rng_key, z, self._tuning, silos, adaptation
            )
        if state.adaptation is not None:
            check_seen(state.adaptation)
        return state

    def _adaptation(self, num_warmup: int) -> Adaptation | None:
        if not self._options.step.learned:
            return None
        dim, dtype = self._config.factors.dim, self._tuning.loc.dtype
        target = self._options.step.bias_target
        return begin(random.key(0), dim, (1 / 8, 1 / 8), target, num_warmup, dtype)

    def sample(
        self, state: LangevinState, model_args: tuple, model_kwargs: ModelArgs | None
    ) -> LangevinState:
        """Run one communication round, or one of its ``num_kept`` equal parts."""
        assert self._sample_fn is not None, "`init` must be called before `sample`"
        return self._sample_fn(state, model_args, model_kwargs)

    def _one(
        self, state: LangevinState, model_args: tuple, model_kwargs: ModelArgs | None
    ) -> LangevinState:
        silos, extra = self._arguments(model_args, model_kwargs)
        if len(silos) != state.visits.shape[-1]:
            raise ValueError(
                f"the state has visited {state.visits.shape[-1]} silos, the data have "
                f"{len(silos)}; start a new MCMC"
            )
        return one_round(self._config, state, silos.with_shared(**extra))

    def _arguments(
        self, model_args: tuple, model_kwargs: ModelArgs | None
    ) -> tuple[Silos, ModelArgs]:
        silos, extra = super()._arguments(model_args, model_kwargs)
        return (self._as_one(silos) if self.pooled else silos), extra

    def _as_one(self, silos: Silos) -> Silos:
        """Return all silos as one silo, the same object in every call with the same data."""
        if self._merged is None or self._merged[0] != silos:
            if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(silos)):
                return silos.as_one()
            with jax.ensure_compile_time_eval():
                self._merged = (silos, silos.as_one())
        return self._merged[1]

    def _diagnostics(self, state: LangevinState) -> str:
        parts = [f"step size {float(state.step_size):.2e}", f"silo {int(state.silo)}"]
        if self._config is not None and self._config.units is not None:
            parts.append(f"local acc. {float(state.local_accept_prob):.2f}")
        if self._config is not None and self._config.cut:
            parts.append(f"cut {float(state.cut_rate):.3f}")
        return ", ".join(parts)

    def ledger(self, state: LangevinState) -> Ledger:
        """Return rounds, gradient evaluations and bytes of each silo, over all chains.

        For each visit a silo receives the position and the step count. For each draw it sends these
        back, with two statistics and (FSGLD) the mean of the conducive residual e. The fit of the
        surrogates and the pilot count once. The preconditioner and the sum of the surrogates, which
        every silo receives once, do not count. Gradients are those of the silo's term with respect
        to theta; Newton steps and Metropolis moves do not count.

        :param state: the state up to which to count, for example ``mcmc.last_state``.
        :raises ValueError: before the kernel has run.
        """
        if self._config is None or self._prepared_for is None:
            raise ValueError("expected a kernel that has run; call mcmc.run(rng_key, silos) first")
        visits, silent = (
            np.asarray(x).reshape(-1, x.shape[-1]).sum(0) for x in (state.visits, state.unanswered)
        )
        config, item = self._config, self._tuning.loc.dtype.itemsize
        chain = config.factors.dim * item + 4
        draw = chain + (1 + (config.factors.dim if config.cut else 0)) * item + 1
        gradients = config.num_local_steps * (1 if self._tuning.anchor is None else 2)
        visit = Cost(1, gradients, chain, config.num_kept * draw)
        once = self._setup_cost
        if state.adaptation is not None:  # such a kernel pools all rows in one silo
            once += look_cost(state.adaptation, self._config.factors.dim)
        asked = Cost(1, 0, chain, 0)
        costs = [
            once + visit.times(int(v - n)) + asked.times(int(n))
            for v, n in zip(visits, silent, strict=True)
        ]
        return Ledger(self._prepared_for.names, *zip(*costs, strict=True))
