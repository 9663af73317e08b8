"""Facts about silos without their rows: what shapes and compiled programs depend on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from numpyro_fed._typing import Column

Names = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class SilosSpec:
    """Facts about silos, hashable; a mapping is a tuple of its items, sorted by name.

    :param names: names of the silos.
    :param arrays: names of the shared arguments that are arrays.
    :param guessed: row groups that follow from the numbers of rows alone.
    :param group: row group of each row argument.
    :param sizes: number of rows of each silo, by row group.
    :param index: row group to which an argument of positions points.
    :param static: shared arguments that are no arrays.
    """

    names: tuple[str, ...]
    arrays: tuple[str, ...]
    guessed: tuple[str, ...]
    group: Names
    sizes: tuple[tuple[str, tuple[int, ...]], ...]
    index: Names
    static: tuple[tuple[str, Column], ...]

    @classmethod
    def of_mappings(
        cls,
        names: tuple[str, ...],
        arrays: tuple[str, ...],
        guessed: tuple[str, ...],
        *mappings: Mapping[str, Any],
    ) -> Self:
        """Return the facts; ``mappings`` are group, sizes, index and static."""
        return cls(names, arrays, guessed, *(tuple(sorted(x.items())) for x in mappings))

    def values(self) -> tuple[tuple, ...]:
        """Return all fields in their order, to be sent."""
        return tuple(vars(self).values())

    def of(self, names: tuple[str, ...], sizes: Mapping[str, Sequence[int]]) -> Self:
        """Return the facts about silos of other names and sizes."""
        pairs = tuple(sorted((g, tuple(n)) for g, n in sizes.items()))
        return replace(self, names=names, sizes=pairs)

    def among(self, names: Sequence[str]) -> Self:
        """Return the facts about some of the silos."""
        numbers = [self.names.index(name) for name in names]
        return self.of(tuple(names), {g: [sizes[n] for n in numbers] for g, sizes in self.sizes})

    def without(self, *shared: str) -> Self:
        """Return the facts without some shared arguments."""
        return replace(
            self,
            arrays=tuple(k for k in self.arrays if k not in shared),
            static=tuple((k, v) for k, v in self.static if k not in shared),
        )
