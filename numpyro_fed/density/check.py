r"""Check of the factorization: before the first round, the factors must sum to the pooled model.

At two random points the check compares :math:`\log p(\theta) + \sum_s \log p(y_s, z_s \mid \theta)`
and its gradient with NumPyro's log density of the pooled model. It evaluates them as the fit will:
jitted, vmapped over silos, padded and masked. It catches a model that reads across silos, a wrong
``rows=`` or ``index=``, a site counted twice, and an error of the compiler.

Nobody asks remote silos about their rows. The server checks the model on made-up rows of two silos
of unequal size. A remote silo checks it on its own rows, cut in two, before it answers any call. It
then reports only the kind of error.
"""

import warnings
from dataclasses import dataclass, replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro import validation_enabled

from numpyro_fed.data.silos import Silos
from numpyro_fed.data.views import SiloView, sweep
from numpyro_fed.density.factors import PARAMS, Factors, pooled_log_density
from numpyro_fed.density.stand_ins import cut_in_two, random_silos
from numpyro_fed.rounds.inline import ask_all, quick_jit
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.rounds.task import SiloTask

# ranges of made-up whole numbers, tried in turn: labels, counts, and ones for a count with a total;
# other numbers lie in (.2, .8), or are whole, too, where the density is not finite there
_WHOLE = ((0, 2), (1, 3), (1, 2))
_EQUALITY = (
    "Expected equality: the model must not combine rows of different silos (means, ranks, "
    "positions in other plates without index=), and rows= and index= must be right"
)
_TOGETHER = (
    "The rows of a silo depend on each other (a risk set, a series, a Gaussian process), and silos "
    "are padded to one size. Expected fed.silo_plate(..., row_wise=False), with which the sum holds"
)
_FINITE = (
    "expected a finite one: are all data inside the supports of the sites that observe them "
    "(counts >= 0, labels 0 or 1), and all scales positive?"
)


class FactorizationError(ValueError):
    """Error for a model or data that the check of the factorization refuses.

    :param said: the message, with numbers.
    :param plain: the kind of error, without any number that comes from a silo's rows.
    """

    def __init__(self, said: str, plain: str) -> None:
        super().__init__(said)
        self.plain = plain


def _point(factors: Factors, silos: Silos, seed: int) -> tuple[dict, dict]:
    """Draw global sites, and local sites in flat order (elements first); compiles nothing."""
    rng, dtype = np.random.default_rng(seed), jnp.result_type(float)
    theta = jax.eval_shape(factors.unravel, jax.ShapeDtypeStruct((factors.dim,), dtype))
    groups = factors.local_groups()
    z = {
        s.name: jax.ShapeDtypeStruct((sum(silos.sizes[groups[s.name]]), *s.shape), dtype)
        for s in factors.local_sites
    }
    return jax.tree.map(lambda x: (0.5 * rng.normal(size=x.shape)).astype(x.dtype), (theta, z))


def _own(factors: Factors, z: dict[str, Array], view: SiloView) -> dict[str, Array]:
    groups = factors.local_groups()
    return {name: x[view.positions(groups[name])] for name, x in z.items()}


@quick_jit("factors")
def _factored(
    factors: Factors, theta: dict, z: dict, silos: Silos
) -> tuple[Array, tuple[dict, dict], Array]:
    """Return the sum of the factors, its gradient in (theta, z), and each silo's term."""

    def total(theta: dict, z: dict) -> tuple[Array, Array]:
        def local(view: SiloView, _: None) -> tuple[Array, None]:
            kwargs, weights = view.whole()
            return factors.log_local(theta, _own(factors, z, view), kwargs, weights), None

        terms, _ = sweep(local, silos, None, None)
        return factors.log_prior(theta, silos.shared) + terms.sum(), terms

    (value, terms), gradient = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(theta, z)
    return value, gradient, terms


@quick_jit("factors")
def _pooled(
    factors: Factors, theta: dict, z: dict, silos: Silos
) -> tuple[Array, tuple[dict, dict]]:
    groups = factors.local_groups()

    def total(theta: dict, z: dict) -> Array:
        placed = {
            s.name: jnp.moveaxis(z[s.name][silos.pooled_position(groups[s.name])], 0, s.axis)
            for s in factors.local_sites
        }
        return pooled_log_density(factors.model, silos, {**theta, **placed})

    return jax.value_and_grad(total, argnums=(0, 1))(theta, z)


def check_factorization(factors: Factors, silos: Silos, *, seed: int = 0) -> None:
    """Raise a :class:`FactorizationError` unless the factors sum to the pooled model.

    Values and gradients have to agree. For remote silos the server checks made-up rows
    (:func:`check_made_up`), and each silo checks its own rows (:func:`check_own_factorization`). A
    carrier between processes that trust each other has the rows themselves checked.

    :raises FactorizationError: with the sites whose gradients differ, and their silos.
    :warns UserWarning: for a single silo whose rows depend on each other.
    """
    if isinstance(silos, RemoteSilos):
        check_made_up(factors, silos, seed=seed)
        # a carrier's silos lack the learned parameters
        learned = {k: v for k, v in silos.shared.items() if k == PARAMS}
        silos.carrier.check(lambda own: _check_sum(factors, own.with_shared(**learned), seed))
        return
    _check_sum(factors, silos, seed)
    if len(silos) == 1 and factors.row_wise:
        try:
            _check_cut(factors, silos, seed)
        except FactorizationError:
            warnings.warn(
                f"the rows of the one silo {silos.names[0]!r} depend on each other given the "
                "latents (a response of shape (n, 1), a mean, ranks, a column that rows= puts into "
                "another group?): this fit takes the model as written, but several silos with "
                "these rows will be refused",
                stacklevel=3,
            )


def check_own_factorization(factors: Factors, silos: Silos, *, seed: int = 0) -> None:
    """Raise a :class:`FactorizationError` unless two parts of a silo sum to the pooled model.

    The parts are its rows, cut in two. Rows that cannot be cut in two, or whose terms are not
    row-wise, are checked as one silo.
    """
    if not factors.row_wise or not _check_cut(factors, silos, seed):
        _check_sum(factors, silos, seed)


def check_made_up(factors: Factors, silos: Silos, *, seed: int = 0) -> None:
    """Raise a :class:`FactorizationError` unless two silos of made-up rows sum to the pooled model.

    The check needs no row of a silo. It passes where the model has no finite density at any made-up
    rows; only the silos' own checks remain then.
    """
    with validation_enabled(False):
        found = made_up_silos(factors, silos, seed)
        if found is not None:
            _check_sum(factors, found, seed)


def _check_cut(factors: Factors, silos: Silos, seed: int) -> bool:
    """Check one silo's rows, cut in two; return whether they could be cut."""
    cut = cut_in_two(silos, seed)
    if cut is not None:
        _check_sum(factors, cut, seed)
    return cut is not None


def made_up_silos(factors: Factors, silos: Silos, seed: int) -> Silos | None:
    """Return two silos of made-up rows with a finite pooled density, or ``None``."""
    for all_whole, (low, high) in product((False, True), _WHOLE):
        found = random_silos(silos, np.random.default_rng(seed), low, high, all_whole)
        theta, z = _point(factors, found, seed)
        try:
            value = float(_pooled(factors, theta, z, found)[0])
        except (TypeError, ValueError, IndexError) as error:
            raise _not_pooled(error) from error
        if np.isfinite(value):
            return found
    return None


def _not_pooled(error: Exception) -> FactorizationError:
    said = "factorization check: the model runs for each silo but not on the pooled data"
    mend = "; expected one that takes the sizes of its plates from the data it is called with"
    return FactorizationError(f"{said} ({error}){mend}", said + mend)


def _check_sum(factors: Factors, silos: Silos, seed: int) -> None:
    """Compare the sum of the factors with the pooled model at two random points."""
    factors = factors.for_silos(silos)
    for point in range(2):
        theta, z = _point(factors, silos, seed + point)
        try:
            value, gradient, terms = _factored(factors, theta, z, silos)
        except (TypeError, ValueError, IndexError) as error:
            sizes = {group: (min(own), max(own)) for group, own in silos.sizes.items()}
            fails = "factorization check: the model fails on the rows of a silo"
            mend = (
                "; expected latent sites (weights of a network) of the same shapes in all silos, "
                "whatever the number of their rows: take sizes of layers from constants or from "
                "the rows' own shape, x.shape[-1]"
            )
            raise FactorizationError(
                f"{fails} ({error}), where least and most rows are {sizes}{mend}", fails + mend
            ) from error
        try:
            expected, expected_gradient = _pooled(factors, theta, z, silos)
        except (TypeError, ValueError, IndexError) as error:
            raise _not_pooled(error) from error
        bad = np.flatnonzero(~np.isfinite(np.asarray(terms)))
        if bad.size and np.isfinite(float(expected)):
            raise FactorizationError(
                f"factorization check: the log density of silo {silos.names[bad[0]]!r} is "
                f"{float(terms[bad[0]])} where the pooled model's is finite",
                "factorization check: the log density of some of its rows is not finite where that "
                "of all is",
            )
        if not np.isfinite(float(expected)):
            where = f", silo {silos.names[bad[0]]!r}" if bad.size else ""
            raise FactorizationError(
                f"factorization check: the log density is {float(expected)} at a typical "
                f"position{where}; {_FINITE}",
                "factorization check: its log density is not finite at a typical position; "
                f"{_FINITE}",
            )
        # terms may cancel, so their size decides the rounding, not the size of the sum
        size = max(float(np.abs(np.asarray(terms)).sum()), abs(float(expected)), 1.0)
        rounding = float(jnp.finfo(terms.dtype).eps)
        allowed = 2e3 * rounding * size
        gap = abs(float(value) - float(expected))
        if not gap <= allowed:  # seldom, as it reads all rows
            allowed += 8 * rounding * _largest_constants(silos)
        wrong = _different_sites(gradient, expected_gradient, silos, factors)
        # not (a <= b), so that NaN fails
        if not gap <= allowed or wrong:
            mend = _TOGETHER if _holds_unpadded(factors, silos, seed) else _EQUALITY
            raise FactorizationError(
                f"factorization check: log p(theta) + sum of the {len(silos)} silos' terms is "
                f"{float(value):.8g}, the pooled model's log density {float(expected):.8g}"
                + (f"; gradients differ at {wrong}" if wrong else "")
                + f". {mend}",
                "factorization check: log p(theta) + sum of the terms of its rows, cut in two, is "
                f"not the log density of all its rows. {mend}",
            )


def _largest_constants(silos: Silos) -> float:
    """Return the sum of x log(1 + x) over whole numbers x in the rows.

    log x! is of this size. In the density of a count it cancels with others, and leaves its
    rounding.
    """
    total = 0.0
    for leaf, column in silos.rows.items():
        x = np.abs(np.asarray(column, np.float64))
        if leaf not in silos.index and (x == np.round(x)).all():
            total += float(np.sum(x * np.log1p(x)))
    return total


def _holds_unpadded(factors: Factors, silos: Silos, seed: int) -> bool:
    """Return whether the silos' terms sum to the pooled model where silos are not padded."""
    if not factors.row_wise:
        return False
    try:
        _check_sum(replace(factors, row_wise=False), silos, seed)
    except FactorizationError:
        return False
    return True


@dataclass(frozen=True)
class BatchGap(SiloTask):
    """Relative gap between rows' terms in a minibatch and in the whole silo."""

    factors: Factors
    group: str
    size: int

    def __call__(self, key: Array, theta: dict, state: None, view: SiloView) -> tuple[Array, None]:
        kwargs, weights = view.whole()
        whole = self.factors.terms(theta, {}, kwargs, weights)[1][self.group][: self.size]
        rows = view.batch(self.group, jnp.arange(self.size))
        batch = self.factors.terms(theta, {}, {**kwargs, **rows}, {**weights, self.group: 1.0})[1][
            self.group
        ]
        return jnp.abs(batch - whole).max() / (1.0 + jnp.abs(whole).max()), None


def check_batch(factors: Factors, silos: Silos, group: str, size: int, *, seed: int = 0) -> None:
    """Raise a :class:`ValueError` if a row's term in a minibatch differs from that in its silo.

    The check catches a model that reads the number of its rows, their mean or their place. For
    remote silos it takes made-up rows.
    """
    if isinstance(silos, RemoteSilos):
        found = made_up_silos(factors, silos, seed)
        if found is None:
            return
        silos = found
    key_theta, key = random.split(random.key(seed))
    theta = factors.unravel(0.5 * random.normal(key_theta, (factors.dim,)))
    # a minibatch of all rows would show nothing
    size = min(size, max(1, min(silos.sizes[group]) - 1))
    gaps = np.asarray(ask_all(BatchGap(factors, group, size), key, theta, None, silos, None)[0])
    if not (gaps <= 2e3 * float(jnp.finfo(gaps.dtype).eps)).all():
        silo = silos.names[int(np.argmax(np.nan_to_num(gaps, nan=np.inf)))]
        raise ValueError(
            f"factorization check: in silo {silo!r} a row's log density in a minibatch of {size} "
            "differs from that among all rows. Expected terms that depend on their own row alone: "
            "no x.shape[0], mean or position of rows; pass such numbers as arguments, or take "
            "batch_size=None"
        )


def _different_sites(
    gradient: tuple[dict, dict], expected: tuple[dict, dict], silos: Silos, factors: Factors
) -> list[str]:
    groups = factors.local_groups()
    out = []
    rounding = float(jnp.finfo(jnp.result_type(float)).eps)
    # in NumPy, as JAX would compile for each shape of a site
    gradients = jax.tree.map(np.asarray, (gradient, expected))
    scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(gradients[1]))
    for part, (own, reference) in enumerate(zip(*gradients, strict=True)):
        for name, g in own.items():
            gap = np.abs(g.astype(np.float64) - reference[name])
            bad = ~(gap <= 2e4 * rounding * max(scale, 1.0))
            if bad.any():
                where = ""
                if part == 1:
                    row = int(np.argmax(bad.reshape(len(bad), -1).any(1)))
                    where = f" (silo {silos.names[silos.silo_of_row(groups[name])[row]]!r})"
                out.append(name + where)
    return out
