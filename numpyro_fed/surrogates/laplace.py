r"""Laplace surrogates, expansions of the silos' (marginal) likelihoods to second order.

All silos expand around one common point. Every silo returns gradient and Hessian at the server's
current center, and the server takes a Newton step. The step is damped and, up to 500 dimensions,
accelerated (:mod:`numpyro_fed.surrogates.natural_step`). At the end :math:`\Lambda_s = -\nabla^2
\log \hat p(y_s \mid \theta^*)`.

FSGLD appendix F.2 expands at each silo's own mode. The common point allows silos with one row or
one label, since only the sum of the precisions must be positive definite. The surrogates are exact
for Gaussian models; for other models score matching looks further than one point.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_fed.data.silos import Silos
from numpyro_fed.data.views import SiloView
from numpyro_fed.density.factors import Factors
from numpyro_fed.density.local_map import LocalMap, Units
from numpyro_fed.rounds.task import SiloTask
from numpyro_fed.surrogates import score
from numpyro_fed.surrogates.local_score import Message, Reply, marginal_score


@dataclass(frozen=True)
class LaplaceLocal(SiloTask):
    """Part of a silo in a round of the Laplace fit.

    It returns gradient and negative Hessian at the center, in whitened coordinates.
    """

    wire_name = "LaplaceLocal"
    methods = ("chains", "network")
    leaves = (
        "The silo sends the value, gradient and precision of its log marginal likelihood at one "
        "point"
    )
    numbers = "d + d^2 + 2 numbers (beyond 500 dimensions 2 d + 2)"
    ceiling = 1_000
    message_classes = ("ScoreMessage",)

    factors: Factors
    units: Units | None

    @property
    def latent_units(self) -> Units | None:
        """Units of the latents, from the static facts."""
        return self.units

    def __call__(
        self, key: Array, message: Message, state: None, view: SiloView
    ) -> tuple[Reply, LocalMap | None]:
        gradient = marginal_score(self.factors, self.units, message, view)
        center = jnp.zeros_like(message.loc)
        hessian = jax.jacfwd(lambda u: gradient(u)[1])(center)
        precision = -0.5 * (hessian + hessian.T)
        if message.scale.ndim == 1:
            precision = jnp.diagonal(precision)
        value, shift = gradient(center)[:2]
        return Reply(shift, precision, jnp.zeros(()), value[None], None), None


def fit(
    factors: Factors, silos: Silos, units: Units | None = None, *, max_rounds: int = 40
) -> score.ScoreFit:
    """Fit Laplace surrogates.

    Arguments and result are those of :func:`numpyro_fed.surrogates.score.fit`.
    """
    return score.fit(
        factors, silos, units, max_rounds=max_rounds, local=LaplaceLocal(factors, units)
    )
