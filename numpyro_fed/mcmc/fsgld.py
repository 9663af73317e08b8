r"""FSGLD: federated stochastic gradient Langevin dynamics with conducive gradients.

Target: the posterior of the pooled model. Update: :mod:`numpyro_fed.mcmc.langevin` with
:math:`\alpha = 1`,

.. math:: \theta \leftarrow \theta + \tfrac h2 \left( \nabla \log p(\theta) + \tfrac{N_s}{f_s m} \nabla \log p(y_s^{(m)} \mid \theta)
          + \alpha g_s(\theta) \right) + N(0, h), \qquad g_s = \nabla \log q - \tfrac1{f_s} \nabla \log q_s .

The next silo is drawn from Categorical(f). Since :math:`\sum_s f_s g_s = 0` for :math:`q = \prod_s
q_s`, the estimator is unbiased for any surrogates and any alpha (FSGLD lemma 1).
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax import Array

from numpyro_fed.mcmc._kernel import LangevinKernel
from numpyro_fed.mcmc.options import Options
from numpyro_fed.surrogates.gaussian import Surrogates

__all__ = ["FSGLD"]


class FSGLD(LangevinKernel):
    """Federated SGLD with conducive gradients, a kernel for :class:`numpyro.infer.MCMC`.

    **Law and bias.** The posterior, up to a bias of order ``step_size`` in the variance. With
    ``step_size="auto"`` it is held to a factor ``1 + bias_target`` in the sds; the prediction is in
    the extra field ``inflation``. One ``sample()`` is one communication round: a stay of
    ``num_local_steps`` steps at one silo.

    **What leaves a silo.** A round: the global position and the mean of e (``d`` numbers each), the
    step count and four statistics. Before the first: for the surrogates, in about ten rounds, ``d +
    d^2`` numbers, a misfit, and log marginal likelihoods at 64 or 256 values of theta; for the
    pilot, in two rounds, 64 means of e and its norms. Rows, local latents and their coordinates
    never do. ``kernel.ledger(mcmc.last_state)`` has the bytes.

    **Local latents** move by Metropolis steps while the chain is at their silo, in coordinates that
    travel with the global parameters: element by element where elements are independent given
    those, together otherwise.

    :param model: a NumPyro model with at least one silo plate.
    :param step_size: h, in preconditioned units: a number, an optax schedule of the number of local
        steps, or ``"auto"``.
    :param num_local_steps: T, local steps a round, or ``"auto"``: those at which effective draws
        are most for what rounds and steps cost.
    :param batch_size: m, rows of a minibatch (with replacement), or, where plate elements have
        latents, m of these elements with their rows (without); ``None``: all rows of the silo.
    :param surrogate: ``"score"``, ``"laplace"``, ``"moments"``, or a
        :class:`~numpyro_fed.surrogates.Surrogates` (analytic, of low rank).
    :param alpha: weight of the conducive gradient (FSGLD remark 1), or ``"auto"``: its coefficient
        as a control variate.
    :param selection: f, probabilities of the silos; equal by default; ``"size"``: in proportion to
        their rows; ``"auto"``: those at which the silos' noise N is least.
    :param preconditioner: ``"surrogate"``: the covariance of the surrogate posterior; ``None``:
        none, as in the papers.
    :param num_kept: draws kept of a round, at equal distances. ``num_warmup`` and ``num_samples``
        then count draws, ``num_kept`` a round.
    :param refresh_every: rounds after which, before the warm-up and as often as they go into it,
        surrogates, local map and step size are settled again around 64 chains made for it;
        ``None``: never.
    :param distinct_silos: vectorised chains are at different silos in every round (where no f
        exceeds one over their number), so that none waits for another; each chain's own silos are
        independent draws from f all the same.
    :param control_variates: take from a minibatch's gradient what the same rows give at the
        surrogates' centre, and add the whole silo's there, which is computed once (Baker et al.
        2019). Two gradients a step; where rows are many its noise is far smaller.
    :param no_answer: probability that the silo chosen does not answer, in simulations: the chain
        waits, its draw counts again, and the next silo is chosen as if nothing had been, which
        keeps the selection unbiased. (Asking another silo instead would not.)
    :param init_from: the result of :class:`~numpyro_fed.SFVI` or :class:`~numpyro_fed.SFVIAvg` on
        the same model: the surrogates' fit starts at its q(theta) and saves the rounds that would
        lead there; all but the four in which they are made (two beyond 16 dimensions), where q is
        full and conducive rounds have settled.
    :param bias_target: accepted relative inflation of the sds under ``step_size="auto"``.
    :param noise_correction: inject less noise where the silos' own makes up for it: four times the
        step at the same inflation. No longer the paper's update.
    :param round_price: what a round costs besides its local steps, in these
        (``num_local_steps="auto"``).
    :param public: observed sites outside every silo plate whose data all silos know.
    :param validate: make the proof check before the first round.
    :raises ValueError: for arguments, data and model structures it cannot use, before compilation.

    **Reference.** el Mekkaoui, Mesquita, Blomstedt, Kaski: Federated stochastic gradient Langevin
    dynamics, UAI 2021, equations 5-7 and algorithm 1.

    **Example**::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_fed as fed
        >>> from numpyro.infer import MCMC
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with fed.silo_plate("patients", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> silos = fed.Silos({"oslo": {"y": jnp.arange(20.0)}, "rome": {"y": jnp.arange(30.0)}})
        >>> mcmc = MCMC(fed.FSGLD(model), num_warmup=50, num_samples=100, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), silos)
        >>> mcmc.get_samples()["mu"].shape
        (100,)
    """

    def __init__(
        self,
        model: Callable,
        step_size: float | str | Callable = "auto",
        num_local_steps: int | str = 40,
        batch_size: int | None = None,
        surrogate: str | Surrogates = "score",
        alpha: float | str = 1.0,
        selection: str | Sequence[float] | Array | None = None,
        preconditioner: str | None = "surrogate",
        *,
        num_kept: int = 1,
        refresh_every: int | None = None,
        distinct_silos: bool = False,
        no_answer: float = 0.0,
        control_variates: bool = False,
        init_from: Any = None,
        bias_target: float = 0.02,
        noise_correction: bool = False,
        round_price: float = 40.0,
        public: Sequence[str] = (),
        validate: bool = True,
    ) -> None:
        super().__init__(
            model,
            Options(
                step_size, num_local_steps, batch_size, surrogate, alpha, selection, preconditioner,
                bias_target, public, validate, round_price, noise_correction, num_kept,
                refresh_every, distinct_silos, no_answer, control_variates=control_variates, init_from=init_from,
            ),
        )  # fmt: skip
