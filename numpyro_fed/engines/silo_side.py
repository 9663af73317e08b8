"""Side of a silo at the wire: it has the rows, answers calls, and records every message."""

import time
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

import jax
import numpy as np

from numpyro_fed._typing import Facts, PyTree, Values
from numpyro_fed.data.silos import Silos
from numpyro_fed.density.check import FactorizationError, check_own_factorization
from numpyro_fed.density.factorize import factorize
from numpyro_fed.density.fingerprint import (
    description,
    fingerprint,
    rows_hash,
    versions,
)
from numpyro_fed.engines.call_checks import (
    CallChecks,
    KeptState,
    Refusal,
    count_program,
    parsed,
    slot_number,
)
from numpyro_fed.engines.limits import (
    MAX_CALLS,
    MAX_KEPT,
    MAX_MESSAGE,
    MAX_REFUSED,
    MAX_SLOTS,
)
from numpyro_fed.engines.opening import agreed_silos
from numpyro_fed.engines.record import Record, call_records
from numpyro_fed.engines.wire import PROTOCOL, Fit, owned
from numpyro_fed.privacy.data_guards import Guards
from numpyro_fed.privacy.guard import RoundGuard, Ticket
from numpyro_fed.privacy.own_keys import hashed, secret_of, with_own_keys
from numpyro_fed.rounds.files import locked, read_sealed, write_sealed
from numpyro_fed.rounds.serialization import name_of, pack, unpack
from numpyro_fed.rounds.task import TASKS
from numpyro_fed.rounds.worker import (
    Call,
    SiloWorker,
    resized,
    typed_worker,
    worker_of,
)

_Asked = ParamSpec("_Asked")
_Answer = TypeVar("_Answer")


class Asked(NamedTuple):
    """Request of a message.

    :param what: ``"hello"``, ``"open"`` or ``"calls"``.
    :param kinds: kind of each call.
    :param silos: text on all silos, in an opening.
    """

    what: str
    kinds: list[str]
    silos: str


class SiloSide:
    """Side of a silo, which answers the server's messages from the silo's rows.

    Its folder holds its private states (local latents, the local map) and the kernel's numbers from
    the server. A new process with the same arguments therefore continues after another was killed.
    The same message has the same answer. The silo answers the tasks in
    :data:`~numpyro_fed.rounds.task.TASKS`, each no more often than its ceiling allows.
    :class:`~numpyro_fed.engines.call_checks.CallChecks` says which calls it refuses. Before the
    first call the silo checks the model on its own rows, split in two. ``audit.jsonl`` has a line
    for every message, with the positions in its calls.

    :param silos: one silo, with its rows.
    :param model: the marked model, which the server has too.
    :param folder: folder for its files, which is made if it does not exist.
    :param public: public arguments, as in the kernel.
    :param fit: the variational fit of the study, which the server has too;
        chains need none.
    :param guards: conditions on the rows (:class:`Guards`); by default none.
    :param ceilings: largest number of calls to answer, by kind of call; by default those in
        :data:`~numpyro_fed.rounds.task.TASKS`.
    :param own_keys: ``True``: draw by the silo's own keys, with the same law as inline silos.
        ``False``: draw by the server's keys, with the very draws of inline silos. A server that
        lies can then solve for single rows. Fits with privacy or secure sums ignore ``False``.
    :raises ValueError: for more than one silo, and rows that a guard refuses. Also for a folder
        with a run of other rows, another model or other versions.

    Example::

        >>> import tempfile, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_fed as fed
        >>> from numpyro_fed.engines.silo_side import SiloSide
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with fed.silo_plate("patients", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> side = SiloSide(fed.Silos({"oslo": {"y": jnp.arange(5.0)}}), model, tempfile.mkdtemp())
        >>> side.name, len(side.answer(b"no message")) < 200
        ('oslo', True)
    """

    def __init__(
        self,
        silos: Silos,
        model: Callable,
        folder: str | Path,
        *,
        public: tuple[str, ...] = (),
        fit: Fit | None = None,
        guards: Guards | None = None,
        ceilings: Mapping[str, int] | None = None,
        own_keys: bool = True,
    ) -> None:
        if not isinstance(silos, Silos) or len(silos) != 1:
            raise ValueError(f"expected fed.Silos of one silo, got {silos!r}")
        self.silos, self.model, self.public, self.fit = silos, model, tuple(public), fit
        self.name = silos.names[0]
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.factors = factorize(model, silos, public=self.public)
        if guards is not None:
            guards.check(silos, self.factors.dim if fit is None else fit.num_parameters(silos))
        self.ceilings = {kind: task.ceiling for kind, task in TASKS.items()} | _checked_ceilings(
            ceilings
        )
        self.record = Record(self.folder / "audit.jsonl")
        self._factors_checked = False
        self.guard: RoundGuard | None = None
        self.secret: bytes | None = None
        if own_keys or (fit is not None and fit.rounds_only):
            self.secret = secret_of(self.folder, self.name, rows_hash(silos))
            if fit is not None and fit.rounds_only:
                self.guard = RoundGuard(self.folder, self.name, fit, self.secret)
        self.worker: SiloWorker | None = None
        self.checks: CallChecks | None = None  # with the worker
        self._asked: list[Facts] = []
        self._programs: set[Hashable] = set()
        if (self.folder / "open.bin").exists():
            self._reopen(unpack(read_sealed(self.folder / "open.bin", "open")))

    def answer(self, data: bytes) -> bytes:
        """Return the answer to a message, or the text of an error.

        Only the type of an unforeseen error leaves. Its text might quote rows, and goes to
        ``errors.log`` in the folder.
        """
        with locked(self.folder / "answer", wait=True):  # ceilings hold for all processes together
            return self._answer(data)

    def _answer(self, data: bytes) -> bytes:
        started, what = time.time(), "?"
        try:
            self._asked = []
            self.record.look()
            if len(data) > MAX_MESSAGE:
                raise Refusal(f"a message of {len(data):,} bytes; expected at most {MAX_MESSAGE:,}")
            try:
                request = unpack(data, keys=False)
            except ValueError as error:
                raise Refusal(str(error)) from error
            answers = {"hello": self._hello, "open": self._opened, "calls": self._calls}
            # a list, since a value from the wire need not be hashable
            if not isinstance(request, dict) or request.get("what") not in list(answers):
                raise Refusal(f"expected a message of one of the kinds {list(answers)}")
            what = request["what"]
            answer = answers[what](request)
        except Refusal as error:
            answer = {"error": str(error)}
        except Exception as error:
            self._log()
            answer = {
                "error": f"{type(error).__name__} while it answered; its own errors.log has more"
            }
        if "error" in answer:  # the text may quote the message
            answer["error"] = answer["error"][:2000]
        sent = pack(answer)
        self.record.add(started, what, data, sent, answer, self._asked)
        return sent

    def asked(self, data: bytes) -> Asked:
        """Return what a message asks; answer nothing, and read no row.

        :raises ValueError: for bytes that are no message, or calls before an opening.
        """
        request = unpack(data, keys=False)
        what = request.get("what") if isinstance(request, dict) else None
        if what == "calls":
            return Asked(what, [name_of(type(c.local)) for c in self._read(request)[0]], "")
        if what == "open":
            return Asked(what, [], str(agreed_silos(request, self.silos)))
        return Asked(str(what), [], "")

    @property
    def counts(self) -> Counter[str]:
        """Numbers of calls of each kind in the record, and of refused connections."""
        return self.record.counts

    @property
    def own_keys(self) -> bool:
        """Flag of a silo that draws by keys that no server knows."""
        return self.secret is not None

    @property
    def answered(self) -> tuple[str, ...]:
        """Kinds of call that this silo answers: those that its ceilings and its fit allow."""
        if self.guard is not None:
            return tuple(kind for kind in TASKS if kind in self.guard.allowed)
        return tuple(kind for kind in TASKS if self._knows(kind) and self.ceilings[kind])

    def _knows(self, kind: str) -> bool:
        return kind in TASKS and (self.fit is not None or TASKS[kind].methods != ("fit",))

    def _hello(self, request: Values) -> Values:
        if request.get("protocol") != PROTOCOL:
            raise Refusal(
                f"the server speaks protocol {str(request.get('protocol'))[:20]}, expected "
                f"{PROTOCOL}; install one version of numpyro_fed everywhere"
            )
        return {"about": description(self.silos), "versions": versions()}

    def _opened(self, request: Values) -> Values:
        if self.counts["refused"] >= MAX_REFUSED:
            raise Refusal(
                f"it has refused {MAX_REFUSED} connections, each of which could be a guess at its "
                "data; expected a person at the silo to look at its audit.jsonl, and to start it "
                "with a new folder"
            )
        self._check_factors()
        model = self._open({k: request.get(k) for k in ("silos", "server", "fresh")}, write=True)
        assert self.worker is not None
        if request["fresh"]:
            for slot in list(self.worker.kept):
                self._drop(slot)
        return {"model": model}

    def _same(self, model: Facts) -> Facts:
        """Return the facts that a new process must share with the one before it."""
        return {"rows": rows_hash(self.silos), "model": model, "versions": versions()}

    def _reopen(self, before: Values) -> None:
        """Continue the run of a former process, from the file that it wrote at connection."""
        hint = (
            f"; its folder {self.folder} has the record of another. Is this the study's file? For "
            "another study give another folder"
        )
        try:
            same = self._same(self._open(before["request"], write=False))
        except Refusal as error:
            raise ValueError(f"silo {self.name!r}: {error}{hint}") from error
        for what, now in same.items():
            if before[what] != now:
                raise ValueError(f"silo {self.name!r}: other {what} than before{hint}")

    def _open(self, request: Values, write: bool) -> Facts:
        """Take the silo's place among all silos, and return its model's fingerprint.

        :param write: whether to write the request for processes to come.
        """
        known, listed = agreed_silos(request, self.silos), pack(request["silos"])
        count_program(self._programs, str(known.sizes))  # other sizes are other programs
        try:
            model = fingerprint(self.factors, known, self.fit)
            worker = worker_of(self.silos, self.name, known)
            both = owned(self.factors, known, self.fit, worker.pad)
            wide = typed_worker(
                resized(known, {g: [n + 1 for n in sizes] for g, sizes in known.sizes.items()})
            )
        except (
            TypeError,
            KeyError,
            IndexError,
            AttributeError,
        ) as error:  # caused by the server's list
            self._log()
            said = "the server's list of silos does not fit the model; its own errors.log has more"
            raise Refusal(said) from error
        rows = sum(sum(sizes) for sizes in known.sizes.values())
        algorithm = None if self.fit is None else self.fit.algorithm
        checks = CallChecks(worker, wide, both, rows, algorithm, self._programs)
        for place in self.folder.glob("slot-*.bin"):
            slot, data = int(place.stem.removeprefix("slot-")), read_sealed(place, "slot")
            worker.kept[slot], kinds, kind, units = unpack(data)
            checks.kept[slot] = KeptState(kind, kinds, len(data), units)
        if self.guard is not None:
            self._worded(self.guard.join, known.names, listed)
        if write:
            file = {"request": request, **self._same(model)}
            write_sealed(self.folder / "open.bin", pack(file), "open")
        # set last: a refused server must not have its calls answered
        self.worker, self.checks = worker, checks
        self._known, self._server = known, request["server"]
        self._list = hashed(listed)
        self._plan_for: bool | None = None
        return model

    def _check_factors(self) -> None:
        """Check the model on the silo's own rows, once.

        The kind of error leaves the silo, and no number.
        """
        if self._factors_checked:
            return
        try:
            if self.fit is None:
                check_own_factorization(self.factors, self.silos)
            else:
                self.fit.check_factors(self.silos)
        except FactorizationError as error:
            self._log()
            raise Refusal(f"{error.plain}; its own errors.log has more") from error
        self._factors_checked = True

    def _log(self) -> None:
        with (self.folder / "errors.log").open("a") as log:
            log.write(traceback.format_exc())

    def _read(self, request: Values) -> tuple[list[Call], bytes, list[int]]:
        """Return the calls of a message, their bytes, and slots to forget."""
        if self.worker is None or self.checks is None:
            raise Refusal("it was called before a server connected; connect first")
        if request.get("server") != self._server:
            raise Refusal("another server has connected since; expected one at a time")
        if "independent" in request and self.fit is None:
            raise Refusal(
                "it has no fit; expected SiloSide(..., fit=...) with the fit of "
                "connect(transport, model, fit=...)"
            )
        independent = request.get("independent")
        if independent is not None and type(independent) is not bool:
            raise Refusal(
                "its call does not say whether elements are independent; expected True or False"
            )
        if independent is not None and self._plan_for is not independent:
            assert self.fit is not None
            self._plan_for = independent
            config = self.fit.planned(self._known, self._plan_for)
            self.checks.own["config"] = config
            self.checks.messages = self.fit.messages(config, self._known)
        own = self.checks.own
        try:
            inside, forget = request["calls"].tobytes(), [slot_number(n) for n in request["forget"]]
            calls = [parsed(self.worker.number, values) for values in unpack(inside, own)]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Refusal(f"its calls cannot be read ({error})") from error
        if len(calls) > MAX_CALLS:
            raise Refusal(
                f"it is asked {len(calls):,} calls at once; expected at most {MAX_CALLS:,}"
            )
        return calls, inside, forget

    def _calls(self, request: Values) -> Values:
        calls, inside, forget = self._read(request)
        assert self.worker is not None
        assert self.checks is not None
        own, independent = self.checks.own, request.get("independent")
        wide = {**own, "pad": self.checks.wide.pad}
        replies = []
        for i, (call, line) in enumerate(zip(calls, call_records(calls, own), strict=True)):
            self._within_ceilings(call)
            self._asked.append(line)
            state, kinds = self._allowed(call, lambda i=i: unpack(inside, wide)[i][0])
            ticket: Ticket | None = None
            if self.guard is not None:
                if independent is None and name_of(type(call.local)) in self.guard.allowed:
                    raise Refusal(
                        "it is not told whether elements are independent; expected True or False"
                    )
                call, ticket = self._worded(self.guard.admit, call, own, state, independent)
            elif self.secret is not None:
                told = pack((call.local, call.key, call.message, independent), own)
                drawn = hashed(self._list.encode(), told, pack(state))
                call = with_own_keys(call, self.secret, drawn)
            reply, new = self.worker.reply(call, state)
            if self.guard is None:
                replies.append([np.asarray(x) for x in jax.tree.leaves(reply)])
            else:
                assert ticket is not None
                replies.append(self._worded(self.guard.let_out, call.local, reply, ticket))
            if call.write is not None:
                self._keep(call, new, kinds)
        for slot in forget:
            self._drop(slot)
        return {"replies": replies}

    def _within_ceilings(self, call: Call) -> None:
        """Count a call, or raise a :class:`Refusal` if its kind has reached the ceiling."""
        assert self.worker is not None
        kind = name_of(type(call.local))
        if not self._knows(kind):
            raise Refusal(f"it does not answer {kind}; expected one of the calls that it knows")
        if self.counts[kind] >= self.ceilings[kind]:
            raise Refusal(
                f"it has answered {self.counts[kind]:,} calls of kind {kind}, its ceiling for a "
                "study; expected fewer, or a person at the silo who allows more (numpyro-fed silo "
                f"--ceiling {kind}=N)"
            )
        if call.write is not None and len(self.worker.kept) >= MAX_SLOTS:
            raise Refusal(
                f"it keeps {MAX_SLOTS:,} states, its limit; expected a server that frees some"
            )
        self.counts[kind] += 1

    def _allowed(self, call: Call, wider: Callable) -> tuple[PyTree, PyTree]:
        """Return the state that a call starts from, and types of the one that it writes.

        :raises Refusal: for a call that no such silo answers.
        """
        assert self.checks is not None
        try:
            state = self.checks.state(call)
            return state, self.checks.allow(call, wider, state)
        except Refusal:
            raise
        except Exception as error:  # caused by types: the checks read no row
            self._log()
            raise Refusal(
                f"what it is told does not fit {type(call.local).__name__} (numbers, shapes or "
                "settings that are not those of its model); its own errors.log has more"
            ) from error

    def _keep(self, call: Call, new: PyTree, kinds: PyTree) -> None:
        """Write a new state to disk, with the kind of call that wrote it."""
        assert self.worker is not None
        assert self.checks is not None
        assert call.write is not None
        kind = name_of(type(call.local))
        units = self.checks.units(call.local)
        data = pack((new, kinds, kind, units))
        if len(data) + sum(kept.size for kept in self.checks.kept.values()) > MAX_KEPT:
            raise Refusal(
                f"it keeps {MAX_KEPT >> 20:,} MiB, its limit; expected a server that frees some"
            )
        write_sealed(self.folder / f"slot-{call.write}.bin", data, "slot")
        self.worker.kept[call.write] = new
        self.checks.kept[call.write] = KeptState(kind, kinds, len(data), units)

    @staticmethod
    def _worded(
        check: Callable[_Asked, _Answer], *args: _Asked.args, **kwargs: _Asked.kwargs
    ) -> _Answer:
        """Return the result of ``check``, and turn its ``ValueError`` into the silo's answer."""
        try:
            return check(*args, **kwargs)
        except ValueError as error:
            raise Refusal(str(error)) from error

    def _drop(self, slot: int) -> None:
        assert self.worker is not None
        assert self.checks is not None
        self.worker.kept.pop(slot, None)
        self.checks.kept.pop(slot, None)
        (self.folder / f"slot-{slot}.bin").unlink(missing_ok=True)


def _checked_ceilings(ceilings: Mapping[str, int] | None) -> dict[str, int]:
    for kind, most in (ceilings or {}).items():
        if kind not in TASKS or type(most) is not int or most < 0:
            raise ValueError(
                f"ceilings: expected whole numbers for some of {list(TASKS)}, got {kind!r}: "
                f"{most!r}"
            )
    return dict(ceilings or {})
