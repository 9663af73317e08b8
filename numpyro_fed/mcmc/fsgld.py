r"""Federated stochastic gradient Langevin dynamics with conducive gradients (FSGLD).

Target: the posterior of the pooled model. Update: :mod:`numpyro_fed.mcmc.langevin` with
:math:`\alpha = 1`,

.. math::
    \theta &\leftarrow \theta + \tfrac h2 \left( \nabla \log p(\theta)
    + \tfrac{N_s}{f_s m} \nabla \log p(y_s^{(m)} \mid \theta)
    + \alpha g_s(\theta) \right) + N(0, h), \\
    g_s &= \nabla \log q - \tfrac1{f_s} \nabla \log q_s .

The chain draws the next silo from Categorical(f). Since :math:`\sum_s f_s g_s = 0` for :math:`q =
\prod_s q_s`, the estimator is unbiased for any surrogates and any alpha (FSGLD lemma 1).
"""

from collections.abc import Callable, Sequence

from jax import Array

from numpyro_fed.mcmc._kernel import LangevinKernel
from numpyro_fed.mcmc.options import Options, Whitened
from numpyro_fed.surrogates.gaussian import Surrogates

__all__ = ["FSGLD"]


class FSGLD(LangevinKernel):
    """Federated SGLD with conducive gradients, a kernel for :class:`numpyro.infer.MCMC`.

    **Law and bias.** Draws follow the posterior, up to a bias of order ``step_size`` in the
    variance. With ``step_size="auto"`` the pilot limits the bias to a factor ``1 + bias_target`` in
    the standard deviations (sds). The extra field ``inflation`` holds the predicted factor. One
    ``sample()`` is one communication round: the chain visits one silo for ``num_local_steps``
    steps.

    **What leaves a silo.** In a round, the global position and the mean of the conducive residual e
    (``d`` numbers each), the step count and four statistics. For the surrogates, in about ten
    rounds before the first: ``d + d^2`` numbers, a misfit, and log marginal likelihoods at 64 or
    256 values of theta. For the pilot, in two rounds: 64 means of e and its norms. Rows, local
    latents and their coordinates never leave a silo. ``kernel.ledger(mcmc.last_state)`` returns the
    bytes.

    **Local latents** move by Metropolis steps while the chain visits their silo, in coordinates
    that move with the global parameters. Elements that are independent given the global parameters
    move one by one, other latents move together.

    :param model: a NumPyro model with at least one silo plate.
    :param step_size: h, in preconditioned units: a number, an optax schedule of the number of local
        steps, or ``"auto"``.
    :param num_local_steps: T, local steps per round, or ``"auto"``: the T with the largest number
        of effective draws for the price of rounds and steps.
    :param batch_size: m, rows of a minibatch, drawn with replacement; ``None``: all rows of the
        silo. Where plate elements have latents, m is a number of elements, drawn without
        replacement, and the minibatch has all their rows.
    :param surrogate: ``"score"``, ``"laplace"``, ``"moments"``, or a
        :class:`~numpyro_fed.surrogates.Surrogates` (analytic, of low rank).
    :param alpha: weight of the conducive gradient (FSGLD remark 1), or ``"auto"``: its coefficient
        as a control variate.
    :param selection: f, probabilities of the silos; equal by default; ``"size"``: in proportion to
        their rows; ``"auto"``: the probabilities at which silos add the least noise.
    :param preconditioner: ``"surrogate"``: the covariance of the surrogate posterior; ``None``:
        none, as in the papers.
    :param num_kept: draws kept per round, at equal distances. ``num_warmup`` and ``num_samples``
        then count draws.
    :param refresh_every: number of rounds, or ``None``: no refits. Before the warm-up, 64 separate
        chains run for so many rounds, and the kernel fits surrogates, local map and step size again
        around them. It does so ``num_warmup // refresh_every`` times.
    :param distinct_silos: let vectorized chains visit different silos in every round, so that none
        waits for another. This holds where no f exceeds one over the number of chains. The silos of
        each chain remain independent draws from f.
    :param control_variates: subtract from a minibatch's gradient the gradient of the same rows at
        the surrogates' center, and add the whole silo's gradient there (Baker et al. 2019). The
        latter is computed once. A step takes two gradients; with many rows, its noise is far
        smaller.
    :param no_answer: probability that the chosen silo does not answer, in simulations. The chain
        then waits, its draw counts again, and the next silo does not depend on the failure. This
        keeps the selection unbiased, which asking another silo instead would not.
    :param init_from: the result of :class:`~numpyro_fed.SFVI` or :class:`~numpyro_fed.SFVIAvg` on
        the same model. The fit of the surrogates starts at its q(theta) and saves the rounds that
        would lead there. If q is full and conducive rounds have converged, four rounds remain (two
        beyond 16 dimensions), in which silos make the surrogates.
    :param bias_target: accepted relative inflation of the sds under ``step_size="auto"``.
    :param noise_correction: inject less noise, by the amount of the silos' noise. This allows four
        times the step at the same inflation, and is no longer the paper's update.
    :param round_price: price of a round besides its local steps, in units of one local step
        (``num_local_steps="auto"``).
    :param public: observed sites outside every silo plate whose data all silos know.
    :param validate: check the factorization before the first round.
    :raises ValueError: for arguments, data and models that the kernel cannot use, before
        compilation.

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
        init_from: Whitened | None = None,
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
                refresh_every, distinct_silos, no_answer, control_variates=control_variates,
                init_from=init_from,
            ),
        )  # fmt: skip
