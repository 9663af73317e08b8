"""Static facts and numbers of a Langevin kernel, fixed before its first round."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_fed._typing import PyTree
from numpyro_fed.density.factors import Factors
from numpyro_fed.density.local_map import Units
from numpyro_fed.mcmc.minibatch import Members
from numpyro_fed.rounds.serialization import wire_name
from numpyro_fed.rounds.task import SiloTask
from numpyro_fed.surrogates.corrections import Corrections
from numpyro_fed.surrogates.gaussian import matvec

# wire names of a kernel's numbers and their parts
TUNING_CLASSES = ("Tuning", "Conducive", "Corrections", "LatentCoordinates")
# local steps whose random numbers and rows are drawn together, and the bytes of their rows: blocks
# made small steps 13 times as fast on one core, and a few MiB stay in the caches
_BLOCK_STEPS = 200
_BLOCK_BYTES = 8 << 20


@wire_name("LangevinConfig")
@dataclass(frozen=True)
class LangevinConfig:
    """Static facts of a kernel; kernels of equal configs share their compiled programs.

    :param factors: the model's factors.
    :param units: the units of the local latents, or ``None`` without any.
    :param num_local_steps: T.
    :param batch: row group and size of a minibatch, or ``None`` for all rows. Where elements have
        latents, the minibatch is of these elements.
    :param cut: whether the conducive residual e is separated and cut.
    :param schedule: step size by number of local steps made, or ``None`` for a constant one.
    :param num_kept: draws kept per visit, a divisor of T.
    """

    factors: Factors
    units: Units | None
    num_local_steps: int
    batch: tuple[str, int] | None
    cut: bool
    schedule: Callable[[Array], ArrayLike] | None
    num_kept: int = 1

    @property
    def steps_a_draw(self) -> int:
        """Local steps from one draw to the next of the same visit."""
        return self.num_local_steps // self.num_kept

    @property
    def block(self) -> int:
        """Local steps in a block, which draws its random numbers and gathers its rows at once."""
        steps, most = self.steps_a_draw, _BLOCK_STEPS
        if self.units is not None:  # each unit takes a normal vector and a uniform
            count = 1 if self.units.group is None else dict(self.units.pad)[self.units.group]
            most = max(1, min(most, _BLOCK_BYTES // (4 * count * (self.units.dim + 1))))
        if self.batch is not None:
            group, m = self.batch
            row = sum(
                math.prod(spec.shape) * spec.dtype.itemsize
                for _, g, spec in self.factors.rows
                if g == group
            )
            most = max(1, min(most, _BLOCK_BYTES // (m * row)))
        fewest = -(-steps // most)
        # blocks of unequal length cost a second program, so prefer equal ones down to half the size
        return next(
            (steps // k for k in range(fewest, 2 * fewest) if steps % k == 0), -(-steps // fewest)
        )


@wire_name("NodeConfig")
@dataclass(frozen=True)
class NodeConfig:
    """Static facts that a node of a network needs for its part of a step.

    They tell a node nothing of the graph.

    :param factors: the model's factors.
    :param units: the units of the local latents, or ``None`` without any.
    :param batch: row group and number of rows of a minibatch, or ``None`` for all rows.
    :param num_nodes: m.
    """

    factors: Factors
    units: Units | None
    batch: tuple[str, int] | None
    num_nodes: int


@dataclass(frozen=True)
class NetworkConfig(NodeConfig):
    """Static facts of a kernel over a network of nodes.

    :param schedule: step size by number of steps made, or ``None`` for a constant one.
    :param fails: whether links or nodes may fail.
    :param both_ways: whether a link works in both directions or not at all (gossip).
    :param exchange: the algorithm, a function of links and nodes. It returns what nodes hold after
        an exchange, and the positions of their gradients.
    :param totals: rows of each row group over all silos.
    """

    schedule: Callable[[Array], ArrayLike] | None
    fails: bool
    both_ways: bool
    exchange: Callable
    totals: tuple[tuple[str, int], ...]

    @property
    def node(self) -> NodeConfig:
        """Config of each node."""
        return NodeConfig(self.factors, self.units, self.batch, self.num_nodes)


class KernelTask(SiloTask):
    """Task of a kernel, whose config says into which units the latents are cut."""

    config: LangevinConfig | NodeConfig

    @property
    def latent_units(self) -> Units | None:
        """Units of the latents, from the config."""
        return self.config.units


@wire_name("Conducive")
class Conducive(NamedTuple):
    """Surrogates expanded around a point.

    They hold gradients at the point ``(S, d)``, precisions ``(S, d, d)`` or ``(S, d)``, the sums of
    both over silos, and bounded corrections.
    """

    shift: Array
    precision: Array
    total_shift: Array
    total_precision: Array
    corrections: Corrections | None = None
    total_corrections: Corrections | None = None

    def of(self, number: Array | int | slice) -> "Conducive":
        """Return the surrogates of some silos, with the sums over all silos."""
        corrections = (
            None
            if self.corrections is None
            else self.corrections.of(self.corrections.coefficients[number])
        )
        return self._replace(
            shift=self.shift[number], precision=self.precision[number], corrections=corrections
        )

    def score(self, theta: Array, loc: Array) -> Array:
        """Return the gradient of one silo's log surrogate, after :meth:`of`."""
        gradient = self.shift - matvec(self.precision, theta - loc)
        return gradient if self.corrections is None else gradient + self.corrections.score(theta)

    def total_score(self, theta: Array, loc: Array) -> Array:
        """Return the gradient of the sum of all log surrogates."""
        gradient = self.total_shift - matvec(self.total_precision, theta - loc)
        return (
            gradient
            if self.total_corrections is None
            else gradient + self.total_corrections.score(theta)
        )


# in sds; farther out, a linear map carried latents of silos that the chain does not visit to 16,
# where NUTS has 4.2; with the limit they came to 4.4 (docs/results.md)
_FARTHEST = 6.0


@wire_name("LatentCoordinates")
class LatentCoordinates(NamedTuple):
    """Local map with its whitening ``u = whiten (theta - loc)``; its rows are private to silos."""

    loc: Array
    whiten: Array
    rows: PyTree

    def u(self, theta: Array) -> Array:
        """Return the whitened global position, with each coordinate clipped to +-6."""
        return jnp.clip(matvec(self.whiten, theta - self.loc), -_FARTHEST, _FARTHEST)


@wire_name("Tuning")
class Tuning(NamedTuple):
    """Numbers of a kernel, made once before the first round.

    :param step_size: h (without a schedule).
    :param alpha: weight of the conducive gradient.
    :param selection: probabilities f of the silos, shape ``(S,)``.
    :param loc: expansion point of the surrogates' gradients, shape ``(d,)``.
    :param scale: L: ``(d, d)``, ``(d,)``, or ``None`` for the identity.
    :param conducive: the surrogates around ``loc``, or ``None``.
    :param latents: the coordinates of local latents, or ``None``.
    :param inflation: predicted ratio of the chain's sd to the posterior's.
    :param cut: largest norm of e, in whitened units.
    :param members: for minibatches of elements with latents, the rows that point to each element.
    :param anchor: for minibatches with control variates, the silos' whole gradients at ``loc``,
        ``(S, d)``.
    :param inject: factor of a step's noise ``(d, d)``, or ``None`` for the identity.
    :param draws: the pilot's positions, which represent the posterior, ``(K, d)``; ``None``: draws
        of the Gaussian.
    """

    step_size: Array
    alpha: Array
    selection: Array
    loc: Array
    scale: Array | None
    conducive: Conducive | None
    latents: LatentCoordinates | None
    inflation: Array
    cut: Array | float = math.inf
    inject: Array | None = None
    members: dict[str, Members] | None = None
    anchor: Array | None = None
    draws: Array | None = None

    def without_rows(self) -> "Tuning":
        """Return the numbers without the local map, whose rows are private to silos."""
        return (
            self
            if self.latents is None
            else self._replace(latents=self.latents._replace(rows=None))
        )

    def seen_by(self, number: int) -> "Tuning":
        """Return the numbers that one silo receives.

        It receives its own probability and surrogate, and the sum of all surrogates.
        """
        own, told = slice(number, number + 1), self.without_rows()._replace(draws=None)
        conducive = told.conducive
        if conducive is not None:
            conducive = conducive.of(own)
        return told._replace(selection=self.selection[own], conducive=conducive)
