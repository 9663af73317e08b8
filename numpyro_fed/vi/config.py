"""Static facts of a variational fit, on which its compiled programs depend."""

from dataclasses import dataclass, field
from functools import partial

import jax
import optax
from jax import Array
from numpyro.distributions.constraints import Constraint
from numpyro.distributions.transforms import biject_to

from numpyro_fed._typing import PyTree
from numpyro_fed.data.views import SiloRows
from numpyro_fed.density.factors import PARAMS, Factors
from numpyro_fed.privacy.differential import Noise
from numpyro_fed.rounds.task import SiloTask
from numpyro_fed.vi.guides.family import Family
from numpyro_fed.vi.guides.normal import SiloNormal

FIT_TASKS = ("InitLocal", "RoundLocal")  # wire names of the tasks that write a silo's state
# wire names of the classes that carry a draw of theta
FIT_CLASSES = ("NormalContext", "GuideContext", "Triangular", "Diagonal", "LowRankScale")


@dataclass(frozen=True)
class FitConfig:
    """Static facts of a fit; fits of equal configs share their compiled programs.

    :param families: the variational family over each structure's factors.
    :param optim: for q(theta) and the learned parameters; ``None`` in conducive rounds without
        optimizers.
    :param local_optim: for each silo's own parameters.
    :param num_particles: draws of theta a round.
    :param num_local_particles: K, draws of each unit's latents for each draw of theta.
    :param batch: row group and number of rows of a minibatch, or ``None`` for all rows.
    :param learned: names of the model's learned parameters.
    :param num_local_steps: steps between two rounds; 1 in SFVI.
    :param num_points: in conducive rounds, number of positions of theta at which silos evaluate
        their likelihood; else 0.
    :param noise: the noise added to a silo's gradients; ``None`` for no noise.
    :param secure_sum: whether the server sees only sums of the remote silos' replies.
    :param supports: support of each global variational and learned parameter.
    """

    families: tuple[Family, ...]
    optim: optax.GradientTransformation | None
    local_optim: optax.GradientTransformation | None
    num_particles: int
    num_local_particles: int
    batch: tuple[str, int] | None
    learned: tuple[str, ...]
    num_local_steps: int
    num_points: int
    noise: Noise | None
    secure_sum: bool
    supports: dict[str, Constraint] = field(compare=False, repr=False)

    @property
    def moving(self) -> tuple[str, ...]:
        """Names of the global parameters that optimizers in the silos move.

        In conducive rounds these do not include q(theta)'s, which follow from the approximate
        factors.
        """
        names = (*self.learned, *self.families[0].shared_params)
        return names if self.conducive else tuple(self.supports)

    @property
    def conducive(self) -> bool:
        """Flag of conducive rounds: silos keep approximate factors, whose product is q."""
        return self.num_points > 0

    def normal(self, part: int = 0) -> SiloNormal:
        """Return a structure's family, in fits that need a Gaussian one."""
        family = self.families[part]
        assert isinstance(family, SiloNormal)
        return family

    def evaluations(self, part: int) -> int:
        """Return the number of gradients of a silo's term in a round."""
        if self.optim is None:  # the gradients are of its marginal likelihood
            return self.num_points
        candidates = self.num_local_particles if self.families[part].has_local else 1
        return candidates * (self.num_particles * self.num_local_steps + self.num_points)

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


class FitTask(SiloTask):
    """Task of a variational fit, whose config the silo has, too."""

    reads = (FIT_TASKS,)
    methods = ("fit",)

    config: FitConfig

    @property
    def fit_config(self) -> FitConfig:
        """Static facts of the fit, which are those of the call."""
        return self.config


# jitted: called outside of a trace each is one program; inside of one it is inlined
@partial(jax.jit, static_argnums=0, inline=True)
def _constrained(config: FitConfig, params: dict[str, PyTree]) -> dict[str, PyTree]:
    return {k: biject_to(config.supports[k])(v) for k, v in params.items()}


@partial(jax.jit, static_argnums=0, inline=True)
def _unconstrained(config: FitConfig, params: dict[str, PyTree]) -> dict[str, PyTree]:
    return {k: biject_to(config.supports[k]).inv(v) for k, v in params.items()}
