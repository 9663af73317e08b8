"""Langevin chains over silos whose rows are elsewhere: the same rounds, driven from the host."""

import hashlib
import re
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.infer import MCMC
from numpyro.util import is_prng_key
from tqdm.auto import tqdm

from numpyro_fed._compat import fill_mcmc
from numpyro_fed.engines.inline import key_of
from numpyro_fed.engines.remote import Call, RemoteSilos, SiloError
from numpyro_fed.engines.roster import fingerprint
from numpyro_fed.mcmc._kernel import LangevinKernel
from numpyro_fed.mcmc.checkpoint import Checkpoint
from numpyro_fed.mcmc.langevin import Chain, StayStats, federated
from numpyro_fed.mcmc.plan import Plan, Tuning
from numpyro_fed.mcmc.rounds import Departure, LangevinState, arrive, chain_axes, depart, first_state, start_keys, wait
from numpyro_fed.storage import SiloView

__all__ = ["RemoteMCMC", "StartLocal", "StayLocal", "TellLocal"]

_UNEVEN = 0.05  # largest difference of the silos' rates of answers that is not spoken of


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
class TellLocal:
    """What the silo is told once, and keeps: surrogates and step size."""

    def __call__(self, key: Array, message: Tuning, state: None, view: SiloView) -> tuple[Array, Tuning]:
        return jnp.zeros(()), message


@dataclass(frozen=True)
class StayLocal:
    """A chain's stay at the silo."""

    plan: Plan

    def __call__(self, key: Array, message: Chain, state: tuple[Tuning, Any], view: SiloView) -> tuple[Any, Any]:
        tuning, own = state
        return federated(self.plan, tuning).local(key, message, own, view)


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
    chain waits: unbiased if all are silent equally often, and warned of if not.

    :param sampler: a :class:`DSGLD` or :class:`FSGLD`.
    :param num_warmup: rounds before draws are kept.
    :param num_samples: rounds whose draws are kept.
    :param num_chains: chains; those at different silos are advanced at the same time.
    :param progress_bar: whether to show one.
    :param checkpoint: a file for the state after every ``checkpoint_every`` rounds. Where it exists, :meth:`run` prepares as before and goes on from
        there, with the draws that an undisturbed run would have had; delete it to start anew.
    :param checkpoint_every: so many rounds are lost at most, and what silos keep of them is kept until the next.

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
        checkpoint: str | Path | None = None,
        checkpoint_every: int = 10,
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
        self._checkpoint = Checkpoint(checkpoint, checkpoint_every)

    def run(self, rng_key: Array, silos: RemoteSilos, *, extra_fields: tuple = (), init_params: None = None) -> None:
        """Prepare, warm up and draw.

        :param rng_key: seed of all draws.
        :param silos: what is known of the silos, and the carrier that asks them.
        :param extra_fields: further fields of the state to collect.
        :raises ValueError: in words, for what does not go over silos elsewhere.
        :raises RuntimeError: naming the silos that did not answer while the fit was prepared, or the one that says that it cannot.
        :warns UserWarning: after Ctrl-C, and where a silo says that it cannot go on: the draws so far are kept; where silos answered unequally often, which leans
            the draws towards the others' data.
        """
        if init_params is not None:
            raise ValueError("init_params: local latents start in their silos; expected None")
        kernel, num_rounds = self.sampler, self.num_warmup + self.num_samples
        _check(kernel, silos)
        saved = self._checkpoint.load(silos.carrier)
        kernel._prepare(silos, {})
        going = self._start(rng_key, silos)
        fields = tuple(dict.fromkeys((*kernel.default_fields, *extra_fields)))
        facts = self._facts(rng_key, silos, fields) if self._checkpoint.place else {}
        if saved is not None:
            going = self._going_on(going, saved, facts)
        going = self._rounds(going, silos, fields, num_rounds, facts)
        states = {f: jax.tree.map(lambda *x: jnp.asarray(np.stack(x, 1)), *going.draws[f]) for f in fields}
        states["z"] = jax.vmap(jax.vmap(partial(_constrained, kernel.factors, silos)))(states["z"])
        fill_mcmc(self, states, going.state, (silos,))
        self._say_who_failed(going, silos)
        if not self._checkpoint.place:
            silos.carrier.forget([*going.slots.reshape(-1).tolist(), *going.told, *going.spent], now=True)

    def _rounds(
        self, going: "_Going", silos: RemoteSilos, fields: tuple[str, ...], num_rounds: int, facts: dict[str, Any]
    ) -> "_Going":
        """All rounds that are left, or those until they are interrupted."""
        with tqdm(total=num_rounds, initial=going.made, disable=not self.progress_bar) as bar:
            while going.made < num_rounds:
                try:
                    going = self._round(going, silos)
                except (KeyboardInterrupt, SiloError) as error:
                    if going.made <= self.num_warmup:
                        raise
                    why = f"interrupted{f' ({error})' if str(error) else ''}"
                    warnings.warn(f"{why}: the first {going.made - self.num_warmup} draws are kept", stacklevel=3)
                    break
                bar.update()
                if going.made > self.num_warmup:
                    for f in fields:
                        going.draws.setdefault(f, []).append(jax.tree.map(np.asarray, getattr(going.state, f)))
                if self._checkpoint.due(going.made, num_rounds):
                    self._checkpoint.save(
                        {**going._asdict(), "state": _without_tuning(going.state), **facts}, silos.carrier
                    )
                    silos.carrier.forget(going.spent)
                    going.spent.clear()
        return going

    def warmup(self, *args: Any, **kwargs: Any) -> None:
        """Refused: the rounds before draws are kept are part of :meth:`run`."""
        raise NotImplementedError(
            "warmup() is not built for silos that are elsewhere; expected run(), whose first num_warmup rounds are warm-up"
        )

    def _start(self, rng_key: Array, silos: RemoteSilos) -> "_Going":
        """All chains' first states; silos are told surrogates and step size, and make the first local latents."""
        kernel, plan, tuning = self.sampler, self.sampler._plan, self.sampler._tuning
        keys = rng_key
        if is_prng_key(rng_key):
            keys = random.split(rng_key, self.num_chains) if self.num_chains > 1 else rng_key[None]
        starts = start_keys(keys, kernel._options.distinct_silos)
        axes = chain_axes(False)
        here = replace(plan, units=None)  # of the local latents nothing is here
        first = jax.vmap(partial(first_state, here), in_axes=(0, 0, None, 0, None, None, None), out_axes=axes)
        state = first(starts[0], starts[1], None, starts[2], tuning, silos, None)
        carrier, every = silos.carrier, range(len(silos))
        told = [carrier.new_slot() for _ in every]
        calls = [Call(n, TellLocal(), random.key(0), tuning.seen_by(n), None, told[n]) for n in every]
        silos.ask_for_sure(calls)
        slots = np.zeros((len(keys), 0), np.int64)
        if plan.units is not None:
            keys_eps = jax.vmap(lambda key: random.split(key, 4)[2])(starts[0])
            slots = np.array([[carrier.new_slot() for _ in every] for _ in keys])
            local, rows = StartLocal(plan), tuning.latents.rows.slot
            pairs = zip(keys_eps, slots.tolist(), strict=True)
            silos.ask_for_sure([Call(n, local, key, None, rows, own[n]) for key, own in pairs for n in every])
        return _Going(state, slots, told, 0, {}, [], [])

    def _round(self, going: "_Going", silos: RemoteSilos) -> "_Going":
        """One round of all chains. New latents are kept beside the old ones, and count once the reply has come."""
        plan, state, slots = self.sampler._plan, going.state, going.slots.copy()
        leave, each = _depart(plan, state, len(silos))
        numbers, local, calls = np.asarray(leave.number).tolist(), StayLocal(plan), []
        for c, (n, (key, chain)) in enumerate(zip(numbers, each, strict=True)):
            own, new = (None, None) if plan.units is None else (int(slots[c, n]), silos.carrier.new_slot())
            calls.append(Call(n, local, key, chain, (going.told[n], own), new))
        replies = silos.ask(calls)
        bad = [n for n, reply in zip(numbers, replies, strict=True) if reply is not None and _is_nan(reply)]
        silent = np.array([reply is None or _is_nan(reply) for reply in replies])
        spent = list(going.spent)
        if plan.units is not None:
            for c, (call, missing) in enumerate(zip(calls, silent.tolist(), strict=True)):
                spent.append(call.write if missing else call.read[1])  # type: ignore[arg-type]
                slots[c, call.number] = call.read[1] if missing else call.write
        if not self._checkpoint.place:
            silos.carrier.forget(spent)
            spent = []
        filled = [
            _nothing(plan, chain) if missing else x
            for x, (_, chain), missing in zip(replies, each, silent, strict=True)
        ]
        # in NumPy, which has no programs to dispatch
        new_state = _arrive(plan, state, leave, jax.tree.map(lambda *x: np.stack(x), *filled), silent)
        return going._replace(state=new_state, slots=slots, made=going.made + 1, spent=spent, bad=[*going.bad, *bad])

    def _facts(self, rng_key: Array, silos: RemoteSilos, fields: tuple[str, ...]) -> dict[str, Any]:
        """What a checkpoint of the same run has."""
        kernel = self.sampler
        settled = [np.asarray(x) for x in jax.tree.leaves(kernel._tuning.without_rows())]
        key = random.key_data(rng_key) if jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key) else rng_key
        plan = kernel._plan
        return {
            "kernel": type(kernel).__name__,
            "stays": re.sub(r"0x[0-9a-f]+", "", repr((plan.num_local_steps, plan.cut, plan.schedule))),
            "sites": [[name, list(shape)] for name, shape in kernel.factors.global_sites],
            "silos": {name: {g: n[i] for g, n in silos.sizes.items()} for i, name in enumerate(silos.names)},
            "num_chains, num_warmup, num_samples": [self.num_chains, self.num_warmup, self.num_samples],
            "extra_fields": list(fields),
            "seed": np.asarray(key).tolist(),
            "model": fingerprint(kernel.factors, silos)["program"],
            "surrogates and step size": hashlib.sha256(b"".join(x.tobytes() for x in settled)).hexdigest(),
        }

    def _going_on(self, first: "_Going", saved: dict[str, Any], facts: dict[str, Any]) -> "_Going":
        """Where a checkpoint left off; silos have been told anew, and their first local latents are not needed."""
        for name, expected in facts.items():
            if saved.get(name) != expected:
                raise ValueError(
                    f"{self._checkpoint.place} is the checkpoint of another run: {name} {saved.get(name)}, expected {expected}; give another file, "
                    "or delete it to start anew"
                )
        going = _Going(**{name: saved[name] for name in _Going._fields})
        spent = [*going.spent, *going.told, *first.slots.reshape(-1).tolist()]
        return going._replace(state=going.state._replace(tuning=first.state.tuning), told=first.told, spent=spent)

    def _say_who_failed(self, going: "_Going", silos: RemoteSilos) -> None:
        for n in sorted(set(going.bad)):
            warnings.warn(
                f"silo {silos.names[n]!r} returned NaN {going.bad.count(n)} times; these visits count as not answered",
                stacklevel=3,
            )
        visits, silent = (np.asarray(x).sum(0) for x in (going.state.visits, going.state.unanswered))
        rates = np.where(visits > 0, 1 - silent / np.maximum(visits, 1), np.nan)
        if np.nanmax(rates) - np.nanmin(rates) > _UNEVEN:
            often = ", ".join(
                f"{silos.names[n]!r} {visits[n] - silent[n]} of {visits[n]}" for n in np.flatnonzero(silent)
            )
            warnings.warn(
                f"silos answered unequally often ({often} visits; the others all): the draws lean to the data of those that answered; run again when all are up, "
                "or have the carrier ask again for longer",
                stacklevel=3,
            )


class _Going(NamedTuple):
    """A run after some rounds.

    :param state: of all chains.
    :param slots: of each chain's local latents in each silo, ``(C, S)``; ``(C, 0)`` without any.
    :param told: the silos' slots of what they were told.
    :param made: rounds made.
    :param draws: of each field what was collected.
    :param spent: slots that are needed no more once there is a checkpoint.
    :param bad: numbers of silos whose reply was NaN.
    """

    state: LangevinState
    slots: np.ndarray
    told: list[int]
    made: int
    draws: dict[str, list]
    spent: list[int]
    bad: list[int]


def _without_tuning(state: LangevinState) -> LangevinState:
    """What a checkpoint has of a state: the numbers of the kernel are settled anew."""
    return state._replace(tuning=None)  # type: ignore[arg-type]


def _is_nan(reply: tuple[Chain, StayStats]) -> bool:
    """Whether a chain came back as none can: a stay that leaves the reals is undone in the silo."""
    return not np.isfinite(np.asarray(reply[0].theta)).all()


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
