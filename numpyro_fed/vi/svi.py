"""Variational fits in the shape of :class:`numpyro.infer.SVI`: their arguments and docstrings.

The algorithms are pure functions: :mod:`numpyro_fed.vi.sfvi`, :mod:`numpyro_fed.vi.sfvi_avg` and
:mod:`numpyro_fed.vi.conducive.rounds`.
"""

from collections.abc import Callable
from typing import Any

from numpyro_fed.data.mixed import MixedSilos
from numpyro_fed.data.silos import Silos
from numpyro_fed.privacy.differential import Privacy
from numpyro_fed.vi import sfvi, sfvi_avg
from numpyro_fed.vi._base import FederatedVI
from numpyro_fed.vi.conducive import checks as conducive_checks
from numpyro_fed.vi.conducive import rounds as conducive_rounds
from numpyro_fed.vi.guides.auto_silo_normal import AutoSiloNormal
from numpyro_fed.vi.loop import VIState
from numpyro_fed.vi.options import Options
from numpyro_fed.vi.result import VIResult, global_params
from numpyro_fed.vi.setup import Setup

__all__ = ["SFVI", "SFVIAvg"]


class SFVI(FederatedVI):
    """Structured federated variational inference, in the shape of :class:`numpyro.infer.SVI`.

    Law: q of the guide at the optimum of the bound. With ``num_local_particles`` K > 1 this is the
    importance-weighted bound inside each unit; draws of the local latents are then resampled with
    the same weights (:func:`~numpyro_fed.to_inference_data`).

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
        sum. With ``privacy`` each silo then adds a share of the noise. For silos in this process,
        and for engines whose processes trust each other, only that share changes.
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
    _federated = staticmethod(sfvi.federated)
    _init_silo = staticmethod(sfvi.init_silo)

    def __init__(
        self,
        model: Callable,
        guide: Any,
        optim: Any,
        num_particles: int = 1,
        num_local_particles: int = 32,
        *,
        local_optim: Any = None,
        batch_size: int | None = None,
        validate: bool = True,
        privacy: Privacy | None = None,
        secure_sum: bool = False,
    ) -> None:
        local_optim = optim if local_optim is None else local_optim
        options = Options(
            optim,
            local_optim,
            num_particles,
            num_local_particles,
            batch_size,
            validate,
            privacy=privacy,
            secure_sum=secure_sum,
        )
        super().__init__(model, guide, options)


class SFVIAvg(FederatedVI):
    """SFVI-Avg: many steps in every silo between two rounds, and an average of the silos' q.

    The shape is that of :class:`SFVI`. Law and bias: see :mod:`numpyro_fed.vi.sfvi_avg`. Losses are
    minus the silos' own objectives (N / N_s times their term), averaged: not comparable with SFVI's
    on unequal silos.

    With ``conducive=True`` the silos keep Gaussian approximate factors, whose product is q, in
    place of averages. This finds the pooled optimum in about ten rounds
    (:mod:`numpyro_fed.vi.conducive.rounds`). Without ``optim`` latents are integrated out, and
    losses are minus the pooled bound. With ``optim``, steps in each round move local maps, networks
    of amortized guides and learned parameters.

    :param model: as for :class:`SFVI`.
    :param guide: an :class:`AutoSiloNormal` with ``global_cov`` full or diagonal.
    :param optim: an optax transformation for each silo's copy of q(theta) and of the learned
        parameters (conducive: of networks' weights and learned parameters alone); its state stays
        in the silo.
    :param num_local_steps: m, steps between two rounds. Conducive: least number of positions of
        theta at which a silo evaluates its likelihood in a round (rounded up to a power of two);
        with ``optim`` also the steps before.
    :param num_particles: as for :class:`SFVI`, in each step.
    :param num_local_particles: as for :class:`SFVI`, in each step; conducive without ``optim``: for
        draws of the result alone.
    :param conducive: whether the silos keep approximate factors.
    :param local_optim: as for :class:`SFVI`.
    :param batch_size: as for :class:`SFVI`, in each step. Conducive: rows that each pair of points
        uses, enough that all pairs together use every row.
    :param validate: as for :class:`SFVI`.
    :param secure_sum: as for :class:`SFVI`; for conducive rounds, and guides with a diagonal
        ``global_cov``.
    :raises TypeError: as :class:`SFVI`; for a guide that is not an :class:`AutoSiloNormal`.
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

    def __init__(
        self,
        model: Callable,
        guide: Any,
        optim: Any = None,
        num_local_steps: int = 200,
        num_particles: int = 1,
        num_local_particles: int = 32,
        *,
        conducive: bool = False,
        local_optim: Any = None,
        batch_size: int | None = None,
        validate: bool = True,
        secure_sum: bool = False,
    ) -> None:
        local_optim = optim if local_optim is None else local_optim
        options = Options(
            optim,
            local_optim,
            num_particles,
            num_local_particles,
            batch_size,
            validate,
            num_local_steps,
            bool(conducive),
            secure_sum=secure_sum,
        )
        super().__init__(model, guide, options)
        if secure_sum and not conducive and getattr(guide, "global_cov", "diag") != "diag":
            raise ValueError(
                "secure_sum=True: the barycenter of the silos' covariances is no sum of them; "
                "expected conducive=True, whose approximate factors add up, a guide with "
                'global_cov="diag", or fed.SFVI'
            )
        self.algorithm, self._federated, self._init_silo = (
            "sfvi_avg",
            sfvi_avg.federated,
            sfvi_avg.init_silo,
        )
        if conducive:
            self.algorithm = "conducive"
            self._federated, self._init_silo = (
                conducive_rounds.federated,
                conducive_rounds.init_silo,
            )
        if not isinstance(guide, AutoSiloNormal):
            raise TypeError(
                "SFVI-Avg averages Gaussians: expected fed.AutoSiloNormal(model), got "
                f"{type(guide).__name__}; fed.SFVI takes any guide"
            )
        if isinstance(guide.global_cov, int):
            raise ValueError(
                f"global_cov={guide.global_cov}: a barycenter of low-rank Gaussians is of full "
                "rank; expected a guide with "
                'global_cov="full" or "diag"'
            )

    def setup(self, silos: Silos | MixedSilos) -> Setup:
        """Return the setup before the first round; conducive rounds check it."""
        setup = super().setup(silos)
        if self._options.conducive:
            conducive_checks.check(setup.config, self.guide, setup.stacks)
        return setup

    def _taken_from(self, result: Any, setup: Setup, params: dict) -> tuple[dict, Any]:
        """Return a result's parameters as a start.

        Conducive rounds without optimizers need q(theta) alone, from these silos or others:
        approximate factors and local maps are regressed anew.
        """
        if self._options.optim is not None or not isinstance(result, VIResult):
            return super()._taken_from(result, setup, params)
        return global_params(result, setup, params), None if setup.remote else setup.local

    def _say_how_it_ended(self, setup: Setup, state: VIState) -> None:
        if self._options.conducive:
            conducive_checks.say_how_it_ended(setup.names, state)
