"""Surrogates whose moments are known in closed form."""

import numpy as np
from jax.typing import ArrayLike

from numpyro_fed.data.silos import Silos
from numpyro_fed.surrogates.gaussian import Gaussian, Surrogates


def analytic(
    silos: Silos,
    means: ArrayLike,
    precisions: ArrayLike,
    *,
    prior: tuple[ArrayLike, ArrayLike] | None = None,
) -> Surrogates:
    """Return surrogates from the mean and the precision of each silo's likelihood.

    :param silos: the data; means and precisions are in the order of ``silos.names``.
    :param means: shape ``(S, d)``, in the flat unconstrained global position (sites sorted by
        name).
    :param precisions: full ``(S, d, d)`` or diagonal ``(S, d)``; may be singular.
    :param prior: mean and precision of the prior, for the preconditioner; of precision zero by
        default.
    :return: the surrogates.
    :raises ValueError: for shapes that disagree, values that are not finite, or a precision that is
        not symmetric.

    Example::

        >>> import numpy as np, numpyro_fed as fed
        >>> silos = fed.Silos({"oslo": {"y": np.ones(4)}, "rome": {"y": np.zeros(2)}})
        >>> q = fed.surrogates.analytic(silos, [[1.0], [0.0]], [[4.0], [2.0]]).posterior()
        >>> round(float(q.mean[0]), 3)
        0.667
    """
    mean, precision = (np.asarray(x, np.float64) for x in (means, precisions))
    size = len(silos)
    if mean.ndim != 2 or mean.shape[0] != size:
        raise ValueError(f"means: expected shape ({size}, d), one row per silo, got {mean.shape}")
    dim = mean.shape[1]
    if precision.shape not in ((size, dim), (size, dim, dim)):
        raise ValueError(
            f"precisions: expected shape {(size, dim)} or {(size, dim, dim)}, got {precision.shape}"
        )
    factors = _natural(mean, precision, "means and precisions")
    if prior is None:
        return Surrogates(factors, Gaussian(np.zeros(dim), np.zeros(precision.shape[1:])))
    own = [np.asarray(x, np.float64) for x in prior]
    if own[0].shape != (dim,) or own[1].shape != precision.shape[1:]:
        raise ValueError(
            f"prior: expected mean {(dim,)} and precision {precision.shape[1:]}, got "
            f"{own[0].shape} and {own[1].shape}"
        )
    return Surrogates(factors, _natural(own[0], own[1], "prior"))


def _natural(mean: np.ndarray, precision: np.ndarray, name: str) -> Gaussian:
    if not (np.isfinite(mean).all() and np.isfinite(precision).all()):
        raise ValueError(f"{name}: expected finite numbers, got NaN or infinity")
    if precision.ndim > mean.ndim:
        if not np.allclose(precision, np.swapaxes(precision, -1, -2)):
            raise ValueError(
                f"{name}: expected symmetric matrices, got {precision}; symmetrize them: "
                "(p + p.T) / 2"
            )
        eta = (precision @ mean[..., None])[..., 0]
    else:
        eta = precision * mean
    return Gaussian(eta, precision)
