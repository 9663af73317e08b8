"""Conducive rounds: exact on Gaussian models, and the same for every partition.

On other models they reach the pooled bound's optimum, whoever does not answer.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from scipy.optimize import minimize
from vi_models import (
    best_scale,
    hierarchy,
    hierarchy_posterior,
    hierarchy_silos,
    learned_scale,
    linear_encoder,
    mean_field,
    unit_hierarchy,
    wheeze,
    wheeze_silos,
)

import numpyro_fed as fed
from numpyro_fed.surrogates.natural_step import ApproxFactor
from numpyro_fed.vi.conducive.antithetic import rows_of_pair, shuffled
from numpyro_fed.vi.conducive.quasi_newton import Memory
from numpyro_fed.vi.conducive.rounds import Reply, SiloState, merge

QUIET = {"progress_bar": False}


def conducive(model, guide=None, **settings):
    return fed.ConduciveSFVI(
        model, fed.AutoSiloNormal(model) if guide is None else guide, **settings
    )


def logistic(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2]).to_event(1))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def logistic_silos(sizes=(9, 4, 20)):
    rng = np.random.default_rng(3)
    data = {}
    for s, n in enumerate(sizes):
        x = rng.normal(size=(n, 2)) + s / 2
        data[f"s{s}"] = {
            "x": x,
            "y": (rng.uniform(size=n) < 1 / (1 + np.exp(-x @ [1.0, -1.5]))).astype(float),
        }
    return fed.Silos(data)


@pytest.mark.parametrize(
    "silo_of",
    [
        pytest.param(np.zeros(9, int), marks=pytest.mark.ci),
        np.arange(9) % 4,
        pytest.param(np.arange(9), marks=pytest.mark.ci),
    ],
)
def test_a_gaussian_hierarchy_is_exact(silo_of):
    """Here q(theta), q(z | theta) and the bound, which is the log evidence, are exact.

    All are reached in a few rounds, and then do not change.
    """
    with jax.enable_x64(True):
        mean, covariance, evidence = hierarchy_posterior()
        fit = conducive(hierarchy)
        result = fit.run(random.key(0), 6, hierarchy_silos(silo_of), **QUIET)
        sd = covariance[0, 0] ** 0.5
        assert float(result.params["auto_loc"][0]) == pytest.approx(mean[0], abs=1e-5 * sd)
        assert float(result.params["auto_scale_tril"][0, 0]) == pytest.approx(sd, rel=1e-5)
        np.testing.assert_allclose(result.params["auto_local_loc"][:, 0], mean[1:], atol=1e-4)
        slope = covariance[1:, 0] / sd  # of E[z | u] in u
        np.testing.assert_allclose(result.params["auto_local_coupling"][:, 0, 0], slope, atol=1e-4)
        conditional = np.diag(covariance)[1:] - slope**2
        np.testing.assert_allclose(
            np.exp(2 * result.params["auto_local_log_scale"][:, 0]), conditional, rtol=1e-3
        )
        assert -result.losses[-1] == pytest.approx(evidence, abs=1e-4)
        assert float(result.state.server.moved) < 1e-6


@pytest.mark.ci
def test_rounds_do_not_depend_on_the_partition():
    """The same numbers in every round; a barycenter of the silos' own optima depends on it."""
    with jax.enable_x64(True):
        partitions = [(np.arange(20) ** 2) % 7, np.arange(20)]
        results = [
            conducive(wheeze, validate=False).run(random.key(0), 10, wheeze_silos(p), **QUIET)
            for p in partitions
        ]
        one, other = results
        np.testing.assert_allclose(other.losses, one.losses, rtol=1e-9)
        for name, value in one.params.items():
            np.testing.assert_allclose(other.params[name], value, rtol=1e-7, atol=1e-9)
        plain = [
            fed.SFVIAvg(
                wheeze, fed.AutoSiloNormal(wheeze), optax.adam(0.02), 30, 1, 4, validate=False
            )
            .run(random.key(0), 1, wheeze_silos(p), **QUIET)
            .params["auto_loc"]
            for p in partitions
        ]
        assert np.abs(plain[0] - plain[1]).max() > 1e-2


def best_gaussian(kwargs):
    """Return the Gaussian of largest pooled bound, by quadrature and a general optimizer."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(12)
    u = jnp.asarray(np.stack(np.meshgrid(nodes, nodes), -1).reshape(-1, 2))
    w = jnp.asarray(np.outer(weights, weights).ravel() / weights.sum() ** 2)
    x, y = jnp.asarray(kwargs["x"]), jnp.asarray(kwargs["y"])

    def unpack(v):
        return v[:2], jnp.array([[jnp.exp(v[2]), 0.0], [v[4], jnp.exp(v[3])]])

    @jax.jit
    @jax.value_and_grad
    def loss(v):
        loc, root = unpack(v)
        theta = loc + u @ root.T
        logits = theta @ x.T
        joint = jnp.sum(y * logits - jnp.logaddexp(0.0, logits), 1) - jnp.sum(theta**2, 1) / 8
        return -(w @ joint) - v[2] - v[3]

    found = minimize(
        lambda v: tuple(np.asarray(a) for a in loss(v)),
        np.array([0.0, 0, -1, -1, 0]),
        jac=True,
        tol=1e-10,
    )
    return unpack(jnp.asarray(found.x))


@pytest.mark.ci
def test_the_fixed_point_is_the_optimum_of_the_pooled_bound():
    with jax.enable_x64(True):
        silos = logistic_silos()
        loc, root = best_gaussian(silos.pooled)
        result = conducive(logistic, num_points=1024).run(random.key(0), 15, silos, **QUIET)
        sd = np.linalg.norm(root, axis=1)
        assert np.abs((result.params["auto_loc"] - loc) / sd).max() < 0.01
        found = result.params["auto_scale_tril"] @ result.params["auto_scale_tril"].T
        np.testing.assert_allclose(
            found / np.outer(sd, sd), root @ root.T / np.outer(sd, sd), atol=0.01
        )
        # a control: the posterior's mode is another
        mode = minimize(
            lambda b: float(
                np.sum(
                    np.logaddexp(0, silos.pooled["x"] @ b)
                    - silos.pooled["y"] * (silos.pooled["x"] @ b)
                )
                + b @ b / 8
            ),
            np.zeros(2),
        ).x
        assert np.abs((mode - loc) / sd).max() > 0.05


def test_a_diagonal_family_has_the_precisions_diagonal():
    with jax.enable_x64(True):
        silos = logistic_silos()
        guide = fed.AutoSiloNormal(logistic, global_cov="diag")
        result = conducive(logistic, guide, num_points=4096).run(random.key(0), 15, silos, **QUIET)
        loc, sd = (np.asarray(result.params[k]) for k in ("auto_loc", "auto_scale"))
        theta = loc + sd * np.random.default_rng(0).normal(size=(200_000, 2))
        p = 1 / (1 + np.exp(-theta @ np.asarray(silos.pooled["x"]).T))
        precision = ((p * (1 - p)).mean(0)[:, None] * np.asarray(silos.pooled["x"]) ** 2).sum(
            0
        ) + 1 / 4
        np.testing.assert_allclose(sd**-2, precision, rtol=0.03)


@pytest.mark.ci
def test_missing_replies_do_not_move_the_fixed_point():
    """30 % of them are missing; a control: the fit of the silos that answered first is another."""
    with jax.enable_x64(True):
        silos = wheeze_silos(np.arange(20) % 5)
        fit = conducive(wheeze, validate=False)
        whole = fit.run(random.key(0), 20, silos, **QUIET)
        sd = np.linalg.norm(whole.params["auto_scale_tril"], axis=1)
        some = fit.run(
            random.key(1), 60, silos, participation={name: 0.7 for name in silos.names}, **QUIET
        )
        assert 170 < sum(some.ledger.rounds) < 250
        # the bound has the last value of a silo that is missing, and so can converge
        np.testing.assert_allclose(some.losses[-10:], whole.losses[-1], atol=1e-3)
        assert np.abs((some.params["auto_loc"] - whole.params["auto_loc"]) / sd).max() < 5e-3
        np.testing.assert_allclose(
            some.params["auto_scale_tril"], whole.params["auto_scale_tril"], atol=1e-3
        )
        four = conducive(wheeze, validate=False).run(
            random.key(0), 20, fed.Silos({name: silos[name] for name in silos.names[:4]}), **QUIET
        )
        assert np.abs((four.params["auto_loc"] - whole.params["auto_loc"]) / sd).max() > 0.05


@pytest.mark.ci
def test_silos_join_and_leave():
    """From another federation's result: the fit of the silos that there are now."""
    with jax.enable_x64(True):
        silos = logistic_silos()
        without = fed.Silos({k: silos[k] for k in ("s0", "s2")})
        fit = conducive(logistic)
        everyone, two = (fit.run(random.key(0), 14, s, **QUIET) for s in (silos, without))
        left = fit.run(random.key(0), 5, without, init_from=everyone, **QUIET)
        joined = fit.run(random.key(0), 5, silos, init_from=two, **QUIET)
        for a, b in ((left, two), (joined, everyone)):
            np.testing.assert_allclose(a.params["auto_loc"], b.params["auto_loc"], atol=1e-3)
            np.testing.assert_allclose(
                a.params["auto_scale_tril"], b.params["auto_scale_tril"], atol=1e-3
            )
        assert np.abs(two.params["auto_loc"] - everyone.params["auto_loc"]).max() > 0.1


def root_of(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 2))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(beta * jnp.sqrt(x), 1), obs=y)


@pytest.mark.ci
def test_a_silo_whose_replies_are_not_finite_is_missing_and_named():
    with jax.enable_x64(True):
        good = {
            "a": {"x": np.ones(4), "y": np.arange(4.0)},
            "b": {"x": np.full(5, 2.0), "y": np.ones(5)},
        }
        bad = {**good, "c": {"x": -np.ones(3), "y": np.ones(3)}}
        with pytest.warns(
            UserWarning, match=r"not finite, taken as missing \(silo, rounds\): 'c' 6 of 6"
        ):
            found = conducive(root_of, validate=False).run(
                random.key(0), 6, fed.Silos(bad), **QUIET
            )
        expected = conducive(root_of, validate=False).run(
            random.key(0), 6, fed.Silos(good), **QUIET
        )
        np.testing.assert_allclose(found.params["auto_loc"], expected.params["auto_loc"], rtol=1e-9)
        np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-9)


@pytest.mark.ci
def test_what_leaves_a_silo():
    silos = wheeze_silos(np.arange(20) % 2)
    fit = conducive(wheeze, validate=False)
    state = fit.init(random.key(0), silos)
    assert isinstance(state.silos[0], SiloState)
    assert Reply._fields == (
        "value",
        "gained",
        "finite",
        "params",
        "share",
    )  # the last two where optimizers move something
    with pytest.warns(UserWarning, match=r"q has not converged: it moved by"):
        result = fit.run(random.key(0), 2, silos, **QUIET)
    d = fit.setup(silos).config.factors.dim
    assert result.ledger.bytes_up == (2 * (4 + 4 * (d + d * (d + 1) // 2) + 1),) * 2
    assert result.ledger.gradient_evaluations == (2 * 256,) * 2


@pytest.mark.ci
def test_it_stops_where_the_loss_does_and_goes_on():
    silos = logistic_silos()
    fit = conducive(logistic)
    short = fit.run(random.key(0), 50, silos, tol=1e-3, **QUIET)
    assert len(short.losses) < 15
    assert abs(short.losses[-1] - short.losses[-2]) < 1e-3
    again = fit.run(random.key(0), 1, silos, init_state=short.state, **QUIET)
    off = again.params["auto_loc"] - short.params["auto_loc"]
    sd = jnp.linalg.norm(short.params["auto_scale_tril"], axis=1)
    assert (jnp.abs(off) < (2 * 1e-3) ** 0.5 * sd).all()  # an sd's square over two is a nat


@pytest.mark.ci
@pytest.mark.parametrize("x64", [False, True])
def test_it_stays_where_it_has_settled(x64):
    """Rounding errors are no residuals to accelerate.

    Such steps had left the fixed point by .2 sds after twenty rounds there.
    """
    with jax.enable_x64(x64):
        silos, state, far = logistic_silos(), None, []
        for _ in range(12):
            result = conducive(logistic).run(
                random.key(0), 6 if state else 12, silos, init_state=state, **QUIET
            )
            state = result.state
            far.append(float(state.server.moved))
        assert max(far) < 1e-3, far


def two_latents(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([2]).to_event(1))
    with fed.silo_plate("units", y.shape[0]):
        z = numpyro.sample("z", dist.Normal(mu, 1).to_event(1))
        numpyro.sample("y", dist.Normal(z, 1).to_event(1), obs=y)


@pytest.mark.ci
def test_two_latents_an_element_are_exact():
    """The posterior of mu is that of the mean of y.

    For z - mu and y - mu are normal with variances 1 and 2.
    """
    with jax.enable_x64(True):
        y = np.random.default_rng(0).normal([1.0, -1.0], 1.0, (7, 2))
        result = conducive(two_latents).run(
            random.key(0), 6, fed.split({"y": y}, by=np.arange(7) % 3), **QUIET
        )
        precision = 1 + 7 / 2
        np.testing.assert_allclose(result.params["auto_loc"], y.sum(0) / 2 / precision, atol=1e-4)
        covariance = result.params["auto_scale_tril"] @ result.params["auto_scale_tril"].T
        np.testing.assert_allclose(covariance, np.eye(2) / precision, atol=1e-4)


def skewed(x, y):
    """Return a gamma law of exp(t) with few counts: t has a long left tail."""
    t = numpyro.sample("t", dist.Normal(0, 3))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Poisson(x * jnp.exp(t)), obs=y)


@pytest.mark.ci
def test_the_last_round_sees_a_tail_that_q_cuts_off():
    """The posterior of t on a grid; within four standard errors, which q alone misses."""
    silos = fed.Silos(
        {
            "a": {"x": np.full(2, 0.5), "y": np.array([1, 0])},
            "b": {"x": np.full(3, 0.5), "y": np.zeros(3, int)},
        }
    )
    grid = np.linspace(-14, 6, 4001)
    log_density = -(grid**2) / 18 + grid - 2.5 * np.exp(grid)
    weight = np.exp(log_density - log_density.max())
    weight /= weight.sum()
    mean = weight @ grid
    sd = np.sqrt(weight @ (grid - mean) ** 2)
    fit = conducive(skewed)
    result = fit.run(random.key(0), 25, silos, **QUIET)
    num = 8000
    last = fed.to_inference_data(
        fit, result, silos, num_draws=num, resample=True, log_likelihood=False
    )
    t = last.posterior["t"].values.ravel()
    error = (
        2 * sd / np.sqrt(num)
    )  # of importance sampling with weights as unequal as these, generously
    assert abs(t.mean() - mean) < 4 * error
    assert t.std() / sd == pytest.approx(1, abs=0.08)
    assert last.posterior.attrs["pareto_k"] < 0.5
    own = float(result.params["auto_scale_tril"][0, 0])
    assert own < 0.9 * sd


@pytest.mark.ci
def test_what_it_does_not_cover_is_refused():
    guide = fed.AutoSiloNormal(wheeze)
    with pytest.raises(
        TypeError,
        match=r"optim: expected an optax transformation, e.g. optax.adam\(1e-2\), got NoneType",
    ):
        fed.ConduciveSFVI(wheeze, guide, None, local_optim=optax.adam(0.1))
    with pytest.raises(
        TypeError,
        match=r"optim: expected an optax transformation, e.g. optax.adam\(1e-2\), got NoneType",
    ):
        fed.SFVIAvg(wheeze, guide)
    with pytest.raises(TypeError, match=r"take fed.ConduciveSFVI\(model, guide, num_points"):
        fed.SFVIAvg(wheeze, guide, conducive=True)
    with pytest.raises(TypeError, match="conducive rounds multiply Gaussians: expected"):
        fed.ConduciveSFVI(wheeze, lambda **kwargs: None)
    silos = wheeze_silos(np.arange(20) % 2)
    with pytest.raises(
        ValueError, match=r"expected a guide with coupling=True and scale_coupling=True"
    ):
        conducive(wheeze, fed.AutoSiloNormal(wheeze, coupling=False)).init(random.key(0), silos)
    with pytest.raises(
        ValueError,
        match=r'2 latents an element: expected a guide with local_cov="element", got "diag"',
    ):
        conducive(two_latents, fed.AutoSiloNormal(two_latents, local_cov="diag")).init(
            random.key(0), fed.split({"y": np.zeros((6, 2))}, by=np.arange(6) % 2)
        )
    with pytest.raises(
        ValueError,
        match=r"batch_size=3 in conducive rounds with latents in the silos: expected "
        r"batch_size=None",
    ):
        conducive(hierarchy, batch_size=3).init(random.key(0), hierarchy_silos(np.arange(9) % 2))
    many = fed.split({"x": np.ones((1000, 2)), "y": np.ones(1000)}, by=np.arange(1000) % 2)
    with pytest.raises(
        ValueError,
        match=r"batch_size=3 .* at least 4, so that 128 pairs of points together look at each of "
        r"the 500 rows .* enough for 2 dim",
    ):
        conducive(logistic, batch_size=3).init(random.key(0), many)
    with pytest.raises(
        ValueError, match=r"learned parameters \['tau'\]: expected an optimizer that moves them"
    ):
        conducive(learned_scale).init(random.key(0), logistic_silos())


@pytest.mark.ci
def test_diagonal_sites_where_coordinates_pull_together():
    """Eight covariates have equal correlations of .8.

    There Jacobi's steps of length one diverge (largest eigenvalue 6.6).
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 8)) * 0.2**0.5 + rng.normal(size=(400, 1)) * 0.8**0.5
    y = x @ np.arange(8.0) + rng.normal(size=400)

    def model(x, y):
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([8]).to_event(1))
        with fed.silo_plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ beta, 1), obs=y)

    precision = x.T @ x + np.eye(8)
    step = np.eye(8) - precision / np.diag(precision)[:, None]
    assert np.abs(np.linalg.eigvals(step)).max() > 5  # the control
    silos = fed.split({"x": x.astype(np.float32), "y": y.astype(np.float32)}, by=np.arange(400) % 3)
    avg = fed.ConduciveSFVI(model, fed.AutoSiloNormal(model, global_cov="diag"))
    result = avg.run(random.key(0), 100, silos, progress_bar=False, tol=1e-5)
    assert len(result.losses) < 40
    sd = np.diag(precision) ** -0.5
    np.testing.assert_allclose(result.params["auto_scale"], sd, rtol=0.001)
    np.testing.assert_allclose(
        result.params["auto_loc"], np.linalg.solve(precision, x.T @ y), atol=0.05 * sd.min()
    )


@pytest.mark.ci
def test_pairs_of_points_that_look_at_some_rows_each():
    """Rows of equal curvature give exactly the fit of all rows.

    Other rows give one near it, and the nearer the more rows a pair has.
    """

    def mean(y):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        with fed.silo_plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    with jax.enable_x64(True):
        y = np.random.default_rng(0).normal(2, 1, 384)
        silos = fed.split({"y": y}, by=np.repeat([0, 1, 2], [64, 128, 192]))
        result = conducive(mean, batch_size=3, num_points=128).run(
            random.key(0), 60, silos, **QUIET
        )
        np.testing.assert_allclose(
            result.params["auto_scale_tril"][0, 0], (384 + 0.01) ** -0.5, rtol=1e-5
        )
        np.testing.assert_allclose(result.params["auto_loc"][0], y.sum() / 384.01, rtol=1e-5)
        silos = logistic_silos()
        whole, some = (
            conducive(logistic, batch_size=size, num_points=256).run(
                random.key(0), 30, silos, **QUIET
            )
            for size in (None, 1)
        )
        sd = np.linalg.norm(whole.params["auto_scale_tril"], axis=1)
        assert 1e-6 < np.abs((some.params["auto_loc"] - whole.params["auto_loc"]) / sd).max() < 0.05


@pytest.mark.ci
def test_hundreds_of_dimensions_from_points_that_change():
    """Beyond 256 dimensions a diagonal q is fitted from 1,024 points.

    Means of a Gaussian posterior are exact, precisions up to noise. Jacobi's steps would diverge.
    """
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(900, 300)) + 0.5 * rng.normal(size=(900, 1))).astype(np.float32)
    y = (x @ rng.normal(size=300) / 10 + rng.normal(size=900)).astype(np.float32)

    def model(x, y):
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([300]).to_event(1))
        with fed.silo_plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ beta, 1), obs=y)

    precision = x.T.astype(float) @ x + np.eye(300)
    step = np.eye(300) - precision / np.diag(precision)[:, None]
    assert np.abs(np.linalg.eigvals(step)).max() > 5  # the control
    silos = fed.split({"x": x, "y": y}, by=np.arange(900) % 3)
    for size in (None, 10):
        avg = conducive(model, fed.AutoSiloNormal(model, global_cov="diag"), batch_size=size)
        result = avg.run(random.key(0), 40, silos, **QUIET)
        sd = np.diag(precision) ** -0.5
        off = (result.params["auto_loc"] - np.linalg.solve(precision, x.T.astype(float) @ y)) / sd
        grown = np.log(result.params["auto_scale"] / sd)
        assert np.sqrt(np.mean(off**2)) < 0.02, size
        assert np.sqrt(np.mean(grown**2)) < 0.05, size
        assert float(result.state.server.moved) < 0.03, size


def test_a_step_after_which_the_bound_is_lower_is_taken_back():
    memory, one = Memory.none(2), jnp.ones(2)
    move, memory = memory.move(
        jnp.zeros(2), one, ApproxFactor(one, one), jnp.array(0.0), jnp.array(True), noisy=False
    )
    assert (move.loc > 0).all()
    assert not move.held
    back, memory = memory.move(
        move.loc,
        move.scale,
        ApproxFactor(-9 * one, one),
        jnp.array(-50.0),
        jnp.array(True),
        noisy=False,
    )
    assert back.held
    np.testing.assert_allclose(back.loc, 0.3 * move.loc, rtol=1e-6)
    again, _ = memory.move(
        back.loc,
        back.scale,
        ApproxFactor(-9 * one, one),
        jnp.array(-40.0),
        jnp.array(True),
        noisy=False,
    )
    np.testing.assert_allclose(again.loc, 0.09 * move.loc, rtol=1e-6)
    # a lower bound that persists is that of noise, and is believed in the end
    _, memory = memory.move(
        back.loc, back.scale, ApproxFactor(one, one), jnp.array(-50.0), jnp.array(True), noisy=True
    )
    _, memory = memory.move(
        0.1 * one, back.scale, ApproxFactor(one, one), jnp.array(-50.0), jnp.array(True), noisy=True
    )
    last, memory = memory.move(
        0.1 * one, one, ApproxFactor(one, one), jnp.array(-50.0), jnp.array(True), noisy=True
    )
    assert not last.held
    assert float(memory.bound) == -50.0
    # where a silo did not answer bounds are not compared
    assert not memory.move(
        move.loc, one, ApproxFactor(one, one), jnp.array(-50.0), jnp.array(False), noisy=False
    )[0].held


@pytest.mark.ci
def test_local_maps_by_steps_reach_the_exact_posterior():
    """Local maps by steps are as exact as quadrature.

    A diagonal q(theta) of one dimension is exact, too. Without enough steps latents are not where
    they should be.
    """
    mean, covariance, evidence = hierarchy_posterior()
    sd, silos = covariance[0, 0] ** 0.5, hierarchy_silos(np.arange(9) % 3)
    settings = {
        "num_local_particles": 1,
        "local_optim": optax.adam(optax.exponential_decay(0.05, 500, 0.5)),
    }
    for cov, size in (("full", None), ("diag", 2)):
        guide = fed.AutoSiloNormal(hierarchy, global_cov=cov)
        fit = fed.ConduciveSFVI(
            hierarchy,
            guide,
            optax.adam(0.05),
            num_local_steps=150,
            batch_size=size,
            validate=False,
            **settings,
        )
        result = fit.run(random.key(0), 20, silos, **QUIET)
        assert abs(float(result.params["auto_loc"][0]) - mean[0]) < 0.1 * sd
        root = result.params["auto_scale_tril" if cov == "full" else "auto_scale"].ravel()[0]
        assert float(root) == pytest.approx(sd, rel=0.05)
        assert np.mean(-result.losses[-4:]) == pytest.approx(evidence, abs=0.2)
    # after a round the maps have moved by 150 steps only: the bound says so
    assert -result.losses[0] < evidence - 0.5


@pytest.mark.ci
def test_an_amortized_guide_and_learned_parameters_move_by_steps():
    n, model, linear = 60, unit_hierarchy, linear_encoder
    y = random.normal(random.key(0), (n,)) * 1.4 + 1.5
    guide = fed.AutoSiloNormal(model, coupling=False, scale_coupling=False, amortize={"z": linear})
    silos = fed.split({"y": y}, by=np.repeat(["a", "b", "c"], [30, 20, 10]))
    with pytest.raises(
        ValueError,
        match=r"learned parameters \['slope', .*\]: expected an optimizer that moves them",
    ):
        conducive(model, guide).init(random.key(0), silos)
    optim = optax.adam(optax.exponential_decay(0.02, 3000, 0.1))
    fit = fed.ConduciveSFVI(model, guide, optim, num_local_steps=300, num_local_particles=1)
    params = fit.run(random.key(0), 25, silos, **QUIET).params
    mean = mean_field(y)
    np.testing.assert_allclose(params["slope"], 0.5, atol=0.03)
    np.testing.assert_allclose(np.exp(params["log_scale"]), np.sqrt(0.5), atol=0.03)
    np.testing.assert_allclose(params["auto_loc"], [mean], atol=0.05)
    np.testing.assert_allclose(params["intercept"], mean / 2, atol=0.05)
    np.testing.assert_allclose(params["auto_scale_tril"].ravel(), (n + 0.01) ** -0.5, rtol=0.05)


@pytest.mark.ci
def test_a_learned_scale_by_steps():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(40, 3))
    y = x @ [1.5, -2.0, 0.5] + rng.normal(size=40)
    silos = fed.split({"x": x, "y": y}, by=np.arange(40) % 3)
    optim = optax.adam(optax.exponential_decay(0.03, 1000, 0.3))
    fit = fed.ConduciveSFVI(
        learned_scale, fed.AutoSiloNormal(learned_scale), optim, num_local_steps=100
    )
    params = fit.run(random.key(0), 25, silos, **QUIET).params
    assert float(params["tau"]) == pytest.approx(best_scale(x, y), rel=0.02)


@pytest.mark.ci
def test_rows_of_pairs():
    """Over all pairs each row comes equally often, in a pair once at most.

    With as many rows as a silo has, a pair looks at all.
    """
    silos = fed.split(
        {"x": np.arange(2.0 * 150).reshape(150, 2), "y": np.ones(150)},
        by=np.repeat([0, 1], [140, 10]),
    )
    for size, often in ((3, (1, 19)), (11, (5, 64)), (200, (64, 64))):
        config, _, stacks, *_ = conducive(logistic, batch_size=size, num_points=128).setup(silos)
        for rows in stacks:
            for i, n in enumerate(np.asarray(next(iter(rows.sizes.values())))):
                one = jax.tree.map(
                    lambda x, axis, i=i: x if axis is None else x[i],
                    rows,
                    rows.axes,
                    is_leaf=lambda x: x is None,
                )
                order, seen = shuffled(config, one, random.key(3)), np.zeros(150)
                for pair in range(64):
                    batch = rows_of_pair(config, one, order, 64, jnp.array(pair))
                    x = (
                        np.asarray(batch.rows.rows["x"])[
                            : int(next(iter(batch.rows.sizes.values()))), 0
                        ]
                        // 2
                    )
                    assert len(set(x)) == len(x)
                    seen[x.astype(int)] += float(next(iter(batch.weights.values()))) / 64
                np.testing.assert_allclose(seen[seen > 0], 1.0, rtol=1e-6)
                assert (seen > 0).sum() == n
                assert float(next(iter(batch.weights.values()))) == pytest.approx(
                    64 / often[int(n == 10)]
                )


def test_a_full_covariance_from_some_rows():
    """Its noise averages out over rounds.

    It is within 15 % of the exact one in all directions, from as few rows as are accepted.
    """
    rng = np.random.default_rng(0)
    x, d = rng.normal(size=(2000, 10)), 10

    def model(x, y):
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([d]).to_event(1))
        with fed.silo_plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ beta, 1), obs=y)

    silos = fed.split(
        {"x": x, "y": x @ rng.normal(size=d) + rng.normal(size=2000)}, by=np.arange(2000) % 2
    )
    with pytest.raises(ValueError, match=r"expected at least 20"):
        conducive(model, batch_size=19).init(random.key(0), silos)
    result = conducive(model, batch_size=20).run(random.key(0), 40, silos, **QUIET)
    root = np.asarray(result.params["auto_scale_tril"])
    values = np.linalg.eigvalsh(root.T @ (x.T @ x + np.eye(d)) @ root)
    assert 0.85 < values.min() < values.max() < 1.15
    # the control: a round alone
    with pytest.warns(UserWarning, match="q has not converged"):
        few = conducive(model, batch_size=20).run(random.key(0), 4, silos, **QUIET)
    root = np.asarray(few.params["auto_scale_tril"])
    assert (
        np.abs(np.linalg.eigvalsh(root.T @ (x.T @ x + np.eye(d)) @ root) - 1).max()
        > np.abs(values - 1).max()
    )


@pytest.mark.ci
def test_what_silos_learn_apart_does_not_bend_q():
    """A learned noise that silos disagree on: q(theta) is the optimum at the average."""
    rng = np.random.default_rng(1)
    y = np.concatenate([rng.normal(1, 0.5, 50), rng.normal(1.5, 5, 50)])

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        sd = numpyro.param("sd", 1.0, constraint=dist.constraints.positive)
        with fed.silo_plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, sd), obs=y)

    fit = fed.ConduciveSFVI(model, fed.AutoSiloNormal(model), optax.sgd(1e-3), num_local_steps=20)
    params = fit.run(
        random.key(0), 30, fed.split({"y": y}, by=np.repeat([0, 1], 50)), **QUIET
    ).params
    precision = 100 / float(params["sd"]) ** 2 + 0.01
    assert float(params["auto_loc"][0]) == pytest.approx(
        y.sum() / float(params["sd"]) ** 2 / precision, abs=0.03
    )
    assert float(params["auto_scale_tril"][0, 0]) == pytest.approx(precision**-0.5, rel=0.03)
    with pytest.raises(ValueError, match="nothing for it to move"):
        fed.ConduciveSFVI(logistic, fed.AutoSiloNormal(logistic), optax.sgd(1e-3)).init(
            random.key(0), logistic_silos()
        )


def test_a_reply_that_is_not_finite_does_not_count_in_the_bound():
    """With a diagonal q, in a sum: its flag is heard."""
    silos = logistic_silos()
    fit = conducive(logistic, fed.AutoSiloNormal(logistic, global_cov="diag"), secure_sum=True)
    config, _, stacks, *_ = fit.setup(silos)
    state = fit.init(random.key(0), silos).server
    d = config.factors.dim
    zero = ApproxFactor(jnp.zeros((3, d)), jnp.zeros((3, d)))
    for finite in (True, False):
        replies = Reply(jnp.array([-5.0, -5.0, 0.0]), zero, jnp.array([True, True, finite]))
        merged, _ = merge(config, stacks[0], state, replies)
        assert bool(merged.history.known) is finite
