"""MCMC over remote silos, whose rounds this process drives.

The rounds of chains that travel are in :mod:`numpyro_fed.mcmc.remote_chains`. Those of networks,
whose nodes are chains, are in :mod:`numpyro_fed.decentralized.remote`.
"""

import hashlib
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
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
from numpyro_fed._typing import Facts, PyTree
from numpyro_fed.data.views import SiloView
from numpyro_fed.density.fingerprint import fingerprint
from numpyro_fed.mcmc._base import FederatedKernel
from numpyro_fed.mcmc.config import TUNING_CLASSES, Tuning
from numpyro_fed.mcmc.remote_chains import remote_steps
from numpyro_fed.rounds.checkpoint import Checkpoint, facts_of_run
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.rounds.task import SiloTask
from numpyro_fed.rounds.worker import Call

__all__ = ["RemoteMCMC", "TellLocal"]

_UNEVEN = 0.05  # largest difference of the silos' answer rates without a warning


@dataclass(frozen=True)
class TellLocal(SiloTask):
    """Call by which a silo stores the kernel's numbers, among them surrogates and step size."""

    wire_name = "TellLocal"
    leaves = "The silo keeps the server's surrogates and step size, and sends only a zero"
    numbers = ""
    ceiling = 1_000
    message_classes = TUNING_CLASSES

    def __call__(
        self, key: Array, message: Tuning, state: None, view: SiloView
    ) -> tuple[Array, Tuning]:
        """Return nothing but a zero, and the numbers as the silo's state."""
        return jnp.zeros(()), message


class RemoteMCMC(MCMC):
    """MCMC over remote silos, a subclass of :class:`numpyro.infer.MCMC`.

    This process drives the rounds, and each chain makes its local steps where the rows are. Draws
    are those of ``MCMC`` with ``chain_method="vectorized"``. Local latents (in silo plates) never
    leave their silos, so the draws are of the global sites. If a silo does not answer, the round
    counts and the chain waits. This is unbiased if all silos are silent equally often; a warning
    says if not.

    Kernels over a network call each node once in a step. This process exchanges what nodes send to
    each other: it is a relay, which sees every node's position and gradient. A step needs all
    nodes. The process asks a silent node five times, then ends the run with the draws so far.

    :param sampler: a :class:`DSGLD`, :class:`FSGLD`, :class:`PushSumLangevin` or
        :class:`GossipLangevin`.
    :param num_warmup: rounds before the first draw that is kept.
    :param num_samples: rounds whose draws are kept.
    :param num_chains: number of chains; chains that visit different silos advance at the same time.
        For a network, a multiple of the number of nodes.
    :param progress_bar: whether to show a progress bar.
    :param checkpoint: a file for the state after every ``checkpoint_every`` rounds. If it exists,
        :meth:`run` prepares as before and continues from it, with the draws of an undisturbed run.
        Delete the file to start anew.
    :param checkpoint_every: largest number of rounds that an interruption loses. Silos store the
        states of these rounds until the next checkpoint.

    Example::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_fed as fed
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with fed.silo_plate("patients", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> silos = fed.Silos({"oslo": {"y": jnp.arange(5.0)}, "rome": {"y": jnp.arange(3.0)}})
        >>> remote = fed.RemoteSilos(silos, fed.Loopback(silos))
        >>> mcmc = fed.RemoteMCMC(
        ...     fed.FSGLD(model), num_warmup=5, num_samples=10, progress_bar=False
        ... )
        >>> mcmc.run(jax.random.key(0), remote)
        >>> mcmc.get_samples()["mu"].shape
        (10,)
    """

    def __init__(
        self,
        sampler: FederatedKernel,
        *,
        num_warmup: int,
        num_samples: int,
        num_chains: int = 1,
        progress_bar: bool = True,
        checkpoint: str | Path | None = None,
        checkpoint_every: int = 10,
    ) -> None:
        self._steps = remote_steps(sampler)
        super().__init__(
            sampler,
            num_warmup=num_warmup,
            num_samples=num_samples,
            num_chains=num_chains,
            chain_method="vectorized",
            progress_bar=progress_bar,
        )
        self._checkpoint = Checkpoint(checkpoint, checkpoint_every)

    def run(
        self,
        rng_key: Array,
        silos: RemoteSilos,
        *,
        extra_fields: tuple = (),
        init_params: None = None,
    ) -> None:
        """Prepare, warm up and draw.

        :param rng_key: seed of all draws.
        :param silos: the remote silos, with the carrier that calls them.
        :param extra_fields: further fields of the state to collect.
        :raises ValueError: for what remote silos do not support.
        :raises RuntimeError: for silos that do not answer during the setup, or refuse a call, with
            their names.
        :warns UserWarning: after Ctrl-C or an error of any kind, if there are draws, which are
            kept; for a reply that is NaN or absurdly far, with its silo; if silos answered
            unequally often, which leans the draws towards the others' data; if a checkpoint could
            not be written.
        """
        if init_params is not None:
            raise ValueError("init_params: local latents start in their silos; expected None")
        kernel, num_rounds = self.sampler, self.num_warmup + self.num_samples
        if not isinstance(silos, RemoteSilos):
            raise ValueError(
                f"expected fed.RemoteSilos, got {type(silos).__name__}; for silos in this process "
                "use numpyro.infer.MCMC"
            )
        self._steps.check(kernel, silos, self.num_chains)
        with self._checkpoint.held():
            saved = self._checkpoint.load(silos.carrier)
            kernel.set_up(silos, {})
            going = self._start(rng_key, silos)
            fields = tuple(dict.fromkeys((*kernel.default_fields, *extra_fields)))
            facts = self._facts(rng_key, silos, fields) if self._checkpoint.place else {}
            if saved is not None:
                going = self._going_on(going, saved, facts)
            going = self._rounds(going, silos, fields, num_rounds, facts)
            states = {
                f: jax.tree.map(lambda *x: jnp.asarray(np.stack(x, 1)), *going.draws[f])
                for f in fields
            }
            states["z"] = jax.vmap(
                jax.vmap(lambda z: kernel.factors.constrain_globals(z, silos.shared))
            )(states["z"])
            fill_mcmc(self, states, going.state, (silos,))
            self._say_who_failed(going, silos)
            if not self._checkpoint.place:
                with suppress(Exception):  # a broken carrier must not lose the draws
                    silos.carrier.forget(
                        [*going.slots.reshape(-1).tolist(), *going.told, *going.spent], now=True
                    )

    def _rounds(
        self,
        going: "_Going",
        silos: RemoteSilos,
        fields: tuple[str, ...],
        num_rounds: int,
        facts: Facts,
    ) -> "_Going":
        """Make all rounds that are left, or those before an interruption."""
        with tqdm(total=num_rounds, initial=going.made, disable=not self.progress_bar) as bar:
            while going.made < num_rounds:
                try:
                    going = self._round(going, silos)
                except (KeyboardInterrupt, Exception) as error:  # no reply may lose the draws
                    if going.made <= self.num_warmup:
                        raise
                    known = isinstance(error, KeyboardInterrupt)
                    why = "" if known else f" ({type(error).__name__}: {error})"
                    kept = going.made - self.num_warmup
                    warnings.warn(
                        f"interrupted{why}: the first {kept} draws are kept", stacklevel=3
                    )
                    break
                bar.update()
                if going.made > self.num_warmup:
                    for f in fields:
                        going.draws.setdefault(f, []).append(
                            jax.tree.map(np.asarray, attrgetter(f)(going.state))
                        )
                if self._checkpoint.due(going.made, num_rounds):
                    values = {**going._asdict(), "state": _without_kernel(going.state), **facts}
                    if self._checkpoint.save(values, silos.carrier):
                        silos.carrier.forget(going.spent)
                        going.spent.clear()
        return going

    def warmup(self, *args: object, **kwargs: object) -> None:
        """Raise an error, since the warm-up is part of :meth:`run`."""
        raise NotImplementedError(
            "warmup() is not built for remote silos; expected run(), whose first num_warmup rounds "
            "are warm-up"
        )

    def _start(self, rng_key: Array, silos: RemoteSilos) -> "_Going":
        """Return all chains' first states.

        Silos receive surrogates and step size, and draw the first local latents.
        """
        keys = rng_key
        if is_prng_key(rng_key):
            keys = random.split(rng_key, self.num_chains) if self.num_chains > 1 else rng_key[None]
        state, slots = self._steps.start(self.sampler, keys, self.num_chains, silos)
        carrier, every, tuning = silos.carrier, range(len(silos)), self.sampler.tuning
        told = [carrier.new_slot() for _ in every]
        calls = [
            Call(n, TellLocal(), random.key(0), tuning.seen_by(n), None, told[n]) for n in every
        ]
        silos.ask_for_sure(calls)
        return _Going(state, slots, told, 0, {}, [], [])

    def _round(self, going: "_Going", silos: RemoteSilos) -> "_Going":
        """Make one round of all chains, or one step of all networks."""
        state, slots, old, bad = self._steps.step(
            self.sampler, going.state, going.slots, going.told, silos
        )
        spent = self._forgotten([*going.spent, *old], silos)
        return going._replace(
            state=state, slots=slots, made=going.made + 1, spent=spent, bad=[*going.bad, *bad]
        )

    def _forgotten(self, spent: list[int], silos: RemoteSilos) -> list[int]:
        """Let silos forget the spent slots, and return those that wait for the next checkpoint."""
        if self._checkpoint.place:
            return spent
        silos.carrier.forget(spent)
        return []

    def _facts(self, rng_key: Array, silos: RemoteSilos, fields: tuple[str, ...]) -> Facts:
        """Return the facts by which a checkpoint recognizes its run."""
        kernel, counts = self.sampler, [self.num_chains, self.num_warmup, self.num_samples]
        numbers = [np.asarray(x) for x in jax.tree.leaves(kernel.tuning.without_rows())]
        return {
            "kernel": type(kernel).__name__,
            **self._steps.facts(kernel),
            "sites": [[name, list(shape)] for name, shape in kernel.factors.global_sites],
            "num_chains, num_warmup, num_samples": counts,
            "extra_fields": list(fields),
            **facts_of_run(rng_key, silos),
            "model": fingerprint(kernel.factors, silos)["program"],
            "surrogates and step size": hashlib.sha256(
                b"".join(x.tobytes() for x in numbers)
            ).hexdigest(),
        }

    def _going_on(self, first: "_Going", saved: dict[str, Any], facts: Facts) -> "_Going":
        """Return the run at its checkpoint.

        Silos have received the kernel's numbers anew; the first local latents of this start are
        spent.
        """
        self._checkpoint.same_run(saved, facts)
        going = _Going(**{name: saved[name] for name in _Going._fields})
        spent = [*going.spent, *going.told, *first.slots.reshape(-1).tolist()]
        numbers = {k: v for k, v in first.state._asdict().items() if k in _KERNEL_FIELDS}
        return going._replace(state=going.state._replace(**numbers), told=first.told, spent=spent)

    def _say_who_failed(self, going: "_Going", silos: RemoteSilos) -> None:
        for (n, what), times in sorted(Counter(going.bad).items()):
            warnings.warn(
                f"silo {silos.names[n]!r} returned {what} {times} times; these visits count as "
                "not answered",
                stacklevel=3,
            )
        if not self._steps.visits:
            return
        visits, silent = (
            np.asarray(x).sum(0) for x in (going.state.visits, going.state.unanswered)
        )
        rates = np.where(visits > 0, 1 - silent / np.maximum(visits, 1), np.nan)
        if np.nanmax(rates) - np.nanmin(rates) > _UNEVEN:
            often = ", ".join(
                f"{silos.names[n]!r} {visits[n] - silent[n]} of {visits[n]}"
                for n in np.flatnonzero(silent)
            )
            warnings.warn(
                f"silos answered unequally often ({often} visits; the others all): the draws lean "
                "towards the data of the silos that answered; run again when all are up, or let "
                "the carrier ask again for longer",
                stacklevel=3,
            )


class _Going(NamedTuple):
    """Run after some rounds.

    :param state: the state of all chains, a :class:`~numpyro_fed.mcmc.visit.LangevinState` or a
        :class:`~numpyro_fed.decentralized.networks.NetworkState`.
    :param slots: slots of the local latents: ``(C, S)`` for each chain and silo, ``(C, 1)`` for
        each node in its silo, or ``(C, 0)`` without any.
    :param told: for each silo, the slot with the kernel's numbers.
    :param made: number of rounds made.
    :param draws: the draws of each field so far.
    :param spent: slots that nothing needs after the next checkpoint.
    :param bad: for each faulty reply, the silo's number and the fault.
    """

    state: PyTree
    slots: np.ndarray
    told: list[int]
    made: int
    draws: dict[str, list]
    spent: list[int]
    bad: list[tuple[int, str]]


_KERNEL_FIELDS = ("tuning", "mixing")  # fields of a state that hold the kernel's numbers


def _without_kernel(state: PyTree) -> PyTree:
    """Return the state without the kernel's numbers, which a continued run computes anew."""
    return state._replace(**dict.fromkeys(set(_KERNEL_FIELDS) & set(state._fields)))
