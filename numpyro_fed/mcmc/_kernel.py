"""What the Langevin kernels share as :class:`numpyro.infer.mcmc.MCMCKernel`: wiring, no mathematics."""

import copy
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import constrain_fn, transform_fn, unconstrain_fn
from numpyro.util import is_prng_key

from numpyro_fed.density import Factors, PooledModel
from numpyro_fed.engines.inline import round_one
from numpyro_fed.federation import Cost, Ledger
from numpyro_fed.mcmc.langevin import Chain, Plan, Tuning, federated
from numpyro_fed.mcmc.prepare import Options, prepare
from numpyro_fed.silos import Silos
from numpyro_fed.surrogates.gaussian import Surrogates, matvec

__all__ = ["LangevinKernel", "LangevinState"]


class LangevinState(NamedTuple):
    """State of a Langevin kernel after a round.

    :param i: rounds made.
    :param z: all latent sites in unconstrained space, local ones in pooled order.
    :param eps: coordinates of the local latents under the local map, ``(units, k)``, or ``None``.
    :param silo: the silo visited in this round.
    :param diverging: whether a step of this round was cut, or the round was undone because it left the reals.
    :param cut_rate: fraction of the round's steps whose conducive residual was cut (0 for an undone round).
    :param local_accept_prob: mean acceptance of the local latents' moves (1 without any).
    :param step_size: step size of the round's last step.
    :param inflation: predicted ratio of the chain's sd to the posterior's (NaN without a preconditioner, and under a schedule).
    :param visits: rounds at each silo so far, ``(S,)``.
    :param rng_key: key of the next round.
    :param tuning: the numbers of the kernel, one for all chains. They are part of the state because compiled
        programs outlive the data they were made for (``jit_model_args=True``).
    """

    i: Array
    z: dict[str, Array]
    eps: Array | None
    silo: Array
    diverging: Array
    cut_rate: Array
    local_accept_prob: Array
    step_size: Array
    inflation: Array
    visits: Array
    rng_key: Array
    tuning: Tuning


# axes of vectorised chains: all have their own state, but one tuning
_CHAINS = LangevinState._make((*[0] * (len(LangevinState._fields) - 1), None))


@partial(jax.jit, static_argnames=("plan",))
def _round(plan: Plan, state: LangevinState, silos: Silos) -> LangevinState:
    """One communication round: choose a silo, stay there for T local steps."""
    tuning = state.tuning
    rng_key, key_silo, key_stay = random.split(state.rng_key, 3)
    # one silo needs no draw, which is a tenth of the time of a short stay
    number = random.categorical(key_silo, jnp.log(tuning.selection)) if len(silos) > 1 else jnp.zeros((), jnp.int32)
    chain = Chain(plan.factors.ravel(state.z), state.i * plan.num_local_steps)
    private = None if tuning.latents is None else (state.eps, tuning.latents.rows)
    group = None if plan.units is None else plan.units.group
    chain, stats, private = round_one(federated(plan, tuning), key_stay, chain, private, silos, number, group)
    eps = None if private is None else private[0]
    return state._replace(
        i=state.i + 1,
        z=_positions(plan, tuning, chain.theta, eps, silos),
        eps=eps,
        silo=number.astype(jnp.int32),
        diverging=~stats.finite | (stats.cut_rate > 0),
        cut_rate=stats.cut_rate,
        local_accept_prob=stats.accept_prob,
        step_size=_step_size(plan, tuning, chain.num_steps - 1),
        visits=state.visits.at[number].add(1),
        rng_key=rng_key,
    )


def _step_size(plan: Plan, tuning: Tuning, count: Array) -> Array:
    if plan.schedule is None:
        return tuning.step_size
    return jnp.asarray(plan.schedule(count), tuning.step_size.dtype)


def _positions(plan: Plan, tuning: Tuning, theta: Array, eps: Array | None, silos: Silos) -> dict[str, Array]:
    sites = plan.factors.unravel(theta)
    if plan.units is None or tuning.latents is None or eps is None:
        return sites
    z = tuning.latents.rows.forward(tuning.latents.u(theta), eps)
    return {**sites, **plan.units.to_pooled(z, silos)}


@partial(jax.jit, static_argnames=("plan",))
def _start(plan: Plan, key: Array, z: dict[str, Array] | None, tuning: Tuning, silos: Silos) -> LangevinState:
    """The initial state: at ``z``, or at a draw of the surrogate posterior."""
    rng_key, key_theta, key_eps = random.split(key, 3)
    factors, units = plan.factors, plan.units
    shape, dtype = (factors.dim,), tuning.loc.dtype
    eps = None
    if z is not None:
        theta = factors.ravel(z).astype(dtype)
    elif tuning.scale is not None:
        theta = tuning.loc + matvec(tuning.scale, random.normal(key_theta, shape, dtype))
    else:
        theta = random.uniform(key_theta, shape, dtype, -2, 2)
    if units is not None and tuning.latents is not None:
        rows = tuning.latents.rows
        if z is None:
            eps = random.normal(key_eps, rows.mean.shape, dtype)
        else:
            eps = rows.inverse(tuning.latents.u(theta), units.from_pooled(z, silos).astype(dtype))
    zero = jnp.zeros((), dtype)
    return LangevinState(
        i=jnp.zeros((), jnp.int32),
        z=_positions(plan, tuning, theta, eps, silos),
        eps=eps,
        silo=jnp.zeros((), jnp.int32),
        diverging=jnp.zeros((), bool),
        cut_rate=zero,
        local_accept_prob=zero + 1,
        step_size=_step_size(plan, tuning, jnp.zeros((), jnp.int32)).astype(dtype),
        inflation=tuning.inflation,
        visits=jnp.zeros(len(silos), jnp.int32),
        rng_key=rng_key,
        tuning=tuning,
    )


def _check_start(got: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> None:
    wrong = sorted(k for k in {**got, **expected} if got.get(k) != expected.get(k))
    if wrong:
        raise ValueError(
            f"init_params: expected unconstrained values of all latent sites (a chain axis first where there are several "
            f"chains), of shapes { {k: expected.get(k, 'no such site') for k in wrong} }, got "
            f"{ {k: got.get(k, 'nothing') for k in wrong} }"
        )


class LangevinKernel(MCMCKernel):
    """Base of :class:`SGLD`, :class:`DSGLD` and :class:`FSGLD`; see there for the parameters."""

    sample_field = "z"
    default_fields = (
        "z", "diverging", "silo", "cut_rate", "local_accept_prob", "step_size", "inflation",
    )  # fmt: skip
    is_ensemble_kernel = False
    _pooled: ClassVar[bool] = False

    def __init__(self, model: Callable, options: Options) -> None:
        if not callable(model):
            raise TypeError(f"expected a model (a callable), got {type(model).__name__}")
        self._model = model
        self._options = options.checked()
        self._reset()

    def _reset(self) -> None:
        self._plan: Plan | None = None
        self._tuning: Tuning | None = None
        self._surrogates: Surrogates | None = None
        self._setup_cost = Cost()
        self._prepared_for: Silos | None = None
        self._merged: tuple[Silos, Silos] | None = None
        self._sample_fn: Callable | None = None
        self._shown = (-1.0, "")

    @property
    def model(self) -> PooledModel:
        """The model, callable with the arguments of ``mcmc.run``: a :class:`Silos` stands for its pooled rows."""
        return PooledModel(self._model)

    @property
    def surrogates(self) -> Surrogates | None:
        """The fitted surrogates; ``None`` before :meth:`init`, and where none are used."""
        return self._surrogates

    @property
    def factors(self) -> Factors | None:
        """The model's factors; ``None`` before :meth:`init`."""
        return None if self._plan is None else self._plan.factors

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: Mapping[str, Array] | None = None,
        model_args: tuple = (),
        model_kwargs: Mapping[str, Any] | None = None,
    ) -> LangevinState:
        """Check the model and the data, fit what is to be fitted (once per silos), and return the first state.

        :param init_params: unconstrained values of all latent sites, local ones in pooled order; by default
            draws of the surrogate posterior (without surrogates: uniform on (-2, 2)).
        """
        silos, extra = self._arguments(model_args, model_kwargs)
        self._prepare(silos, extra)
        silos = silos.with_shared(**extra)
        start = partial(_start, self._plan)
        z = None
        if init_params is not None:
            z = {k: jnp.asarray(v) for k, v in init_params.items()}
            for name, value in z.items():
                if not isinstance(value, jax.core.Tracer) and not np.isfinite(value).all():
                    raise ValueError(f"init_params: expected finite values, got NaN or infinity at site {name!r}")
            if extra:  # Gibbs hands the values of all blocks but HMC's over constrained
                z = unconstrain_fn(self.model, model_args, extra, z)
            chains = () if is_prng_key(rng_key) else (len(rng_key),)
            template = jax.eval_shape(start, random.key(0), None, self._tuning, silos).z
            _check_start({k: v.shape for k, v in z.items()}, {k: (*chains, *v.shape) for k, v in template.items()})
        if is_prng_key(rng_key):
            self._sample_fn = self._one
            return start(rng_key, z, self._tuning, silos)
        self._sample_fn = jax.vmap(self._one, in_axes=(_CHAINS, None, None), out_axes=_CHAINS)
        return jax.vmap(start, in_axes=(0, 0, None, None), out_axes=_CHAINS)(rng_key, z, self._tuning, silos)

    def sample(self, state: LangevinState, model_args: tuple, model_kwargs: Mapping[str, Any] | None) -> LangevinState:
        """One communication round."""
        assert self._sample_fn is not None, "`init` must be called before `sample`"
        return self._sample_fn(state, model_args, model_kwargs)

    def _one(self, state: LangevinState, model_args: tuple, model_kwargs: Any) -> LangevinState:
        silos, extra = self._arguments(model_args, model_kwargs)
        if len(silos) != state.visits.shape[-1]:
            raise ValueError(
                f"the state has visited {state.visits.shape[-1]} silos, the data have {len(silos)}; start a new MCMC"
            )
        return _round(self._plan, state, silos.with_shared(**extra))

    def _arguments(self, model_args: tuple, model_kwargs: Mapping[str, Any] | None) -> tuple[Silos, dict[str, Any]]:
        if len(model_args) != 1 or not isinstance(model_args[0], Silos):
            got = ", ".join(type(a).__name__ for a in model_args) or "no positional argument"
            raise ValueError(
                f"expected mcmc.run(rng_key, silos) with silos = fed.split(...) or fed.Silos(...), got {got}; "
                "one silo with all rows will do: fed.Silos({'all': {'x': x, 'y': y}})"
            )
        extra = dict(model_kwargs or {})
        unknown = set(extra) - {"_gibbs_sites"}
        if unknown:
            raise ValueError(f"arguments {sorted(unknown)} of mcmc.run: put all arguments of the model into the silos")
        silos = model_args[0]
        return (self._as_one(silos) if self._pooled else silos), extra

    def _as_one(self, silos: Silos) -> Silos:
        """The silos as one; kept, so that the same data are the same object in every call."""
        if self._merged is None or self._merged[0] != silos:
            if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(silos)):
                return silos.as_one()
            with jax.ensure_compile_time_eval():
                self._merged = (silos, silos.as_one())
        return self._merged[1]

    def _prepare(self, silos: Silos, extra: dict[str, Any]) -> None:
        key = silos.with_shared(**extra)
        if self._prepared_for is not None and self._prepared_for == key:
            return
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(key)):
            raise ValueError(
                "the kernel must see concrete data when it starts; expected chain_method 'vectorized', "
                "'parallel' or 'sequential' (as a block of Gibbs: 'sequential')"
            )
        with jax.ensure_compile_time_eval():
            self._plan, self._tuning, self._surrogates, self._setup_cost = prepare(
                self._model, silos, extra, self._options
            )
        self._prepared_for = key

    def postprocess_fn(self, model_args: tuple, model_kwargs: Mapping[str, Any] | None) -> Callable:
        """Unconstrained to constrained values, and deterministic sites."""
        if self._plan is None:
            return lambda z: z
        factors: Factors = self._plan.factors
        if factors.transforms is not None:
            return partial(transform_fn, factors.transforms)
        kwargs = dict(model_kwargs or {})
        return partial(constrain_fn, self.model, model_args, kwargs, return_deterministic=True)

    def refresh(self, state: LangevinState, model_args: tuple, model_kwargs: Any) -> LangevinState:
        """Nothing is cached of the conditioning sites."""
        return state

    def wrap_model(self, wrapper: Callable) -> "LangevinKernel":
        kernel = copy.copy(self)
        kernel._model = wrapper(self._model)
        kernel._reset()
        return kernel

    def get_diagnostics_str(self, state: LangevinState) -> str:
        # reading numbers waits for the round: only as often as the bar is drawn, so that rounds run ahead of it
        now = time.monotonic()
        if now < self._shown[0] + 0.1:
            return self._shown[1]
        parts = [f"step size {float(state.step_size):.2e}", f"silo {int(state.silo)}"]
        if self._plan is not None and self._plan.units is not None:
            parts.append(f"local acc. {float(state.local_accept_prob):.2f}")
        if self._plan is not None and self._plan.cut:
            parts.append(f"cut {float(state.cut_rate):.3f}")
        self._shown = (now, ", ".join(parts))
        return self._shown[1]

    def ledger(self, state: LangevinState) -> Ledger:
        """Rounds, gradient evaluations and bytes of each silo up to ``state`` (e.g. ``mcmc.last_state``), all chains.

        A visit sends the position and the step count down, and these and three statistics up. What surrogates and pilot
        cost, once, is counted too; the preconditioner and the surrogates' sum, which every silo is told once, are not.
        Gradients are those of the silo's term with respect to theta; Newton steps and Metropolis moves are not counted.
        """
        if self._plan is None or self._prepared_for is None:
            raise ValueError("expected a kernel that has run; call mcmc.run(rng_key, silos) first")
        visits = np.asarray(state.visits).reshape(-1, state.visits.shape[-1]).sum(0)
        item = self._tuning.loc.dtype.itemsize  # type: ignore[union-attr]
        chain = self._plan.factors.dim * item + 4
        visit = Cost(1, self._plan.num_local_steps, chain, chain + 3 * item)
        costs = [self._setup_cost + visit.times(int(v)) for v in visits]
        return Ledger(self._prepared_for.names, *zip(*costs, strict=True))

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_sample_fn"] = None
        state["_shown"] = (-math.inf, "")  # this machine's clock means nothing on another
        return state
