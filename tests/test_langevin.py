"""What one step and one stay of the Langevin kernels do, exactly: sums, quadratures and detailed balance."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from small_models import intercepts, intercepts_silos, linear, linear_precisions, linear_silos

import numpyro_fed as fed
from numpyro_fed.density import pooled_log_density
from numpyro_fed.factorise import factorise
from numpyro_fed.local_map import LocalMap, Units
from numpyro_fed.mcmc import langevin
from numpyro_fed.mcmc.langevin import Chain, LatentCoordinates, Tuning
from numpyro_fed.mcmc.local_moves import MoveNoise, metropolis, move_noise
from numpyro_fed.mcmc.prepare import Options, prepare
from numpyro_fed.storage import SiloView, largest
from numpyro_fed.surrogates import Gaussian, Surrogates


def options(**given):
    settings = {
        "step_size": 0.01, "num_local_steps": 1, "batch_size": None, "surrogate": None, "alpha": 0.0,
        "selection": None, "preconditioner": None, "bias_target": 0.02, "public": (), "validate": False,
    }  # fmt: skip
    return Options(**{**settings, **given})


def random_surrogates(rng, num, dim, diagonal=False):
    """Symmetric, not necessarily positive definite precisions: only their product with the prior must be."""
    root = rng.normal(size=(num, dim, dim))
    precision = root + np.swapaxes(root, 1, 2)
    prior = np.eye(dim) * (1 - np.linalg.eigvalsh(precision.sum(0)).min())
    if diagonal:
        precision = rng.normal(size=(num, dim))
        prior = np.full(dim, 1 - precision.sum(0).min())
    eta = rng.normal(size=(num, dim))
    return Surrogates(Gaussian(jnp.asarray(eta), jnp.asarray(precision)), Gaussian(jnp.zeros(dim), jnp.asarray(prior)))


def exact_surrogates(silos):
    eta, precision = linear_precisions(silos)
    return Surrogates(Gaussian(jnp.asarray(eta), jnp.asarray(precision)), Gaussian(jnp.zeros(2), jnp.eye(2)))


def view_of(silos, number):
    return SiloView(silos, jnp.asarray(number), largest(silos))


# Lemma 1


def logistic(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=tau * (x @ beta)), obs=y)


def logistic_silos():
    rng = np.random.default_rng(3)
    sizes = {"a": 4, "b": 9, "c": 6}
    return fed.Silos(
        {k: {"x": rng.normal(size=(n, 2)).astype(np.float32), "y": rng.integers(0, 2, n)} for k, n in sizes.items()}
    )


@partial(jax.jit, static_argnames=("plan",))
def mean_over_single_rows(plan, tuning, theta, silos, number):
    """Mean of the residual e over a silo's minibatches of one row, in preconditioned units."""
    view = view_of(silos, number)
    silo = langevin.open_silo(plan, tuning, None, view)
    group, _ = plan.batch

    def one(row):
        here = silo._replace(kwargs={**silo.kwargs, **view.batch(group, row[None])})
        return langevin.residual(plan, tuning, theta, None, here, view)[0]

    weights = view.mask(group) / view.size(group)
    return weights @ jax.vmap(one)(jnp.arange(dict(view.pad)[group]) % view.size(group))


@partial(jax.jit, static_argnames=("plan",))
def residual_and_cut(plan, tuning, theta, silos, number):
    view = view_of(silos, number)
    return langevin.residual(plan, tuning, theta, None, langevin.open_silo(plan, tuning, None, view), view)


def full_batch_residual(*args):
    return residual_and_cut(*args)[0]


@partial(jax.jit, static_argnames=("plan",))
def server_drift(plan, tuning, theta, silos):
    gradient = langevin._server_gradient(plan, tuning, theta, view_of(silos, 0))
    return langevin._pull_back(tuning, gradient)


def expected_drift(plan, tuning, theta, silos, residual):
    """The drift averaged over the silos, each with its probability of being visited."""
    parts = [np.asarray(residual(plan, tuning, theta, silos, s), np.float64) for s in range(len(silos))]
    return np.asarray(tuning.selection) @ np.stack(parts) + np.asarray(server_drift(plan, tuning, theta, silos))


@jax.jit
def logistic_gradient(silos, theta):
    def density(theta):
        return pooled_log_density(logistic, silos, {"beta": theta[:2], "tau": theta[2]})

    return jax.grad(density)(theta)


@pytest.mark.parametrize("diagonal", [False, True], ids=["full", "diagonal"])
@pytest.mark.parametrize("preconditioner", [None, "surrogate"])
@pytest.mark.parametrize("seed", [0, 1])
def test_lemma_1_the_estimator_averages_to_the_full_gradient(seed, preconditioner, diagonal):
    rng = np.random.default_rng(seed)
    silos = logistic_silos()
    alpha = float(rng.uniform(0.1, 3))
    plan, tuning, *_ = prepare(
        logistic, silos, {},
        options(batch_size=1, alpha=alpha, selection=rng.dirichlet([2, 2, 2]), preconditioner=preconditioner,
                surrogate=random_surrogates(rng, 3, 3, diagonal)),
    )  # fmt: skip
    plan = dataclasses.replace(plan, cut=False)
    theta = jnp.asarray(rng.normal(size=3), jnp.float32)
    gradient = logistic_gradient(silos, theta)
    expected = np.asarray(langevin._pull_back(tuning, gradient))
    for residual in (mean_over_single_rows, full_batch_residual):
        one = plan if residual is mean_over_single_rows else dataclasses.replace(plan, batch=None)
        got = expected_drift(one, tuning, theta, silos, residual)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=2e-4 * np.abs(expected).max())
    # negative control: a product of surrogates that lacks one factor is biased
    conducive = tuning.conducive
    lacking = conducive._replace(total_shift=conducive.total_shift - conducive.shift[0])
    wrong = expected_drift(plan, tuning._replace(conducive=lacking), theta, silos, mean_over_single_rows)
    assert np.abs(wrong - expected).max() > 0.01 * np.abs(expected).max()


@pytest.mark.parametrize("diagonal", [False, True], ids=["full", "diagonal"])
@pytest.mark.parametrize("preconditioner", [None, "surrogate"])
def test_a_step_without_a_cut_has_the_same_drift_in_one_call_of_the_model(preconditioner, diagonal):
    rng = np.random.default_rng(5)
    silos = logistic_silos()
    plan, tuning, *_ = prepare(
        logistic, silos, {},
        options(alpha=0.7, selection=rng.dirichlet([2, 2, 2]), preconditioner=preconditioner,
                surrogate=random_surrogates(rng, 3, 3, diagonal)),
    )  # fmt: skip
    plan = dataclasses.replace(plan, cut=False)
    theta = jnp.asarray(rng.normal(size=3), jnp.float32)
    server = np.asarray(server_drift(plan, tuning, theta, silos))
    drift = jax.jit(langevin._drift, static_argnums=0)
    for s in range(3):
        view = view_of(silos, s)
        got, cut = drift(plan, tuning, theta, None, langevin.open_silo(plan, tuning, None, view), view)
        e = np.asarray(full_batch_residual(plan, tuning, theta, silos, s))
        assert cut is None
        np.testing.assert_allclose(got, server + e, rtol=1e-4, atol=1e-4 * np.abs(e).max())
        assert np.abs(e).max() > 0.1  # negative control: the silo's part is not nothing


def test_exact_surrogates_leave_no_residual():
    silos = linear_silos()
    plan, tuning, *_ = prepare(
        linear, silos, {},
        options(alpha=1.0, surrogate=exact_surrogates(silos), preconditioner="surrogate", selection=[0.1, 0.2, 0.3, 0.4]),
    )  # fmt: skip
    theta = jnp.asarray([0.7, -2.0])
    for s in range(4):
        assert np.abs(full_batch_residual(plan, tuning, theta, silos, s)).max() < 2e-4
        # negative control: DSGLD's residual at the same point is not small
        alone = tuning._replace(alpha=jnp.asarray(0.0))
        assert np.abs(full_batch_residual(plan, alone, theta, silos, s)).max() > 0.3


def test_residual_of_a_silo_does_not_depend_on_the_order_or_size_of_the_others():
    rng = np.random.default_rng(5)
    silos = linear_silos()
    given = random_surrogates(rng, 4, 2)
    f = np.array([0.1, 0.2, 0.3, 0.4])
    theta = jnp.asarray(rng.normal(size=2), jnp.float32)

    def residuals(order):
        part = fed.Silos({silos.names[s]: silos[silos.names[s]] for s in order})
        factors = Gaussian(given.factors.eta[jnp.asarray(order)], given.factors.precision[jnp.asarray(order)])
        settings = options(alpha=0.7, surrogate=Surrogates(factors, given.prior), selection=f[order] / f[order].sum())
        plan, tuning, *_ = prepare(linear, part, {}, settings)
        tuning = tuning._replace(loc=jnp.zeros(2), conducive=tuning.conducive._replace(shift=jnp.asarray(factors.eta)))
        tuning = tuning._replace(selection=jnp.asarray(f[order]))
        return {part.names[i]: np.asarray(full_batch_residual(plan, tuning, theta, part, i)) for i in range(len(order))}

    reference = residuals([0, 1, 2, 3])
    for order in ([3, 1, 0, 2], [2, 0]):
        for name, e in residuals(order).items():
            np.testing.assert_allclose(e, reference[name], rtol=1e-5, atol=1e-5)


def test_the_cut_shortens_the_residual_and_is_counted():
    silos = linear_silos()
    plan, tuning, *_ = prepare(
        linear, silos, {}, options(alpha=1.0, surrogate=exact_surrogates(silos), preconditioner="surrogate")
    )
    assert plan.cut
    assert float(tuning.cut) == 8
    tuning = tuning._replace(alpha=jnp.asarray(0.0))
    for distance, cut in ((0.1, 0), (300.0, 1)):
        theta = tuning.loc + distance
        e, was_cut = residual_and_cut(plan, tuning, theta, silos, 3)
        whole, _ = residual_and_cut(dataclasses.replace(plan, cut=False), tuning, theta, silos, 3)
        assert int(was_cut) == cut
        length = np.linalg.norm(whole)
        np.testing.assert_allclose(e, np.asarray(whole) * (8 / length if cut else 1.0), rtol=1e-5)


# Gradients at fixed eps


def slopes(x, y):
    """Two latents an element, two global parameters, one of them a scale."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    tau = numpyro.sample("tau", dist.LogNormal(0, 1))
    with fed.silo_plate("groups", x.shape[0]):
        a = numpyro.sample("a", dist.Normal(mu, 1))
        b = numpyro.sample("b", dist.Normal(0, tau))
        numpyro.sample("y", dist.Normal(a[:, None] + b[:, None] * x, 1).to_event(1), obs=y)


def slopes_silos():
    rng = np.random.default_rng(6)
    sizes = {"a": 2, "b": 3}
    return fed.Silos({k: {n: rng.normal(size=(g, 4)).astype(np.float32) for n in "xy"} for k, g in sizes.items()})


def random_map(rng, units, k, dim):
    tril = np.tril(rng.normal(size=(units, k, k)), -1) + np.eye(k)
    shapes = {"mean": (k,), "coupling": (k, dim), "log_scale": (k,), "scale_coupling": (k, dim)}
    parts = {name: 0.4 * rng.normal(size=(units, *shape)) for name, shape in shapes.items()}
    return LocalMap(**{name: jnp.asarray(x, jnp.float32) for name, x in {**parts, "tril": tril}.items()})


def slopes_kernel(rng):
    """Plan, tuning and silos of the model above with a local map that is as wrong as can be."""
    silos = slopes_silos()
    factors = factorise(slopes, silos)
    units = Units(factors, "x", largest(silos))
    assert units.dim == 2
    plan = langevin.Plan(factors, units, 1, None, False, None)
    whiten = jnp.asarray(np.eye(2) + 0.3 * rng.normal(size=(2, 2)), jnp.float32)
    latents = LatentCoordinates(jnp.asarray(rng.normal(size=2), jnp.float32), whiten, random_map(rng, 5, 2, 2))
    zero = jnp.zeros(())
    tuning = Tuning(zero, zero, jnp.array([0.4, 0.6]), jnp.zeros(2), None, None, latents, zero)
    return plan, tuning, silos


def exact_conditional(theta, x, y):
    """Mean and covariance of one element's (a, b) given mu and log tau."""
    design = jnp.stack([jnp.ones_like(x), x], 1)
    prior = jnp.diag(jnp.array([1.0, jnp.exp(-2 * theta[1])]))
    covariance = jnp.linalg.inv(prior + design.T @ design)
    return covariance @ (prior @ jnp.array([theta[0], 0.0]) + design.T @ y), covariance


@jax.jit
@jax.grad
def exact_marginal_gradient(theta, x, y):
    """Gradient of log p(y | theta) of all elements, latents integrated out."""

    def one(x, y):
        covariance = jnp.eye(4) + 1.0 + jnp.exp(2 * theta[1]) * jnp.outer(x, x)
        return dist.MultivariateNormal(jnp.full(4, theta[0]), covariance).log_prob(y)

    return jax.vmap(one)(x, y).sum()


@partial(jax.jit, static_argnames=("plan",))
def residuals_at(plan, tuning, theta, silos, number, latents):
    """The residual of a silo for each of some standard normal positions ``(nodes, E, k)`` of its latents."""
    view = view_of(silos, number)
    positions, _ = view.units("x")
    rows = jax.tree.map(lambda v: v[positions], tuning.latents.rows)
    silo = langevin.open_silo(plan, tuning, (None, rows), view)
    mean, covariance = jax.vmap(partial(exact_conditional, theta))(silo.kwargs["x"], silo.kwargs["y"])
    z = mean + jnp.einsum("eij,nej->nei", jnp.linalg.cholesky(covariance), latents)
    eps = jax.vmap(partial(rows.inverse, tuning.latents.u(theta)))(z)
    return jax.vmap(lambda e: langevin.residual(plan, tuning, theta, e, silo, view)[0])(eps)


@pytest.mark.parametrize("seed", [0, 1])
def test_gradient_at_fixed_eps_has_the_marginal_gradient_as_its_mean(seed):
    rng = np.random.default_rng(seed)
    plan, tuning, silos = slopes_kernel(rng)
    theta = jnp.asarray(0.5 * rng.normal(size=2), jnp.float32)
    x, w = np.polynomial.hermite_e.hermegauss(6)  # the gradient is a polynomial of degree 2 in each eps: exact
    nodes = np.stack(np.meshgrid(x, x), -1).reshape(-1, 1, 2).astype(np.float32)
    weights = np.outer(w, w).reshape(-1) / w.sum() ** 2
    for s in range(2):
        values = residuals_at(plan, tuning, theta, silos, s, jnp.tile(nodes, (1, 3, 1)))
        values = np.asarray(values, np.float64) * float(tuning.selection[s])
        own = silos[silos.names[s]]
        expected = exact_marginal_gradient(theta, own["x"], own["y"])
        np.testing.assert_allclose(weights @ values, expected, rtol=2e-4, atol=2e-4)
        assert values.std(0).min() > 0.1  # negative control: at one eps it is not the marginal's


def test_units_that_are_padding_do_not_touch_the_gradient():
    plan, tuning, silos = slopes_kernel(np.random.default_rng(7))
    theta = jnp.asarray([0.2, -0.3])
    mask = np.asarray(view_of(silos, 0).mask("x"))
    np.testing.assert_array_equal(mask, [True, True, False])
    latents = np.random.default_rng(8).normal(size=(36, 3, 2)).astype(np.float32)
    first = residuals_at(plan, tuning, theta, silos, 0, latents)
    second = residuals_at(plan, tuning, theta, silos, 0, latents + 10 * ~mask[:, None].astype(bool))
    np.testing.assert_array_equal(first, second)
    third = residuals_at(plan, tuning, theta, silos, 0, latents + 10 * mask[:, None])
    assert np.abs(np.asarray(first - third)).max() > 1  # negative control


# Moves of local latents


def bent_density(eps):
    """A density that is neither Gaussian nor symmetric, one term a unit."""
    return jnp.sum(-0.3 * eps**4 + 0.5 * eps - 0.2 * (eps - 1) ** 2, -1) + 0.3 * jnp.sin(eps).prod(-1)


@partial(jax.jit, static_argnames=("joint",))
def acceptance(eps, noise, joint):
    """Where a proposal made with ``noise`` would go, and the probability of going there."""
    moved = MoveNoise(noise, jnp.full(noise.shape[0], -jnp.inf))
    owned = jnp.ones(noise.shape, bool)
    return metropolis(bent_density, eps, moved, owned, joint=joint)


@pytest.mark.parametrize("joint", [False, True], ids=["units", "joint"])
def test_moves_are_in_detailed_balance(joint):
    rng = np.random.default_rng(9)
    k = 3
    step = 1.4 * k ** (-1 / 6)

    def mean(eps):
        if not joint:
            return jnp.zeros_like(eps)
        return eps + 0.5 * step**2 * jax.grad(lambda e: bent_density(e).sum())(eps)

    spread = step if joint else 1.0
    for _ in range(5):
        here, noise = jnp.asarray(0.5 * rng.normal(size=(2, 1, k)), jnp.float32)
        there, forward = acceptance(here, noise, joint)
        noise_back = (here - mean(there)) / spread
        back, backward = acceptance(there, noise_back, joint)
        np.testing.assert_allclose(back, here, atol=1e-4)
        noise_there = (there - mean(here)) / spread
        flow = float(bent_density(here)[0] - 0.5 * jnp.sum(noise_there**2) + jnp.log(forward))
        flow_back = float(bent_density(there)[0] - 0.5 * jnp.sum(noise_back**2) + jnp.log(backward))
        assert flow == pytest.approx(flow_back, abs=1e-4)
        # negative control: the same without the proposal's density is out of balance
        assert abs(flow - flow_back + 0.5 * float(jnp.sum(noise_there**2 - noise_back**2))) > 1e-3


@partial(jax.jit, static_argnames=("units", "accept"))
def twenty_moves(units, theta, latents, eps, silos, key, accept):
    view = view_of(silos, 0)
    kwargs, weights = view.whole()
    u, sites = latents.u(theta), units.factors.unravel(theta)

    def target(e):
        return units.log_density(sites, latents.rows.forward(u, e), kwargs, weights, view)

    def step(eps, key):
        noise = move_noise(units, key, eps, view, 1)
        noise = jax.tree.map(lambda x: x[0], noise)
        if not accept:
            noise = noise._replace(log_uniform=jnp.full_like(noise.log_uniform, -jnp.inf))
        return metropolis(target, eps, noise, units.owned(view), joint=False)[0], None

    return latents.rows.forward(u, jax.lax.scan(step, eps, random.split(key, 20))[0])


def test_moves_keep_the_conditional_law_of_the_latents():
    """4,000 equal elements start from exact draws; after 20 moves mean and covariance are within 4 s.e."""
    rng, count = np.random.default_rng(10), 4000
    x, y = (np.tile(rng.normal(size=(1, 4)).astype(np.float32), (count, 1)) for _ in range(2))
    silos = fed.Silos({"all": {"x": x, "y": y}})
    units = Units(factorise(slopes, silos), "x", largest(silos))
    rows = jax.tree.map(lambda v: jnp.tile(v, (count,) + (1,) * (v.ndim - 1)), random_map(rng, 1, 2, 2))
    latents = LatentCoordinates(jnp.zeros(2), jnp.eye(2), rows)
    theta = jnp.asarray([0.4, -0.2])
    mean, covariance = exact_conditional(theta, jnp.asarray(x[0]), jnp.asarray(y[0]))
    start = mean + random.normal(random.key(11), (count, 2)) @ jnp.linalg.cholesky(covariance).T
    eps = rows.inverse(latents.u(theta), start)

    def errors(accept):
        z = twenty_moves(units, theta, latents, eps, silos, random.key(12), accept)
        w = jnp.linalg.solve(jnp.linalg.cholesky(covariance), (z - mean).T).T  # N(0, I) if right
        moments = jnp.stack([w[:, 0], w[:, 1], w[:, 0] ** 2 - 1, w[:, 1] ** 2 - 1, w[:, 0] * w[:, 1]])
        assert float(jnp.mean(jnp.any(z != start, 1))) > 0.5
        return np.abs(moments.mean(1)) * np.sqrt(count / np.array([1, 1, 2, 2, 1]))

    assert errors(accept=True).max() < 4
    assert errors(accept=False).max() > 20  # negative control: proposals always accepted


def test_noise_of_the_moves_follows_the_pooled_row_and_not_the_partition():
    labels = np.array([2, 0, 1, 0, 2, 1, 1])
    x = np.random.default_rng(13).normal(size=(7, 4)).astype(np.float32)
    found = []
    for by in (labels, np.zeros(7, int)):
        silos = fed.split({"x": x, "y": x}, by=by)
        units = Units(factorise(slopes, silos), "rows", largest(silos))
        normal = np.full((7, 2), np.nan)
        for s in range(len(silos)):
            view = view_of(silos, s)
            eps = jnp.zeros((dict(view.pad)["rows"], 2))
            draws = move_noise(units, random.key(14), eps, view, 3).normal[1]
            mask = np.asarray(view.mask("rows"))
            normal[np.asarray(units.identity(view))[mask]] = np.asarray(draws)[mask]
        found.append(normal)
    np.testing.assert_array_equal(*found)
    assert len(np.unique(found[0])) == found[0].size


# Stays


def run_kernel(kernel, silos, rounds=3, key=0, **init):
    state = kernel.init(random.key(key), 0, model_args=(silos,), **init)
    for _ in range(rounds):
        state = kernel.sample(state, (silos,), {})
    return state


def test_sgld_is_dsgld_with_one_silo():
    silos = linear_silos()
    rows = [silos[name] for name in silos]
    one = fed.Silos({"all": {k: np.concatenate([r[k] for r in rows]) for k in "xy"}})
    for batch in (None, 3):
        sgld = run_kernel(fed.SGLD(linear, 0.01, 7, batch, validate=False), silos)
        dsgld = run_kernel(fed.DSGLD(linear, 0.01, 7, batch, validate=False), one)
        np.testing.assert_allclose(sgld.z["beta"], dsgld.z["beta"], rtol=1e-6)
        assert int(sgld.visits.sum()) == int(sgld.visits[0]) == 3


def test_fsgld_with_one_silo_is_sgld():
    silos = linear_silos().as_one()
    given = random_surrogates(np.random.default_rng(15), 1, 2)
    start = {"beta": jnp.array([0.3, 0.1])}
    fsgld = run_kernel(fed.FSGLD(linear, 0.01, 7, surrogate=given, preconditioner=None), silos, init_params=start)
    sgld = run_kernel(fed.SGLD(linear, 0.01, 7), silos, init_params=start)
    np.testing.assert_allclose(fsgld.z["beta"], sgld.z["beta"], rtol=1e-4)


def test_dsgld_is_fsgld_with_alpha_zero():
    silos = linear_silos()
    dsgld = run_kernel(fed.DSGLD(linear, 0.01, 7, 3), silos)
    fsgld = run_kernel(fed.FSGLD(linear, 0.01, 7, 3, alpha=0.0, surrogate=None, preconditioner=None), silos)
    np.testing.assert_array_equal(dsgld.z["beta"], fsgld.z["beta"])
    other = run_kernel(
        fed.FSGLD(linear, 0.01, 7, 3, alpha=0.5, surrogate=exact_surrogates(silos), preconditioner=None), silos
    )
    assert np.abs(np.asarray(dsgld.z["beta"] - other.z["beta"])).max() > 1e-3  # negative control


def straight(y):
    """Rows so far away that the gradient is constant, and so large that noise does not matter."""
    mu = numpyro.sample("mu", dist.Normal(0, 1e6))
    with fed.silo_plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def rising(count):
    return 1e-10 * (1.0 + count)


@pytest.mark.parametrize(("steps", "batch"), [(1, None), (7, None), (100, None), (250, None), (211, 2)])
def test_every_local_step_is_made_once_with_its_own_step_size(steps, batch):
    """The chain moves by gradient / 2 x the sum of its steps' sizes, whatever the blocks."""
    silos = fed.Silos({"a": {"y": np.full(4, 1e7, np.float32)}, "b": {"y": np.full(4, 1.1e7, np.float32)}})
    kernel = fed.DSGLD(straight, rising, steps, batch, validate=False)
    state = kernel.init(random.key(0), 0, {"mu": jnp.zeros(())}, model_args=(silos,))
    for r in range(2):
        before = float(state.z["mu"])
        state = kernel.sample(state, (silos,), {})
        counts = np.arange(r * steps, (r + 1) * steps)
        gradient = [8e7, 8.8e7][int(state.silo)]
        moved = gradient / 2 * float(rising(counts).sum())
        # one step more or less would be 2 / 250 of a stay
        noise = 4 * np.sqrt(float(rising(counts).sum()))
        assert float(state.z["mu"]) - before == pytest.approx(moved, rel=1e-4, abs=noise)
        assert noise < 0.002 * moved or steps < 100
        assert float(state.step_size) == pytest.approx(float(rising(counts[-1])), rel=1e-5)
    assert int(state.i) == 2
    assert kernel.ledger(state).gradient_evaluations == tuple(int(v) * steps for v in state.visits)


def test_blocks_are_bounded_by_memory():
    rows = np.zeros((50, 1000), np.float32)
    wide = fed.Silos({"a": {"x": rows, "y": rows[:, 0]}, "b": {"x": rows[:40], "y": rows[:40, 0]}})
    plan, *_ = prepare(linear, wide, {}, options(num_local_steps=500, batch_size=40))
    assert (8 << 20) // (40 * 4 * 1001) == 52  # steps whose rows fit
    assert plan.block == 50
    assert dataclasses.replace(plan, num_local_steps=40).block == 40
    assert dataclasses.replace(plan, num_local_steps=53).block == 27  # 53 is prime: two blocks that differ by one step
    plan, *_ = prepare(linear, wide, {}, options(num_local_steps=500))
    assert plan.block == 125


def quartic(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with fed.silo_plate("rows", y.shape[0]):
        numpyro.factor("term", -((mu - y) ** 4))


def first_stay_is_huge(count):
    return jnp.where(count < 20, 1e3, 1e-4)


def test_a_stay_that_leaves_the_reals_is_undone_and_counted():
    silos = fed.Silos({"a": {"y": np.zeros(2, np.float32)}, "b": {"y": np.ones(2, np.float32)}})
    kernel = fed.DSGLD(quartic, first_stay_is_huge, 20)
    state = kernel.init(random.key(0), 0, {"mu": jnp.asarray(0.5)}, model_args=(silos,))
    state = kernel.sample(state, (silos,), {})
    assert bool(state.diverging)
    assert float(state.z["mu"]) == 0.5
    state = kernel.sample(state, (silos,), {})
    assert not bool(state.diverging)
    assert np.isfinite(float(state.z["mu"]))
    assert float(state.z["mu"]) != 0.5


def test_a_stay_that_leaves_the_reals_restores_local_latents():
    plan, tuning, silos = slopes_kernel(np.random.default_rng(16))
    plan = dataclasses.replace(plan, num_local_steps=3)
    view = view_of(silos, 1)
    rows = jax.tree.map(lambda v: np.asarray(v)[2:], tuning.latents.rows)
    eps = jnp.asarray(np.random.default_rng(17).normal(size=(3, 2)), jnp.float32)
    stay = jax.jit(langevin.stay, static_argnums=0)
    for step_size, finite in ((1e30, False), (1e-4, True)):
        tuned = tuning._replace(step_size=jnp.asarray(step_size))
        chain = Chain(jnp.array([0.1, 0.2]), jnp.zeros((), jnp.int32))
        (end, stats), (after, _) = stay(plan, tuned, random.key(0), chain, (eps, rows), view)
        assert bool(stats.finite) == finite
        assert np.array_equal(end.theta, chain.theta) == (not finite)
        assert np.array_equal(after, eps) == (not finite)
        assert int(end.num_steps) == 3


@pytest.fixture(scope="module")
def intercepts_kernel():
    silos = intercepts_silos()
    kernel = fed.FSGLD(intercepts, num_local_steps=5)
    kernel.init(random.key(0), 0, model_args=(silos,))
    return kernel, silos


def test_exact_local_maps_leave_no_residual_and_accept_every_move(intercepts_kernel):
    kernel, silos = intercepts_kernel
    state = run_kernel(kernel, silos)
    assert float(state.local_accept_prob) > 0.999
    assert float(state.inflation) == pytest.approx(1 / np.sqrt(1 - float(state.step_size) / 4), rel=1e-3)


def test_local_latents_keep_their_pooled_places_and_stay_in_their_silos(intercepts_kernel):
    kernel, silos = intercepts_kernel
    start = {"mu": jnp.asarray(0.3), "a": jnp.arange(18.0)}
    state = kernel.init(random.key(0), 0, start, model_args=(silos,))
    np.testing.assert_allclose(state.z["a"], start["a"], atol=1e-4)
    owner = np.asarray(silos.silo_of_row("groups"))[np.asarray(silos.pooled_position("groups"))]
    np.testing.assert_array_equal(silos.pooled["groups"], np.arange(18))
    for _ in range(2):
        new = kernel.sample(state, (silos,), {})
        # at fixed eps every latent moves with theta; the visited silo's eps are redrawn
        flat_owner = silos.silo_of_row("groups")
        changed = np.any(np.asarray(new.eps != state.eps), 1)
        np.testing.assert_array_equal(changed, flat_owner == int(new.silo))
        slope = (np.asarray(new.z["a"]) - np.asarray(state.z["a"])) / float(new.z["mu"] - state.z["mu"])
        elsewhere = owner != int(new.silo)
        np.testing.assert_allclose(slope[elsewhere], slope[elsewhere][0], rtol=1e-3)
        state = new


def test_ledger_counts_rounds_gradients_and_bytes(intercepts_kernel):
    kernel, silos = intercepts_kernel
    state = run_kernel(kernel, silos, rounds=4)
    ledger, before = kernel.ledger(state), kernel.ledger(kernel.init(random.key(0), 0, model_args=(silos,)))
    visits = np.asarray(state.visits)
    assert ledger.silos == silos.names
    assert visits.sum() == 4
    for field, each in {"rounds": 1, "gradient_evaluations": 5, "bytes_down": 4 + 4, "bytes_up": 4 + 12}.items():
        gained = np.subtract(getattr(ledger, field), getattr(before, field))
        np.testing.assert_array_equal(gained, visits * each)
        assert min(getattr(before, field)) > 0  # what fitting cost
