"""Model shapes the library claims to cover: one battery of tests runs over all of them.

An entry's rows are tied to *units*, what may not be torn apart by a partition: rows themselves, or
schools.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions.transforms import AffineTransform, OrderedTransform
from numpyro.handlers import mask, reparam, scale
from numpyro.infer.reparam import LocScaleReparam, TransformReparam

import numpyro_fed as fed

__all__ = ["ENTRIES", "Entry"]

_RNG = np.random.default_rng(7)
_N = 8  # rows of the entries with one silo plate
X = _RNG.normal(size=(_N, 2)).round(2)
Y = (X @ [1.0, -0.5] + 0.3 * _RNG.normal(size=_N)).round(2)
BINARY = (Y > 0).astype(int)
COUNT = _RNG.poisson(2.0, _N)
VISITS = _RNG.normal(size=(_N, 3)).round(2)


@dataclass(frozen=True)
class Entry:
    """A marked model, its pooled data, and what else :func:`numpyro_fed.split` is to know.

    :param by: a default partition of the units, ragged, with a silo of a single row.
    :param unit: the unit of each labeled row.
    """

    name: str
    model: Callable
    data: dict[str, Any]
    by: np.ndarray = field(default_factory=lambda: np.array([1, 2, 0, 2, 1, 2, 1, 2]))
    unit: np.ndarray = field(default_factory=lambda: np.arange(_N))
    rows: dict[str, str] = field(default_factory=dict)
    index: dict[str, str] = field(default_factory=dict)

    def silos(self, by: np.ndarray | None = None) -> fed.Silos:
        """Return the data with unit ``u`` in silo ``by[u]``."""
        by = self.by if by is None else np.asarray(by)
        return fed.split(self.data, by=by[self.unit], rows=self.rows, index=self.index)


def logistic(x: Array, y: Array) -> None:
    with numpyro.plate("covariates", x.shape[1]):
        beta = numpyro.sample("beta", dist.Normal(0, 1))
    with fed.silo_plate("patients", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def constrained_globals(x: Array, y: Array, df: float) -> None:
    """Positive globals; ``df`` is a shared argument and no array."""
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    rate = numpyro.sample("rate", dist.Gamma(2.0, 3.0))
    with fed.silo_plate("patients", x.shape[0]):
        numpyro.sample("y", dist.StudentT(df, x @ beta, sigma + rate), obs=y)


def dirichlet(y: Array, centers: Array) -> None:
    """Sample a simplex; ``centers`` is a shared array."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    with fed.silo_plate("patients", y.shape[0]):
        components = dist.Normal(centers, 1.0)
        numpyro.sample(
            "y", dist.MixtureSameFamily(dist.Categorical(probs=weights), components), obs=y
        )


def cholesky(x: Array, y: Array) -> None:
    corr = numpyro.sample("corr", dist.LKJCholesky(2, concentration=2.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0).expand([2]).to_event(1))
    with fed.silo_plate("patients", x.shape[0]):
        z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
        slopes = z @ (tau[:, None] * corr).T
        numpyro.sample("y", dist.Normal((x * slopes).sum(-1), 0.5), obs=y)


def ordered(x: Array, level: Array) -> None:
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    base = dist.Normal(0, 1).expand([3]).to_event(1)
    cuts = numpyro.sample("cuts", dist.TransformedDistribution(base, OrderedTransform()))
    with fed.silo_plate("patients", x.shape[0]):
        numpyro.sample("level", dist.OrderedLogistic(x @ beta, cuts), obs=level)


def _random_intercepts(y: Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with fed.silo_plate("patients", y.shape[0]):
        z = numpyro.sample("z", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(z, 0.7), obs=y)


loc_scale = reparam(_random_intercepts, config={"z": LocScaleReparam(0)})


def _transformed(y: Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.LogNormal(0.0, 0.5))
    with fed.silo_plate("patients", y.shape[0]):
        z = numpyro.sample(
            "z", dist.TransformedDistribution(dist.Normal(0, 1), AffineTransform(mu, tau))
        )
        numpyro.sample("y", dist.Normal(z, 0.7), obs=y)


transformed = reparam(_transformed, config={"z": TransformReparam()})


def deterministic(x: Array, count: Array) -> None:
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    numpyro.deterministic("first", jnp.exp(beta[0]))
    with fed.silo_plate("patients", x.shape[0]):
        rate = numpyro.deterministic("rate", jnp.exp(x @ beta))
        numpyro.sample("count", dist.Poisson(rate), obs=count)


def factor(x: Array, y: Array) -> None:
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    with fed.silo_plate("patients", x.shape[0]):
        z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.factor("robust", -jnp.log1p((y - x @ beta - z) ** 2))


def masked(x: Array, y: Array, seen: Array) -> None:
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    with fed.silo_plate("patients", x.shape[0]):
        with mask(mask=seen > 0):
            numpyro.sample("y", dist.Normal(x @ beta, 1.0), obs=y)
        z = numpyro.sample("z", dist.Normal(beta[0], 1.0))
        numpyro.sample("again", dist.Normal(z, 1.0), obs=y)


def scaled(x: Array, y: Array, weight: Array) -> None:
    with scale(scale=0.5):
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    with fed.silo_plate("patients", x.shape[0]), scale(scale=weight):
        sigma = numpyro.sample("sigma", dist.Exponential(1.0))
        numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


def nested(visits: Array) -> None:
    """Sample latents in the silo plate, and in an ordinary plate inside it."""
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with fed.silo_plate("patients", visits.shape[0], dim=-2):
        a = numpyro.sample("a", dist.Normal(0, tau))
        with numpyro.plate("times", visits.shape[1], dim=-1):
            z = numpyro.sample("z", dist.Gamma(2.0, 1.0))
            numpyro.sample("visits", dist.Normal(a, z), obs=visits)


def items(visits: Array) -> None:
    """Put the silo plate innermost: elements run along the last axis of local sites."""
    ability = numpyro.sample("ability", dist.Normal(0, 1).expand([visits.shape[1]]).to_event(1))
    with (
        numpyro.plate("times", visits.shape[1], dim=-2),
        fed.silo_plate("patients", visits.shape[0], dim=-1),
    ):
        z = numpyro.sample("z", dist.Normal(ability[:, None], 1.0))
        numpyro.sample("visits", dist.Normal(z, 0.5), obs=visits.T)


def local_simplex(visits: Array) -> None:
    concentration = numpyro.sample("concentration", dist.Gamma(2.0, 1.0))
    with fed.silo_plate("patients", visits.shape[0]):
        share = numpyro.sample("share", dist.Dirichlet(concentration * jnp.ones(3)))
        numpyro.sample("visits", dist.Normal(share, 0.3).to_event(1), obs=visits)


def local_correlation(x: Array) -> None:
    """Local latents with fewer event axes in unconstrained space."""
    eta = numpyro.sample("eta", dist.Gamma(2.0, 1.0))
    with fed.silo_plate("patients", x.shape[0]):
        corr = numpyro.sample("corr", dist.LKJCholesky(2, eta))
        numpyro.sample("x", dist.Normal(corr[:, 1], 0.5).to_event(1), obs=x)


def dynamic_support(y: Array) -> None:
    upper = numpyro.sample("upper", dist.LogNormal(0.0, 0.3))
    sigma = numpyro.sample("sigma", dist.Uniform(0.0, upper))
    with fed.silo_plate("patients", y.shape[0]):
        z = numpyro.sample("z", dist.Uniform(-sigma, upper))
        numpyro.sample("y", dist.Normal(z, sigma), obs=y)


def _unmarked(y: Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("patients", y.shape[0]):
        numpyro.sample("y", dist.Laplace(mu, 1.0), obs=y)


def women(x: Array, y: Array, district: Array, districts: Array) -> None:
    """Women in districts: the district's latent, positive, is its rate."""
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    tau = numpyro.sample("tau", dist.Gamma(3.0, 2.0))
    with fed.silo_plate("districts", districts.shape[0]):
        rate = numpyro.sample("rate", dist.Gamma(tau, tau))
    with fed.silo_plate("women", x.shape[0]):
        numpyro.sample("y", dist.Poisson(rate[district] * jnp.exp(x @ beta)), obs=y)


def schools(y: Array, room: Array, school: Array, schools: Array) -> None:
    """Pupils in classes in schools: latents of two silo plates, one pointing into the other."""
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with fed.silo_plate("schools", schools.shape[0]):
        a = numpyro.sample("a", dist.Normal(0, 1))
    with fed.silo_plate("classes", school.shape[0]):
        b = numpyro.sample("b", dist.Normal(a[school], tau))
    with fed.silo_plate("pupils", y.shape[0]):
        numpyro.sample("y", dist.Normal(b[room], 0.5), obs=y)


_DISTRICT = np.array([4, 0, 2, 1, 3, 0, 4, 2])
_SCHOOL = np.array([2, 0, 1, 0, 2])
_ROOM = np.array([4, 0, 2, 1, 3, 0, 4, 2])
_ONE_PLATE = {
    "logistic": (logistic, {"x": X, "y": BINARY}),
    "constrained_globals": (constrained_globals, {"x": X, "y": Y, "df": 4.0}),
    "dirichlet": (dirichlet, {"y": Y, "centers": np.array([-1.0, 0.0, 2.0])}),
    "cholesky": (cholesky, {"x": X, "y": Y}),
    "ordered": (ordered, {"x": X, "level": np.clip(COUNT, 0, 3)}),
    "loc_scale_reparam": (loc_scale, {"y": Y}),
    "transform_reparam": (transformed, {"y": Y}),
    "deterministic": (deterministic, {"x": X, "count": COUNT}),
    "factor": (factor, {"x": X, "y": Y}),
    "mask": (masked, {"x": X, "y": Y, "seen": np.arange(_N) % 3}),
    "scale": (scaled, {"x": X, "y": Y, "weight": np.linspace(0.5, 2.0, _N)}),
    "nested_plates": (nested, {"visits": VISITS}),
    "silo_plate_innermost": (items, {"visits": VISITS}),
    "local_simplex": (local_simplex, {"visits": VISITS}),
    "local_correlation": (local_correlation, {"x": X}),
    "dynamic_support": (dynamic_support, {"y": Y}),
    "marked_from_outside": (fed.mark_silos(_unmarked, "patients"), {"y": Y}),
}
ENTRIES = {name: Entry(name, model, data) for name, (model, data) in _ONE_PLATE.items()} | {
    "women_in_districts": Entry(
        "women_in_districts",
        women,
        {"x": X, "y": COUNT, "district": _DISTRICT, "districts": np.arange(5)},
        by=np.array([1, 0, 0, 2, 1]),
        unit=_DISTRICT,
        rows={"x": "women", "y": "women", "district": "women", "districts": "districts"},
        index={"district": "districts"},
    ),
    "pupils_in_classes_in_schools": Entry(
        "pupils_in_classes_in_schools",
        schools,
        {"y": Y, "room": _ROOM, "school": _SCHOOL, "schools": np.arange(3)},
        by=np.array([1, 0, 1]),
        unit=_SCHOOL[_ROOM],
        rows={"y": "pupils", "room": "pupils", "school": "classes", "schools": "schools"},
        index={"room": "classes", "school": "schools"},
    ),
}
