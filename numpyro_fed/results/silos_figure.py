"""Figure of a coefficient, silo by silo: alone, from a hierarchy, and one for all."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from xarray import DataArray

_COLORS = {"alone": "#D55E00", "hierarchical": "#0072B2", "pooled": "#6B6B6B"}
_HEIGHT = 0.12  # distance of a silo's two intervals, in rows
_TALLEST = 36.0  # most inches of all silos


def plot_silos(
    hierarchical: "DataArray",
    *,
    alone: "Mapping[str, DataArray | np.ndarray] | None" = None,
    pooled: "DataArray | np.ndarray | None" = None,
    prob: float = 0.9,
    figure: "Figure | None" = None,
) -> "Figure":
    """Draw a coefficient of each silo, and how far the hierarchy has moved it.

    :param hierarchical: draws of a latent with one element in each silo and their names as a
        coordinate, such as ``idata.posterior["z"]``, or ``idata.posterior["silo_effect"]`` of
        :func:`glmm`.
    :param alone: draws of each silo's coefficient from its own data, by name.
    :param pooled: draws of the coefficient of a model in which all silos have the same.
    :param prob: probability in an interval, its tails equal.
    :param figure: an empty figure (or subfigure) to draw in. ``None``: a new one.
    :return: the figure.
    :raises ValueError: for draws without names of silos, of vectors, or of several elements in a
        silo, and for silos in ``alone`` that the fit does not have.

    Example::

        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_fed as fed
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 5))
        ...     with fed.silo_plate("centers", y.shape[0]):
        ...         z = numpyro.sample("z", dist.Normal(mu, 1))
        ...         numpyro.sample("y", dist.Normal(z, 1), obs=y)
        >>> silos = fed.Silos({s: {"y": jnp.ones(1) * i} for i, s in enumerate(["oslo", "rome"])})
        >>> idata = fed.fit(model, silos, progress_bar=False)
        >>> figure = fed.plot_silos(idata.posterior["z"], pooled=idata.posterior["mu"])
        >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
        ['oslo', 'rome']
    """
    from matplotlib import pyplot

    if not 0 < prob < 1:
        raise ValueError(f"prob: expected a probability between 0 and 1, got {prob!r}")
    of_silo = _by_silo(hierarchical)
    names = list(of_silo)
    if unknown := sorted(set(alone or {}) - set(names)):
        raise ValueError(f"alone: expected silos of the fit, {names}, got {unknown}")
    if figure is None:
        size = (7, 1.2 + min(0.3 * len(names), _TALLEST))
        figure = pyplot.figure(figsize=size, layout="constrained", facecolor="white")
    axis = figure.add_subplot()
    ends = (1 - prob) / 2, 0.5, (1 + prob) / 2
    if pooled is not None:
        low, middle, high = np.quantile(np.asarray(pooled), ends)
        axis.axvspan(low, high, color=_COLORS["pooled"], alpha=0.15, lw=0, label="pooled")
        axis.axvline(middle, color=_COLORS["pooled"], lw=0.8)
    for label, draws, shift in (("alone", alone, -_HEIGHT), ("hierarchical", of_silo, _HEIGHT)):
        if not draws:
            continue
        found = np.array([np.quantile(np.asarray(x), ends) for x in draws.values()])
        places = np.array([names.index(name) for name in draws]) + (shift if alone else 0.0)
        color = _COLORS[label]
        axis.hlines(places, found[:, 0], found[:, 2], color=color, lw=1.6)
        axis.plot(found[:, 1], places, "o", color=color, ms=5, label=label)
    small = 72 * 0.7 * _TALLEST / len(names)  # points, where silos lie closer than 0.3 inches
    axis.set_yticks(range(len(names)), names, fontsize=min(10.0, small))
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.set_xlabel(f"{hierarchical.name}: median and {100 * prob:g} % interval")
    axis.spines[["right", "top"]].set_visible(False)
    if alone or pooled is not None:
        figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return figure


def _by_silo(draws: "DataArray") -> dict[str, np.ndarray]:
    """Return the draws of each silo's element, by its name."""
    ends = ("_silo", "_element")  # of a silo plate's coordinate, and of a group's in a formula
    coords = getattr(draws, "coords", {})
    own = [x for name, x in coords.items() if str(name).endswith(ends)]
    if len(own) != 1 or draws.ndim != 3:
        raise ValueError(
            "expected draws of one number for each silo, with the silos' names as a coordinate, "
            f"such as idata.posterior['z'], got {type(draws).__name__} of shape {np.shape(draws)}"
        )
    names = [str(x) for x in own[0].values]
    if len(set(names)) < len(names):
        raise ValueError(f"expected one element in each silo, got {len(names)} of {set(names)}")
    last = draws.transpose(..., own[0].dims[0]).values
    return {name: last[..., i].ravel() for i, name in enumerate(names)}
