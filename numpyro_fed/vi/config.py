"""The static facts of a variational fit: what its compiled programs depend on."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax import Array
from numpyro.distributions.transforms import biject_to

from numpyro_fed.data.views import SiloRows
from numpyro_fed.density.factors import PARAMS, Factors
from numpyro_fed.privacy.differential import Noise

__all__ = ["MOST_DIAGONAL", "Plan", "own_params"]

MOST_DIAGONAL = 1024  # points that a diagonal precision is worth


@dataclass(frozen=True)
class Plan:
    """The static facts of a fit; fits of equal plans share their compiled programs.

    :param families: the variational family over each structure's factors.
    :param optim: for q(theta) and the learned parameters; ``None`` in conducive rounds without
        steps.
    :param local_optim: for each silo's own parameters.
    :param num_particles: draws of theta a round.
    :param num_local_particles: K, draws of each unit's latents for each draw of theta.
    :param batch: row group and number of rows of a minibatch, or ``None`` for all rows.
    :param learned: names of the model's learned parameters.
    :param num_local_steps: of SFVI-Avg; 1 in SFVI.
    :param noise: what is added to a silo's gradients, ``None`` for nothing.
    :param secure_sum: whether of silos elsewhere the server hears sums alone.
    :param conducive: whether silos keep sites, whose product is q.
    :param supports: support of each global variational and learned parameter.
    """

    families: tuple[Any, ...]
    optim: Any
    local_optim: Any
    num_particles: int
    num_local_particles: int
    batch: tuple[str, int] | None
    learned: tuple[str, ...]
    num_local_steps: int
    noise: Noise | None
    secure_sum: bool
    conducive: bool
    supports: dict[str, Any] = field(compare=False, repr=False)

    @property
    def moving(self) -> tuple[str, ...]:
        """Names of the global parameters that optimisers in the silos move.

        Conducive sites are q(theta)'s.
        """
        names = (*self.learned, *getattr(self.families[0], "shared_params", ()))
        return names if self.conducive else tuple(self.supports)

    @property
    def num_points(self) -> int:
        """Positions of theta at which conducive silos look.

        A power of two, at least ``num_local_steps``, 64, and four times as many as dimensions
        (diagonal: up to 1,024).
        """
        dim, full = self.factors.dim, self.families[0].global_cov == "full"
        wanted = 4 * dim if full else min(4 * dim, MOST_DIAGONAL)
        return 1 << (max(64, self.num_local_steps, wanted) - 1).bit_length()

    def evaluations(self, part: int) -> int:
        """Gradients of a silo's term in a round."""
        if self.optim is None:  # of its marginal likelihood
            return self.num_points
        candidates = self.num_local_particles if self.families[part].has_local else 1
        points = self.num_points if self.conducive else 0
        return candidates * (self.num_particles * self.num_local_steps + points)

    @property
    def factors(self) -> Factors:
        """The factors of the first structure (global sites are those of all)."""
        return self.families[0].factors

    def unit_clocks(self, part: int) -> bool:
        """Whether each unit has an optimiser of its own.

        Where a step moves some units and not others.
        """
        return self.batch is not None and self.families[part].group == self.batch[0]

    def suffix(self, part: int) -> str:
        """What names of a structure's own things end in, where there are several structures."""
        return "" if len(self.families) == 1 else f"_{part}"

    def constrain(self, params: dict[str, Array]) -> dict[str, Array]:
        """Parameters in their supports, of unconstrained ones."""
        return _constrained(self, params)

    def unconstrain(self, params: dict[str, Array]) -> dict[str, Array]:
        """The inverse of :meth:`constrain`."""
        return _unconstrained(self, params)

    def log_prior(self, theta: Array, params: dict[str, Array], rows: SiloRows) -> Array:
        """``log p(theta)`` from the shared arguments; ``params`` constrained."""
        shared = {**dict(rows.static), **rows.shared}
        learned = {k: params[k] for k in self.learned}
        if learned:
            shared = {**shared, PARAMS: learned}
        factors = self.families[rows.part].factors
        return factors.log_prior(factors.unravel(theta), shared)


# one program each where they are called outside of a trace, and nothing inside of one
@partial(jax.jit, static_argnums=0, inline=True)
def _constrained(plan: Plan, params: dict[str, Any]) -> dict[str, Any]:
    return {k: biject_to(plan.supports[k])(v) for k, v in params.items()}


@partial(jax.jit, static_argnums=0, inline=True)
def _unconstrained(plan: Plan, params: dict[str, Any]) -> dict[str, Any]:
    return {k: biject_to(plan.supports[k]).inv(v) for k, v in params.items()}


def own_params(
    plan: Plan, part: int, state: Any, params: dict[str, Array], averaged: bool = True
) -> Any:
    """A silo's own parameters.

    Averaged where an average is kept, else those of its last round, in coordinates whitened by the
    global ones given.
    """
    if hasattr(state, "average"):
        return state.average if averaged else state.params
    family = plan.families[part]
    if not family.has_local:
        return state.params
    return family.rebased(state.params, plan.constrain(state.base), plan.constrain(params))
