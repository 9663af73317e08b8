r"""Federated stochastic gradient Langevin dynamics with conducive gradients (FSGLD).

Target: the posterior of the pooled model. Update: :mod:`numpyro_fed.mcmc.langevin` with
:math:`\alpha = 1`,

.. math::
    \theta &\leftarrow \theta + \tfrac h2 \left( \nabla \log p(\theta)
    + \tfrac{N_s}{f_s m} \nabla \log p(y_s^{(m)} \mid \theta)
    + \alpha g_s(\theta) \right) + N(0, h), \\
    g_s &= \nabla \log q - \tfrac1{f_s} \nabla \log q_s .

The chain draws the next silo from Categorical(f). Since :math:`\sum_s f_s g_s = 0` for :math:`q =
\prod_s q_s`, the estimator is unbiased for any surrogates and any alpha (FSGLD lemma 1), but for
the steps that the default cuts (:mod:`numpyro_fed.mcmc.gradients`).
"""

from collections.abc import Callable, Sequence

from jax import Array

from numpyro_fed.mcmc._kernel import LangevinKernel
from numpyro_fed.mcmc.options import Options, Step, Whitened, as_step
from numpyro_fed.surrogates.gaussian import Surrogates


class FSGLD(LangevinKernel):
    """Federated SGLD with conducive gradients, a kernel for :class:`numpyro.infer.MCMC`.

    **Law and bias.** Draws follow the posterior, up to a bias of order ``step_size`` in the
    variance. With ``step_size="auto"`` the pilot limits the bias to a factor ``1 + bias_target`` in
    the standard deviations (:class:`Step`). The extra field ``inflation`` holds this factor. One
    ``sample()`` is one communication round: the chain visits one silo for ``num_local_steps``
    steps.

    **What leaves a silo.** In a round, the global position, the mean difference e of its gradient
    and its surrogate's (``d`` numbers each), the step count and two statistics. For the surrogates,
    in about ten rounds before the first: ``d + d^2`` numbers, a misfit, and log marginal
    likelihoods at 64 or 256 values of theta. For the pilot, in two rounds: 64 means of e and its
    norms. Rows, local latents and their coordinates never leave a silo.
    ``kernel.ledger(mcmc.last_state)`` returns the bytes.

    **Local latents** move by Metropolis steps while the chain visits their silo, in coordinates
    that move with the global parameters. Elements that are independent given the global parameters
    move one by one, other latents move together.

    :param model: a NumPyro model with at least one silo plate.
    :param step_size: h, in whitened units: a number, an optax schedule of the number of local
        steps, or ``"auto"``. A :class:`Step` also sets ``bias_target``, ``noise_correction``,
        ``control_variates`` and ``preconditioner``.
    :param num_local_steps: T, local steps per round.
    :param batch_size: m, rows of a minibatch, drawn with replacement; ``None``: all rows of the
        silo. Where plate elements have latents, m is a number of elements, drawn without
        replacement, and the minibatch has all their rows.
    :param surrogate: ``"score"``, ``"laplace"``, ``"moments"``, or a
        :class:`~numpyro_fed.surrogates.Surrogates`.
    :param alpha: weight of the conducive gradient (FSGLD remark 1).
    :param selection: f, the silos' probabilities: ``None`` (equal), numbers, ``"size"`` (by rows),
        ``"auto"`` (least noise), or ``"distinct"``: equal, and vectorized chains visit different
        silos in every round. The silos of each chain remain independent draws from f.
    :param num_kept: draws kept per round, at equal distances. ``num_warmup`` and ``num_samples``
        then count draws.
    :param init_from: the result of :class:`~numpyro_fed.ConduciveSFVI`, :class:`~numpyro_fed.SFVI`
        or :class:`~numpyro_fed.SFVIAvg` on the same model. The fit of the surrogates starts at its
        q(theta) and saves the rounds that would lead there. If q is full and conducive rounds have
        converged, four rounds remain (two beyond 16 dimensions), in which silos make the
        surrogates.
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
        step_size: float | str | Callable | Step = "auto",
        num_local_steps: int = 40,
        batch_size: int | None = None,
        surrogate: str | Surrogates = "score",
        alpha: float = 1.0,
        selection: str | Sequence[float] | Array | None = None,
        *,
        num_kept: int = 1,
        init_from: Whitened | None = None,
        public: Sequence[str] = (),
        validate: bool = True,
    ) -> None:
        super().__init__(
            model,
            Options(
                as_step(step_size, whitened=True), num_local_steps, batch_size, surrogate, alpha,
                selection, public, validate, num_kept, init_from=init_from,
            ),
        )  # fmt: skip
