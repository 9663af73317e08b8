"""The constants of FSGLD's theorems and the best weight of the conducive gradient, against closed forms and enumeration."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import Array
from numpyro.infer import MCMC

import numpyro_fed as fed
from numpyro_fed.surrogates import Gaussian, Surrogates
from numpyro_fed.surrogates.noise import Noise

RNG = np.random.default_rng(5)
SIZES = (4, 30, 7)
X = RNG.normal(size=(41, 2))
LABELS = (RNG.random(41) < 0.4).astype(int)
BY = np.repeat(["oslo", "rome", "bern"], SIZES)


def logistic(x: Array, y: Array) -> None:
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2]).to_event(1))
    with fed.silo_plate("patients", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def points(x: Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([2]).to_event(1))
    with fed.silo_plate("points", x.shape[0]):
        numpyro.sample("x", dist.Normal(mu, 1).to_event(1), obs=x)


def heterogeneous(num_silos: int = 10, num_rows: int = 50, seed: int = 0) -> fed.Silos:
    """The papers' experiment 5.1: each silo around a center of its own in [-6, 6]^2."""
    rng = np.random.default_rng(seed)
    silo = np.repeat(np.arange(num_silos), num_rows)
    return fed.split(
        {"x": rng.uniform(-6, 6, (num_silos, 2))[silo] + rng.normal(size=(len(silo), 2))}, by=silo
    )


def likelihoods(silos: fed.Silos, times: float = 1.0) -> Surrogates:
    means = np.stack([np.asarray(silos[name]["x"], np.float64).mean(0) for name in silos])
    sizes = np.array([len(silos[name]["x"]) for name in silos])
    return fed.surrogates.analytic(
        silos, means, times * np.repeat(sizes[:, None], 2, 1), prior=(np.zeros(2), np.ones(2))
    )


def some_surrogates(silos: fed.Silos, full: bool) -> Surrogates:
    rng = np.random.default_rng(1)
    root = rng.normal(size=(len(silos), 2, 2))
    precision = root @ root.swapaxes(1, 2) + np.eye(2)
    if not full:
        precision = np.diagonal(precision, axis1=1, axis2=2)
    return Surrogates(
        Gaussian(rng.normal(size=(len(silos), 2)), precision),
        Gaussian(np.zeros(2), precision[0] * 0 + 1),
    )


@pytest.mark.parametrize("full", [True, False], ids=["full", "diagonal"])
@pytest.mark.parametrize("rows_at_once", [3, 1024])
def test_constants_are_those_of_a_loop(
    full: bool, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        importlib.import_module("numpyro_fed.surrogates.noise"), "_ROWS_AT_ONCE", rows_at_once
    )
    jax.clear_caches()
    silos = fed.split({"x": X, "y": LABELS}, by=BY)
    surrogates = some_surrogates(silos, full)
    thetas = RNG.normal(size=(5, 2))
    found = fed.surrogates.noise(logistic, silos, surrogates, thetas)
    for s, name in enumerate(silos.names):
        x, y = (np.asarray(silos[name][k], np.float64) for k in "xy")
        largest, mean, left = [], [], []
        for theta in thetas:
            slopes = (y - 1 / (1 + np.exp(-x @ theta)))[:, None] * x
            precision = surrogates.factors.precision[s]
            share = (
                surrogates.factors.eta[s] - (precision @ theta if full else precision * theta)
            ) / len(x)
            largest.append((slopes**2).sum(1).max())
            mean.append((slopes**2).sum(1).mean())
            left.append(((slopes - share) ** 2).sum(1).mean())
        np.testing.assert_allclose(found.gamma_squared[s], max(largest), rtol=1e-5)
        np.testing.assert_allclose(found.gamma_squared_mean[s], max(mean), rtol=1e-5)
        np.testing.assert_allclose(found.epsilon_squared[s], max(left), rtol=1e-5)
        assert found.num_rows[s] == len(x)


def test_one_point_is_a_grid_of_one() -> None:
    silos = heterogeneous()
    single, grid = (
        fed.surrogates.noise(points, silos, likelihoods(silos), t)
        for t in ([1.0, 2.0], [[1.0, 2.0]])
    )
    jax.tree.map(np.testing.assert_array_equal, single, grid)


def test_figure_4() -> None:
    """epsilon_s^2 << gamma_s^2: exactly the silo's own variance against the largest distance of a row."""
    silos = heterogeneous()
    grid = np.stack(np.meshgrid(*[np.linspace(-6, 6, 13)] * 2), -1).reshape(-1, 2)
    found = fed.surrogates.noise(points, silos, likelihoods(silos), grid)
    for s, name in enumerate(silos.names):
        x = np.asarray(silos[name]["x"], np.float64)
        distance = ((x[:, None] - grid) ** 2).sum(-1)
        np.testing.assert_allclose(found.epsilon_squared[s], x.var(0).sum(), rtol=1e-4)
        np.testing.assert_allclose(found.gamma_squared[s], distance.max(), rtol=1e-5)
        np.testing.assert_allclose(found.gamma_squared_mean[s], distance.mean(0).max(), rtol=1e-5)
    assert (found.gamma_squared > 30 * found.epsilon_squared).all()
    # negative control: other silos' surrogates are no better than none
    own = likelihoods(silos)
    swapped = Surrogates(Gaussian(own.factors.eta[::-1], own.factors.precision[::-1]), own.prior)
    assert (
        fed.surrogates.noise(points, silos, swapped, grid).epsilon_squared
        > 2 * found.epsilon_squared
    ).mean() > 0.7


def test_bounds_are_theorems_1_and_2() -> None:
    constants = Noise(*map(np.array, ([9.0, 4.0], [5.0, 2.0], [0.5, 0.25], [10.0, 20.0])))
    f = [0.25, 0.75]
    found = fed.surrogates.mse_bounds(
        constants, step_size=0.1, num_steps=500, batch_size=5, selection=f
    )
    rest = 1 / (0.1 * 500) + 0.01
    assert found.dsgld == pytest.approx((100 * 9 / 0.25 + 400 * 4 / 0.75) / (5 * 500) + rest)
    assert found.fsgld == pytest.approx((100 * 0.5 / 0.25 + 400 * 0.25 / 0.75) / (5 * 500) + rest)
    longer = fed.surrogates.mse_bounds(constants, step_size=0.1, num_steps=10**12, batch_size=5)
    assert longer.fsgld == pytest.approx(0.01)  # h^2 is left


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_size": 0.0}, "step_size: expected a finite number > 0, got 0.0"),
        ({"num_steps": "many"}, "num_steps: expected a finite number > 0, got 'many'"),
        ({"batch_size": -1}, "batch_size: expected a finite number > 0, got -1"),
        (
            {"selection": [0.5, 0.6]},
            r"selection: expected 2 probabilities > 0 that sum to one, got \[0.5, 0.6\]",
        ),
        ({"selection": [1.0]}, "selection: expected 2 probabilities"),
    ],
)
def test_arguments_of_bounds(options: dict, message: str) -> None:
    constants = Noise(*np.ones((4, 2)))
    with pytest.raises(ValueError, match=message):
        fed.surrogates.mse_bounds(
            constants, **{"step_size": 0.1, "num_steps": 5, "batch_size": 5, **options}
        )


def intercepts(y: Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with fed.silo_plate("patients", y.shape[0]):
        z = numpyro.sample("z", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(z, 0.5), obs=y)


def two_kinds(x: Array, y: Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with fed.silo_plate("patients", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)
    with fed.silo_plate("visits", x.shape[0]):
        numpyro.sample("x", dist.Normal(mu, 1), obs=x)


def test_models_and_shapes_that_are_refused() -> None:
    silos = heterogeneous(3, 4)
    good = likelihoods(silos)
    few = fed.Silos({"oslo": {"y": jnp.ones(3)}, "rome": {"y": jnp.ones(2)}})
    flat = fed.surrogates.analytic(few, [[0.0], [0.0]], [[1.0], [1.0]])
    for call in (
        lambda: fed.surrogates.noise(intercepts, few, flat, [0.0]),
        lambda: fed.surrogates.optimal_alpha(intercepts, few, flat),
    ):
        with pytest.raises(ValueError, match=r"local latents \['z'\].*expected a model without"):
            call()
    both = fed.Silos(
        {n: {"x": k + jnp.ones(3), "y": k + jnp.ones(2)} for k, n in enumerate(("oslo", "rome"))}
    )
    with pytest.raises(ValueError, match=r"silo plates are of .*expected one group"):
        fed.surrogates.noise(two_kinds, both, flat, [0.0])
    for theta in ([0.0], np.zeros((2, 3)), np.zeros((2, 2, 2)), np.zeros((0, 2))):
        with pytest.raises(ValueError, match=r"theta: expected .*\(K, 2\) or \(2,\), got"):
            fed.surrogates.noise(points, silos, good, theta)
    for theta in ([0.0], np.zeros((2, 3)), [0.0, np.nan]):
        with pytest.raises(ValueError, match=r"theta: expected finite numbers of shape \(K, 2\)"):
            fed.surrogates.optimal_alpha(points, silos, good, theta)
    with pytest.raises(ValueError, match="theta: expected finite numbers, got NaN or infinity"):
        fed.surrogates.noise(points, silos, good, [0.0, np.inf])
    others = likelihoods(heterogeneous(4, 4))
    for call in (
        lambda q: fed.surrogates.noise(points, silos, q, [0.0, 0.0]),
        lambda q: fed.surrogates.optimal_alpha(points, silos, q),
    ):
        with pytest.raises(
            ValueError,
            match=r"surrogates: expected factors of 3 silos in dimension 2, got Surrogates\(4",
        ):
            call(others)
        with pytest.raises(
            ValueError, match=r"surrogates: expected a fed\.surrogates\.Surrogates, got 'score'"
        ):
            call("score")
    with pytest.raises(ValueError, match="selection: expected 3 probabilities"):
        fed.surrogates.optimal_alpha(points, silos, good, selection=[0.5, 0.5])


# The weight of the conducive gradient


@pytest.mark.parametrize("times", [1.0, 2.0, 5.0])
def test_alpha_of_scaled_likelihoods_is_the_scale_s_inverse(times: float) -> None:
    silos = heterogeneous()
    f = np.random.default_rng(0).dirichlet(np.full(10, 3.0))
    for selection in (None, f):
        found = fed.surrogates.optimal_alpha(
            points, silos, likelihoods(silos, times), selection=selection
        )
        assert found == pytest.approx(1 / times, rel=1e-4)


def test_alpha_of_useless_surrogates_is_about_zero() -> None:
    silos = heterogeneous(400, 5)
    own = likelihoods(silos)
    eta = np.random.default_rng(2).permutation(own.factors.eta)
    useless = Surrogates(Gaussian(eta, own.factors.precision), own.prior)
    found = fed.surrogates.optimal_alpha(points, silos, useless)
    assert abs(found) < 4 / np.sqrt(2 * 400)
    assert fed.surrogates.optimal_alpha(points, silos, own) == pytest.approx(1, rel=1e-4)


def test_alpha_minimizes_the_variance_of_minibatches() -> None:
    """By enumeration of silos and minibatches of one row, f unequal, at given theta."""
    silos = fed.split({"x": X, "y": LABELS}, by=BY)
    surrogates = some_surrogates(silos, True)
    f, thetas = np.array([0.2, 0.5, 0.3]), RNG.normal(size=(3, 2))
    scale = np.linalg.cholesky(
        np.linalg.inv(np.asarray(surrogates.posterior().precision, np.float64))
    )

    def trace(alpha: float) -> float:
        total = 0.0
        for theta in thetas:
            whole = np.asarray(surrogates.factors.product().score(theta))
            values, weights = [], []
            for s, name in enumerate(silos.names):
                x, y = (np.asarray(silos[name][k], np.float64) for k in "xy")
                slopes = (y - 1 / (1 + np.exp(-x @ theta)))[:, None] * x
                g = whole - np.asarray(surrogates.factors.score(theta))[s] / f[s]
                values.append((len(x) / f[s] * slopes + alpha * g) @ scale)
                weights.append(np.full(len(x), f[s] / len(x)))
            v, w = np.concatenate(values), np.concatenate(weights)
            total += w @ ((v - w @ v) ** 2).sum(1)
        return total

    found = fed.surrogates.optimal_alpha(logistic, silos, surrogates, thetas, selection=f)
    # a parabola in alpha, through three points
    low, middle, high = (trace(a) for a in (-1.0, 0.0, 1.0))
    assert found == pytest.approx(0.5 * (low - high) / (low - 2 * middle + high), rel=1e-3)
    assert abs(found - 1) > 0.05  # negative control: not what exact surrogates would have


def test_one_silo_has_no_conducive_gradient() -> None:
    silos = heterogeneous(1, 5)
    assert fed.surrogates.optimal_alpha(points, silos, likelihoods(silos)) == 1.0


@pytest.mark.parametrize("times", [1.0, 2.0])
def test_fsgld_with_alpha_auto(times: float) -> None:
    silos = heterogeneous()
    kernel = fed.FSGLD(points, surrogate=likelihoods(silos, times), alpha="auto")
    mcmc = MCMC(kernel, num_warmup=20, num_samples=400, progress_bar=False)
    mcmc.run(jax.random.key(0), silos)
    assert float(mcmc.last_state.tuning.alpha) == pytest.approx(1 / times, rel=1e-3)
    if times == 1:  # twice too sure surrogates also halve the preconditioner
        x = np.asarray(silos.pooled["x"], np.float64)
        draws = np.asarray(mcmc.get_samples()["mu"])
        assert (abs(draws.mean(0) - x.sum(0) / 501) < 0.4 / np.sqrt(501)).all()
    with pytest.raises(
        ValueError, match="alpha: expected a finite number >= 0, got 'best'; or \"auto\""
    ):
        fed.FSGLD(points, alpha="best")


def test_alpha_auto_with_local_latents() -> None:
    silos = fed.split({"y": RNG.normal(1.0, 1.2, 12)}, by=np.repeat([0, 1], [4, 8]))
    mcmc = MCMC(
        fed.FSGLD(intercepts, alpha="auto"), num_warmup=5, num_samples=5, progress_bar=False
    )
    mcmc.run(jax.random.key(0), silos)
    assert float(mcmc.last_state.tuning.alpha) == pytest.approx(1, abs=0.02)
