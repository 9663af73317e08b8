"""Driver of rounds: their loop, and over remote silos the slots and the checkpoint of a run.

A kernel or a fit gives a first :class:`Run`, a ``step`` that makes a round from it, and the facts
by which a checkpoint recognizes the run. A step says what is asked and how replies are taken. The
driver has the progress bar, interruptions, slots and checkpoints. Silent silos are asked again by
:meth:`numpyro_fed.rounds.remote.RemoteSilos.ask_again`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from tqdm.auto import tqdm

from numpyro_fed._typing import Facts, PyTree
from numpyro_fed.rounds.checkpoint import Checkpoint
from numpyro_fed.rounds.remote import Carrier


@dataclass(frozen=True)
class Run:
    """Run after some rounds.

    :param state: state of the chains, the networks or the fit.
    :param slots: slots of the states in remote silos; an array whose shape does not change.
    :param made: number of rounds made.
    :param record: what the rounds have left, by its names in checkpoints, which never change.
    :param stopped: the reason if the rounds broke off.
    :param note: text beside the progress bar.
    """

    state: PyTree
    slots: np.ndarray
    made: int = 0
    record: dict[str, Any] = field(default_factory=dict)
    stopped: str | None = None
    note: str = ""

    def after(self, state: PyTree, slots: np.ndarray, num: int = 1, **record: object) -> Self:
        """Return the run after ``num`` more rounds, with new values in its record."""
        record = {**self.record, **record}
        return replace(self, state=state, slots=slots, made=self.made + num, record=record)


class Slots:
    """Slots that a run writes in remote silos, and the checkpoint that names some of them.

    A round writes new states beside the old ones. Those that no later round starts from are
    forgotten, once the checkpoint does not name them either.

    :param carrier: the carrier of the run. Its slots so far belong to other runs, and stay.
    :param checkpoint: the checkpoint of the run; ``None`` for none.
    :param facts: the facts by which the checkpoint recognizes the run.
    :param shorten: a function that takes from a state what a resumed run computes anew.
    """

    def __init__(
        self,
        carrier: Carrier,
        checkpoint: Checkpoint | None = None,
        facts: Facts | None = None,
        shorten: Callable[[PyTree], PyTree] = lambda state: state,
    ) -> None:
        self.carrier, self.checkpoint = carrier, checkpoint or Checkpoint(None, 1)
        self.facts, self.shorten, self._first = facts or {}, shorten, carrier.next_slot
        self._saved: set[int] = set()
        self._spent: list[int] = []

    def resume(self, slots: np.ndarray, spent: Iterable[int]) -> None:
        """Take over the slots of a checkpoint.

        :param slots: the slots of the states that it names.
        :param spent: slots that nothing needs.
        """
        self._first, self._saved = 0, set(slots.reshape(-1).tolist())
        self._spent = list(spent)
        self._forget_spent()

    @contextmanager
    def writing(self) -> Iterator[int]:
        """Have silos forget what calls wrote, if an error occurs: no run names these slots.

        :return: the first slot that they may write.
        """
        first = self.carrier.next_slot
        try:
            yield first
        except BaseException:
            self.carrier.forget(list(range(first, self.carrier.next_slot)))
            raise

    def keep(self, before: Run, run: Run, first: int, last: bool) -> None:
        """Write a checkpoint if one is due, and have silos forget the spent slots.

        :param before: the run before the round.
        :param run: the run after it.
        :param first: the first slot that the round may have written.
        :param last: whether the run ends with this round.
        """
        changed = before.slots != run.slots
        lost = set(range(first, self.carrier.next_slot)).difference(run.slots[changed].tolist())
        spent = [*before.slots[changed].tolist(), *sorted(lost)]
        self._spent += [slot for slot in spent if slot >= self._first]
        if run.made > before.made and self.checkpoint.due(run.made, last):
            values = {"state": self.shorten(run.state), "slots": run.slots, "made": run.made}
            values |= {**run.record, "spent": self._spent, **self.facts}
            if self.checkpoint.save(values, self.carrier):
                self._saved = set(run.slots.reshape(-1).tolist())
        self._forget_spent()

    def _forget_spent(self) -> None:
        self.carrier.forget([slot for slot in self._spent if slot not in self._saved])
        self._spent = [slot for slot in self._spent if slot in self._saved]


def drive(
    run: Run,
    step: Callable[[Run], Run],
    total: int,
    *,
    slots: Slots,
    progress_bar: bool,
    ended: Callable[[Run], bool] = lambda run: False,
    title: str = "",
) -> tuple[Run, BaseException | None]:
    """Make rounds until their number is reached, the run has ended, or an error occurs.

    :param step: a function that makes one or more rounds.
    :param total: number of rounds, those of ``run`` included.
    :param slots: the run's slots in remote silos; inline silos have a carrier to no one.
    :param ended: a function that says if the run has converged. It is asked before the first step
        and after each, so that a resumed run ends at the same round.
    :param title: text before the bar.
    :return: the last whole run, and the error.
    """

    def over(run: Run) -> bool:
        return run.made >= total or run.stopped is not None or ended(run)

    last = over(run)
    with tqdm(desc=title, total=total, initial=run.made, disable=not progress_bar) as bar:
        while not last:
            before = run
            try:
                with slots.writing() as first:
                    run = step(before)
                last = over(run)
                slots.keep(before, run, first, last)
            except (KeyboardInterrupt, Exception) as error:
                return run, error
            bar.update(run.made - before.made)
            if run.note:
                bar.set_postfix_str(run.note, refresh=False)
        if run.made < total and run.stopped is None:  # it has converged, and is done
            bar.total = run.made
            bar.refresh()
    return run, None
