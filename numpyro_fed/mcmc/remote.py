"""MCMC over remote silos, whose rounds this process drives.

The rounds of chains that travel are in :mod:`numpyro_fed.mcmc.remote_chains`. Those of networks,
whose nodes are chains, are in :mod:`numpyro_fed.decentralized.remote`.
"""

import hashlib
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.infer import MCMC
from numpyro.util import is_prng_key

from numpyro_fed._compat import fill_mcmc
from numpyro_fed._typing import Facts, PyTree
from numpyro_fed.data.views import SiloView
from numpyro_fed.density.fingerprint import fingerprint
from numpyro_fed.mcmc._base import FederatedKernel
from numpyro_fed.mcmc.config import TUNING_CLASSES, Tuning
from numpyro_fed.mcmc.remote_chains import remote_steps
from numpyro_fed.rounds.checkpoint import Checkpoint, facts_of_run
from numpyro_fed.rounds.driver import Run, Slots, drive
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.rounds.task import SiloTask
from numpyro_fed.rounds.worker import Call

_UNEVEN = 0.05  # largest difference of the silos' answer rates without a warning


@dataclass(frozen=True)
class TellLocal(SiloTask):
    """Call by which a silo stores the kernel's numbers, among them surrogates and step size."""

    wire_name = "TellLocal"
    methods = ("chains", "network")
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

    :class:`HMC` calls every silo in each leapfrog step. Its rounds here are draws. If a silo does
    not answer five times, the run ends with the draws so far.

    Kernels over a network call each node once in a step. This process exchanges what nodes send to
    each other: it is a relay, which sees every node's position and gradient. A step needs all
    nodes. The process asks a silent node five times, then ends the run with the draws so far.

    :param sampler: a :class:`DSGLD`, :class:`FSGLD`, :class:`HMC`, :class:`PushSumLangevin` or
        :class:`GossipLangevin`.
    :param num_warmup: rounds (of HMC: draws) before the first draw that is kept.
    :param num_samples: rounds whose draws are kept.
    :param num_chains: number of chains; chains that visit different silos advance at the same time.
        For a network, a multiple of the number of nodes.
    :param progress_bar: whether to show a progress bar.
    :param checkpoint: a file for the state after every ``checkpoint_every`` rounds. If it exists,
        :meth:`run` prepares as before and continues from it, with the draws of an undisturbed run.
        Delete the file to start anew.
    :param checkpoint_every: largest number of rounds that an interruption loses. Silos store the
        states that the checkpoint names until the next one.

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
            fields = tuple(dict.fromkeys((*kernel.default_fields, *extra_fields)))
            facts = self._facts(rng_key, silos, fields) if self._checkpoint.place else {}
            slots = Slots(silos.carrier, self._checkpoint, facts, _without_kernel)
            with slots.writing():
                run = self._start(rng_key, silos)
            if saved is not None:
                run = self._resumed(run, saved, slots)
            step = partial(self._round, silos=silos, fields=fields)
            run, error = drive(run, step, num_rounds, slots=slots, progress_bar=self.progress_bar)
            num_draws = run.made - self.num_warmup
            if error is not None:
                if num_draws <= 0:
                    self._free(run, silos)
                    raise error
                _say_interrupted(num_draws, error)
            states = {  # an interrupted round may have left a draw behind
                f: jax.tree.map(
                    lambda *x: jnp.asarray(np.stack(x, 1)), *run.record["draws"][f][:num_draws]
                )
                for f in fields
            }
            states["z"] = jax.vmap(
                jax.vmap(lambda z: kernel.factors.constrain_globals(z, silos.shared))
            )(states["z"])
            fill_mcmc(self, states, run.state, (silos,))
            self._say_who_failed(run, silos)
            self._free(run, silos)

    def _free(self, run: Run, silos: RemoteSilos) -> None:
        """Have silos forget the run's slots, unless a checkpoint names them."""
        if not self._checkpoint.place:
            used = [*run.slots.reshape(-1).tolist(), *run.record["told"]]
            with suppress(Exception):  # a broken carrier must not lose the draws
                silos.carrier.forget(used, now=True)

    def warmup(self, *args: object, **kwargs: object) -> None:
        """Raise an error, since the warm-up is part of :meth:`run`."""
        raise NotImplementedError(
            "warmup() is not built for remote silos; expected run(), whose first num_warmup rounds "
            "are warm-up"
        )

    def _start(self, rng_key: Array, silos: RemoteSilos) -> Run:
        """Return all chains' first states.

        Silos receive surrogates and step size, and draw the first local latents.
        """
        keys = rng_key
        if is_prng_key(rng_key):
            keys = random.split(rng_key, self.num_chains) if self.num_chains > 1 else rng_key[None]
        run = self._steps.start(self.sampler, keys, self.num_chains, self.num_warmup, silos)
        tuning, tuning_slots = self.sampler.tuning, []
        if tuning is not None:  # HMC learns its numbers in the rounds
            tuning_slots = [silos.carrier.new_slot() for _ in silos.names]
            silos.ask_for_sure(
                [
                    Call(n, TellLocal(), random.key(0), tuning.seen_by(n), None, slot)
                    for n, slot in enumerate(tuning_slots)
                ]
            )
        return replace(run, record={"told": tuning_slots, "draws": {}, "bad": []})

    def _round(self, run: Run, silos: RemoteSilos, fields: tuple[str, ...]) -> Run:
        """Make one round of all chains, or one step of all networks, and note its draws."""
        run = self._steps.step(self.sampler, run, silos)
        if run.made > self.num_warmup:
            for f in fields:
                draw = jax.tree.map(np.asarray, attrgetter(f)(run.state))
                run.record["draws"].setdefault(f, []).append(draw)
        return run

    def _facts(self, rng_key: Array, silos: RemoteSilos, fields: tuple[str, ...]) -> Facts:
        """Return the facts by which a checkpoint recognizes its run."""
        kernel, counts = self.sampler, [self.num_chains, self.num_warmup, self.num_samples]
        tuning = None if kernel.tuning is None else kernel.tuning.without_rows()
        numbers = [np.asarray(x) for x in jax.tree.leaves(tuning)]
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

    def _resumed(self, first: Run, saved: dict[str, Any], slots: Slots) -> Run:
        """Return the run at its checkpoint.

        Silos have received the kernel's numbers anew; the first local latents of this start are
        spent.
        """
        self._checkpoint.same_run(saved, slots.facts)
        spent = [*saved["spent"], *saved["told"], *first.slots.reshape(-1).tolist()]
        slots.resume(saved["slots"], spent)
        numbers = {k: v for k, v in first.state._asdict().items() if k in _KERNEL_FIELDS}
        record = {**first.record, "draws": saved["draws"], "bad": saved["bad"]}
        return Run(saved["state"]._replace(**numbers), saved["slots"], saved["made"], record)

    def _say_who_failed(self, run: Run, silos: RemoteSilos) -> None:
        for (n, what), times in sorted(Counter(run.record["bad"]).items()):
            warnings.warn(
                f"silo {silos.names[n]!r} returned {what} {times} times; these visits count as "
                "not answered",
                stacklevel=3,
            )
        if not self._steps.visits:
            return
        visits, silent = (np.asarray(x).sum(0) for x in (run.state.visits, run.state.unanswered))
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


_KERNEL_FIELDS = ("tuning", "mixing")  # fields of a state that hold the kernel's numbers


def _without_kernel(state: PyTree) -> PyTree:
    """Return the state without the kernel's numbers, which a continued run computes anew."""
    return state._replace(**dict.fromkeys(set(_KERNEL_FIELDS) & set(state._fields)))


def _say_interrupted(num_draws: int, error: BaseException) -> None:
    why = "" if isinstance(error, KeyboardInterrupt) else f" ({type(error).__name__}: {error})"
    warnings.warn(f"interrupted{why}: the first {num_draws} draws are kept", stacklevel=3)
