"""Small models that several files of variational tests share."""

import functools

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import constraints

import numpyro_fed as fed

GROUP_SD, ROW_SD, PRIOR_SD = 0.8, 1.5, 2.0


def wheeze(y: Array, x: Array) -> None:
    """Sample binary rows of each element (visits of children).

    Each has an intercept; their spread is learned.
    """
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.Exponential(1.0))
    with fed.silo_plate("children", y.shape[0], dim=-2):
        z = numpyro.sample("z", dist.Normal(0, 1))
        with numpyro.plate("visits", y.shape[1], dim=-1):
            numpyro.sample(
                "y", dist.Bernoulli(logits=beta[0] + beta[1] * x[:, None] + sigma * z), obs=y
            )


@functools.cache
def wheeze_data(n: int = 70) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    x = rng.normal(size=n)
    logits = -0.5 + 0.7 * x + 1.2 * rng.normal(size=n)
    y = rng.uniform(size=(n, 4)) < 1 / (1 + np.exp(-logits))[:, None]
    return y.astype(float), x


def wheeze_silos(by: np.ndarray) -> fed.Silos:
    y, x = wheeze_data(len(by))
    return fed.split({"y": y, "x": x}, by=by)


def hierarchy(y: Array) -> None:
    """Sample a row for each element, known variances: the posterior of (mu, z) is Gaussian."""
    mu = numpyro.sample("mu", dist.Normal(0, PRIOR_SD))
    with fed.silo_plate("patients", y.shape[0]):
        z = numpyro.sample("z", dist.Normal(mu, GROUP_SD))
        numpyro.sample("y", dist.Normal(z, ROW_SD), obs=y)


@functools.cache
def hierarchy_data(n: int = 9) -> np.ndarray:
    return np.random.default_rng(8).normal(1.0, 1.7, n)


def hierarchy_silos(by: np.ndarray) -> fed.Silos:
    return fed.split({"y": hierarchy_data(len(by))}, by=by)


def hierarchy_posterior(n: int = 9) -> tuple[np.ndarray, np.ndarray, float]:
    """Mean and covariance of (mu, z) in pooled order, and the log evidence."""
    y = hierarchy_data(n)
    prior = np.zeros((n + 1, n + 1))
    prior[0, 0] = PRIOR_SD**-2 + n * GROUP_SD**-2
    prior[0, 1:] = prior[1:, 0] = -(GROUP_SD**-2)
    prior[1:, 1:] = np.eye(n) * GROUP_SD**-2
    precision = prior.copy()
    precision[1:, 1:] += np.eye(n) * ROW_SD**-2
    covariance = np.linalg.inv(precision)
    mean = covariance @ np.concatenate([[0.0], y / ROW_SD**2])
    marginal = PRIOR_SD**2 * np.ones((n, n)) + (GROUP_SD**2 + ROW_SD**2) * np.eye(n)
    evidence = -0.5 * (
        y @ np.linalg.solve(marginal, y) + np.linalg.slogdet(2 * np.pi * marginal)[1]
    )
    return mean, covariance, evidence


def learned_scale(x: Array, y: Array) -> None:
    """Sample with the prior's scale as a parameter (empirical Bayes).

    The model's marginal likelihood in it is known.
    """
    tau = numpyro.param("tau", 1.0, constraint=constraints.positive)
    beta = numpyro.sample("beta", dist.Normal(0, tau).expand([x.shape[1]]).to_event(1))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, 1.0), obs=y)


def three_kinds(x: Array, y: Array, proxy: Array | None = None, kind: str = "plain") -> None:
    """Sample silos that measured different things.

    They measure exactly, by a noisy proxy with a latent of its own, or with heavier tails.
    """
    beta = numpyro.sample("beta", dist.Normal(0, 2))
    with fed.silo_plate("rows", x.shape[0]):
        if proxy is not None:
            truth = numpyro.sample("truth", dist.Normal(0, 1))
            numpyro.sample("proxy", dist.Normal(truth, 0.5), obs=proxy)
            numpyro.sample("y", dist.Normal(beta * truth, 0.7), obs=y)
        elif kind == "rough":
            numpyro.sample("y", dist.Normal(beta * x, 3.0), obs=y)
        else:
            numpyro.sample("y", dist.Normal(beta * x, 0.7), obs=y)


def three_kinds_silos() -> fed.MixedSilos:
    rng = np.random.default_rng(3)

    def silo(n: int, noise: float) -> dict:
        x = rng.normal(size=n)
        return {"x": x, "y": 1.2 * x + noise * rng.normal(size=n)}

    oslo, rome, bern, nice = silo(8, 0.7), silo(5, 0.7), silo(12, 3.0), silo(6, 0.7)
    rome["proxy"] = rome["x"] + 0.5 * rng.normal(size=5)
    return fed.MixedSilos(
        {"oslo": oslo, "rome": rome, "bern": {**bern, "kind": "rough"}, "nice": nice},
        rows={"x": "rows", "y": "rows", "proxy": "rows"},
    )


def hierarchy_guide(y: Array) -> None:
    """Sample the exact posterior's form, written by hand."""
    loc = numpyro.param("loc", jnp.zeros(()))
    scale = numpyro.param("scale", jnp.ones(()), constraint=constraints.positive)
    mu = numpyro.sample("mu", dist.Normal(loc, scale))
    with fed.silo_plate("patients", y.shape[0]):
        shift = numpyro.param("shift", jnp.zeros(y.shape[0]), event_dim=0)
        slope = numpyro.param("slope", jnp.zeros(y.shape[0]), event_dim=0)
        sd = numpyro.param("sd", jnp.ones(y.shape[0]), constraint=constraints.positive, event_dim=0)
        numpyro.sample("z", dist.Normal(shift + slope * mu, sd))


def unit_hierarchy(y: Array) -> None:
    """Sample a row for each element, variances of one."""
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with fed.silo_plate("patients", y.shape[0]):
        z = numpyro.sample("z", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(z, 1), obs=y)


def linear_encoder(y: Array) -> tuple[Array, Array]:
    """Return an encoder of :func:`unit_hierarchy`'s latents.

    Its family holds the mean-field optimum.
    """
    slope, intercept, log_scale = (
        numpyro.param(n, 0.1) for n in ("slope", "intercept", "log_scale")
    )
    return intercept + slope * y, log_scale


def mean_field(y: Array) -> float:
    """Return the mean of mu at that optimum.

    There z_g ~ N((y_g + E mu) / 2, 1 / 2), and mu's precision is n + 1 / 100, its mean that of all
    z.
    """
    n = len(y)
    return float(n * y.mean() / 2 / (n + 0.01 - n / 2))


def best_scale(x: np.ndarray, y: np.ndarray) -> float:
    """Return the ``tau`` of :func:`learned_scale` that maximizes the marginal likelihood."""

    def evidence(tau: float) -> float:
        marginal = tau**2 * x @ x.T + np.eye(len(y))
        return float(-0.5 * (y @ np.linalg.solve(marginal, y) + np.linalg.slogdet(marginal)[1]))

    taus = np.linspace(0.5, 4, 351)
    return float(taus[np.argmax([evidence(t) for t in taus])])
