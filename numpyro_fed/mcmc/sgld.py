r"""Stochastic gradient Langevin dynamics (SGLD) on the pooled rows.

.. math::
    \theta \leftarrow \theta + \tfrac h2 \left( \nabla \log p(\theta)
    + \tfrac Nm \nabla \log p(y^{(m)} \mid \theta) \right) + N(0, h)

It is DSGLD with one silo, and the reference for comparisons of the federated kernels.
"""

from collections.abc import Callable, Sequence

from numpyro_fed.mcmc._kernel import LangevinKernel
from numpyro_fed.mcmc.options import Options
from numpyro_fed.surrogates.gaussian import Surrogates

__all__ = ["SGLD"]


class SGLD(LangevinKernel):
    """Centralized SGLD, a kernel for :class:`numpyro.infer.MCMC`.

    It pools the rows of all silos as one silo, so nothing is federated.

    **Law and bias.** Draws follow the posterior, up to a bias of order ``step_size``. One
    ``sample()`` makes ``num_local_steps`` steps.

    :param step_size: h: a number, an optax schedule of the number of steps, ``"auto"`` (with a
        preconditioner), or ``"adaptive"``. The last learns in warm-up, from the curvature and the
        gradient noise, the step at which sds are a factor ``1 + bias_target`` too large
        (:mod:`numpyro_fed.mcmc.adaptation`).
    :param preconditioner: ``"surrogate"`` whitens by a Gaussian fitted to the pooled score.

    The other parameters are those of :class:`numpyro_fed.FSGLD`.

    **Reference.** Welling, Teh: Bayesian learning via stochastic gradient Langevin dynamics, ICML
    2011.

    **Example**::

        >>> import numpyro_fed as fed
        >>> kernel = fed.SGLD(lambda y: None, step_size=1e-3, batch_size=5)
    """

    pooled = True

    def __init__(
        self,
        model: Callable,
        step_size: float | str | Callable,
        num_local_steps: int = 40,
        batch_size: int | None = None,
        preconditioner: str | None = None,
        *,
        surrogate: str | Surrogates | None = "score",
        bias_target: float = 0.02,
        public: Sequence[str] = (),
        validate: bool = True,
    ) -> None:
        super().__init__(
            model,
            Options(
                step_size, num_local_steps, batch_size, surrogate, 0.0, None, preconditioner,
                bias_target, public, validate,
            ),
        )  # fmt: skip
