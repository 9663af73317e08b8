"""Static facts of a variational fit, on which its compiled programs depend."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax import Array
from numpyro.distributions.transforms import biject_to

from numpyro_fed.data.views import SiloRows
from numpyro_fed.density.factors import PARAMS, Factors
from numpyro_fed.privacy.differential import Noise

__all__ = ["FIT_CLASSES", "FIT_TASKS", "MOST_DIAGONAL", "FitConfig", "own_params"]

FIT_TASKS = ("InitLocal", "RoundLocal")  # wire names of the tasks that write a silo's state
# wire names of the classes that carry a draw of theta
FIT_CLASSES = ("NormalContext", "GuideContext", "Triangular", "Diagonal", "LowRankScale")

MOST_DIAGONAL = 1024  # most points for a diagonal precision


@dataclass(frozen=True)
class FitConfig:
    """Static facts of a fit; fits of equal plans share their compiled programs.

    :param families: the variational family over each structure's factors.
    :param optim: for q(theta) and the learned parameters; ``None`` in conducive rounds without
        optimizers.
    :param local_optim: for each silo's own parameters.
    :param num_particles: draws of theta a round.
    :param num_local_particles: K, draws of each unit's latents for each draw of theta.
    :param batch: row group and number of rows of a minibatch, or ``None`` for all rows.
    :param learned: names of the model's learned parameters.
    :param num_local_steps: of SFVI-Avg; 1 in SFVI.
    :param noise: the noise added to a silo's gradients; ``None`` for no noise.
    :param secure_sum: whether the server sees only sums of the remote silos' replies.
    :param conducive: whether silos keep approximate factors, whose product is q.
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
        """Names of the global parameters that optimizers in the silos move.

        In conducive rounds these do not include q(theta)'s, which follow from the approximate
        factors.
        """
        names = (*self.learned, *getattr(self.families[0], "shared_params", ()))
        return names if self.conducive else tuple(self.supports)

    @property
    def num_points(self) -> int:
        """Number of positions of theta at which conducive silos evaluate their likelihood.

        It is the least power of two that is at least ``num_local_steps``, 64, and four times the
        number of dimensions (for a diagonal q at least the smaller of this and 1,024).
        """
        dim, full = self.factors.dim, self.families[0].global_cov == "full"
        wanted = 4 * dim if full else min(4 * dim, MOST_DIAGONAL)
        return 1 << (max(64, self.num_local_steps, wanted) - 1).bit_length()

    def evaluations(self, part: int) -> int:
        """Return the number of gradients of a silo's term in a round."""
        if self.optim is None:  # the gradients are of its marginal likelihood
            return self.num_points
        candidates = self.num_local_particles if self.families[part].has_local else 1
        points = self.num_points if self.conducive else 0
        return candidates * (self.num_particles * self.num_local_steps + points)

    @property
    def factors(self) -> Factors:
        """Factors of the first structure (the global sites are those of all structures)."""
        return self.families[0].factors

    def unit_clocks(self, part: int) -> bool:
        """Return whether each unit has an optimizer state of its own.

        It has where a step moves some units and not others.
        """
        return self.batch is not None and self.families[part].group == self.batch[0]

    def suffix(self, part: int) -> str:
        """Return the ending of the names of a structure's local things; empty for one structure."""
        return "" if len(self.families) == 1 else f"_{part}"

    def constrain(self, params: dict[str, Array]) -> dict[str, Array]:
        """Map unconstrained parameters to their supports."""
        return _constrained(self, params)

    def unconstrain(self, params: dict[str, Array]) -> dict[str, Array]:
        """Map parameters in their supports to unconstrained space."""
        return _unconstrained(self, params)

    def log_prior(self, theta: Array, params: dict[str, Array], rows: SiloRows) -> Array:
        """Return ``log p(theta)`` from the shared arguments; ``params`` are constrained."""
        shared = {**dict(rows.static), **rows.shared}
        learned = {k: params[k] for k in self.learned}
        if learned:
            shared = {**shared, PARAMS: learned}
        factors = self.families[rows.part].factors
        return factors.log_prior(factors.unravel(theta), shared)


# jitted: called outside of a trace each is one program; inside of one it is inlined
@partial(jax.jit, static_argnums=0, inline=True)
def _constrained(config: FitConfig, params: dict[str, Any]) -> dict[str, Any]:
    return {k: biject_to(config.supports[k])(v) for k, v in params.items()}


@partial(jax.jit, static_argnums=0, inline=True)
def _unconstrained(config: FitConfig, params: dict[str, Any]) -> dict[str, Any]:
    return {k: biject_to(config.supports[k]).inv(v) for k, v in params.items()}


def own_params(
    config: FitConfig, part: int, state: Any, params: dict[str, Array], averaged: bool = True
) -> Any:
    """Return a silo's own parameters.

    They are the tail average where the algorithm keeps one, else those of the silo's last round.
    The latter are rewritten for coordinates whitened by ``params``.

    :param params: global parameters, unconstrained.
    :param averaged: whether to take the tail average where there is one.
    """
    if hasattr(state, "average"):
        return state.average if averaged else state.params
    family = config.families[part]
    if not family.has_local:
        return state.params
    return family.rebased(state.params, config.constrain(state.base), config.constrain(params))
