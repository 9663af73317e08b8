"""JAX's settings and NumPyro's private names."""

import math
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax import Array, lax
from jax._src import compilation_cache
from jax.extend.core import Primitive
from jax.interpreters import mlir
from numpyro.distributions import Distribution, ExpandedDistribution, MaskedDistribution
from numpyro.handlers import substitute

# _unconstrain_reparam substitutes unconstrained values, and adds each Jacobian as a factor site
# inside the site's own plates, scales and masks. NumPyro's potential_energy uses it too, so that
# the factors here agree with that energy term by term. _transforms_from_trace says if transforms
# alone constrain a draw, or the model must run again.
from numpyro.infer.util import _transforms_from_trace, _unconstrain_reparam

from numpyro_fed._typing import PyTree

if TYPE_CHECKING:
    from numpyro.distributions.transforms import Transform
    from numpyro.infer import MCMC

# options of XLA for programs of few runs: less optimization, and no MLIR on the way to LLVM. A
# first fit takes two thirds of the time, and programs run as fast (docs/results.md). XLA
# prefers a program's options to JAX_DISABLE_MOST_OPTIMIZATIONS. Where that is set, its level is 0
QUICKLY: dict[str, Any] = {
    "xla_backend_optimization_level": int(not jax.config.read("jax_disable_most_optimizations"))
}
if jax.__version_info__ < (0, 11):  # later ones refuse the option
    QUICKLY["xla_cpu_use_fusion_emitters"] = False
# LAPACK's calls, by JAX's names of their primitives
_LAPACK = (
    "cholesky", "eig", "eigh", "geqp3", "geqrf", "hessenberg", "householder_product", "lu", "ormqr",
    "schur", "svd", "triangular_solve", "tridiagonal",
)  # fmt: skip
_LOADING = threading.Lock()  # one program at a time has the standard error
_ENOUGH = 8  # threads with which no batched calls were seen to wait for each other


def _one_after_the_other(primitive: Primitive, rule: Callable) -> Callable:
    """Return a lowering in which the matrices of a batch are a loop of calls with one matrix."""

    def lower(ctx: Any, *args: object, **params: object) -> object:
        batch = ctx.avals_in[0].shape[:-2]
        if not all(isinstance(n, int) for n in batch) or math.prod(batch) < 2:
            return rule(ctx, *args, **params)

        def loop(*arrays: Array) -> PyTree:
            flat = [x.reshape(-1, *x.shape[len(batch) :]) for x in arrays]
            out = lax.map(lambda each: primitive.bind(*each, **params), flat)
            return jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), out)

        return mlir.lower_fun(loop, primitive.multiple_results)(ctx, *args)

    return lower


def _threads() -> int:
    """Return how many threads XLA's CPU client will have, or fewer."""
    usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    asked = [os.environ.get(variable, "") for variable in ("NPROC", "PJRT_NPROC")]
    return min([len(usable(0)), *(int(n) for n in asked if n.isdecimal())])


def _keep_lapack_from_waiting() -> None:
    """Compile batched LAPACK calls so that they cannot wait for each other for ever.

    XLA's CPU client has as many threads as the process may use cores. A batched call splits its
    work over these threads, and waits for it in one of them. Two such calls on two cores then hang
    (jaxlib 0.10.1; one ``MultivariateNormal`` in a model suffices). A loop of single calls waits
    for nobody. Where JAX has no such table of lowerings, XLA gets more threads, and small loops are
    up to twice as slow.
    """
    if _threads() >= _ENOUGH:
        return
    lowerings = getattr(mlir, "_platform_specific_lowerings", {}).get("cpu", {})
    for primitive in [p for p in lowerings if p.name in _LAPACK]:
        entry = lowerings[primitive]
        rule = _one_after_the_other(primitive, getattr(entry, "rule", entry))
        mlir.register_lowering(primitive, rule, platform="cpu")
    if not lowerings:  # the client reads these when it starts, which is after the import of JAX
        for variable in ("NPROC", "PJRT_NPROC"):
            os.environ.setdefault(variable, str(_ENOUGH))


_keep_lapack_from_waiting()


def enable_compilation_cache(folder: str | Path | None = None) -> Path:
    """Keep compiled programs in a folder, so that another process does not compile them again.

    The commands and the models do this. A program may hold numbers of the data as constants, so the
    folder has to be as private as the data. A new one is readable to its owner alone. Where JAX has
    a cache already (``JAX_COMPILATION_CACHE_DIR``), it stays.

    :param folder: the folder; by default ``numpyro_fed`` in the user's cache folder,
        ``$XDG_CACHE_HOME`` or ``~/.cache``.
    :return: the folder of JAX's cache.
    :raises OSError: if the folder cannot be made.

    Example::

        >>> import tempfile, numpyro_fed as fed
        >>> fed.enable_compilation_cache(tempfile.mkdtemp()).is_dir()
        True
    """
    _load_quietly()
    if (there := jax.config.values["jax_compilation_cache_dir"]) is not None:
        return Path(there)
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = user / "numpyro_fed" if folder is None else Path(folder)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(place))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return place


def _load_quietly() -> None:
    """Keep XLA from printing errors for each program that it takes from the cache.

    It compares the program's machine with this one, and takes two preferences of the compiler for
    features that this one lacks (openxla/xla#44565). JAX has no public place for it.
    """
    load = getattr(compilation_cache, "get_executable_and_time", None)
    if load is None or hasattr(load, "__wrapped__"):  # another release, or done
        return

    @wraps(load)
    def quietly(*args: Any, **kwargs: Any) -> Any:
        with _LOADING, stderr_without(b"cpu_aot_loader.cc"):
            return load(*args, **kwargs)

    compilation_cache.get_executable_and_time = quietly


@contextmanager
def stderr_without(word: bytes) -> Iterator[None]:
    """Leave out lines with a word, of what the process writes to its standard error meanwhile."""
    try:
        place = os.dup(2)
    except OSError:  # there is none
        yield
        return
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(place, 2)
            os.close(place)
            said.seek(0)
            for line in said:
                if word not in line:
                    os.write(2, line)


def layers(law: Distribution) -> Iterator[Distribution]:
    """Yield a distribution, and those that it masks, expands or transforms."""
    yield law
    while isinstance(law := getattr(law, "base_dist", None), Distribution):
        yield law


def is_of(law: Distribution, *kinds: type[Distribution]) -> bool:
    """Return whether a distribution is of a kind, whatever masks or expands it."""
    return any(isinstance(layer, kinds) for layer in layers(law))


def mask_of(law: Distribution) -> Array | bool:
    """Return the mask of a distribution's batch; ``True`` where it has none."""
    for layer in layers(law):
        if isinstance(layer, MaskedDistribution):
            return layer._mask
        if not isinstance(layer, ExpandedDistribution):
            break
    return True


def unconstrained(model: Callable, values: Mapping[str, Array]) -> Callable:
    """Return the model at unconstrained ``values`` of latent sites, with Jacobians as factors."""
    return substitute(model, substitute_fn=partial(_unconstrain_reparam, values))


def transforms(trace: Mapping[str, dict]) -> "dict[str, Transform] | None":
    """Return the transforms that constrain the latent sites of a trace.

    Return ``None`` where a draw needs the model. It does for deterministic sites, for supports that
    depend on values, and for supports with arrays that the model makes. Such arrays would be
    tracers here, and NumPyro does not look for them inside ``Independent``.
    """
    info = _transforms_from_trace(trace, raise_warnings=False)
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(info.inv_transforms))
    return None if info.has_deterministic or info.dynamic_support or traced else info.inv_transforms


def fill_mcmc(mcmc: "MCMC", states: dict[str, PyTree], last_state: PyTree, args: tuple) -> None:
    """Give an ``MCMC`` the draws ``(chains, draws, ...)`` of rounds that it has not run itself."""
    mcmc._states, mcmc._states_flat, mcmc._last_state = states, None, last_state
    mcmc._args, mcmc._kwargs = args, {}
