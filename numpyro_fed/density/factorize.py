"""Factorization of a marked model: its global sites, and its local sites with their plates.

The model is traced without data, by :func:`jax.eval_shape`, with made-up numbers of rows. Nothing
else in the model is likely to have these numbers, so a plate's size identifies its row group,
whatever the silos' real sizes are.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import jax
import numpy as np
import numpyro
from jax import Array
from numpyro.distributions import Delta, Distribution
from numpyro.distributions.transforms import biject_to
from numpyro.handlers import seed, substitute, trace
from numpyro.infer.initialization import init_to_sample

from numpyro_fed import _compat
from numpyro_fed._typing import ModelArgs, Site
from numpyro_fed.data.silos import Silos
from numpyro_fed.density.factors import Factors, LocalSite
from numpyro_fed.density.handlers import (
    NO_STEPS,
    is_public,
    is_silo_plate,
    takes_rows_together,
)

_NO_PLATE = (
    "the model has no silo plate, so it does not say which data live in silos; write "
    'fed.silo_plate("patients", x.shape[0]) in place of numpyro.plate, or mark one from outside: '
    'fed.mark_silos(model, "patients")'
)
# rows of the first row group in each of two traces; every further row group has ten more. Primes,
# which no product of a model's own sizes gives
_PROBES = (1009, 2003)


def factorize(
    model: Callable, silos: Silos, *, public: tuple[str, ...] = (), extra: ModelArgs | None = None
) -> Factors:
    """Find the global and local sites of a marked model.

    The model is traced by :func:`jax.eval_shape`. The result is cached by model and shapes, so that
    a second fit of the same model traces nothing.

    :param model: a model with at least one silo plate.
    :param silos: the data.
    :param public: names of observed or factor sites outside every silo plate. All silos must know
        their data; their terms count once.
    :param extra: further keyword arguments (Gibbs conditioning).
    :return: the factors.
    :raises TypeError: for a model that is no function.
    :raises ValueError: for every structure that the factorization does not cover.
    :warns UserWarning: where a latent site has the name of an argument with rows, as happens where
        a model lacks ``obs=``.
    """
    if not callable(model):
        raise TypeError(f"model: expected a function with NumPyro's primitives, got {model!r:.60}")
    if not isinstance(silos, Silos):
        raise TypeError(f"silos: expected fed.Silos or fed.RemoteSilos, got {silos!r:.60}")
    specs = tuple(
        (leaf, silos.group[leaf], jax.ShapeDtypeStruct(v.shape[1:], v.dtype))
        for leaf, v in silos.rows.items()
    )
    shared = {**silos.shared, **dict(extra or {})}
    leaves, tree = jax.tree.flatten(
        jax.tree.map(
            lambda v: (
                jax.ShapeDtypeStruct(v.shape, v.dtype) if isinstance(v, Array | np.ndarray) else v
            ),
            shared,
        )
    )
    conditioned = tuple(sorted((extra or {}).get("_gibbs_sites", {})))
    factors = _factorize(
        model, specs, (tuple(leaves), tree), tuple(sorted(silos.index.items())), public, conditioned
    )
    for site in factors.local_sites:
        if site.name in silos.rows:
            warnings.warn(
                f"site {site.name!r} is latent, and the silos have an argument {site.name!r}: was "
                f"obs={site.name} forgotten? As it stands nothing is learned from these data; "
                "leave the argument out of the silos, or rename the site, if that is meant",
                stacklevel=3,
            )
    for group in silos.guessed:
        plates = [plate for plate, g in factors.plates if g == group]
        members = [leaf for leaf, g, _ in specs if g == group]
        if len(plates) > 1:
            raise ValueError(
                f"arguments {members} have as many rows as each of the silo plates {plates}; say "
                "which plate each belongs to: "
                f'Silos(..., rows={{"{members[0]}": "{plates[0]}", ...}})'
            )
    return factors.for_silos(silos)


def pooled_factors(
    model: Callable, sites: Mapping[str, Site], shapes: Mapping[str, tuple[int, ...]]
) -> Factors:
    """Return the factors of a model as a guide on pooled data sees them.

    Each silo plate is a row group of its own.

    :param sites: a trace of the model.
    :param shapes: unconstrained shape of each latent site.
    """
    plates = {name: name for name, site in sites.items() if is_silo_plate(site)}
    if not plates:
        raise ValueError(_NO_PLATE)
    global_sites, local_sites = _sorted_sites(
        _latent_sites(sites, plates, tuple(sites), ()), shapes
    )
    return Factors(model, global_sites, local_sites, tuple(plates.items()), (), (), None)


def _sorted_sites(
    latent: list[tuple[str, str | None, Callable[[int], int]]],
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[tuple, tuple]:
    global_sites, local_sites = [], []
    for name, plate, dim in latent:
        shape = shapes[name]
        if plate is None:
            global_sites.append((name, shape))
            continue
        axis = dim(len(shape))
        local_sites.append(LocalSite(name, plate, axis, shape[:axis] + shape[axis + 1 :]))
    return tuple(sorted(global_sites)), tuple(sorted(local_sites))


@lru_cache(maxsize=256)
def _factorize(
    model: Callable,
    specs: tuple[tuple[str, str, jax.ShapeDtypeStruct], ...],
    shared: tuple[tuple, jax.tree_util.PyTreeDef],
    index: tuple[tuple[str, str], ...],
    public: tuple[str, ...],
    conditioned: tuple[str, ...],
) -> Factors:
    groups = list(dict.fromkeys(group for _, group, _ in specs))
    found = []
    for base in _PROBES:
        sizes = {group: base + 10 * i for i, group in enumerate(groups)}
        rows = {leaf: jax.ShapeDtypeStruct((sizes[g], *s.shape), s.dtype) for leaf, g, s in specs}
        *sites, undrawn, observed, transforms, together = _probe(
            model, rows, shared, sizes, public, conditioned
        )
        found.append(tuple(sites))
    first, second = found
    if first != second:
        names = sorted({site[0] for kind in (0, 1) for site in {*first[kind]} ^ {*second[kind]}})
        raise ValueError(
            f"latent sites {names} change shape with a silo's number of rows; expected equal "
            "shapes in all silos, of global sites and of the local sites of a plate's element: put "
            "each row's latents inside a silo plate"
        )
    global_sites, local_sites, plates = first
    return Factors(
        model,
        global_sites,
        local_sites,
        plates,
        specs,
        index,
        transforms,
        undrawn,
        observed,
        row_wise=not together,
    )


def _probe(
    model: Callable,
    rows: dict[str, jax.ShapeDtypeStruct],
    shared: tuple[tuple, jax.tree_util.PyTreeDef],
    sizes: dict[str, int],
    public: tuple[str, ...],
    conditioned: tuple[str, ...],
) -> tuple:
    """Trace the model abstractly and sort its sites."""
    leaves, tree = shared
    abstract = [x for x in leaves if isinstance(x, jax.ShapeDtypeStruct)]
    seen: dict[str, Any] = {}

    def run(key: Array, rows: dict, arrays: list) -> dict[str, Array]:
        fill = iter(arrays)
        kwargs = jax.tree.unflatten(
            tree, [next(fill) if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves]
        )
        sites = _sites(model, key, {**rows, **kwargs}, sizes)
        unknown = [name for name in public if name not in sites]
        if unknown:
            raise ValueError(
                f"public= names sites that the model lacks: {unknown}; it has {list(sites)}"
            )
        stepped = {
            f.name
            for x in sites.values()
            for f in x.get("cond_indep_stack", ())
            if f.size in sizes.values()
        }
        if stepped - set(sites):
            raise ValueError(
                f"plates {sorted(stepped - set(sites))} are inside a scan or a cond: {NO_STEPS}"
            )
        plates = _silo_plates(sites, sizes)
        latent = _latent_sites(sites, plates, public, conditioned)
        seen.update(
            plates=plates,
            latent=latent,
            undrawn=_undrawn(sites),
            observed=_observed(sites, plates),
            transforms=_compat.transforms(sites),
            together=any(map(takes_rows_together, sites.values())),
        )
        return {
            name: biject_to(sites[name]["fn"].support).inv(sites[name]["value"])
            for name, *_ in latent
        }

    shapes = jax.eval_shape(run, jax.random.key(0), rows, abstract)
    global_sites, local_sites = _sorted_sites(
        seen["latent"], {name: x.shape for name, x in shapes.items()}
    )
    plates = tuple(seen["plates"].items())
    rest = (seen[name] for name in ("undrawn", "observed", "transforms", "together"))
    return global_sites, local_sites, plates, *rest


def _undrawn(sites: Mapping[str, Site]) -> tuple[tuple[str, str], ...]:
    """Return name and type of each learned parameter and mutable state."""
    kinds = ("param", "mutable")
    return tuple((n, site["type"]) for n, site in sites.items() if site["type"] in kinds)


def _observed(sites: Mapping[str, Site], plates: Mapping[str, str]) -> tuple[str, ...]:
    """Return names of observed sites and factors inside silo plates."""
    return tuple(
        name
        for name, site in sites.items()
        if site["type"] == "sample"
        and site["is_observed"]
        and any(frame.name in plates for frame in site["cond_indep_stack"])
    )


def _sites(
    model: Callable, key: Array, kwargs: ModelArgs, sizes: dict[str, int]
) -> dict[str, Site]:
    """Return the sites of a model's trace, with errors that say what the model must be like."""
    try:
        drawn = substitute(seed(model, key), substitute_fn=init_to_sample)
        sites: dict[str, Site] = trace(drawn).get_trace(**kwargs)
    except NotImplementedError as error:
        if "control flow" not in str(error):
            raise
        raise ValueError(
            f"plate {_raised_by(error)!r} has a scan or a cond inside it: {NO_STEPS}"
        ) from error
    except (TypeError, ValueError, IndexError) as error:
        if str(error).startswith("mark_silos"):
            raise
        raise ValueError(
            f"the model fails when traced with as many rows as {sizes} ({error}); expected one "
            "that takes all sizes from its arguments and runs under jax.jit, and rows= that "
            "put each argument in its group"
        ) from error
    return sites


def _raised_by(error: Exception) -> str:
    """Return the name of the plate whose code raised an error."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    owner = None if step is None else step.tb_frame.f_locals.get("self")
    return owner.name if isinstance(owner, numpyro.plate) else "?"


def _silo_plates(sites: Mapping[str, Site], sizes: dict[str, int]) -> dict[str, str]:
    """Return the row group of each marked plate by its number of elements."""
    plates: dict[str, str] = {}
    for name, site in sites.items():
        if not is_silo_plate(site):
            continue
        size, subsample_size = site["args"]
        if subsample_size is not None and subsample_size != size:
            raise ValueError(
                f"silo plate {name!r} subsamples {subsample_size} of its elements itself; leave "
                "subsample_size out and give the kernel batch_size="
            )
        matches = [g for g, n in sizes.items() if n == size]
        if not matches:
            raise ValueError(
                f"silo plate {name!r}: its size is no argument's number of rows. Take it from the "
                f"data, e.g. silo_plate({name!r}, x.shape[0]); the row groups are {sorted(sizes)}. "
                "Where arguments have different numbers of rows, rows= (ROWS in a study's file) "
                "names the plate of each"
            )
        plates[name] = matches[0]
    if not plates:
        raise ValueError(_NO_PLATE)
    return plates


def _is_delta(fn: Distribution) -> bool:
    """Return whether a distribution is a Delta, or has one as its base distribution."""
    return isinstance(fn, Delta) or (hasattr(fn, "base_dist") and _is_delta(fn.base_dist))


def _latent_sites(
    sites: Mapping[str, Site],
    plates: dict[str, str],
    public: tuple[str, ...],
    conditioned: tuple[str, ...],
) -> list[tuple[str, str | None, Callable[[int], int]]]:
    latent: list[tuple[str, str | None, Callable[[int], int]]] = []
    for name, site in sites.items():
        if site["type"] != "sample":
            continue
        frames = [f for f in site["cond_indep_stack"] if f.name in plates]
        if site["is_observed"]:
            if frames and is_public(site):
                raise ValueError(
                    f"the published result {name!r} is inside the silo plate {frames[0].name!r}; "
                    "expected it outside, since it counts once"
                )
            if not frames and not is_public(site) and name not in (*public, *conditioned):
                raise ValueError(
                    f"observed site {name!r} is outside every silo plate, so it belongs to no "
                    "silo; move it into a silo plate, or, if all silos know its data, say so: "
                    f'public=("{name}",)'
                )
            if frames and name in conditioned:
                raise ValueError(
                    f"site {name!r} lives in a silo plate and is owned by another Gibbs block; "
                    "expected all local sites in the federated kernel's own block"
                )
            continue
        if site["fn"].support.is_discrete:
            raise ValueError(
                f"latent site {name!r} is discrete; expected continuous latents: sum it out, e.g. "
                "with dist.MixtureSameFamily"
            )
        if _is_delta(site["fn"]):
            raise ValueError(f"latent site {name!r} is a Delta; use numpyro.deterministic for it")
        if len(frames) > 1:
            raise ValueError(
                f"latent site {name!r} is inside {len(frames)} silo plates, "
                f"{[f.name for f in frames]}; expected one: mark only the outer plate"
            )
        event_dim = len(site["fn"].event_shape)
        codomain = biject_to(site["fn"].support)
        shift = codomain.codomain.event_dim - codomain.domain.event_dim

        def axis(
            ndim: int, event: int = event_dim - shift, d: int = frames[0].dim if frames else 0
        ) -> int:
            return ndim - event + d

        latent.append((name, frames[0].name if frames else None, axis))
    return latent
