"""What a kernel's options mean for one model and its data, with their checks."""

import warnings
from collections.abc import Sequence

import numpy as np
from jax import Array

from numpyro_fed.data.silos import Silos
from numpyro_fed.data.views import MAX_BATCH, largest
from numpyro_fed.density.factors import Factors
from numpyro_fed.density.independence import independent_units
from numpyro_fed.density.local_map import Units
from numpyro_fed.mcmc.minibatch import pointing_groups
from numpyro_fed.mcmc.options import Options
from numpyro_fed.surrogates.gaussian import Surrogates


def selection_of(selection: str | Sequence[float] | Array | None, silos: Silos) -> np.ndarray:
    """Return the silos' probabilities with which the setup begins, ``(S,)``."""
    if selection is None or (isinstance(selection, str) and selection != "size"):
        return np.full(len(silos), 1 / len(silos))
    if isinstance(selection, str):  # "size" counts rows to which no other rows point
        targets = set(silos.index.values())
        sizes = np.sum(
            [n for group, n in silos.sizes.items() if group not in targets],
            axis=0,
            dtype=np.float64,
        )
        return sizes / sizes.sum()
    try:
        f = np.asarray(selection, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"selection: expected numbers, one for each of the silos {list(silos.names)} in this "
            f"order, got {selection!r}"
        ) from error
    if f.shape != (len(silos),):
        raise ValueError(
            f"selection: expected one probability for each of the {len(silos)} silos, got shape "
            f"{f.shape}"
        )
    if not (f > 0).all():
        raise ValueError(
            f"selection: expected probabilities > 0, got {f[np.argmin(f)]} for silo "
            f"{silos.names[int(np.argmin(f))]!r}; a silo that is never visited adds nothing to the "
            "posterior"
        )
    if not abs(f.sum() - 1) <= 1e-6:
        raise ValueError(
            f"selection: expected probabilities that sum to one, got a sum of {f.sum():.6g}"
        )
    return f / f.sum()


def batch_of(
    size: int | None, factors: Factors, silos: Silos, units: Units | None
) -> tuple[str, int] | None:
    """Return row group and size of a minibatch, or ``None`` for all rows."""
    if size is None:
        return None
    factors.check_minibatch()
    if units is not None and units.group is None:
        names = [s.name for s in factors.local_sites]
        raise ValueError(
            f"batch_size={size} with local latents {names} that are one unit in a silo, or nested: "
            "they need all rows of a silo; expected batch_size=None"
        )
    group = factors.batch_group() if units is None else str(units.group)
    sizes = silos.sizes[group]
    if size > min(sizes):
        small = silos.names[int(np.argmin(sizes))]
        raise ValueError(
            f"batch_size={size} is more than silo {small!r} has: {min(sizes)} rows of {group!r}; "
            f"expected at most {min(sizes)}, or None for all rows"
        )
    if units is not None and size > MAX_BATCH:  # rows without latents are drawn one by one
        raise ValueError(f"batch_size={size:,} elements of {group!r}; expected <= {MAX_BATCH:,}")
    return group, int(size)


def units_of(factors: Factors, silos: Silos) -> Units | None:
    """Return the units into which local latents are cut, or ``None`` without any.

    :warns UserWarning: if all latents of a silo are one unit.
    """
    groups, units = factors.latent_groups, independent_units(factors, silos)
    if units is not None or not groups:
        return units
    names = [s.name for s in factors.local_sites]
    why = f"elements of {groups[0]!r} are not independent given the global sites"
    if len(groups) > 1:
        why = (
            f"{list(groups)} are not two plates nested by index=, with inner elements that are "
            "independent given the outer ones"
        )
    warnings.warn(
        f"{why}, so the latents {names} of a silo are one unit: they move together (MALA), and a "
        "dense Laplace approximation, whose cost grows with the cube of their number, integrates "
        "them out",
        stacklevel=2,
    )
    return Units(factors, None, largest(silos))


def check_latents(options: Options, factors: Factors) -> None:
    """Raise an error for minibatches that a model with local latents does not support.

    Among these are minibatches of elements to which not all rows point.
    """
    names = [s.name for s in factors.local_sites]
    if not names or options.batch_size is None:
        return
    if not options.element_batches or options.step.learned:
        raise ValueError(
            f"batch_size={options.batch_size} with local latents {names} is for DSGLD, FSGLD, and "
            "SGLD without an adaptive step size; expected batch_size=None"
        )
    if options.step.control_variates:
        raise ValueError(
            f"control_variates=True is for models without local latents, got {names}; expected "
            "False"
        )
    if len(factors.latent_groups) == 1:
        pointing_groups(factors, factors.latent_groups[0])


def warn_of_params(factors: Factors) -> None:
    """Warn of learned parameters, which keep their first values as in NumPyro's own kernels.

    Networks whose weights are all drawn have no such parameters.
    """
    drawn = {name.split("/")[0] for name, _ in factors.global_sites}
    kept = [
        n
        for n, kind in factors.undrawn
        if kind == "param" and n.removesuffix("$params") not in drawn
    ]
    if kept:
        warnings.warn(
            f"learned parameters {kept} are kept at their first values, since chains learn none; "
            "expected numpyro.sample with a prior in place of numpyro.param, or fed.SFVI, which "
            "learns them",
            stacklevel=5,
        )


def check_surrogates(given: str | Surrogates | None, factors: Factors, silos: Silos) -> None:
    """Raise an error for a user's surrogates that do not fit the model and the silos."""
    if not isinstance(given, Surrogates):
        return
    if len(given) != len(silos) or given.dim != factors.dim:
        raise ValueError(
            f"surrogate: expected factors of {len(silos)} silos in dimension {factors.dim} "
            f"({[name for name, _ in factors.global_sites]} unconstrained), got {given!r}"
        )
    given.posterior()  # raises an error unless it is positive definite
