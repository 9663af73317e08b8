"""Law of the silos that take part in a round, or answer in it."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array, random


@dataclass(frozen=True)
class Participation:
    """Law of the silos that take part in a round.

    :param count: number of silos, drawn uniformly without replacement; ``None``: each silo takes
        part independently, with its probability.
    :param probability: each silo's probability of taking part, ``(S,)``.
    """

    count: int | None
    probability: np.ndarray

    def weights(self, key: Array) -> Array:
        """Draw the Horvitz-Thompson weights of a round's replies.

        A weight is zero, or one over the silo's probability.
        """
        probability = jnp.asarray(self.probability, jnp.result_type(float))
        if self.count is None:
            asked = random.uniform(key, probability.shape) < probability
        else:
            asked = random.permutation(key, len(self.probability)) < self.count
        return jnp.where(asked, 1 / probability, 0.0)

    def __hash__(self) -> int:
        return hash((self.count, self.probability.tobytes()))

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Participation) and self.count == other.count
        return same and np.array_equal(
            self.probability,
            other.probability,  # type: ignore[attr-defined]
        )


def answering_of(
    value: float | Mapping[str, float] | None,
    names: tuple[str, ...],
    remote: bool,
    adds_up: bool,
) -> Participation | None:
    """Return the probabilities that ``answering=`` means.

    :param names: the silos' names, in the order of the stacks.
    :param remote: whether the silos are remote.
    :param adds_up: whether the algorithm adds replies up, and does not average them.
    :raises ValueError: for inline silos, averages, and values out of range.
    """
    if value is None:
        return None
    if not remote:
        raise ValueError(
            f"answering={value!r}: silos in this process always answer; expected None, or "
            "participation="
        )
    if not adds_up:
        raise ValueError(
            f"answering={value!r} is for fed.SFVI; expected None, since other fits average over "
            "the silos that answered"
        )
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not number and not isinstance(value, Mapping):
        raise ValueError(
            f"answering: expected a probability, or one for each silo's name, got {value!r}"
        )
    each = value if isinstance(value, Mapping) else dict.fromkeys(names, value)
    return participation_of(each, names, "answering")


def participation_of(
    value: float | Mapping[str, float] | None,
    names: tuple[str, ...],
    argument: str = "participation",
) -> Participation | None:
    """Return the law that ``participation=`` means.

    :param names: the silos' names, in the order of the stacks.
    :param argument: the argument's name, for the messages.
    :raises ValueError: for names that are not the silos', and for values out of range.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        unknown, lacking = sorted(set(value) - set(names)), sorted(set(names) - set(value))
        if unknown or lacking:
            raise ValueError(
                f"{argument}: expected a probability for every silo, got unknown silos {unknown}, "
                f"none for {lacking}"
            )
        probability = np.array([float(value[name]) for name in names])
        wrong = ~((probability > 0) & (probability <= 1))
        if wrong.any():
            name = names[int(np.argmax(wrong))]
            raise ValueError(
                f"{argument}: expected probabilities in (0, 1], got {value[name]} for silo "
                f"{name!r}; a silo that "
                "never takes part does not count in the posterior: leave it out of the data"
            )
        return Participation(None, probability)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float | np.number)
        or not 0 < value <= 1
    ):
        raise ValueError(
            "participation: expected the fraction of silos in a round, in (0, 1], or a "
            "probability for each silo's name, "
            f"got {value!r}"
        )
    count = max(1, round(float(value) * len(names)))
    return (
        None
        if count == len(names)
        else Participation(count, np.full(len(names), count / len(names)))
    )


def drawn(who: Participation | None, rng_key: Array) -> tuple[Array, Array | None]:
    """Return the key of a round, and the weights of the silos' replies in it.

    :param rng_key: the server's key.
    """
    key_who, key_round = random.split(random.fold_in(rng_key, 1))
    return key_round, None if who is None else who.weights(key_who)


def warn_of_absent(names: tuple[str, ...], visits: Array | np.ndarray) -> None:
    """Warn of silos that never took part."""
    never = [name for name, n in zip(names, np.asarray(visits), strict=True) if n == 0]
    if never:
        shown = ", ".join(map(repr, never[:5])) + (", ..." if len(never) > 5 else "")
        warnings.warn(
            f"{len(never)} of {len(names)} silos never took part ({shown}): their data are not in "
            "the fit. Run more rounds, or raise participation",
            stacklevel=3,
        )
