"""Posterior predictive draws for a silo of the fit, for new rows in it, or for a new silo."""

import json
from collections.abc import Callable, Collection, Container, Hashable, Mapping
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import Predictive

from numpyro_fed._arviz import posterior_dataset
from numpyro_fed._typing import Column, PyTree, Site
from numpyro_fed.data.checks import check_key
from numpyro_fed.density.handlers import is_silo_plate

if TYPE_CHECKING:
    from xarray import Dataset


def predict(
    model: Callable,
    posterior: object,
    rng_key: Array,
    data: Mapping[str, Column],
    *,
    silo: str | None = None,
    params: Mapping[str, PyTree] | None = None,
) -> dict[str, np.ndarray]:
    """Draw from the posterior predictive of a model, given a fit.

    :param model: the model of the fit. It must run with its observed arguments ``None`` or left
        out.
    :param posterior: the fit's ``InferenceData``, from :func:`to_inference_data`.
    :param rng_key: seed.
    :param data: keyword arguments of the model, with ``None`` for observed ones. For a silo of the
        fit, plates with latents must have the elements of ``silos[name]``, in the same order. Rows
        of other plates may be new.
    :param silo: a silo of the fit, whose latents are those of the fit. ``None``: a new silo, whose
        latents are drawn from the model given each draw of the global latents.
    :param params: learned parameters of the model. ``None``: those that the fit holds. A fit does
        not hold weights of networks; pass ``result.params`` for these.
    :return: an array ``(draws, *site)`` for each site that neither the fit nor the data hold.
    :raises ValueError: for an unknown silo, a remote silo whose latents stayed there, a fit without
        silo coordinates or without a global latent of the model, or data that are not finite or
        leave nothing to predict.

    Example::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
        >>> import numpyro_fed as fed
        >>> def model(x, y=None):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with fed.silo_plate("patients", x.shape[0]):
        ...         z = numpyro.sample("z", dist.Normal(0, 1))
        ...         numpyro.sample("y", dist.Normal(mu * x + z, 1), obs=y)
        >>> sizes = {"oslo": 3, "rome": 2}
        >>> silos = fed.Silos(
        ...     {s: {"x": jnp.arange(n) * 1.0, "y": jnp.ones(n)} for s, n in sizes.items()}
        ... )
        >>> guide = fed.AutoSiloNormal(model)
        >>> svi = fed.SFVI(model, guide, optax.adam(0.05), num_local_particles=1)
        >>> result = svi.run(jax.random.key(0), 500, silos, progress_bar=False)
        >>> idata = fed.to_inference_data(svi, result, silos, num_draws=50)
        >>> old_x = {"x": silos["oslo"]["x"]}
        >>> again = fed.predict(model, idata, jax.random.key(1), old_x, silo="oslo")
        >>> new = fed.predict(model, idata, jax.random.key(2), {"x": jnp.zeros(4)})
        >>> again["y"].shape, sorted(new), new["z"].shape
        ((50, 3), ['y', 'z'], (50, 4))
    """
    check_key(rng_key)
    draws = posterior_dataset(posterior)
    plates = {
        str(name).removesuffix("_silo"): names.values
        for name, names in draws.coords.items()
        if _is_silos(name, draws)
    }
    known = sorted({str(n) for names in plates.values() for n in names} | _attribute(draws))
    if not known:
        raise ValueError("expected a fit with silo coordinates, from fed.to_inference_data(...)")
    if silo is not None and str(silo) not in known:
        raise ValueError(
            f"silo={silo!r}: expected a silo of the fit, {known}, or None for a new one"
        )
    visited = json.loads(draws.attrs.get("remote", "[]"))
    if silo is not None and visited:
        raise ValueError(
            f"silo={silo!r}: its own latents {visited} stayed there, and the fit has none; "
            "expected None, for a new silo, or in the silo the result of fed.local_latents"
        )
    values = _draws_of(silo, draws, plates)
    params = _learned(draws) if params is None else params
    learned = substitute(model, data=dict(params)) if params else model
    _check_finite(data)
    _check_positions(data, json.loads(draws.attrs.get("index", "{}")))
    sites = trace(seed(learned, random.key(0))).get_trace(**data)
    marked = {name for name, site in sites.items() if is_silo_plate(site)}
    observed = getattr(posterior, "observed_data", ())
    _check_global(sites, marked | set(plates), {*values, *observed})
    if silo is not None:
        own = plates
        if draws.attrs.get("structures", 1) > 1:  # names of plates end in the structure's number
            own = {k.rpartition("_")[0]: of for k, of in plates.items() if (of == str(silo)).any()}
        _check_sizes(sites, own, str(silo))
    given = {n for n, s in sites.items() if s["type"] == "sample" and s["is_observed"]}
    predictive = Predictive(learned, posterior_samples=values)
    found = {
        name: x
        for name, x in predictive(rng_key, **data).items()
        if name not in values and name not in given
    }
    if not found:
        raise ValueError(
            f"expected data with something to predict, got values of all that is observed, "
            f"{sorted(given)}: leave out the arguments to predict, or set them to None"
        )
    return {name: np.asarray(x) for name, x in found.items()}


def _draws_of(
    silo: str | None, draws: "Dataset", plates: Mapping[str, np.ndarray]
) -> dict[str, Array]:
    """Return draws ``(draws, *site)`` of the global latents and of one silo's latents."""
    values = {}
    for name, x in draws.data_vars.items():
        own = [d for d in x.dims if d in plates]
        if own and silo is None:
            continue
        for dim in own:
            x = x.isel({dim: np.flatnonzero(plates[str(dim)] == str(silo))})
        if own and not x.size:  # a latent of silos of another structure
            continue
        site = (
            str(name).rpartition("_")[0]
            if own and draws.attrs.get("structures", 1) > 1
            else str(name)
        )
        values[site] = jnp.asarray(x.values.reshape(-1, *x.shape[2:]))
    return values


def _learned(draws: "Dataset") -> dict[str, Array]:
    """Return the learned parameters that a fit's draws hold."""
    networks = json.loads(draws.attrs.get("networks", "[]"))
    if networks:
        raise ValueError(
            f"params: expected the learned networks {networks}, which an InferenceData does not "
            "hold; give result.params"
        )
    return {k: jnp.asarray(v) for k, v in json.loads(draws.attrs.get("learned", "{}")).items()}


def _check_global(
    sites: Mapping[str, Site], silo_plates: Container[str], known: Collection[str]
) -> None:
    """Raise for a global latent that the fit lacks, which would be drawn from its prior."""
    for name, site in sites.items():
        free = site["type"] == "sample" and not site["is_observed"]
        inside = any(frame.name in silo_plates for frame in site.get("cond_indep_stack", ()))
        if free and not inside and name not in known:
            raise ValueError(
                f"site {name!r} is in no silo plate, and the fit has no draws of it: expected the "
                f"model of the fit, with the sites {sorted(known)}"
            )


def _check_finite(data: Mapping[str, Column]) -> None:
    for leaf, value in data.items():
        if getattr(value, "dtype", np.dtype(bool)).kind == "f" and not np.isfinite(value).all():
            raise ValueError(f"argument {leaf!r}: expected finite numbers, got NaN or infinity")


def _check_positions(data: Mapping[str, Column], index: Mapping[str, list[str]]) -> None:
    """Raise for positions outside their target, which JAX would silently move inside it."""
    for leaf, targets in index.items():
        given = [t for t in targets if data.get(t) is not None]
        if data.get(leaf) is None or not given:
            continue
        positions, size = np.asarray(data[leaf]), np.shape(data[given[0]])[0]
        wrong = (positions < 0) | (positions >= size)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise ValueError(
                f"argument {leaf!r} points to the rows of {given[0]!r}: expected positions from 0 "
                f"to {size - 1}, got {positions[row]} in row {row}"
            )


def _check_sizes(sites: Mapping[str, Site], plates: Mapping[str, np.ndarray], silo: str) -> None:
    """Raise for a plate with latents in the fit and another number of elements in the data."""
    for name, site in sites.items():
        if site["type"] == "plate" and name in plates:
            expected, got = int((plates[name] == silo).sum()), site["args"][0]
            if got != expected:
                raise ValueError(
                    f"silo {silo!r} has {expected} elements of {name!r} in the fit, got data with "
                    f"{got}; expected the same elements, or silo=None for new ones"
                )


def _is_silos(name: Hashable, draws: "Dataset") -> bool:
    dim = str(name).removesuffix("_silo")
    return str(name).endswith("_silo") and dim in draws.dims and draws.coords[name].dims == (dim,)


def _attribute(draws: "Dataset") -> set[str]:
    return set(json.loads(draws.attrs.get("silos", "[]")))
