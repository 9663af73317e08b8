"""The law of the chains: within 4 Monte-Carlo s.e. of the exact law of the *discretized* chain.

For Gaussian models every step of every Langevin kernel is affine in theta, with random
coefficients. So mean and covariance of its stationary law, whatever the silos, minibatches,
surrogates, step size and number of local steps, follow from a linear recursion of second moments.
Monte-Carlo errors come from independent chains.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC
from small_models import (
    intercepts,
    intercepts_posterior,
    intercepts_silos,
    linear,
    linear_precisions,
    linear_silos,
)

import numpyro_fed as fed
from numpyro_fed.mcmc import pilot, step_rule
from numpyro_fed.surrogates import Gaussian, Surrogates

CHAINS = 64


def run(kernel, silos, num_samples=300, num_warmup=100, seed=0):
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(seed), silos)
    assert np.isfinite(mcmc.last_state.z[next(iter(mcmc.last_state.z))]).all()
    return {k: np.asarray(v, np.float64) for k, v in mcmc.get_samples(group_by_chain=True).items()}


def uncut(kernel, silos):
    """Return the kernel without the cut, which is not affine in theta."""
    kernel.init(random.key(0), 0, model_args=(silos,))
    kernel._config = dataclasses.replace(kernel._config, cut=False)
    return kernel


def errors(draws, mean, covariance):
    """Return errors of mean and covariance in Monte-Carlo s.e., from independent chains.

    :param draws: ``(C, N, d)``.
    """
    centered = draws - mean
    first = centered.mean(1)
    second = np.einsum("cni,cnj->cij", centered, centered) / draws.shape[1] - covariance
    upper = np.triu_indices(draws.shape[2])
    each = np.concatenate([first, second[:, upper[0], upper[1]]], axis=1)
    return each.mean(0) / (each.std(0, ddof=1) / np.sqrt(len(draws)))


def exact_law(
    silos, h, steps, *, alpha=0.0, f=None, batch=None, surrogates=None, scale=None, inject=None
):
    """Stationary mean and covariance of the chain for the model ``linear``, in float64.

    With v = (theta, 1), a step at silo s is v <- B v + noise, B = B_0 + (the rows' part, averaged
    over a minibatch), so that E[v v'] moves linearly.
    """
    eta, precision = linear_precisions(silos)
    num, d = eta.shape
    f = np.full(num, 1 / num) if f is None else np.asarray(f)
    scale = np.eye(d) if scale is None else np.asarray(scale, np.float64)
    metric = scale @ scale.T
    own_eta, own_precision = np.zeros((num, d)), np.zeros((num, d, d))
    if surrogates is not None:
        own_eta = alpha * np.asarray(surrogates.factors.eta, np.float64)
        own_precision = alpha * np.asarray(surrogates.factors.precision, np.float64)
    size = (d + 1) ** 2
    noise = np.zeros((d + 1, d + 1))
    root = scale if inject is None else scale @ inject
    noise[:d, :d] = h * root @ root.T

    def affine(linear_part, constant):
        out = np.zeros((d + 1, d + 1))
        out[:d, :d], out[:d, d] = -h / 2 * metric @ linear_part, h / 2 * metric @ constant
        return out

    whole = np.zeros((size + 1, size + 1))  # on (vec E[v v'], 1)
    whole[size, size] = 1
    for s in range(num):
        fixed = np.eye(d + 1) + affine(
            np.eye(d) + own_precision.sum(0) - own_precision[s] / f[s],
            own_eta.sum(0) - own_eta[s] / f[s],
        )
        mean = fixed + affine(precision[s] / f[s], eta[s] / f[s])
        once = np.kron(mean, mean)
        if batch is not None:
            x, y = (np.asarray(silos[silos.names[s]][k], np.float64) for k in "xy")
            ratio = len(y) / f[s]
            rows = [
                fixed + affine(ratio * np.outer(a, a), ratio * a * b)
                for a, b in zip(x, y, strict=True)
            ]
            spread = np.mean([np.kron(r, r) for r in rows], axis=0)
            once = (1 - 1 / batch) * once + spread / batch
        step = np.zeros((size + 1, size + 1))
        step[:size, :size], step[:size, size], step[size, size] = once, noise.ravel(), 1
        whole[:size] += f[s] * np.linalg.matrix_power(step, steps)[:size]
    start = np.zeros(size + 1)
    start[size - 1 :] = 1
    moments = (np.linalg.matrix_power(whole, 1 << 20) @ start)[:size].reshape(d + 1, d + 1)
    mean = moments[:d, d]
    return mean, moments[:d, :d] - np.outer(mean, mean)


def exact_surrogates(silos, error=0.0, seed=0):
    """Return the exact factors, or with errors that differ between silos."""
    eta, precision = linear_precisions(silos)
    rng = np.random.default_rng(seed)
    eta = eta * (1 + error * rng.normal(size=eta.shape))
    precision = precision * (1 + error * rng.uniform(-1, 1, size=len(precision)))[:, None, None]
    return Surrogates(
        Gaussian(jnp.asarray(eta), jnp.asarray(precision)), Gaussian(jnp.zeros(2), jnp.eye(2))
    )


def posterior_of(silos):
    eta, precision = linear_precisions(silos)
    covariance = np.linalg.inv(precision.sum(0) + np.eye(2))
    return covariance @ eta.sum(0), covariance


F = np.array([0.1, 0.3, 0.2, 0.4])
SILOS = linear_silos()


def test_exact_law_is_that_of_the_closed_form():
    """In a direction of precision lam the variance is 1 / (lam (1 - h lam / 4)).

    That is of theta += h/2 grad + N(0, h).
    """
    mean, covariance = posterior_of(SILOS)
    for steps in (1, 10):
        got = exact_law(SILOS, 0.01, steps, alpha=1.0, f=F, surrogates=exact_surrogates(SILOS))
        np.testing.assert_allclose(got[0], mean, rtol=1e-6)
        lam, vectors = np.linalg.eigh(np.linalg.inv(covariance))
        expected = (vectors / (lam * (1 - 0.01 * lam / 4))) @ vectors.T
        np.testing.assert_allclose(got[1], expected, rtol=1e-6)


# The step size h is large, so that the discretization is far above the Monte-Carlo error.
CASES = {
    "FSGLD, exact surrogates": (
        lambda: fed.FSGLD(
            linear, fed.Step(0.02, preconditioner=None), 10, None, exact_surrogates(SILOS), 1.0, F
        ),
        {"h": 0.02, "steps": 10, "alpha": 1.0, "f": F, "surrogates": exact_surrogates(SILOS)},
    ),
    "FSGLD, preconditioned, minibatches": (
        lambda: fed.FSGLD(linear, 0.1, 10, 2, exact_surrogates(SILOS), 1.0, F),
        {
            "h": 0.1,
            "steps": 10,
            "alpha": 1.0,
            "f": F,
            "batch": 2,
            "surrogates": exact_surrogates(SILOS),
            "scale": np.linalg.cholesky(posterior_of(SILOS)[1]),
        },
    ),
    "FSGLD, poor surrogates, alpha 0.8": (
        lambda: fed.FSGLD(
            linear,
            fed.Step(0.005, preconditioner=None),
            10,
            None,
            exact_surrogates(SILOS, 0.3),
            0.8,
        ),
        {"h": 0.005, "steps": 10, "alpha": 0.8, "surrogates": exact_surrogates(SILOS, 0.3)},
    ),
    "DSGLD, minibatches": (
        lambda: fed.DSGLD(linear, 0.002, 10, 3, F),
        {"h": 0.002, "steps": 10, "f": F, "batch": 3},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_chain_has_the_law_of_the_discretized_chain(name):
    make, settings = CASES[name]
    mean, covariance = exact_law(SILOS, **settings)
    draws = run(uncut(make(), SILOS), SILOS)["beta"]
    assert np.abs(errors(draws, mean, covariance)).max() < 4
    # negative controls: 1.3 x the variance, and the posterior's own law without the discretization
    assert np.abs(errors(draws, mean, 1.3 * covariance)).max() > 8
    assert np.abs(errors(draws, *posterior_of(SILOS))).max() > 8


def test_sgld_has_the_law_of_the_discretized_chain():
    pooled = SILOS.as_one()
    mean, covariance = exact_law(pooled, 0.02, 10, batch=5)
    draws = run(fed.SGLD(linear, 0.02, 10, 5), SILOS)["beta"]
    assert np.abs(errors(draws, mean, covariance)).max() < 4
    assert (
        np.abs(errors(draws, *exact_law(pooled, 0.02, 10))).max() > 8
    )  # negative control: no minibatches
    assert np.abs(errors(draws, *exact_law(pooled, 0.04, 10, batch=5))).max() > 8  # N(0, 2h)


def whitened_sd(covariance, loc_covariance):
    """Largest ratio of sds over all directions."""
    root = np.linalg.inv(np.linalg.cholesky(loc_covariance))
    return np.sqrt(np.linalg.eigvalsh(root @ covariance @ root.T)[-1])


AUTO = {
    "minibatches": (linear_silos((30, 40, 50)), 2, 0.0),
    "poor surrogates": (linear_silos((30, 40, 50)), None, 0.5),
    "SGLD, minibatches": (linear_silos((120,)), 3, 0.0),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", AUTO)
def test_step_size_auto_reaches_the_accepted_inflation(name):
    """The predicted inflation of sds, about 1.2, is that of the exact law at the chosen step."""
    silos, batch, error = AUTO[name]
    given = exact_surrogates(silos, error)
    kernel = fed.FSGLD(linear, fed.Step(bias_target=0.2), 10, batch, given)
    if len(silos) == 1:
        kernel = fed.SGLD(linear, fed.Step(bias_target=0.2), 10, batch, surrogate=given)
    state = kernel.init(random.key(0), 0, model_args=(silos,))
    h = float(state.step_size)
    assert h < step_rule.MAX_STEP_SIZE
    assert float(state.inflation) == pytest.approx(1.2, abs=0.03)
    scale = np.linalg.cholesky(np.asarray(given.posterior().covariance))
    alpha = float(len(silos) > 1)
    law = exact_law(silos, h, 10, alpha=alpha, batch=batch, surrogates=given, scale=scale)
    exact = whitened_sd(law[1], posterior_of(silos)[1])
    assert exact - 1 == pytest.approx(float(state.inflation) - 1, rel=0.25)
    draws = run(uncut(kernel, silos), silos)["beta"]
    assert np.abs(errors(draws, *law)).max() < 4
    assert np.abs(errors(draws, *posterior_of(silos))).max() > 6  # negative control


# Local latents


def local_errors(draws, mean, covariance, h):
    """Return errors in s.e. of the means, and the sds' distance from [1, predicted].

    The distance is in s.e. of the sd ratio.
    """
    sd = np.sqrt(np.diag(covariance))
    z = (draws - mean) / sd
    means = z.mean((0, 1)) / (z.mean(1).std(0, ddof=1) / np.sqrt(len(z)))
    squares = (z**2).mean(1)
    ratio, error = squares.mean(0), squares.std(0, ddof=1) / np.sqrt(len(z))
    predicted = 1 / (1 - h / 4)
    outside = np.maximum(1 - ratio, ratio - predicted) / error
    return np.abs(means).max(), outside.max()


def flat(draws, *names):
    return np.concatenate([draws[n].reshape(*draws[n].shape[:2], -1) for n in names], axis=2)


@pytest.fixture(scope="module")
def intercepts_run():
    silos = intercepts_silos()
    kernel = fed.FSGLD(intercepts, num_local_steps=5)
    return kernel, silos, run(kernel, silos)


@pytest.mark.ci
def test_local_latents_have_their_exact_posterior(intercepts_run):
    kernel, silos, draws = intercepts_run
    mean, covariance = intercepts_posterior(silos)
    draws = flat(draws, "mu", "a")
    h = float(kernel._tuning.step_size)
    assert h == pytest.approx(step_rule.MAX_STEP_SIZE)
    means, sds = local_errors(draws, mean, covariance, h)
    assert means < 4
    assert sds < 4
    correlation = np.abs(errors(draws, mean, covariance * (1 + h / 4)))
    assert np.sort(correlation)[-5] < 5
    # negative controls: sds 14 % larger, and the intercepts of two groups swapped
    assert local_errors(draws, mean, covariance / 1.3, h)[1] > 8
    swapped = mean.copy()
    two = 1 + np.argsort(mean[1:])[[0, -1]]
    swapped[two] = mean[two[::-1]]
    assert local_errors(draws, swapped, covariance, h)[0] > 8


@pytest.mark.ci
def test_the_law_does_not_depend_on_the_local_map(intercepts_run):
    """A map whose every part is wrong costs noise and acceptance, not the law.

    Its scales are too wide: moves from a map that is too narrow leave the law invariant, but seldom
    reach its tails.
    """
    _, silos, _ = intercepts_run
    kernel = uncut(fed.FSGLD(intercepts, 0.01, num_local_steps=5), silos)
    tuning, rng = kernel._tuning, np.random.default_rng(0)
    rows = tuning.latents.rows
    wrong = dataclasses.replace(
        rows,
        mean=rows.mean + 0.3 * rng.normal(size=rows.mean.shape).astype(np.float32),
        coupling=rows.coupling + 0.3 * rng.normal(size=rows.coupling.shape).astype(np.float32),
        log_scale=rows.log_scale + 0.4,
        scale_coupling=rows.scale_coupling
        + 0.1 * rng.normal(size=rows.coupling.shape).astype(np.float32),
    )
    kernel._tuning = tuning._replace(latents=tuning.latents._replace(rows=wrong))
    noise = pilot.visit_noise(kernel._config, kernel._tuning, silos)
    inflated = step_rule.inflation(noise, np.full(3, 1 / 3), 5, 0.01) ** 2
    assert 1.02 < inflated < 1.1
    draws = flat(run(kernel, silos, num_samples=400), "mu", "a")
    mean, covariance = intercepts_posterior(silos)
    means, sds = local_errors(draws, mean, covariance, 4 * (1 - 1 / inflated))
    assert means < 4
    assert sds < 4
    # negative control: the wrong map's own law
    own = rows.mean[:, 0] - wrong.mean[:, 0]
    at = np.asarray(silos.order["groups"])
    shifted = mean.copy()
    shifted[1 + at] += np.asarray(own)
    assert local_errors(draws, shifted, covariance, 0.05)[0] > 8


def schools(y, school, schools, room, rooms):
    """Two latent plates, rooms in schools, all variances known: a silo's latents move together."""
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    with fed.silo_plate("schools", schools.shape[0]):
        a = numpyro.sample("a", dist.Normal(mu, 0.8))
    with fed.silo_plate("rooms", school.shape[0]):
        b = numpyro.sample("b", dist.Normal(a[school], 0.6))
    with fed.silo_plate("pupils", room.shape[0]):
        numpyro.sample("y", dist.Normal(b[room], 1.2), obs=y)


def schools_posterior(data):
    """Exact mean and covariance of (mu, a, b) in pooled order."""
    school, room = np.asarray(data["school"]), np.asarray(data["room"])
    num_a, num_b = len(data["schools"]), len(school)
    dim = 1 + num_a + num_b
    links = [(np.eye(dim)[0], 2.0)]
    links += [(np.eye(dim)[1 + j] - np.eye(dim)[0], 0.8) for j in range(num_a)]
    links += [(np.eye(dim)[1 + num_a + k] - np.eye(dim)[1 + school[k]], 0.6) for k in range(num_b)]
    precision = sum(np.outer(v, v) / sd**2 for v, sd in links)
    term = np.zeros(dim)
    for y, k in zip(np.asarray(data["y"], np.float64), room, strict=True):
        precision[1 + num_a + k, 1 + num_a + k] += 1 / 1.2**2
        term[1 + num_a + k] += y / 1.2**2
    covariance = np.linalg.inv(precision)
    return covariance @ term, covariance


@pytest.mark.ci
def test_joint_units_have_their_exact_posterior():
    rng = np.random.default_rng(4)
    school = rng.permutation(np.repeat(np.arange(6), 2))
    room = rng.permutation(np.repeat(np.arange(12), 3))
    silo = rng.permutation([0, 0, 0, 1, 1, 2])
    y = 1 + rng.normal(size=6)[school[room]] + rng.normal(size=12)[room] + 1.2 * rng.normal(size=36)
    data = {
        "y": y.astype(np.float32),
        "school": school,
        "schools": np.arange(6),
        "room": room,
        "rooms": np.arange(12),
    }
    rows = {
        "y": "pupils",
        "room": "pupils",
        "school": "rooms",
        "rooms": "rooms",
        "schools": "schools",
    }
    silos = fed.split(
        data, by=silo[school[room]], rows=rows, index={"room": "rooms", "school": "schools"}
    )
    kernel = fed.FSGLD(schools, num_local_steps=10)
    draws = flat(run(kernel, silos, num_samples=600), "mu", "a", "b")
    assert kernel._config.units.group is None
    mean, covariance = schools_posterior(silos.pooled)
    h = float(kernel._tuning.step_size)
    means, sds = local_errors(draws, mean, covariance, h)
    assert means < 4
    assert sds < 4
    assert local_errors(draws, mean, covariance / 1.3, h)[1] > 8  # negative control
