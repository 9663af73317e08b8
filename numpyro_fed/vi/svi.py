"""Variational fits in the shape of :class:`numpyro.infer.SVI`: their arguments and docstrings.

The algorithms are pure functions: :mod:`numpyro_fed.vi.sfvi`, :mod:`numpyro_fed.vi.sfvi_avg` and
:mod:`numpyro_fed.vi.conducive.rounds`.
"""

import copy
from collections.abc import Callable

import optax

from numpyro_fed._typing import PyTree
from numpyro_fed.data.mixed import MixedSilos
from numpyro_fed.data.silos import Silos
from numpyro_fed.privacy.differential import Privacy
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.vi._base import FederatedVI
from numpyro_fed.vi.conducive import checks
from numpyro_fed.vi.guides.auto_silo_normal import AutoSiloNormal
from numpyro_fed.vi.loop import VIState
from numpyro_fed.vi.options import Options
from numpyro_fed.vi.result import VIResult, global_params
from numpyro_fed.vi.setup import Setup

MOST_ROUNDS = 40  # of conducive rounds: 15 models took 6 to 28 (docs/results.md)
# change of the bound in a round, in nats, below which rounds may end; a mean that is .045 sds off
# costs so much
TOL = 1e-3


class SFVI(FederatedVI):
    """Structured federated variational inference, in the shape of :class:`numpyro.infer.SVI`.

    Law: q of the guide at the optimum of the bound. With ``num_local_particles`` K > 1 the bound is
    importance-weighted inside each unit, and its weights resample draws of the local latents
    (:func:`~numpyro_fed.to_inference_data`).

    Bias: that of the family. K = 1 can be more than a posterior sd off on hierarchical models with
    few rows a unit, whatever the optimizer.

    What leaves a silo in a round: ``2 d`` numbers for each draw of theta, the gradients in the
    learned parameters, its part of the bound, and a flag. Local latents, their parameters and
    optimizer state stay.

    :param model: a model with at least one silo plate; ``numpyro.param`` sites outside of silo
        plates are learned (empirical Bayes).
    :param guide: an :class:`AutoSiloNormal` of the model, or a guide of your own with the same silo
        plates.
    :param optim: an optax transformation for q(theta) and the learned parameters.
    :param num_particles: draws of theta a round.
    :param num_local_particles: K, draws of each unit's latents. A round costs K evaluations of the
        silos' terms for each draw of theta; without local latents K is one.
    :param local_optim: an optax transformation for each silo's own parameters (``optim`` if None).
        With elementwise ones (Adam, SGD) the fit is the same for every partition of the rows.
    :param batch_size: number of rows that a silo uses in a round (all if None, or if it has fewer),
        each with the same probability.
    :param validate: whether to check the factorization (factors sum to the pooled model) before the
        first round.
    :param privacy: a budget of differential privacy for each silo's rows (:class:`Privacy`), for an
        :class:`AutoSiloNormal`. Gradients are clipped and noised in the silo, nothing else leaves
        it, and losses are NaN.
    :param secure_sum: over a wire, silos mask their replies, so that the server sees only their
        sum. With ``privacy`` each silo then adds a share of the noise. Inline silos, and those of
        :mod:`numpyro_fed.engines.spmd`, send no masks: there it only divides the noise.
    :raises TypeError: for a model that is not callable, an optimizer that is not optax's, a guide
        that is not callable.
    :raises ValueError: for options out of range; at :meth:`init` and :meth:`run` for options that
        do not fit the model or the data.

    **References**

    1. *Federated Variational Inference Methods for Structured Latent Variable Models*, Hassan,
       Salomone & Mengersen (2023), algorithm 1 and supplement S1

    Example::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
        >>> import numpyro_fed as fed
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with fed.silo_plate("patients", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> silos = fed.Silos({"oslo": {"y": jnp.ones(3)}, "rome": {"y": jnp.zeros(2)}})
        >>> svi = fed.SFVI(model, fed.AutoSiloNormal(model), optax.adam(0.05))
        >>> result = svi.run(jax.random.key(0), 500, silos, progress_bar=False)
        >>> round(float(result.params["auto_loc"][0]), 1), result.ledger.rounds
        (0.6, (500, 500))
    """

    algorithm = "sfvi"

    def __init__(
        self,
        model: Callable,
        guide: Callable,
        optim: optax.GradientTransformation,
        num_particles: int = 1,
        num_local_particles: int = 32,
        *,
        local_optim: optax.GradientTransformation | None = None,
        batch_size: int | None = None,
        validate: bool = True,
        privacy: Privacy | None = None,
        secure_sum: bool = False,
    ) -> None:
        options = Options(
            optim, local_optim, num_particles, num_local_particles, batch_size, validate,
            secure_sum, privacy=privacy,
        )  # fmt: skip
        super().__init__(model, guide, options)


class SFVIAvg(FederatedVI):
    """SFVI-Avg: many steps in every silo between two rounds, and an average of the silos' q.

    The shape is that of :class:`SFVI`. Law and bias: see :mod:`numpyro_fed.vi.sfvi_avg`. Losses are
    minus the silos' own objectives (N / N_s times their term), averaged: not comparable with SFVI's
    on unequal silos.

    :param model: as for :class:`SFVI`.
    :param guide: an :class:`AutoSiloNormal` with ``global_cov`` full or diagonal.
    :param optim: an optax transformation for each silo's copy of q(theta) and of the learned
        parameters; its state stays in the silo.
    :param num_local_steps: m, steps between two rounds.
    :param num_particles: as for :class:`SFVI`, in each step.
    :param num_local_particles: as for :class:`SFVI`, in each step.
    :param local_optim: as for :class:`SFVI`.
    :param batch_size: as for :class:`SFVI`, in each step.
    :param validate: as for :class:`SFVI`.
    :param secure_sum: as for :class:`SFVI`; for guides with a diagonal ``global_cov``.
    :param conducive: gone; see :class:`ConduciveSFVI`.
    :raises TypeError: as :class:`SFVI`; for a guide that is not an :class:`AutoSiloNormal`, and for
        ``conducive=True``.
    :raises ValueError: as :class:`SFVI`; for a low-rank ``global_cov``, whose barycenters are of
        full rank.

    **References**

    1. *Federated Variational Inference Methods for Structured Latent Variable Models*, Hassan,
       Salomone & Mengersen (2023), algorithm 2 and section 3.2

    Example::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
        >>> import numpyro_fed as fed
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with fed.silo_plate("patients", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> silos = fed.Silos({"oslo": {"y": jnp.ones(3)}, "rome": {"y": jnp.zeros(3)}})
        >>> optim = optax.adam(0.05)
        >>> avg = fed.SFVIAvg(model, fed.AutoSiloNormal(model), optim, num_local_steps=20)
        >>> start = avg.run(jax.random.key(0), 10, silos, progress_bar=False)
        >>> svi = fed.SFVI(model, fed.AutoSiloNormal(model), optim)
        >>> result = svi.run(jax.random.key(1), 50, silos, progress_bar=False, init_from=start)
        >>> len(result.losses)
        50
    """

    algorithm = "sfvi_avg"

    def __init__(
        self,
        model: Callable,
        guide: AutoSiloNormal,
        optim: optax.GradientTransformation | None = None,
        num_local_steps: int = 200,
        num_particles: int = 1,
        num_local_particles: int = 32,
        *,
        local_optim: optax.GradientTransformation | None = None,
        batch_size: int | None = None,
        validate: bool = True,
        secure_sum: bool = False,
        conducive: bool = False,
    ) -> None:
        if conducive:
            raise TypeError(
                "conducive: expected False, got True; take fed.ConduciveSFVI(model, guide, "
                "num_points=...)"
            )
        options = Options(
            optim, local_optim, num_particles, num_local_particles, batch_size, validate,
            secure_sum, num_local_steps,
        )  # fmt: skip
        super().__init__(model, guide, options)
        _check_gaussian(guide, "SFVI-Avg averages Gaussians", "a barycenter")
        if secure_sum and guide.global_cov != "diag":
            raise ValueError(
                'secure_sum=True: expected a guide with global_cov="diag", fed.ConduciveSFVI or '
                f"fed.SFVI, got global_cov={guide.global_cov!r}, whose barycenter is no sum"
            )


class ConduciveSFVI(FederatedVI):
    """Conducive rounds, which find the pooled optimum in about ten.

    The silos keep Gaussian approximate factors of their likelihoods, and q(theta) is the product of
    these and the prior's. The shape is that of :class:`SFVI`.

    Law, bias and what leaves a silo: see :mod:`numpyro_fed.vi.conducive.rounds`. Without ``optim``
    latents are integrated out, and losses are minus the pooled bound. With ``optim``, steps in each
    round move local maps, networks of amortized guides and learned parameters.

    :param model: as for :class:`SFVI`.
    :param guide: an :class:`AutoSiloNormal` with ``global_cov`` full or diagonal.
    :param optim: an optax transformation for each silo's copy of networks' weights and learned
        parameters; its state stays in the silo.
    :param num_points: least number of positions of theta at which a silo evaluates its likelihood
        in a round. It is raised to ``max(64, 4 d)``, then to a power of two. For a diagonal q it
        is raised to ``max(64, min(4 d, 1024))``.
    :param num_local_steps: with ``optim``, steps in each round.
    :param num_particles: as for :class:`SFVI`, in each step.
    :param num_local_particles: as for :class:`SFVI`, in each step and at each point; without
        ``optim``, for draws of the result alone.
    :param local_optim: as for :class:`SFVI`.
    :param batch_size: as for :class:`SFVI`, in each step; also the rows of each pair of points,
        enough that all pairs together use every row.
    :param validate: as for :class:`SFVI`.
    :param secure_sum: as for :class:`SFVI`.
    :raises TypeError: as :class:`SFVI`; for a guide that is not an :class:`AutoSiloNormal`.
    :raises ValueError: as :class:`SFVI`; for a low-rank ``global_cov``, since a product of
        Gaussians is of full rank.

    Example::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_fed as fed
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with fed.silo_plate("patients", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> silos = fed.Silos({"oslo": {"y": jnp.ones(3)}, "rome": {"y": jnp.zeros(3)}})
        >>> svi = fed.ConduciveSFVI(model, fed.AutoSiloNormal(model))
        >>> result = svi.run(jax.random.key(0), 30, silos, tol=1e-3, progress_bar=False)
        >>> len(result.losses) < 10, round(float(result.params["auto_loc"][0]), 2)
        (True, 0.5)
    """

    algorithm = "conducive"
    guide: AutoSiloNormal

    def __init__(
        self,
        model: Callable,
        guide: AutoSiloNormal,
        optim: optax.GradientTransformation | None = None,
        *,
        num_points: int = 256,
        num_local_steps: int = 200,
        num_particles: int = 1,
        num_local_particles: int = 32,
        local_optim: optax.GradientTransformation | None = None,
        batch_size: int | None = None,
        validate: bool = True,
        secure_sum: bool = False,
    ) -> None:
        options = Options(
            optim, local_optim, num_particles, num_local_particles, batch_size, validate,
            secure_sum, num_local_steps, num_points,
        )  # fmt: skip
        super().__init__(model, guide, options)
        _check_gaussian(guide, "conducive rounds multiply Gaussians", "a product")

    def setup(self, silos: Silos | MixedSilos) -> Setup:
        """Return the setup before the first round, checked."""
        setup = super().setup(silos)
        checks.check(setup.config, self.guide, setup.stacks)
        return setup

    def together(self, silos: Silos | MixedSilos) -> tuple["ConduciveSFVI", Silos | MixedSilos]:
        """Return this fit with all silos as one, where their sizes would make several programs.

        The factor of all rows is the product of the silos' factors. Silos that are remote, of
        several structures, or whose latents are one unit stay apart.
        """
        setup, apart = self.setup(silos), (self, silos)
        if isinstance(silos, MixedSilos | RemoteSilos) or len(setup.stacks) == 1:
            return apart
        one = setup.as_one()
        if len(one.stacks) > 1:
            return apart
        fit, (pooled,) = copy.copy(self), one.parts
        fit.keep(pooled, one)
        return fit, pooled

    def _taken_from(self, result: VIResult, setup: Setup, params: dict) -> tuple[dict, PyTree]:
        """Return a result's parameters as a start.

        Without optimizers q(theta) alone is needed, from these silos or others: approximate factors
        and local maps are regressed anew.
        """
        if self._options.optim is not None or not isinstance(result, VIResult):
            return super()._taken_from(result, setup, params)
        return global_params(result, setup, params), None if setup.remote else setup.local

    def _say_how_it_ended(self, setup: Setup, state: VIState) -> None:
        checks.say_how_it_ended(setup.names, state)


def conducive_for(
    model: Callable, silos: Silos | MixedSilos, *, validate: bool = True
) -> ConduciveSFVI:
    """Return conducive rounds whose guide covers the latents of the model.

    The guide has a local map of each element, or leaves the latents of nested plates to the silos'
    quadrature.

    :raises JointUnits: where the latents of a silo depend on each other in another way.
    """
    svi = ConduciveSFVI(model, AutoSiloNormal(model), validate=validate)
    try:
        svi.setup(silos)
        return svi
    except checks.JointUnits as error:  # after the check of the factorization
        guide = AutoSiloNormal(model, marginal=True)
        svi = ConduciveSFVI(model, guide, validate=False)
        try:
            svi.setup(silos)
        except ValueError:
            raise error from None
        return svi


def _check_gaussian(guide: Callable, why: str, what: str) -> None:
    if not isinstance(guide, AutoSiloNormal):
        raise TypeError(
            f"{why}: expected fed.AutoSiloNormal(model), got {type(guide).__name__}; fed.SFVI "
            "takes any guide"
        )
    if isinstance(guide.global_cov, int):
        raise ValueError(
            f"global_cov={guide.global_cov}: {what} of low-rank Gaussians is of full rank; "
            'expected a guide with global_cov="full" or "diag"'
        )
