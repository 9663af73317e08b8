"""Langevin chains over silos whose rows are elsewhere: the same rounds, driven from the host."""

import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.infer import MCMC
from numpyro.util import is_prng_key
from tqdm.auto import tqdm

from numpyro_fed._compat import fill_mcmc
from numpyro_fed.engines.inline import key_of
from numpyro_fed.engines.remote import Call, RemoteSilos
from numpyro_fed.mcmc._kernel import LangevinKernel
from numpyro_fed.mcmc.langevin import Chain, StayStats, federated
from numpyro_fed.mcmc.plan import Plan, Tuning
from numpyro_fed.mcmc.rounds import Departure, LangevinState, arrive, chain_axes, depart, first_state, start_keys, wait
from numpyro_fed.storage import SiloView

__all__ = ["RemoteMCMC", "StartLocal", "StayLocal"]


@dataclass(frozen=True)
class StartLocal:
    """A chain's first coordinates of the silo's latents: its part of what one draw for all silos would be."""

    plan: Plan

    def __call__(self, key: Array, message: None, rows: Any, view: SiloView) -> tuple[Array, Any]:
        units, silos = self.plan.units, view.silos
        assert units is not None
        if units.group is None:
            count, own = len(silos), view.number[None]
        else:
            sizes = np.asarray(silos.sizes[units.group])
            count = int(sizes.sum())
            own = jnp.asarray(np.cumsum(sizes) - sizes)[view.number] + view.positions(units.group)
        eps = random.normal(key, (count, *rows.shape[1:]), jnp.result_type(float))[own]
        return jnp.zeros(()), (eps, rows)


@dataclass(frozen=True)
class StayLocal:
    """A chain's stay at the silo."""

    plan: Plan

    def __call__(self, key: Array, message: tuple[Tuning, Chain], state: Any, view: SiloView) -> tuple[Any, Any]:
        tuning, chain = message
        return federated(self.plan, tuning).local(key, chain, state, view)


@partial(jax.jit, static_argnames=("plan", "num_silos"))
def _depart(plan: Plan, state: LangevinState, num_silos: int) -> tuple[Departure, list[tuple[Array, Chain]]]:
    """Of all chains where they go; of each the key of the stay there, and what travels."""
    axes = chain_axes(False)
    leave = jax.vmap(lambda s: depart(plan, s, num_silos), in_axes=(axes,))(state)
    keys = jax.vmap(key_of)(leave.key, leave.number)
    return leave, [(keys[c], jax.tree.map(lambda x, c=c: x[c], leave.chain)) for c in range(len(keys))]


@partial(jax.jit, static_argnames=("plan",))
def _arrive(
    plan: Plan, state: LangevinState, leave: Departure, reply: tuple[Chain, StayStats], silent: Array
) -> LangevinState:
    axes = chain_axes(False)

    def one(state: LangevinState, leave: Departure, reply: tuple[Chain, StayStats], silent: Array) -> LangevinState:
        return wait(state, arrive(plan, state, leave, *reply), leave.arrives, silent)

    return jax.vmap(one, in_axes=(axes, 0, 0, 0), out_axes=axes)(state, leave, reply, silent)


class RemoteMCMC(MCMC):
    """:class:`numpyro.infer.MCMC` over silos whose rows are elsewhere.

    Rounds are driven from here, and each chain's stay is made where the rows are; draws are those of ``MCMC`` with ``chain_method="vectorized"``. What is
    local to silos (latents in silo plates) stays there: the draws are of the global sites. A silo that does not answer has its round counted, and the
    chain waits, which leaves the choice of silos unbiased.

    :param sampler: a :class:`DSGLD` or :class:`FSGLD`.
    :param num_warmup: rounds before draws are kept.
    :param num_samples: rounds whose draws are kept.
    :param num_chains: chains; those at different silos are advanced at the same time.
    :param progress_bar: whether to show one.

    Example::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_fed as fed
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with fed.silo_plate("patients", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> silos = fed.Silos({"oslo": {"y": jnp.arange(5.0)}, "rome": {"y": jnp.arange(3.0)}})
        >>> remote = fed.RemoteSilos(silos, fed.Loopback(silos))
        >>> mcmc = fed.RemoteMCMC(fed.FSGLD(model), num_warmup=5, num_samples=10, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), remote)
        >>> mcmc.get_samples()["mu"].shape
        (10,)
    """

    def __init__(
        self,
        sampler: LangevinKernel,
        *,
        num_warmup: int,
        num_samples: int,
        num_chains: int = 1,
        progress_bar: bool = True,
    ) -> None:
        if not isinstance(sampler, LangevinKernel) or sampler._pooled:
            raise TypeError(f"expected a fed.DSGLD or fed.FSGLD, got {type(sampler).__name__}")
        super().__init__(
            sampler,
            num_warmup=num_warmup,
            num_samples=num_samples,
            num_chains=num_chains,
            chain_method="vectorized",
            progress_bar=progress_bar,
        )

    def run(self, rng_key: Array, silos: RemoteSilos, *, extra_fields: tuple = (), init_params: None = None) -> None:
        """Prepare, warm up and draw.

        :param rng_key: seed of all draws.
        :param silos: what is known of the silos, and the carrier that asks them.
        :param extra_fields: further fields of the state to collect.
        :raises ValueError: in words, for what does not go over silos elsewhere.
        :raises RuntimeError: naming the silos that did not answer while the fit was prepared.
        :warns UserWarning: after Ctrl-C; the draws so far are kept.
        """
        if init_params is not None:
            raise ValueError("init_params: local latents start in their silos; expected None")
        kernel = self.sampler
        _check(kernel, silos)
        kernel._prepare(silos, {})
        state, slots = self._start(rng_key, silos)
        told = [kernel._tuning.seen_by(n) for n in range(len(silos))]
        fields = tuple(dict.fromkeys((*kernel.default_fields, *extra_fields)))
        collected: dict[str, list] = {f: [] for f in fields}
        with tqdm(total=self.num_warmup + self.num_samples, disable=not self.progress_bar) as bar:
            for i in range(self.num_warmup + self.num_samples):
                try:
                    new = self._round(state, slots, told, silos)
                except KeyboardInterrupt:
                    if i <= self.num_warmup:
                        raise
                    warnings.warn(f"interrupted: the first {i - self.num_warmup} draws are kept", stacklevel=2)
                    break
                state = new
                bar.update()
                if i >= self.num_warmup:
                    for f, values in collected.items():
                        values.append(jax.tree.map(np.asarray, getattr(state, f)))
        silos.carrier.forget(slots[:, 0].tolist())
        states = {f: jax.tree.map(lambda *x: jnp.asarray(np.stack(x, 1)), *values) for f, values in collected.items()}
        states["z"] = jax.vmap(jax.vmap(partial(_constrained, kernel.factors, silos)))(states["z"])
        fill_mcmc(self, states, state, (silos,))

    def warmup(self, *args: Any, **kwargs: Any) -> None:
        """Refused: the rounds before draws are kept are part of :meth:`run`."""
        raise NotImplementedError(
            "warmup() is not built for silos that are elsewhere; expected run(), whose first num_warmup rounds are warm-up"
        )

    def _start(self, rng_key: Array, silos: RemoteSilos) -> tuple[LangevinState, np.ndarray]:
        """All chains' first states, and the slots of their local latents in each silo, ``(C, S)``."""
        kernel, plan, tuning = self.sampler, self.sampler._plan, self.sampler._tuning
        keys = rng_key
        if is_prng_key(rng_key):
            keys = random.split(rng_key, self.num_chains) if self.num_chains > 1 else rng_key[None]
        starts = start_keys(keys, kernel._options.distinct_silos)
        axes = chain_axes(False)
        here = replace(plan, units=None)  # of the local latents nothing is here
        first = jax.vmap(partial(first_state, here), in_axes=(0, 0, None, 0, None, None, None), out_axes=axes)
        state = first(starts[0], starts[1], None, starts[2], tuning, silos, None)
        slots = [silos.carrier.new_slot() for _ in keys]
        if plan.units is not None:
            keys_eps = jax.vmap(lambda key: random.split(key, 4)[2])(starts[0])
            local, rows = StartLocal(plan), tuning.latents.rows.slot
            every = range(len(silos))
            silos.ask_for_sure(
                [
                    Call(n, local, key, None, rows, slot)
                    for key, slot in zip(keys_eps, slots, strict=True)
                    for n in every
                ]
            )
        return state, np.repeat(np.array(slots)[:, None], len(silos), 1)

    def _round(self, state: LangevinState, slots: np.ndarray, told: list[Tuning], silos: RemoteSilos) -> LangevinState:
        """One round of all chains. New latents are kept beside the old ones, and count once the reply has come.

        :param told: what each silo is told of surrogates and step size.
        """
        plan = self.sampler._plan
        leave, each = _depart(plan, state, len(silos))
        numbers, local = np.asarray(leave.number), StayLocal(plan)
        calls = []
        for c, (n, (key, chain)) in enumerate(zip(numbers.tolist(), each, strict=True)):
            slot = None if plan.units is None else int(slots[c, n])
            calls.append(Call(n, local, key, (told[n], chain), slot, None if slot is None else slot ^ 1))
        replies = silos.ask(calls)
        silent = np.array([reply is None for reply in replies])
        slots[np.arange(len(numbers)), numbers] ^= ~silent
        filled = [_nothing(plan, chain) if x is None else x for x, (_, chain) in zip(replies, each, strict=True)]
        # in NumPy, which has no programs to dispatch
        return _arrive(plan, state, leave, jax.tree.map(lambda *x: np.stack(x), *filled), silent)


def _nothing(plan: Plan, chain: Chain) -> tuple[Chain, StayStats]:
    """In place of a reply that did not come, and not looked at."""
    zero: Any = np.zeros((), chain.theta.dtype)
    still: Any = np.zeros(chain.theta.shape, chain.theta.dtype) if plan.cut else None
    finite: Any = np.array(False)
    return chain, StayStats(zero, zero, zero, finite, still)


def _check(kernel: LangevinKernel, silos: Any) -> None:
    if not isinstance(silos, RemoteSilos):
        raise ValueError(
            f"expected fed.RemoteSilos, got {type(silos).__name__}; for silos at hand use numpyro.infer.MCMC"
        )
    options = kernel._options
    moments = isinstance(options.surrogate, str) and options.surrogate == "moments"
    refused = {
        "batch_size": (options.batch_size, options.batch_size is not None, "None"),
        "alpha": (options.alpha, isinstance(options.alpha, str), "a number"),
        "refresh_every": (options.refresh_every, options.refresh_every is not None, "None"),
        "no_answer": (options.no_answer, options.no_answer != 0, "0.0"),
        "num_kept": (options.num_kept, options.num_kept != 1, "1"),
        "surrogate": (options.surrogate, moments, '"score", "laplace" or a fed.surrogates.Surrogates'),
    }
    for name, (got, wrong, expected) in refused.items():
        if wrong:
            raise ValueError(f"{name}={got!r} is not built for silos that are elsewhere; expected {expected}")


def _constrained(factors: Any, silos: RemoteSilos, z: dict[str, Array]) -> dict[str, Array]:
    return factors.constrain_globals(z, silos.shared)
