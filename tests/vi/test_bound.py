"""The importance-weighted bound of a silo, and its gradients.

The doubly reparametrized gradients are compared with plain ones.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from marks import heavy
from vi_models import GROUP_SD, ROW_SD, hierarchy, hierarchy_silos, wheeze, wheeze_silos

import numpyro_fed as fed
from numpyro_fed.data.views import stack
from numpyro_fed.density.factorize import factorize
from numpyro_fed.density.local_map import LocalMap
from numpyro_fed.vi.bound import silo_bound, unit_terms
from numpyro_fed.vi.guides.normal import Context
from numpyro_fed.vi.guides.scales import Diagonal, LowRank, Triangular, relative
from numpyro_fed.vi.minibatch import pick


def setup(model, silos, **options):
    """Return a family, the rows of the only silo, and its batch."""
    family = fed.AutoSiloNormal(model, **options).family(factorize(model, silos), {})
    rows = jax.tree.map(lambda x: x[0], stack(silos)[0])
    return family, rows, pick(family, None, random.key(0), rows)


def some_map(family, rows, seed=0):
    """Return a map whose every part matters."""
    rng = np.random.default_rng(seed)
    start = family.init_local(rows)
    return jax.tree.map(lambda x: jnp.asarray(x + 0.3 * rng.normal(size=x.shape)), start)


def plain_value(family, local, context, batch, eps):
    """Return the bound as its definition says, all of it to be differentiated."""
    z = family.latents(local, context, eps, batch.rows)

    def log_weight(z):
        terms, _ = unit_terms(family, context.theta, z, {}, batch)
        return terms - family.log_local(local, context, z, batch.rows)

    return jnp.sum(jax.nn.logsumexp(jax.vmap(log_weight)(z), axis=0) - jnp.log(len(z)))


@pytest.mark.parametrize("num", heavy([1, 4], 1))
def test_gradients_are_those_of_the_bound_on_average(num):
    """Within 4 Monte-Carlo errors from 4,000 draws; unsquared weights are a control that fails."""
    with jax.enable_x64(True):
        family, rows, batch = setup(wheeze, wheeze_silos(np.zeros(5, int)))
        local = some_map(family, rows)
        context = Context(jnp.array([-0.4, 0.5, 0.3]), jnp.array([0.5, -1.0, 0.7]), {})

        def both(key):
            eps = family.noise(key, rows, num)
            ours = silo_bound(family, local, context, {}, eps, batch)
            plain = jax.grad(lambda local: plain_value(family, local, context, batch, eps))(local)
            _, pull = jax.vjp(lambda local: family.latents(local, context, eps, rows), local)
            z = family.latents(local, context, eps, rows)
            lw, slope = jax.vjp(lambda z: jax.vmap(lambda z: weigh(z))(z), z)
            unsquared = pull(slope(jax.nn.softmax(lw, axis=0))[0])[0]
            return ours.local, plain, unsquared, ours.context.u

        def weigh(z):
            return unit_terms(family, context.theta, z, {}, batch)[0] - family.log_local(
                local, context, z, rows
            )

        ours, plain, unsquared, shift = jax.lax.map(
            both, random.split(random.key(1), 4000), batch_size=200
        )

        def off(one, other):
            """Largest difference of means in standard errors."""
            gap = [
                np.asarray(a - b)
                for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
            ]
            return max(
                float(np.abs(g.mean(0) / (g.std(0) / np.sqrt(len(g)) + 1e-12)).max()) for g in gap
            )

        assert off(ours, plain) < 4.5  # the largest of 65 numbers
        assert off(shift, jnp.zeros_like(shift)) < 4.5
        if num > 1:
            assert off(unsquared, plain) > 10


@pytest.mark.parametrize("num", heavy([1, 5], 1))
def test_no_noise_is_left_at_the_exact_posterior(num):
    with jax.enable_x64(True):
        silos = hierarchy_silos(np.zeros(6, int))
        family, rows, batch = setup(hierarchy, silos)
        loc, scale = 0.4, 0.6
        precision = GROUP_SD**-2 + ROW_SD**-2
        y = rows.rows["y"]
        gain = GROUP_SD**-2 / precision
        local = LocalMap(
            mean=((y / ROW_SD**2 + loc * GROUP_SD**-2) / precision)[:, None],
            log_scale=jnp.full((6, 1), -0.5 * np.log(precision)),
            coupling=jnp.full((6, 1, 1), gain * scale),
            scale_coupling=jnp.zeros((6, 1, 1)),
        )
        u = jnp.array([0.8])
        context = Context(loc + scale * u, u, {})

        @jax.jit
        def term_at(key):
            return silo_bound(family, local, context, {}, family.noise(key, rows, num), batch)

        terms = [term_at(random.key(i)) for i in range(3)]
        var = GROUP_SD**2 + ROW_SD**2
        exact = np.sum(-0.5 * (y - context.theta) ** 2 / var - 0.5 * np.log(2 * np.pi * var))
        for term in terms:
            assert float(term.value) == pytest.approx(float(exact), rel=1e-12)
            assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(term.local)) < 1e-12
            # the gradient in theta at fixed z, less q's: that of the marginal likelihood
            total = term.context.theta + term.context.u / scale
            np.testing.assert_allclose(total, np.sum(y - context.theta) / var, rtol=1e-10)


@pytest.mark.ci
def test_bound_grows_with_the_number_of_particles():
    with jax.enable_x64(True):
        family, rows, batch = setup(wheeze, wheeze_silos(np.zeros(20, int)))
        local = family.init_local(rows)
        context = Context(jnp.array([-0.4, 0.5, 0.3]), jnp.array([0.5, -1.0, 0.7]), {})
        values = {}
        for num in (1, 2, 8, 32):

            def one(key, num=num):
                return silo_bound(
                    family, local, context, {}, family.noise(key, rows, num), batch
                ).value

            draws = jax.lax.map(one, random.split(random.key(0), 500))
            values[num] = (float(draws.mean()), float(draws.std() / np.sqrt(500)))
        means = [m for m, _ in values.values()]
        for (low, e1), (high, e2) in zip(
            list(values.values())[:-1], list(values.values())[1:], strict=True
        ):
            assert high - low > 4 * np.hypot(e1, e2)
        assert means == sorted(means)


# pieces


@pytest.mark.parametrize("kind", ["full", "diag", "rank"])
def test_scales_agree_with_their_matrices(kind):
    with jax.enable_x64(True):
        rng = np.random.default_rng(1)
        scale = {
            "full": Triangular(jnp.asarray(np.tril(rng.normal(size=(5, 5))) + 3 * np.eye(5))),
            "diag": Diagonal(jnp.asarray(rng.uniform(0.5, 2, 5))),
            "rank": LowRank(
                jnp.asarray(rng.uniform(0.5, 2, 5)), jnp.asarray(rng.normal(size=(5, 2)))
            ),
        }[kind]
        root = np.stack([np.asarray(scale.apply(e)) for e in np.eye(5)], 1)
        expected = np.diag(root @ root.T) if kind == "diag" else root @ root.T
        np.testing.assert_allclose(scale.covariance(), expected, rtol=1e-12, atol=1e-14)
        x = jnp.asarray(rng.normal(size=5))
        np.testing.assert_allclose(scale.solve(scale.apply(x)), x, rtol=1e-10)
        assert float(scale.log_det()) == pytest.approx(np.linalg.slogdet(root)[1], rel=1e-12)
        np.testing.assert_allclose(scale.sd(), np.sqrt(np.diag(root @ root.T)), rtol=1e-12)
        other = Triangular(jnp.asarray(np.tril(rng.normal(size=(5, 5))) + 3 * np.eye(5)))
        np.testing.assert_allclose(
            relative(other, scale), np.linalg.solve(other.tril, root), rtol=1e-9, atol=1e-12
        )


def test_a_rebased_map_is_the_same_function():
    with jax.enable_x64(True):
        family, rows, _ = setup(wheeze, wheeze_silos(np.zeros(5, int)))
        local = some_map(family, rows)
        rng = np.random.default_rng(4)

        def params():
            tril = np.tril(0.2 * rng.normal(size=(3, 3))) + np.eye(3)
            return {
                "auto_loc": jnp.asarray(rng.normal(size=3)),
                "auto_scale_tril": jnp.asarray(tril),
            }

        old, new = params(), params()
        theta = jnp.asarray(rng.normal(size=3))
        eps = jnp.asarray(rng.normal(size=(5, 1)))
        there = family.rebased(local, old, new)
        np.testing.assert_allclose(
            there.forward(family.whiten(new, theta), eps),
            local.forward(family.whiten(old, theta), eps),
            rtol=1e-10,
        )


def test_rows_that_reach_an_element_by_way_of_others_count_once():
    """Pupils point to classes, classes to schools, and schools alone have latents."""

    def model(y, klass, school, schools):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with fed.silo_plate("schools", schools.shape[0]):
            a = numpyro.sample("a", dist.Normal(mean, 0.7))
        with fed.silo_plate("pupils", y.shape[0]):
            numpyro.sample("y", dist.Normal(a[school[klass]], 0.5), obs=y)

    part = {
        "y": np.array([0.2, 1.0, 0.4, 2.0], np.float32),
        "klass": np.array([0, 1, 1, 2]),
        "school": np.array([0, 1, 1]),
        "schools": np.arange(2),
    }
    rows = {"y": "pupils", "klass": "pupils", "school": "classes", "schools": "schools"}
    silos = fed.Silos({"one": part}, rows=rows, index={"klass": "classes", "school": "schools"})
    family, rows, batch = setup(model, silos)
    theta, z = jnp.array([0.3]), jnp.array([[0.5], [1.1]])
    terms, rest = unit_terms(family, theta, z, {}, batch)
    factors = family.factors
    kwargs, weights = rows.whole()
    expected = factors.log_local(factors.unravel(theta), {"a": z[:, 0]}, kwargs, weights)
    assert rest == 0
    np.testing.assert_allclose(terms.sum(), expected, rtol=1e-6)


@pytest.mark.ci
def test_padding_has_no_part_in_the_bound():
    silos = hierarchy_silos(np.array([0] * 3 + [1] * 7))
    rows = stack(silos)[0]
    family = fed.AutoSiloNormal(hierarchy).family(factorize(hierarchy, silos), {})
    context = Context(jnp.array([0.3]), jnp.array([0.2]), {})

    def bound(rows, num):
        eps = jnp.zeros(
            (num, *family.init_local(rows).shape)
        )  # all candidates alike: K says nothing
        return silo_bound(
            family,
            family.init_local(rows),
            context,
            {},
            eps,
            pick(family, None, random.key(0), rows),
        ).value

    one, many = (jax.vmap(lambda r, k=k: bound(r, k), in_axes=(rows.axes,))(rows) for k in (1, 8))
    assert len(one) == 2
    np.testing.assert_allclose(one, many, rtol=1e-5)
