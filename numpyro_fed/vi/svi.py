"""Variational fits in the shape of :class:`numpyro.infer.SVI`.

Arguments and docstrings, no mathematics.

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
from numpyro_fed.vi.setup import Prepared

__all__ = ["SFVI", "SFVIAvg"]


class SFVI(FederatedVI):
    r"""Structured federated variational inference, in the shape of :class:`numpyro.infer.SVI`.

    Law: q of the guide at the optimum of the bound (with ``num_local_particles`` K > 1, of the
    importance-weighted bound inside each unit; draws of the local latents are then resampled with
    the same weights, see :func:`~numpyro_fed.to_inference_data`). Bias: that of the family; K = 1
    can be more than a posterior sd off on hierarchical models with few rows a unit, whatever the
    optimiser. What leaves a silo in a round: ``2 d`` numbers for each draw of theta, the gradients
    in the learned parameters, its part of the bound and a flag. Local latents, their parameters and
    optimiser's state stay.

    :param model: a model with at least one silo plate; ``numpyro.param`` sites outside of them are
        learned (empirical Bayes).
    :param guide: an :class:`AutoSiloNormal` of the model, or a guide of your own with the same silo
        plates.
    :param optim: an optax transformation for q(theta) and the learned parameters.
    :param num_particles: draws of theta a round.
    :param num_local_particles: K. A round costs K evaluations of the silos' terms for each draw of
        theta; without local latents K is one.
    :param local_optim: an optax transformation for each silo's own parameters (``optim`` if None);
        elementwise ones (Adam, SGD) keep the fit the same for every partition of the rows.
    :param batch_size: rows a silo uses in a round (all if None, or if it has fewer), each with the
        same probability.
    :param validate: run the proof check (factors sum to the pooled model) before the first round.
    :param privacy: a budget of differential privacy for each silo's rows (:class:`Privacy`), for an
        :class:`AutoSiloNormal`: gradients are cut and noised in the silo, nothing else leaves it,
        and losses are NaN.
    :param secure_sum: over a wire, silos mask their replies so that the server sees their sum
        alone; with ``privacy`` each then adds a share of the noise. Of silos at hand, and engines
        whose processes trust each other, it changes nothing but that share.
    :raises TypeError: for a model that is not callable, an optimiser that is not optax's, a guide
        that is not callable.
    :raises ValueError: for options out of range; at :meth:`init` and :meth:`run` for what does not
        fit the model or the data.

    **References**

    1. *Federated Variational Inference Methods for Structured Latent Variable Models*, Hassan,
       Salomone & Mengersen (2023), algorithm 1 and supplement S1

    Example::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax, numpyro_fed as fed
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
    r"""SFVI-Avg: ``num_local_steps`` steps in every silo between two rounds.

    In the shape of :class:`SFVI`.

    Law and bias: see :mod:`numpyro_fed.vi.sfvi_avg`. Losses are minus the silos' own objectives (N
    / N_s times their term), averaged: not comparable with SFVI's on unequal silos.

    :param model: as for :class:`SFVI`.
    :param guide: an :class:`AutoSiloNormal` with ``global_cov`` full or diagonal.
    :param optim: an optax transformation for each silo's copy of q(theta) and of the learned
        parameters (conducive: of the latter alone); its state stays in the silo.
    :param num_local_steps: m, steps between two rounds; conducive: positions of theta at which a
        silo looks in a round (a power of two, at least so many), and with ``optim`` steps before
        that.
    :param num_particles: as for :class:`SFVI`, of each step.
    :param num_local_particles: likewise; conducive without ``optim``: of the draws of the result
        alone.
    :param conducive: the silos keep Gaussian sites, whose product is q, in place of averages: the
        pooled optimum in about ten rounds (:mod:`numpyro_fed.vi.conducive.rounds`). Without
        ``optim`` latents are integrated out, and losses are minus the pooled bound; with it,
        ``num_local_steps`` steps a round move local maps, networks of amortised guides and learned
        parameters.
    :param local_optim: likewise.
    :param batch_size: likewise; conducive: rows at which each pair of points looks, at least so
        many that all pairs together look at every row.
    :param validate: likewise.
    :param secure_sum: likewise, of conducive rounds, and of guides with a diagonal ``global_cov``.
    :raises TypeError: as :class:`SFVI`.
    :raises ValueError: as :class:`SFVI`; for a low-rank ``global_cov``, whose barycentres are of
        full rank.

    **References**

    1. *Federated Variational Inference Methods for Structured Latent Variable Models*, Hassan,
       Salomone & Mengersen (2023), algorithm 2 and section 3.2

    Example::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax, numpyro_fed as fed
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with fed.silo_plate("patients", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> silos = fed.Silos({"oslo": {"y": jnp.ones(3)}, "rome": {"y": jnp.zeros(3)}})
        >>> avg = fed.SFVIAvg(model, fed.AutoSiloNormal(model), optax.adam(0.05), num_local_steps=20)
        >>> start = avg.run(jax.random.key(0), 10, silos, progress_bar=False)
        >>> svi = fed.SFVI(model, fed.AutoSiloNormal(model), optax.adam(0.05))
        >>> len(svi.run(jax.random.key(1), 50, silos, progress_bar=False, init_from=start).losses)
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
                "secure_sum=True: the barycentre of the silos' covariances is no sum of them; "
                "expected conducive=True, whose sites add up, a guide with "
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
                f"global_cov={guide.global_cov}: a barycentre of low-rank Gaussians is of full "
                "rank; expected a guide with "
                'global_cov="full" or "diag"'
            )

    def prepared(self, silos: Silos | MixedSilos) -> Prepared:
        """As of every variational method; conducive rounds refuse what they do not cover."""
        prepared = super().prepared(silos)
        if self._options.conducive:
            conducive_checks.check(prepared.plan, self.guide, prepared.stacks)
        return prepared

    def _taken_from(self, result: Any, prepared: Prepared, params: dict) -> tuple[dict, Any]:
        """Conducive rounds without optimisers need q(theta) alone, from these silos or others.

        Sites and local maps are regressed anew.
        """
        if self._options.optim is not None or not isinstance(result, VIResult):
            return super()._taken_from(result, prepared, params)
        return global_params(
            result, prepared, params
        ), None if prepared.elsewhere else prepared.local

    def _say_how_it_ended(self, prepared: Prepared, state: VIState) -> None:
        if self._options.conducive:
            summed = prepared.elsewhere and prepared.plan.secure_sum
            conducive_checks.say_how_it_ended(prepared.names, state, summed)
