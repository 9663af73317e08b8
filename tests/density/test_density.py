"""The sum of the factors is NumPyro's density of the pooled model, value and gradient.

Partitions are drawn by hypothesis. Every silo is shown padded to the number of all rows. So shapes
are the same in all partitions, and a drawn partition compiles nothing.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array, random
from marks import heavy
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.reparam import LocScaleReparam
from numpyro.infer.util import log_density
from registry import ENTRIES, Entry

import numpyro_fed as fed
from numpyro_fed import split
from numpyro_fed.data import views as storage
from numpyro_fed.data.views import SiloView, buckets, largest, sweep
from numpyro_fed.density.factorize import factorize
from numpyro_fed.density.factors import Factors, PooledModel, pooled_log_density

ALL = pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
TOLERANCE = {False: 1e-5, True: 1e-10}  # relative, by whether in double precision


def some(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("entry", [ENTRIES[name] for name in names], ids=names)


def random_point(factors: Factors, silos: fed.Silos, seed: int = 0) -> tuple[dict, dict]:
    """Global sites, and local ones in flat order, elements first."""
    rng, groups, dtype = np.random.default_rng(seed), factors.local_groups(), jnp.result_type(float)

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        return 0.5 * rng.normal(size=shape).astype(dtype)

    theta = {name: draw(shape) for name, shape in factors.global_sites}
    return theta, {
        s.name: draw((sum(silos.sizes[groups[s.name]]), *s.shape)) for s in factors.local_sites
    }


def parts(entry: Entry) -> tuple[fed.Silos, Factors, dict, dict]:
    silos = entry.silos()
    factors = factorize(entry.model, silos)
    theta, z = jax.tree.map(jnp.asarray, random_point(factors, silos))
    return silos, factors, theta, z


def own(factors: Factors, z: dict, view: SiloView) -> dict[str, Array]:
    return {name: z[name][view.positions(group)] for name, group in factors.local_groups().items()}


# The sum of the factors


@lru_cache
def programs(name: str, double: bool) -> tuple:
    """Return an entry's factors, a point, and densities there.

    These are of the pooled model, of the prior, and of a silo's term.
    """
    entry = ENTRIES[name]
    silos = entry.silos()
    factors = factorize(entry.model, silos)
    theta, pooled = random_point(factors, silos)

    def whole(theta: dict, z: dict) -> Array:
        placed = {s.name: jnp.moveaxis(z[s.name], 0, s.axis) for s in factors.local_sites}
        return pooled_log_density(factors.model, silos, {**theta, **placed})

    def local(theta: dict, z: dict, places: dict, rows: dict, weights: dict) -> Array:
        shown = {name: z[name][places[group]] for name, group in factors.local_groups().items()}
        return factors.log_local(theta, shown, {**silos.shared, **rows}, weights)

    def prior(theta: dict, z: dict) -> Array:
        return factors.log_prior(theta, silos.shared)

    @jax.jit
    def once(theta: dict, z: dict) -> tuple:
        return tuple(jax.value_and_grad(f, argnums=(0, 1))(theta, z) for f in (whole, prior))

    program = jax.jit(jax.value_and_grad(local, argnums=(0, 1)))
    return factors, theta, pooled, jax.device_get(once(theta, pooled)), program


def check_sum(entry: Entry, by: np.ndarray, double: bool) -> None:
    factors, theta, pooled, ((expected, slope), (value, prior_slope)), local = programs(
        entry.name, double
    )
    silos, groups = entry.silos(by), factors.local_groups()
    order = {name: np.asarray(silos.order[group]) for name, group in groups.items()}
    z = {name: x[order[name]] for name, x in pooled.items()}
    pad = tuple((g, sum(n)) for g, n in silos.sizes.items())
    slopes, size = [prior_slope], abs(float(value))
    for number in range(len(silos)):
        view = SiloView(silos, jnp.asarray(number), pad)
        kwargs, weights = view.whole()
        rows = {leaf: kwargs[leaf] for leaf in silos.rows}
        places = {g: view.positions(g) for g in silos.sizes}
        term, gradient = jax.device_get(local(theta, z, places, rows, weights))
        value, size = value + term, size + abs(float(term))
        slopes.append(gradient)
    assert abs(float(value - expected)) <= TOLERANCE[double] * size
    theta_slope, z_slope = jax.tree.map(lambda *each: np.sum(each, 0), *slopes)
    z_slope = {name: x[np.argsort(order[name])] for name, x in z_slope.items()}
    scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(slopes))
    for got, wanted in zip(
        jax.tree.leaves((theta_slope, z_slope)), jax.tree.leaves(slope), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE[double] * max(scale, 1.0))


def partitions(entry: Entry) -> Any:
    return st.lists(st.integers(0, 3), min_size=len(entry.by), max_size=len(entry.by)).map(np.array)


@ALL
@pytest.mark.parametrize("double", heavy([False, True], False), ids=["single", "double"])
def test_factors_sum_to_the_pooled_density(entry: Entry, double: bool) -> None:
    with jax.enable_x64(double):

        @settings(max_examples=10, deadline=None, derandomize=True)
        @given(partitions(entry))
        def check(by: np.ndarray) -> None:
            check_sum(entry, by, double)

        check_sum(entry, entry.by, double)  # ragged, with a silo of one row
        check()


def test_a_term_counted_twice_is_seen() -> None:
    """Negative control: the same comparison with one silo's term twice."""
    entry = ENTRIES["logistic"]
    silos, factors, theta, z = parts(entry)

    @jax.jit
    def sums(theta: dict) -> tuple[Array, Array, Array]:
        terms = [factors.log_local(theta, z, silos[name], {"rows": 1.0}) for name in silos]
        total = factors.log_prior(theta, silos.shared) + sum(terms)
        return total, total + terms[1], pooled_log_density(entry.model, silos, theta)

    total, twice, expected = sums(theta)
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    assert abs(twice - expected) > 1e-2 * abs(expected)


# Padding, and a silo whose number is traced


@some("logistic", "mask", "silo_plate_innermost", "pupils_in_classes_in_schools")
def test_traced_silo_padded_in_any_way(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    silos, factors, theta, z = parts(entry)

    def term(view: SiloView) -> Array:
        kwargs, weights = view.whole()
        return factors.log_local(theta, own(factors, z, view), kwargs, weights)

    expected = []
    for number, name in enumerate(silos):
        rows = {
            g: slice(silos.offsets(g)[number], silos.offsets(g)[number] + n[number])
            for g, n in silos.sizes.items()
        }
        exact = {leaf: z[leaf][rows[g]] for leaf, g in factors.local_groups().items()}
        own_term = jax.jit(
            lambda z, kwargs: factors.log_local(theta, z, kwargs, dict.fromkeys(silos.sizes, 1.0))
        )
        expected.append(own_term(exact, silos[name]))

    def padded(number: Array) -> Array:
        return term(SiloView(silos, number, largest(silos)))

    jitted = jax.jit(padded)
    numbers = jnp.arange(len(silos))
    np.testing.assert_allclose([jitted(n) for n in numbers], expected, rtol=3e-6)
    np.testing.assert_allclose(jax.jit(jax.vmap(padded))(numbers), expected, rtol=3e-6)
    monkeypatch.setattr(storage, "SMALL", 0)
    assert len(buckets(silos)) > 1
    swept, state = jax.jit(lambda: sweep(lambda view, _: (term(view), None), silos, None, None))()
    assert state is None
    np.testing.assert_allclose(swept, expected, rtol=3e-6)


@pytest.mark.parametrize("small", [0, 1 << 13], ids=["buckets", "one bucket"])
@pytest.mark.parametrize("group", ["rows", None])
def test_sweep_gives_each_silo_its_own_states(
    small: int, group: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "SMALL", small)
    # two buckets: of the last silo, then of the first two, one of them padded
    silos = fed.split({"y": np.arange(13.0)}, by=np.repeat([0, 1, 2], [2, 3, 8]))
    assert (len(buckets(silos)) > 1) == (small == 0)
    count = len(silos) if group is None else sum(silos.sizes[group])
    silo = np.arange(len(silos)) if group is None else silos.silo_of_row(group)
    states = {"a": np.arange(count), "b": np.ones((count, 2))}

    def visit(view: SiloView, own: dict) -> tuple[Array, dict]:
        mask = view.units(group)[1]
        return jnp.where(mask, own["a"], 0).sum(), {
            "a": own["a"] + 10 * view.number,
            "b": own["b"] * 2,
        }

    replies, new = sweep(visit, silos, jax.tree.map(jnp.asarray, states), group)
    np.testing.assert_array_equal(replies, np.bincount(silo, states["a"]))
    np.testing.assert_array_equal(new["a"], states["a"] + 10 * silo)
    np.testing.assert_array_equal(new["b"], 2 * states["b"])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5)), min_size=1, max_size=8))
def test_buckets_hold_every_silo_once_and_pad_below_twofold(sizes: list[tuple[int, int]]) -> None:
    rows, elements = zip(*sizes, strict=True)
    data = {str(s): {"y": np.full(n, s), "d": np.zeros(k)} for s, (n, k) in enumerate(sizes)}
    silos = fed.Silos(data, rows={"y": "rows", "d": "ds"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "SMALL", 0)
        found = buckets(silos)
    assert sorted(s for numbers, _ in found for s in numbers) == list(range(len(silos)))
    for numbers, pad in found:
        for group, n in (("rows", rows), ("ds", elements)):
            own = np.array(n)[numbers]
            assert dict(pad)[group] == own.max() < 2 * own.min()
    (single,) = buckets(silos)
    assert single.pad == largest(silos) == (("rows", max(rows)), ("ds", max(elements)))


def test_padding_repeats_the_silos_own_last_row() -> None:
    silos = ENTRIES["women_in_districts"].silos()
    for number, name in enumerate(silos):
        view = SiloView(silos, jnp.asarray(number), tuple((g, 8) for g in silos.sizes))
        kwargs, weights = view.whole()
        for leaf, group in silos.group.items():
            count = silos.sizes[group][number]
            np.testing.assert_array_equal(kwargs[leaf][:count], silos[name][leaf])
            np.testing.assert_array_equal(
                kwargs[leaf][count:], np.repeat(silos[name][leaf][-1:], 8 - count, 0)
            )
            np.testing.assert_array_equal(weights[group], np.arange(8) < count)


@some("logistic", "mask", "nested_plates", "pupils_in_classes_in_schools")
def test_padding_is_worth_exactly_nothing(entry: Entry) -> None:
    silos, factors, theta, z = parts(entry)
    view = SiloView(silos, jnp.asarray(0), tuple((g, n[0] + 3) for g, n in silos.sizes.items()))
    kwargs, weights = view.whole()
    rows = {
        k: v for k, v in kwargs.items() if k in silos.rows and jnp.issubdtype(v.dtype, jnp.floating)
    }

    def padding(theta: dict, z: dict) -> Array:
        local = factors.terms(theta, z, kwargs, weights)[1]
        return sum(jnp.sum(jnp.where(view.mask(g), 0.0, v)) for g, v in local.items())

    def term(z: dict, rows: dict) -> Array:
        return factors.log_local(theta, z, {**kwargs, **rows}, weights)

    shown = own(factors, z, view)
    value, slope = jax.jit(jax.value_and_grad(padding, argnums=(0, 1)))(theta, shown)
    assert value == 0
    assert all((x == 0).all() for x in jax.tree.leaves(slope))
    by_z, by_rows = jax.jit(jax.grad(term, argnums=(0, 1)))(shown, rows)
    for name, x in (by_z | by_rows).items():
        mask = view.mask((factors.local_groups() | silos.group)[name])
        assert (x[~mask] == 0).all()
        assert (x[mask] != 0).any()


# Minibatches


@some("logistic", "scale", "nested_plates", "women_in_districts")
@pytest.mark.parametrize("size", [1, 2])
def test_minibatches_average_to_the_full_term(entry: Entry, size: int) -> None:
    """Over all batches of ``size`` rows, their terms weighted N_s / m."""
    with jax.enable_x64(True):
        silos, factors, theta, z = parts(entry)
        group = silos.group.get("y", "rows")
        number = int(np.argmax(silos.sizes[group]))
        view = SiloView(
            silos, jnp.asarray(number), tuple((g, n[number]) for g, n in silos.sizes.items())
        )
        count = silos.sizes[group][number]
        kwargs, weights = view.whole()

        def term(theta: dict, z: dict, index: Array) -> Array:
            shown = own(factors, z, view)
            shown = {
                k: x[index] if factors.local_groups()[k] == group else x for k, x in shown.items()
            }
            batch = view.batch(group, index)
            return factors.log_local(
                theta, shown, {**kwargs, **batch}, {**weights, group: count / size}
            )

        def average(theta: dict, z: dict) -> Array:
            batches = jnp.array(list(combinations(range(count), size)))
            return jax.vmap(lambda index: term(theta, z, index))(batches).mean()

        def full(theta: dict, z: dict) -> Array:
            return factors.log_local(theta, own(factors, z, view), kwargs, weights)

        both = [jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(theta, z) for f in (average, full)]
        for got, wanted in zip(*map(jax.tree.leaves, both), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)


# A marked model is the plain one


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Run a function with ordinary plates in place of silo plates."""

    def run(fn: Callable) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(fed, "silo_plate", numpyro.plate)
            return fn()

    return run


def assert_same(first: Any, second: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, first, second)


HANDLERS: dict[str, Callable[[Callable], Callable]] = {
    "none": lambda model: model,
    "reparam": lambda model: handlers.reparam(model, config={"z": LocScaleReparam(0)}),
    "condition": lambda model: handlers.condition(model, {"tau": jnp.array(0.5)}),
    "substitute": lambda model: handlers.substitute(model, {"z": jnp.linspace(-1.0, 1.0, 8)}),
    "do": lambda model: handlers.do(model, {"mu": jnp.array(0.5)}),
    "mask": lambda model: handlers.mask(model, mask=jnp.arange(8) > 2),
    "scale": lambda model: handlers.scale(model, scale=0.3),
    "block": lambda model: handlers.block(model, hide=["mu"]),
}


def intercepts(y: Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with fed.silo_plate("patients", y.shape[0]):
        z = numpyro.sample("z", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(z, 0.7), obs=y)


@pytest.mark.parametrize("name", HANDLERS)
@pytest.mark.parametrize(
    "outside", [False, True], ids=["handler around mark", "mark around handler"]
)
def test_handlers_see_a_plain_model(name: str, outside: bool, plain: Callable) -> None:
    y = jnp.linspace(-1.0, 2.0, 8)

    def draws(mark: bool) -> tuple[dict, Array]:
        model = HANDLERS[name](intercepts)
        if mark and outside:
            model = fed.mark_silos(model, "patients")

        @jax.jit
        def found() -> tuple[dict, Array]:
            with handlers.seed(rng_seed=3):
                trace = handlers.trace(model).get_trace(y)
            assert fed.handlers.is_silo_plate(trace["patients"]) == mark
            values = {k: s["value"] for k, s in trace.items() if s["type"] == "sample"}
            with handlers.seed(rng_seed=3):
                return values, log_density(model, (y,), {}, values)[0]

        return found()

    expected = plain(lambda: draws(False))
    assert_same(plain(lambda: draws(True)) if outside else draws(True), expected)


@pytest.mark.ci
def test_nuts_sees_a_plain_model(plain: Callable) -> None:
    def draws() -> dict:
        mcmc = MCMC(NUTS(intercepts), num_warmup=10, num_samples=5, progress_bar=False)
        mcmc.run(random.key(0), jnp.linspace(-1.0, 2.0, 8))
        return mcmc.get_samples()

    assert_same(draws(), plain(draws))


@pytest.mark.ci
def test_svi_and_predictive_see_a_plain_model(plain: Callable) -> None:
    def fit() -> tuple[dict, Array, dict, dict]:
        y = jnp.linspace(-1.0, 2.0, 8)
        guide = AutoNormal(intercepts)
        svi = SVI(intercepts, guide, optax.adam(0.05), Trace_ELBO())
        result = svi.run(random.key(1), 10, y, progress_bar=False)
        prior = Predictive(intercepts, num_samples=4)(random.key(2), y)
        posterior = Predictive(intercepts, guide=guide, params=result.params, num_samples=4)
        return result.params, result.losses, prior, posterior(random.key(3), y)

    assert_same(fit(), plain(fit))


def test_the_pooled_model_takes_silos() -> None:
    entry = ENTRIES["pupils_in_classes_in_schools"]
    silos = entry.silos()
    model = PooledModel(entry.model)
    traces = [
        handlers.trace(handlers.seed(model, 0)).get_trace(*args, **kwargs)
        for args, kwargs in [
            ((silos,), {}),
            ((), silos.pooled),
            ((), jax.tree.map(jnp.asarray, entry.data)),
        ]
    ]
    values = [{k: s["value"] for k, s in t.items() if s["type"] == "sample"} for t in traces]
    assert_same(values[0], values[1])
    assert_same(values[0], values[2])


def test_thin_keeps_rows_evenly_spaced_in_each_silo_and_the_pooled_order():
    silos = split(
        {"x": np.arange(12.0), "scale": 2.0}, by=np.array([1, 0, 0, 1, 1, 0, 1, 1, 0, 1, 1, 1])
    )
    (group,) = silos.sizes
    part = storage.thin(silos, group, 6)
    assert part.sizes == {group: (3, 3)}
    np.testing.assert_array_equal(part["0"]["x"], [1, 2, 5])
    np.testing.assert_array_equal(part["1"]["x"], [0, 4, 9])
    np.testing.assert_array_equal(part.pooled["x"], [0, 1, 2, 4, 5, 9])
    assert part.pooled["scale"] == 2.0
    assert silos.sizes == {group: (4, 8)}
    assert storage.thin(silos, group, 12) is silos
