"""Two plates with latents in a silo, nested or crossed: all is Gaussian, and exact."""

import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array

import numpyro_fed as fed


def nested(y: Array, klass: Array, pupils_of: Array, schools: Array) -> None:
    """Pupils of a mean, with effects of their schools and classes."""
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    with fed.silo_plate("schools", schools.shape[0]):
        a = numpyro.sample("a", dist.Normal(0, 1))
    with fed.silo_plate("classes", klass.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, 0.5))
    with fed.silo_plate("pupils", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu + a[klass[pupils_of]] + b[pupils_of], 0.7), obs=y)


def nested_silos() -> tuple[fed.Silos, float, float]:
    """Two silos of 3 and 2 schools, 2 classes each, 4 pupils each; with mu's exact mean and sd."""
    rng, data = np.random.default_rng(1), {}
    for name, n in (("north", 3), ("south", 2)):
        klass, of = np.repeat(np.arange(n), 2), np.repeat(np.arange(2 * n), 4)
        y = rng.normal(size=n)[klass[of]] + 0.5 * rng.normal(size=2 * n)[of] + 1
        y = (y + 0.7 * rng.normal(size=8 * n)).astype(np.float32)
        data[name] = {"y": y, "klass": klass, "pupils_of": of, "schools": np.arange(n)}
    rows = {"y": "pupils", "klass": "classes", "pupils_of": "pupils", "schools": "schools"}
    silos = fed.Silos(data, rows=rows, index={"klass": "schools", "pupils_of": "classes"})
    y, covariance = nested_law(silos)
    inverse = np.linalg.inv(covariance)
    variance = 1 / (0.25 + inverse.sum())
    return silos, variance * inverse.sum(0) @ y, np.sqrt(variance)


def nested_law(silos: fed.Silos) -> tuple[np.ndarray, np.ndarray]:
    """Return all outcomes ``(n,)``, and their covariance given mu ``(n, n)``."""
    pooled = silos.pooled
    of, y = np.asarray(pooled["pupils_of"]), np.asarray(pooled["y"], float)
    school = np.asarray(pooled["klass"])[of]
    effects = (school[:, None] == school) + 0.25 * (of[:, None] == of)
    return y, effects + 0.49 * np.eye(len(y))


def crossed(y: Array, case: Array, rater: Array, cases: Array, raters: Array) -> None:
    """Raters and cases crossed within a silo, with known variances."""
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    with fed.silo_plate("cases", cases.shape[0]):
        a = numpyro.sample("a", dist.Normal(0, 1))
    with fed.silo_plate("raters", raters.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, 0.5))
    with fed.silo_plate("ratings", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu + a[case] + b[rater], 0.7), obs=y)


def crossed_silos() -> tuple[fed.Silos, np.ndarray, np.ndarray]:
    """Two silos of unequal size, and the exact mean and sd of (mu, a, b)."""
    rng, data = np.random.default_rng(3), {}
    for name, (n, m) in {"oslo": (6, 3), "rome": (4, 2)}.items():
        case, rater = (x.ravel() for x in np.indices((n, m)))
        y = 1 + rng.normal(size=n)[case] + 0.5 * rng.normal(size=m)[rater]
        data[name] = {
            "y": (y + 0.7 * rng.normal(size=n * m)).astype(np.float32),
            "case": case,
            "rater": rater,
            "cases": np.arange(n),
            "raters": np.arange(m),
        }
    rows = {"y": "ratings", "case": "ratings", "rater": "ratings"}
    silos = fed.Silos(
        data,
        rows={**rows, "cases": "cases", "raters": "raters"},
        index={"case": "cases", "rater": "raters"},
    )
    mean, covariance = exact_moments(*(silos.pooled[k] for k in ("y", "case", "rater")))
    return silos, mean, np.sqrt(np.diag(covariance))


def exact_moments(y: Array, of_a: Array, of_b: Array) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of (mu, a, b), local ones in pooled order.

    :param y: outcomes.
    :param of_a: the element of a of each row.
    :param of_b: the element of b of each row.
    """
    num_a, num_b, rows = int(of_a.max()) + 1, int(of_b.max()) + 1, np.arange(len(y))
    design = np.zeros((len(y), 1 + num_a + num_b))
    design[:, 0] = 1
    design[rows, 1 + np.asarray(of_a)] = 1
    design[rows, 1 + num_a + np.asarray(of_b)] = 1
    prior = np.concatenate([[1 / 4], np.ones(num_a), np.full(num_b, 4.0)])
    covariance = np.linalg.inv(np.diag(prior) + design.T @ design / 0.49)
    return covariance @ design.T @ np.asarray(y, float) / 0.49, covariance
