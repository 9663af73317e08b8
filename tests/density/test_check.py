"""The check of the factorization passes on the registry's models, and fails where it must."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import Array
from registry import ENTRIES, Entry

import numpyro_fed as fed
from numpyro_fed.data.views import largest
from numpyro_fed.density import check as proof
from numpyro_fed.density.check import check_factorization
from numpyro_fed.density.factorize import factorize
from numpyro_fed.density.independence import elements_are_independent
from numpyro_fed.density.local_map import Units

Y = np.array([0.3, -1.0, 2.0, 0.1, 0.7, -0.4])
BY = np.array([0, 1, 2, 1, 1, 2])


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_every_model_shape_passes(entry: Entry) -> None:
    silos = entry.silos()
    check_factorization(factorize(entry.model, silos), silos)


# Models that read across silos


def patients(change: Callable[[Array], Any]) -> Callable:
    """Return a random-intercept model of ``change(y)``."""

    def model(y: Array) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with fed.silo_plate("patients", y.shape[0]):
            z = numpyro.sample("z", dist.Normal(mu, 1))
            numpyro.sample("y", dist.Normal(z, 1), obs=change(y))

    return model


def pools_only_when_small(y: Array) -> Array:
    if y.shape[0] == len(Y):
        raise ValueError("too many rows")
    return y


WRONG: dict[str, tuple[Callable, str]] = {
    "mean over silos": (
        patients(lambda y: y - y.mean()),
        "factorization check: log p.* gradients differ at .*z \\(silo '0'\\).*must not combine "
        "rows of different silos",
    ),
    "position in the silo": (patients(lambda y: y + jnp.arange(len(y))), "must not combine rows"),
    "NaN in one silo": (
        patients(lambda y: (y - y.mean()) / y.std()),
        "the log density of silo '0' is (nan|-inf) where the pooled model's is finite",
    ),
    "NaN in all": (
        patients(jnp.log),
        r"the log density is (nan|-inf) at a typical position.*inside the supports",
    ),
    "not pooled": (
        patients(pools_only_when_small),
        "runs for each silo but not on the pooled data \\(too many rows\\)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_model(case: str) -> None:
    model, words = WRONG[case]
    silos = fed.split({"y": Y}, by=BY)
    with pytest.raises(ValueError, match=words):
        check_factorization(factorize(model, silos), silos)


@pytest.mark.parametrize("shift", [1e-10, 1e-6])
def test_log_factorials_of_large_counts_are_no_error(shift: float) -> None:
    """In double precision they leave a rounding of 1e-9; a millionth is an error still.

    Programs of tests round alike in silos and pooled rows, so a planted shift is the rounding.
    """

    def model(control: Array, treated: Array, died: Array, dead: Array) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        with fed.silo_plate("trials", control.shape[0]):
            u = numpyro.sample("u", dist.Normal(mu, 1))
            v = numpyro.sample("v", dist.Normal(mu, 1))
            numpyro.sample("died", dist.Binomial(control, logits=-2.2 + 0.01 * u), obs=died)
            numpyro.sample("dead", dist.Binomial(treated, logits=-1.7 + 0.01 * (u + v)), obs=dead)
            numpyro.factor("shift", shift * (control.shape[0] > 2) * jnp.ones(len(control)))

    rng, data = np.random.default_rng(0), {}
    for s in range(12):
        one, other = rng.integers(10_000, 80_000, (2, rng.integers(1, 3)))
        died, dead = rng.binomial(one, 0.1), rng.binomial(other, 0.15)
        data[s] = {"control": one, "treated": other, "died": died, "dead": dead}
    with jax.enable_x64(True):
        silos = fed.Silos(data)
        factors = factorize(model, silos)
        if shift > 1e-9:
            with pytest.raises(ValueError, match="must not combine rows"):
                check_factorization(factors, silos)
        else:
            check_factorization(factors, silos)


# Data whose rows= or index= are wrong


def towns(y: Array, town: Array, towns: Array, height: Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with fed.silo_plate("towns", towns.shape[0]):
        z = numpyro.sample("z", dist.Normal(mu, 1))
    with fed.silo_plate("people", y.shape[0]):
        numpyro.sample("y", dist.Normal(z[town] + height[town], 1), obs=y)


TOWN = np.array([3, 0, 5, 1, 2, 4])
TOWNS = {"y": Y, "town": TOWN, "towns": np.arange(6), "height": np.linspace(-2.0, 2.0, 6)}
ROWS = {"y": "people", "town": "people", "towns": "towns", "height": "towns"}


def split_towns(**changes: str) -> fed.Silos:
    return fed.split(TOWNS, by=BY, rows={**ROWS, **changes}, index={"town": "towns"})


def test_wrong_rows() -> None:
    silos = split_towns()
    check_factorization(factorize(towns, silos), silos)
    silos = split_towns(height="people")
    with pytest.raises(ValueError, match="rows= and index= must be right"):
        check_factorization(factorize(towns, silos), silos)


def test_missing_index() -> None:
    silos = split_towns()
    by_hand = fed.Silos({name: silos[name] for name in silos}, rows=ROWS)
    with pytest.raises(ValueError, match="rows= and index= must be right"):
        check_factorization(factorize(towns, by_hand), by_hand)


def test_wrong_index() -> None:
    """An index that points into the other plate of two that are as large."""

    def model(y: Array, town: Array, towns: Array, villages: Array) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with fed.silo_plate("towns", towns.shape[0]):
            z = numpyro.sample("z", dist.Normal(mu, 1))
        with fed.silo_plate("villages", villages.shape[0]):
            numpyro.sample("w", dist.Normal(mu, 1), obs=villages)
        with fed.silo_plate("people", y.shape[0]):
            numpyro.sample("y", dist.Normal(z[town], 1), obs=y)

    rng = np.random.default_rng(0)
    sizes = {"a": (3, 2, 2), "b": (4, 2, 1)}  # people, towns, villages
    data = {
        name: {
            "y": rng.normal(size=n),
            "town": np.arange(n) % v,
            "towns": np.zeros(t),
            "villages": rng.normal(size=v),
        }
        for name, (n, t, v) in sizes.items()
    }
    rows = {"y": "people", "town": "people", "towns": "towns", "villages": "villages"}
    silos = fed.Silos(data, rows=rows, index={"town": "towns"})
    check_factorization(factorize(model, silos), silos)
    data["a"]["town"] = np.array([0, 1, 0])
    data["a"]["villages"] = rng.normal(size=3)
    silos = fed.Silos(data, rows=rows, index={"town": "villages"})
    with pytest.raises(ValueError, match="rows= and index= must be right"):
        check_factorization(factorize(model, silos), silos)


# Planted faults: a compiler that is wrong


def plant(monkeypatch: pytest.MonkeyPatch, change: Callable) -> None:
    right = proof._factored
    monkeypatch.setattr(proof, "_factored", lambda *args: change(*right(*args)))


def scaled_at(gradient: tuple[dict, dict], part: int, site: str, row: Any) -> tuple[dict, dict]:
    both = [dict(g) for g in gradient]
    both[part][site] = both[part][site].at[row].add(0.05)
    return both[0], both[1]


FAULTS: dict[str, tuple[Callable, str]] = {
    "none": (lambda value, gradient, terms: (value, gradient, terms), ""),
    "value": (
        lambda value, gradient, terms: (value * 1.01, gradient, terms),
        "factorization check: log p.*pooled model's",
    ),
    "NaN value": (
        lambda value, gradient, terms: (value * jnp.nan, gradient, terms),
        "terms is nan",
    ),
    "global gradient": (
        lambda value, gradient, terms: (value, scaled_at(gradient, 0, "mu", ()), terms),
        "gradients differ at \\['mu'\\]",
    ),
    "local gradient": (
        lambda value, gradient, terms: (value, scaled_at(gradient, 1, "z", 3), terms),
        "gradients differ at \\[\"z \\(silo '1'\\)\"\\]",
    ),
    "NaN gradient": (
        lambda value, gradient, terms: (
            value,
            jax.tree.map(lambda g: g * jnp.nan, gradient),
            terms,
        ),
        "gradients differ at \\['mu', \"z \\(silo '0'\\)\"\\]",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_planted_fault(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, words = FAULTS[case]
    silos = fed.split({"y": Y}, by=BY)
    factors = factorize(RIGHT, silos)
    plant(monkeypatch, change)
    if not words:
        return check_factorization(factors, silos)
    with pytest.raises(ValueError, match=words):
        check_factorization(factors, silos)


RIGHT = patients(lambda y: y)


# Independent elements


def independent(model: Callable, silos: fed.Silos, group: str) -> bool:
    factors = factorize(model, silos)
    return elements_are_independent(factors, Units(factors, group, largest(silos)), silos)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("women_in_districts", "districts"),
        ("nested_plates", "rows"),
        ("silo_plate_innermost", "rows"),
    ],
)
def test_elements_are_independent(name: str, group: str) -> None:
    assert independent(ENTRIES[name].model, ENTRIES[name].silos(), group)


def autoregressive(y: Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with fed.silo_plate("patients", y.shape[0]):
        z = numpyro.sample("z", dist.Normal(mu, 1))
        before = jnp.concatenate([jnp.zeros(1), z[:-1]])
        numpyro.sample("y", dist.Normal(z + 0.5 * before, 1), obs=y)


def classes(school: Array, schools: Array) -> None:
    """Classes whose latents meet in their school's term."""
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with fed.silo_plate("classes", school.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, tau))
    with fed.silo_plate("schools", schools.shape[0]):
        total = jax.ops.segment_sum(b, school, num_segments=schools.shape[0])
        numpyro.sample("mean", dist.Normal(total, 1), obs=schools)


def pupils(y: Array, room: Array, school: Array, schools: Array) -> None:
    """Latents two steps of the index away from the observations."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with fed.silo_plate("schools", schools.shape[0]):
        a = numpyro.sample("a", dist.Normal(mu, 1))
    with fed.silo_plate("pupils", y.shape[0]):
        numpyro.sample("y", dist.Normal(a[school[room]], 0.5), obs=y)


def test_elements_that_are_not() -> None:
    one = fed.split({"y": Y}, by=np.zeros(6, int))
    assert not independent(autoregressive, one, "rows")
    data = {"school": np.array([1, 0, 1, 0]), "schools": np.array([0.3, -1.0])}
    rows = {"school": "classes", "schools": "schools"}
    silos = fed.split(data, by=np.array([0, 1, 0, 1]), rows=rows, index={"school": "schools"})
    check_factorization(factorize(classes, silos), silos)
    assert not independent(classes, silos, "classes")


def test_rows_reach_an_element_by_way_of_others() -> None:
    """Pupils point to classes, classes to schools, and schools alone have latents."""
    entry = ENTRIES["pupils_in_classes_in_schools"]
    silos = entry.silos()
    check_factorization(factorize(pupils, silos), silos)
    assert independent(pupils, silos, "schools")
