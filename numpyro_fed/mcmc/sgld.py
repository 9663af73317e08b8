r"""Stochastic gradient Langevin dynamics (SGLD) on the pooled rows.

.. math::
    \theta \leftarrow \theta + \tfrac h2 \left( \nabla \log p(\theta)
    + \tfrac Nm \nabla \log p(y^{(m)} \mid \theta) \right) + N(0, h)

It is DSGLD with one silo, and the reference for comparisons of the federated kernels.
"""

from collections.abc import Callable, Sequence

from numpyro_fed.mcmc._kernel import LangevinKernel
from numpyro_fed.mcmc.options import Options, Step, as_step
from numpyro_fed.surrogates.gaussian import Surrogates


class SGLD(LangevinKernel):
    """Centralized SGLD, a kernel for :class:`numpyro.infer.MCMC`.

    It pools the rows of all silos as one silo, so nothing is federated.

    **Law and bias.** Draws follow the posterior, up to a bias of order ``step_size``. One
    ``sample()`` makes ``num_local_steps`` steps.

    :param step_size: h: a number or an optax schedule, in the coordinates of the model;
        ``"auto"``, whitened by a Gaussian fitted to the pooled score; ``"adaptive"``; or a
        :class:`Step`. ``"adaptive"`` learns in warm-up, from the curvature and the gradient noise,
        the step at which sds are a factor ``1 + bias_target`` too large
        (:mod:`numpyro_fed.mcmc.adaptation`).

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
        step_size: float | str | Callable | Step,
        num_local_steps: int = 40,
        batch_size: int | None = None,
        *,
        surrogate: str | Surrogates | None = "score",
        public: Sequence[str] = (),
        validate: bool = True,
    ) -> None:
        super().__init__(
            model,
            Options(
                as_step(step_size), num_local_steps, batch_size, surrogate, 0.0, None, public,
                validate,
            ),
        )  # fmt: skip
