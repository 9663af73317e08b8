"""Local latents: the gradient at fixed eps, the moves, and their places, exactly.

By quadrature and detailed balance.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from small_models import intercepts, intercepts_silos, run_kernel, view_of

import numpyro_fed as fed
from numpyro_fed.data.views import largest
from numpyro_fed.density.factorize import factorize
from numpyro_fed.density.local_map import LocalMap, Units
from numpyro_fed.mcmc import gradients, langevin
from numpyro_fed.mcmc.config import LatentCoordinates, Tuning
from numpyro_fed.mcmc.langevin import Chain
from numpyro_fed.mcmc.local_moves import MoveNoise, metropolis, move_noise

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
    return fed.Silos(
        {k: {n: rng.normal(size=(g, 4)).astype(np.float32) for n in "xy"} for k, g in sizes.items()}
    )


def random_map(rng, units, k, dim):
    tril = np.tril(rng.normal(size=(units, k, k)), -1) + np.eye(k)
    shapes = {"mean": (k,), "coupling": (k, dim), "log_scale": (k,), "scale_coupling": (k, dim)}
    parts = {name: 0.4 * rng.normal(size=(units, *shape)) for name, shape in shapes.items()}
    return LocalMap(
        **{name: jnp.asarray(x, jnp.float32) for name, x in {**parts, "tril": tril}.items()}
    )


def slopes_kernel(rng):
    """Config, tuning and silos of the model above with a local map that is as wrong as can be."""
    silos = slopes_silos()
    factors = factorize(slopes, silos)
    units = Units(factors, "x", largest(silos))
    assert units.dim == 2
    config = langevin.LangevinConfig(factors, units, 1, None, False, None)
    whiten = jnp.asarray(np.eye(2) + 0.3 * rng.normal(size=(2, 2)), jnp.float32)
    latents = LatentCoordinates(
        jnp.asarray(rng.normal(size=2), jnp.float32), whiten, random_map(rng, 5, 2, 2)
    )
    zero = jnp.zeros(())
    tuning = Tuning(zero, zero, jnp.array([0.4, 0.6]), jnp.zeros(2), None, None, latents, zero)
    return config, tuning, silos


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


@partial(jax.jit, static_argnames=("config",))
def residuals_at(config, tuning, theta, silos, number, latents):
    """Return the residual of a silo for some standard normal positions of its latents.

    :param positions: ``(nodes, E, k)``.
    """
    view = view_of(silos, number)
    positions, _ = view.units("x")
    rows = jax.tree.map(lambda v: v[positions], tuning.latents.rows)
    silo = gradients.open_silo(config, tuning, (None, rows), view)
    mean, covariance = jax.vmap(partial(exact_conditional, theta))(
        silo.kwargs["x"], silo.kwargs["y"]
    )
    z = mean + jnp.einsum("eij,nej->nei", jnp.linalg.cholesky(covariance), latents)
    eps = jax.vmap(partial(rows.inverse, tuning.latents.u(theta)))(z)
    return jax.vmap(lambda e: gradients.residual(config, tuning, theta, e, silo, view)[0])(eps)


@pytest.mark.parametrize("seed", [0, 1])
def test_gradient_at_fixed_eps_has_the_marginal_gradient_as_its_mean(seed):
    rng = np.random.default_rng(seed)
    config, tuning, silos = slopes_kernel(rng)
    theta = jnp.asarray(0.5 * rng.normal(size=2), jnp.float32)
    x, w = np.polynomial.hermite_e.hermegauss(
        6
    )  # the gradient is a polynomial of degree 2 in each eps: exact
    nodes = np.stack(np.meshgrid(x, x), -1).reshape(-1, 1, 2).astype(np.float32)
    weights = np.outer(w, w).reshape(-1) / w.sum() ** 2
    for s in range(2):
        values = residuals_at(config, tuning, theta, silos, s, jnp.tile(nodes, (1, 3, 1)))
        values = np.asarray(values, np.float64) * float(tuning.selection[s])
        own = silos[silos.names[s]]
        expected = exact_marginal_gradient(theta, own["x"], own["y"])
        np.testing.assert_allclose(weights @ values, expected, rtol=2e-4, atol=2e-4)
        assert values.std(0).min() > 0.1  # negative control: at one eps it is not the marginal's


def test_units_that_are_padding_do_not_touch_the_gradient():
    config, tuning, silos = slopes_kernel(np.random.default_rng(7))
    theta = jnp.asarray([0.2, -0.3])
    mask = np.asarray(view_of(silos, 0).mask("x"))
    np.testing.assert_array_equal(mask, [True, True, False])
    latents = np.random.default_rng(8).normal(size=(36, 3, 2)).astype(np.float32)
    first = residuals_at(config, tuning, theta, silos, 0, latents)
    second = residuals_at(
        config, tuning, theta, silos, 0, latents + 10 * ~mask[:, None].astype(bool)
    )
    np.testing.assert_array_equal(first, second)
    third = residuals_at(config, tuning, theta, silos, 0, latents + 10 * mask[:, None])
    assert np.abs(np.asarray(first - third)).max() > 1  # negative control


# Moves of local latents


def bent_density(eps):
    """Return a density that is neither Gaussian nor symmetric, one term a unit."""
    return jnp.sum(-0.3 * eps**4 + 0.5 * eps - 0.2 * (eps - 1) ** 2, -1) + 0.3 * jnp.sin(eps).prod(
        -1
    )


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
    """4,000 equal elements start from exact draws.

    After 20 moves mean and covariance are within 4 s.e.
    """
    rng, count = np.random.default_rng(10), 4000
    x, y = (np.tile(rng.normal(size=(1, 4)).astype(np.float32), (count, 1)) for _ in range(2))
    silos = fed.Silos({"all": {"x": x, "y": y}})
    units = Units(factorize(slopes, silos), "x", largest(silos))
    rows = jax.tree.map(
        lambda v: jnp.tile(v, (count,) + (1,) * (v.ndim - 1)), random_map(rng, 1, 2, 2)
    )
    latents = LatentCoordinates(jnp.zeros(2), jnp.eye(2), rows)
    theta = jnp.asarray([0.4, -0.2])
    mean, covariance = exact_conditional(theta, jnp.asarray(x[0]), jnp.asarray(y[0]))
    start = mean + random.normal(random.key(11), (count, 2)) @ jnp.linalg.cholesky(covariance).T
    eps = rows.inverse(latents.u(theta), start)

    def errors(accept):
        z = twenty_moves(units, theta, latents, eps, silos, random.key(12), accept)
        w = jnp.linalg.solve(jnp.linalg.cholesky(covariance), (z - mean).T).T  # N(0, I) if right
        moments = jnp.stack(
            [w[:, 0], w[:, 1], w[:, 0] ** 2 - 1, w[:, 1] ** 2 - 1, w[:, 0] * w[:, 1]]
        )
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
        units = Units(factorize(slopes, silos), "rows", largest(silos))
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


# Visits


def test_a_stay_that_leaves_the_reals_restores_local_latents():
    config, tuning, silos = slopes_kernel(np.random.default_rng(16))
    config = dataclasses.replace(config, num_local_steps=3)
    view = view_of(silos, 1)
    rows = jax.tree.map(lambda v: np.asarray(v)[2:], tuning.latents.rows)
    eps = jnp.asarray(np.random.default_rng(17).normal(size=(3, 2)), jnp.float32)
    visit = jax.jit(langevin.visit, static_argnums=0)
    for step_size, finite in ((1e30, False), (1e-4, True)):
        tuned = tuning._replace(step_size=jnp.asarray(step_size))
        chain = Chain(jnp.array([0.1, 0.2]), jnp.zeros((), jnp.int32))
        (end, stats), (after, _) = visit(config, tuned, random.key(0), chain, (eps, rows), view)
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


@pytest.mark.ci
def test_exact_local_maps_leave_no_residual_and_accept_every_move(intercepts_kernel):
    kernel, silos = intercepts_kernel
    state = run_kernel(kernel, silos)
    assert (
        float(state.local_accept_prob) > 0.8
    )  # 1 but for the wide proposals, whose mean is about 0.8
    assert float(state.inflation) == pytest.approx(
        1 / np.sqrt(1 - float(state.step_size) / 4), rel=1e-3
    )


@pytest.mark.ci
def test_local_latents_keep_their_pooled_places_and_stay_in_their_silos(intercepts_kernel):
    kernel, silos = intercepts_kernel
    # within a few sds of the map, whose scales are constant up to the fit's rounding
    start = {"mu": jnp.asarray(0.3), "a": jnp.linspace(0.0, 3.0, 18)}
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
        slope = (np.asarray(new.z["a"]) - np.asarray(state.z["a"])) / float(
            new.z["mu"] - state.z["mu"]
        )
        remote = owner != int(new.silo)
        np.testing.assert_allclose(slope[remote], slope[remote][0], rtol=1e-3)
        state = new
