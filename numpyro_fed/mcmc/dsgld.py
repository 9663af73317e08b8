r"""Distributed stochastic gradient Langevin dynamics (DSGLD), a chain that visits silos.

Target: the posterior of the pooled model. Update: :mod:`numpyro_fed.mcmc.langevin` with
:math:`\alpha = 0`,

.. math::
    \theta \leftarrow \theta + \tfrac h2 \left( \nabla \log p(\theta)
    + \tfrac{N_s}{f_s m} \nabla \log p(y_s^{(m)} \mid \theta) \right) + N(0, h) .

With many local steps it samples a mixture of the silos' posteriors; FSGLD's conducive gradient is
the remedy.
"""

from collections.abc import Callable, Sequence

from jax import Array

from numpyro_fed.mcmc._kernel import LangevinKernel
from numpyro_fed.mcmc.options import Options, Step, as_step
from numpyro_fed.surrogates.gaussian import Surrogates


class DSGLD(LangevinKernel):
    """Distributed SGLD, a kernel for :class:`numpyro.infer.MCMC`.

    It is FSGLD without conducive gradients.

    **Law and bias.** Draws follow the posterior for one local step per round and a small step size.
    With ``num_local_steps`` of T, the variance that silos add is T times as large.

    **What leaves a silo.** The global position.

    :param step_size: h: a number or an optax schedule, in the coordinates of the model; or
        ``"auto"`` or a :class:`Step`, whose whitening alone needs the surrogates.

    The other parameters are those of :class:`numpyro_fed.FSGLD`.

    **Reference.** Ahn, Shahbaba, Welling: Distributed stochastic gradient MCMC, ICML 2014; FSGLD
    equations 3-4.

    **Example**::

        >>> import numpyro_fed as fed
        >>> kernel = fed.DSGLD(lambda y: None, step_size=1e-3, num_local_steps=10, batch_size=5)
    """

    def __init__(
        self,
        model: Callable,
        step_size: float | str | Callable | Step,
        num_local_steps: int = 40,
        batch_size: int | None = None,
        selection: Sequence[float] | Array | None = None,
        *,
        surrogate: str | Surrogates | None = "score",
        num_kept: int = 1,
        public: Sequence[str] = (),
        validate: bool = True,
    ) -> None:
        super().__init__(
            model,
            Options(
                as_step(step_size), num_local_steps, batch_size, surrogate, 0.0, selection, public,
                validate, num_kept,
            ),
        )  # fmt: skip
