"""Latents of two nested plates: marginal, map, moves and whole runs.

All are exact, on a model where everything is Gaussian.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC
from small_models import view_of

import numpyro_fed as fed
from numpyro_fed.data import views as storage
from numpyro_fed.data.views import largest
from numpyro_fed.density.factorize import factorize
from numpyro_fed.density.independence import elements_are_independent
from numpyro_fed.density.local_map import LocalMap
from numpyro_fed.density.nested import NestedMap, NestedUnits, nesting
from numpyro_fed.mcmc import pilot
from numpyro_fed.mcmc.config import LangevinConfig
from numpyro_fed.mcmc.local_moves import MoveNoise, move_noise
from numpyro_fed.mcmc.nested_moves import nested_metropolis
from numpyro_fed.mcmc.setup import model_setup
from numpyro_fed.surrogates.local_score import Message, marginal_score
from numpyro_fed.surrogates.nested_marginal import nested_marginal

SCHOOL_SD, CLASS_SD, ROW_SD = 0.7, 0.5, 0.8


def pupils(y, klass, school, schools, slope=0.0):
    """Pupils in classes in schools; a school may have no class, a class no pupil."""
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with fed.silo_plate("schools", schools.shape[0]):
        a = numpyro.sample("a", dist.Normal(mean, SCHOOL_SD))
    with fed.silo_plate("classes", school.shape[0]):
        b = numpyro.sample("b", dist.Normal(slope * a[school], CLASS_SD))
    with fed.silo_plate("pupils", y.shape[0]):
        numpyro.sample("y", dist.Normal(a[school[klass]] + b[klass], ROW_SD), obs=y)


ROWS = {"y": "pupils", "klass": "pupils", "school": "classes", "schools": "schools"}
INDEX = {"klass": "classes", "school": "schools"}
SCHOOL = np.array([0, 0, 1, 2, 3, 3, 3])  # of the classes; school 4 has none
KLASS = np.array([0, 0, 1, 2, 2, 2, 3, 4, 5, 5])  # of the pupils; class 6 has none


def pupils_silos():
    y = np.random.default_rng(0).normal(1, 1, size=len(KLASS)).astype(np.float32)
    north = {"y": y[:6], "klass": KLASS[:6], "school": SCHOOL[:3], "schools": np.arange(2)}
    south = {"y": y[6:], "klass": KLASS[6:] - 3, "school": SCHOOL[3:] - 2, "schools": np.arange(3)}
    return fed.Silos({"north": north, "south": south}, rows=ROWS, index=INDEX)


def pupils_posterior(silos):
    """Exact mean and covariance of (mean, a, b) in pooled order."""
    design = np.zeros((10 + 1 + 5 + 7, 13))
    precision = np.r_[
        np.full(10, ROW_SD**-2), 1.0, np.full(5, SCHOOL_SD**-2), np.full(7, CLASS_SD**-2)
    ]
    design[np.arange(10), 1 + SCHOOL[KLASS]] = 1
    design[np.arange(10), 6 + KLASS] = 1
    design[10:, :] = np.eye(13)
    design[11:16, 0] = -1
    right = np.r_[np.asarray(silos.pooled["y"], float), np.zeros(13)]
    covariance = np.linalg.inv(design.T @ (precision[:, None] * design))
    return covariance @ design.T @ (precision * right), covariance


def units_of(model, silos):
    factors = factorize(model, silos)
    return NestedUnits(factors, None, largest(silos), *nesting(factors))


# Structure


@pytest.mark.ci
def test_who_is_inside_whom():
    silos = pupils_silos()
    units = units_of(pupils, silos)
    assert (units.outer, units.inner) == ("schools", "classes")
    assert elements_are_independent(units.factors, units, silos)
    reversed_units = replace(units, outer="classes", inner="schools")
    with pytest.raises(StopIteration):
        reversed_units.parent(view_of(silos, 0).whole()[0])


def test_rows_belong_to_the_innermost_element_also_by_way_of_others():
    silos = pupils_silos()
    factors = factorize(pupils, silos)
    kwargs = {"klass": jnp.array([0, 1, 1, 2]), "school": jnp.array([0, 0, 1])}
    local = {
        "pupils": jnp.array([1.0, 2, 4, 8]),
        "classes": jnp.array([16.0, 32, 64]),
        "schools": jnp.array([128.0, 256]),
    }
    (outer, inner), rest = factors.by_elements(("schools", "classes"), local, kwargs)
    assert outer.tolist() == [128, 256]
    assert inner.tolist() == [17, 38, 72]
    assert rest == 0
    # where classes are no level pupils reach their school through them
    (outer,), rest = factors.by_elements(("schools",), local, kwargs)
    assert outer.tolist() == [128 + 17 + 38, 256 + 72]
    _, rest = factors.by_elements(("classes",), local, kwargs)
    assert rest == 384


@pytest.mark.parametrize("names", [("klass", "own_school"), ("own_klass", "a_school")])
def test_what_a_row_points_to_itself_goes_before_what_it_reaches(names):
    """The order does not depend on names.

    By way of its class the last pupil would be in school 0. Rows that point to their like are no
    way.
    """
    klass, own = names

    def model(y, school, schools, friend, **index):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with fed.silo_plate("schools", schools.shape[0]):
            a = numpyro.sample("a", dist.Normal(mean, 1))
        with fed.silo_plate("pupils", y.shape[0]):
            numpyro.sample("y", dist.Normal(a[index[own]] + 0.1 * y[friend], 1), obs=y)

    part = {
        "y": np.ones(3, np.float32),
        klass: np.array([0, 0, 0]),
        own: np.array([0, 0, 1]),
        "school": np.array([0]),
        "schools": np.arange(2),
        "friend": np.array([1, 2, 0]),
    }
    rows = {
        "y": "pupils",
        klass: "pupils",
        own: "pupils",
        "friend": "pupils",
        "school": "classes",
        "schools": "schools",
    }
    index = {klass: "classes", own: "schools", "school": "schools", "friend": "pupils"}
    factors = factorize(model, fed.Silos({"one": part}, rows=rows, index=index))
    (terms,), rest = factors.by_elements(
        ("schools",), {"pupils": jnp.array([1.0, 2, 4]), "schools": jnp.array([8.0, 16])}, part
    )
    assert terms.tolist() == [11, 20]
    assert rest == 0


@pytest.mark.ci
def test_plates_that_are_crossed_move_together():
    def crossed(y, left, right, lefts, rights):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with fed.silo_plate("lefts", lefts.shape[0]):
            a = numpyro.sample("a", dist.Normal(mean, 1))
        with fed.silo_plate("rights", rights.shape[0]):
            b = numpyro.sample("b", dist.Normal(0, 1))
        with fed.silo_plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(a[left] + b[right], 1), obs=y)

    part = {
        "y": np.ones(4, np.float32),
        "left": np.array([0, 0, 1, 1]),
        "right": np.array([0, 1, 0, 1]),
        "lefts": np.arange(2),
        "rights": np.arange(2),
    }
    rows = {"y": "rows", "left": "rows", "right": "rows", "lefts": "lefts", "rights": "rights"}
    silos = fed.Silos(
        {"one": part, "two": part}, rows=rows, index={"left": "lefts", "right": "rights"}
    )
    kernel = fed.FSGLD(crossed)
    with pytest.warns(
        UserWarning,
        match=r"'rights'\] are not two plates nested by .* \['a', 'b'\] of a silo are one unit",
    ):
        kernel.init(random.key(0), 0, model_args=(silos,))
    assert type(kernel._config.units).__name__ == "Units"


def test_inner_elements_that_depend_on_each_other_are_found_out():
    def tied(y, klass, school, schools):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with fed.silo_plate("schools", schools.shape[0]):
            a = numpyro.sample("a", dist.Normal(mean, 1))
        with fed.silo_plate("classes", school.shape[0]):
            b = numpyro.sample("b", dist.Normal(0, 1))
        with fed.silo_plate("pupils", y.shape[0]):
            numpyro.sample("y", dist.Normal(a[school[klass]] + jnp.cumsum(b)[klass], 1), obs=y)

    silos = pupils_silos()
    units = units_of(tied, silos)
    assert not elements_are_independent(units.factors, units, silos)


# Marginal

PARENT = jnp.array([0, 0, 0, 1, 1])


@pytest.mark.parametrize("width", [1, 2])
def test_marginal_value_and_score_are_exact_for_gaussians(width):
    """Scalars have trapezoidal rules.

    Two latents an outer element have quasi-Monte-Carlo, which is less exact.
    """
    y = jnp.asarray(np.random.default_rng(1).normal(size=5), jnp.float32)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(5, width)), jnp.float32).at[:, 0].set(1)
    noise = 0.7

    def log_terms(u, a, b):
        mean, log_outer, log_inner = u
        eta = mean + jnp.exp(log_outer) * jnp.sum(x * a[PARENT], 1) + jnp.exp(log_inner) * b[:, 0]
        own = -0.5 * jnp.sum(a**2, 1)
        return own, -0.5 * b[:, 0] ** 2 - 0.5 * ((y - eta) / noise) ** 2, jnp.zeros(())

    def exact(u):
        mean, log_outer, log_inner = u
        same = PARENT[:, None] == PARENT
        covariance = jnp.exp(2 * log_outer) * same * (x @ x.T) + (
            jnp.exp(2 * log_inner) + noise**2
        ) * jnp.eye(5)
        r = y - mean
        # the terms above leave the rows' normalization out, log_normalizer the latents'
        scale = 5 * jnp.log(noise)
        return (
            -0.5 * r @ jnp.linalg.solve(covariance, r)
            - 0.5 * jnp.linalg.slogdet(covariance)[1]
            + scale
        )

    u = jnp.array([0.3, -0.2, 0.1])
    starts = jnp.zeros((2, width)), jnp.zeros((5, 1))
    found = jax.jit(lambda u: nested_marginal(log_terms, u, PARENT, starts, jnp.zeros(width)))(u)
    tolerance = 2e-4 if width == 1 else 0.05
    np.testing.assert_allclose(found.value, exact(u), atol=tolerance)
    np.testing.assert_allclose(found.score, jax.grad(exact)(u), atol=5 * tolerance)
    inner_variance = noise**2 / (noise**2 + jnp.exp(0.2))
    np.testing.assert_allclose(found.inner.chol[:, 0, 0], np.sqrt(inner_variance), rtol=1e-4)


@pytest.mark.ci
def test_marginal_of_two_inner_latents():
    """A product of trapezoidal rules; errors of 40 elements add up."""
    count, parent = 40, jnp.repeat(jnp.arange(10), 4)
    y = jnp.asarray(np.random.default_rng(7).normal(size=count), jnp.float32)

    def log_terms(u, a, b):
        eta = u[0] + a[parent, 0] + jnp.exp(u[1]) * (b[:, 0] + 0.5 * b[:, 1])
        return -0.5 * a[:, 0] ** 2, -0.5 * jnp.sum(b**2, 1) - 0.5 * (y - eta) ** 2, jnp.zeros(())

    def exact(u):
        same = parent[:, None] == parent
        covariance = same + (1.25 * jnp.exp(2 * u[1]) + 1) * jnp.eye(count)
        r = y - u[0]
        return -0.5 * r @ jnp.linalg.solve(covariance, r) - 0.5 * jnp.linalg.slogdet(covariance)[1]

    u, starts = jnp.array([0.1, -0.1]), (jnp.zeros((10, 1)), jnp.zeros((count, 2)))
    found = jax.jit(lambda u: nested_marginal(log_terms, u, parent, starts))(u)
    np.testing.assert_allclose(found.value, exact(u), atol=0.05)
    np.testing.assert_allclose(found.score, jax.grad(exact)(u), atol=0.1)


def test_marginal_of_binary_data_is_that_of_fine_grids():
    """One outer element has three inner ones, two of them with equal answers.

    The marginal is integrated by brute force.
    """
    counts = np.array([0.0, 2.0, 4.0])  # of 4
    parent = jnp.zeros(3, int)

    def log_terms(u, a, b):
        eta = u[0] + jnp.exp(u[1]) * a[parent, 0] + jnp.exp(u[2]) * b[:, 0]
        return (
            -0.5 * a[:, 0] ** 2,
            counts * eta - 4 * jax.nn.softplus(eta) - 0.5 * b[:, 0] ** 2,
            jnp.zeros(()),
        )

    def brute(u):
        grid = np.linspace(-9, 9, 1201)
        eta = u[0] + np.exp(u[1]) * grid[:, None, None] + np.exp(u[2]) * grid[:, None]
        inner = np.exp(counts * eta - 4 * np.logaddexp(0, eta) - 0.5 * grid[:, None] ** 2).sum(
            1
        ) * (grid[1] - grid[0])
        total = (np.exp(-0.5 * grid**2) * inner.prod(1)).sum() * (grid[1] - grid[0])
        return np.log(total) - 2 * np.log(2 * np.pi)

    u = np.array([0.2, 0.3, 0.8])
    starts = jnp.zeros((1, 1)), jnp.zeros((3, 1))
    found = jax.jit(lambda u: nested_marginal(log_terms, u, parent, starts))(
        jnp.asarray(u, jnp.float32)
    )
    slope = [(brute(u + h) - brute(u - h)) / 2e-4 for h in 1e-4 * np.eye(3)]
    np.testing.assert_allclose(found.value, brute(u), atol=2e-3)
    np.testing.assert_allclose(found.score, slope, atol=5e-3)


@pytest.mark.ci
def test_terms_of_rows_without_latents_count():
    """A silo's marginal has the terms of rows that belong to no element with latents, too."""

    def model(y, group, groups, free):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with fed.silo_plate("groups", groups.shape[0]):
            a = numpyro.sample("a", dist.Normal(mean, SCHOOL_SD))
        with fed.silo_plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(a[group], ROW_SD), obs=y)
        with fed.silo_plate("free", free.shape[0]):
            numpyro.sample("alone", dist.Normal(mean, 0.5), obs=free)

    part = {
        "y": np.array([0.3, 0.9]),
        "group": np.array([0, 0]),
        "groups": np.arange(1),
        "free": np.array([2.0, 1.0, 3.0]),
    }
    rows = {"y": "rows", "group": "rows", "groups": "groups", "free": "free"}
    silos = fed.Silos({"one": part}, rows=rows, index={"group": "groups"})
    ground = model_setup(model, silos, {}, fed.FSGLD(model)._options)
    precision = 2 / (ROW_SD**2 + 2 * SCHOOL_SD**2) + 3 / 0.25
    assert ground.units.group == "groups"
    np.testing.assert_allclose(
        np.asarray(ground.surrogates.factors.precision)[0], precision, rtol=1e-3
    )


# Map and moves


def random_map(rng, parent, dim, bent=False):
    def one(units, dim):
        shapes = {"mean": (1,), "coupling": (1, dim), "log_scale": (1,), "scale_coupling": (1, dim)}
        if bent:
            shapes |= {"shift": (1,), "shift_coupling": (1, dim)}
        return LocalMap(
            **{
                k: jnp.asarray(0.4 * rng.normal(size=(1, units, *s)), jnp.float32)
                for k, s in shapes.items()
            }
        )

    return NestedMap(
        one(int(parent.max()) + 1, dim), one(len(parent), dim + 1), jnp.asarray(parent)[None]
    )


@pytest.mark.parametrize("bent", [False, True])
def test_the_map_s_inverse_and_its_volume(bent):
    rng, parent = np.random.default_rng(3), np.array([0, 0, 1])
    rows = random_map(rng, parent, 2, bent)
    u, eps = jnp.array([0.3, -0.6]), jnp.asarray(rng.normal(size=(1, 5)), jnp.float32)
    assert rows.shape == (1, 5)
    np.testing.assert_allclose(rows.inverse(u, rows.forward(u, eps)), eps, atol=1e-5)
    jacobian = jax.jacfwd(lambda e: rows.forward(u, e[None])[0])(eps[0])
    assert abs(jacobian[2, 0]) > 0.01  # inner latents move with their outer element's coordinates
    assert jacobian[2, 1] == 0
    np.testing.assert_allclose(
        jnp.linalg.slogdet(jacobian)[1], rows.log_scales(u, eps).sum(), rtol=1e-4
    )


@pytest.mark.parametrize("control", [False, True])
def test_moves_keep_the_conditional_law(control):
    """8,000 copies start from exact draws.

    After 20 moves means and covariances are within 4 s.e.; without the inner scales they are not.
    """
    silos = pupils_silos()
    units, view = units_of(pupils, silos), view_of(silos, 0)
    kwargs, weights = view.whole()
    parent, masks, count = units.parent(kwargs), units.masks(view), 8000
    sizes = [int(m.sum()) for m in masks]
    assert sizes == [2, 3]
    rows = random_map(np.random.default_rng(4), np.asarray(parent), 1)
    padded = [n for _, n, _ in units.blocks()]
    rows = replace(
        rows,
        outer=jax.tree.map(
            lambda x: jnp.concatenate([x, jnp.zeros_like(x)], 1)[:, : padded[0]], rows.outer
        ),
    )
    u, theta = jnp.array([0.4]), {"mean": jnp.array(0.4)}
    # the silo's own latents given the mean: rows 0-5 of the data, schools 0 and 1, classes 0 to 2
    y = np.asarray(silos.pooled["y"], float)[:6]
    design = np.zeros((6, 5))
    design[np.arange(6), SCHOOL[KLASS[:6]]] = 1
    design[np.arange(6), 2 + KLASS[:6]] = 1
    prior = np.r_[[SCHOOL_SD**-2] * 2, [CLASS_SD**-2] * 3]
    covariance = np.linalg.inv(design.T @ design / ROW_SD**2 + np.diag(prior))
    mean = covariance @ (design.T @ y / ROW_SD**2 + prior * np.r_[0.4, 0.4, 0, 0, 0])
    root = np.linalg.cholesky(covariance)
    own = np.r_[0:2, padded[0] : padded[0] + 3]
    start = np.random.default_rng(5).normal(size=(count, units.dim))
    start[:, own] = mean + start[:, own] @ root.T

    def log_terms(eps):
        terms = units.level_terms(theta, rows.forward(u, eps), kwargs, weights, view)
        scales = units.levels(rows.log_scales(u, eps))
        if control:
            scales = scales[0], jnp.zeros_like(scales[1])
        return terms[0] + scales[0].sum(1), terms[1] + scales[1].sum(1)

    @jax.jit
    def moved(z, key):
        eps = rows.inverse(u, z[None])

        def step(eps, key):
            noise = jax.tree.map(lambda x: x[0], move_noise(units, key, eps, view, 1))
            return nested_metropolis(units, log_terms, eps, noise, parent, masks)

        eps, accepted = jax.lax.scan(step, eps, random.split(key, 20))
        return rows.forward(u, eps)[0], accepted.mean()

    z, accepted = jax.vmap(moved)(
        jnp.asarray(start, jnp.float32), random.split(random.key(6), count)
    )
    assert 0.2 < accepted.mean() < 0.95
    assert np.mean(np.any(np.asarray(z) != start, axis=1)) > 0.9
    w = np.linalg.solve(root, (np.asarray(z, float)[:, own] - mean).T).T
    off = np.abs(w.mean(0)).max() * np.sqrt(count)
    second = np.abs(w.T @ w / count - np.eye(5)) * np.sqrt(count) / np.sqrt(1 + np.eye(5))
    if control:
        assert max(off, second.max()) > 10
    else:
        assert off < 4
        assert second.max() < 4


def test_a_number_that_is_no_number_is_refused():
    silos = pupils_silos()
    units, view = units_of(pupils, silos), view_of(silos, 0)
    n0, n1 = units.num_elements
    eps, bad = jnp.ones((1, units.dim)), (jnp.full(n0, jnp.nan), jnp.full(n1, jnp.nan))
    noise = MoveNoise(jnp.zeros((1, units.dim)), jnp.full((1, n0 + n1), -5.0))
    new, accepted = nested_metropolis(
        units, lambda e: bad, eps, noise, units.parent(view.whole()[0]), units.masks(view)
    )
    assert (new == eps).all()
    assert accepted == 0


# Whole runs


@pytest.fixture(scope="module")
def pupils_run():
    silos = pupils_silos()
    kernel = fed.FSGLD(pupils)
    mcmc = MCMC(
        kernel,
        num_warmup=50,
        num_samples=1500,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), silos, extra_fields=("residual", "local_stuck"))
    return mcmc, silos


@pytest.mark.ci
def test_a_gaussian_model_leaves_no_residual_and_accepts_every_move(pupils_run):
    mcmc, _ = pupils_run
    fields = mcmc.get_extra_fields()
    assert np.abs(fields["residual"]).max() < 5e-3
    assert fields["local_stuck"].max() == 0
    # a quarter of the proposals are wide on purpose
    assert fields["local_accept_prob"].mean() > 0.9


@pytest.mark.ci
def test_the_posterior_is_exact_also_for_elements_without_rows(pupils_run):
    """Latents of five schools and seven classes are within 4.5 s.e., in pooled order.

    The sds are within 5 %.
    """
    mcmc, silos = pupils_run
    mean, covariance = pupils_posterior(silos)
    draws = mcmc.get_samples(group_by_chain=True)
    x = np.concatenate([np.asarray(draws["mean"])[..., None], draws["a"], draws["b"]], axis=2)
    sd = np.sqrt(np.diag(covariance))
    error = [
        4.5 * s / np.sqrt(numpyro.diagnostics.effective_sample_size(x[..., i]))
        for i, s in enumerate(sd)
    ]
    assert (np.abs(x.mean((0, 1)) - mean) < error).all()
    np.testing.assert_allclose(x.std((0, 1)), sd, rtol=0.05)
    assert np.abs(x[..., 1:].mean((0, 1)) - mean[0]).max() > 0.1  # a mean for all would not do


@pytest.mark.ci
def test_the_marginal_has_the_scores_of_a_silo_s_exact_likelihood():
    silos = pupils_silos()
    units = units_of(pupils, silos)
    message = Message(jnp.zeros(1), jnp.eye(1), jnp.zeros((1, 1)), jnp.ones(1))
    for number, rows in ((0, np.arange(6)), (1, np.arange(6, 10))):
        same_class = KLASS[rows][:, None] == KLASS[rows]
        same_school = SCHOOL[KLASS[rows]][:, None] == SCHOOL[KLASS[rows]]
        covariance = (
            SCHOOL_SD**2 * same_school + CLASS_SD**2 * same_class + ROW_SD**2 * np.eye(len(rows))
        )
        r = np.asarray(silos.pooled["y"], float)[rows] - 0.3
        value, score, _ = jax.jit(
            marginal_score(units.factors, units, message, view_of(silos, number))
        )(jnp.array([0.3]))
        expected = (
            -0.5 * r @ np.linalg.solve(covariance, r)
            - 0.5 * np.linalg.slogdet(2 * np.pi * covariance)[1]
        )
        np.testing.assert_allclose(value, expected, rtol=1e-4)
        np.testing.assert_allclose(score, [np.linalg.solve(covariance, r).sum()], rtol=1e-4)


@pytest.mark.ci
def test_silos_of_very_different_size_share_one_layout(monkeypatch):
    """Buckets of silos are padded differently; the row of a silo's latents is not."""
    monkeypatch.setattr(storage, "SMALL", 1)
    small = {
        "y": np.ones(1, np.float32),
        "klass": np.zeros(1, int),
        "school": np.zeros(1, int),
        "schools": np.arange(1),
    }
    silos = fed.Silos(
        {"large": dict(pupils_silos()["north"]), "small": small}, rows=ROWS, index=INDEX
    )
    assert len(storage.buckets(silos)) == 2
    ground = model_setup(pupils, silos, {}, fed.FSGLD(pupils)._options)
    config = LangevinConfig(ground.factors, ground.units, 4, None, True, None)
    noise = pilot.visit_noise(config, ground.tuning, silos)
    assert np.abs(noise.first).max() < 5e-3
    network = MCMC(
        fed.PushSumLangevin(pupils, fed.graphs.complete(2), 0.02),
        num_warmup=0,
        num_samples=3,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    network.run(random.key(0), silos)
    assert network.get_samples()["b"].shape == (6, 4)


@pytest.mark.ci
def test_push_sum_has_nested_latents_too():
    silos = pupils_silos()
    kernel = fed.PushSumLangevin(pupils, fed.graphs.complete(2), 0.02)
    mcmc = MCMC(
        kernel,
        num_warmup=100,
        num_samples=400,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(1), silos)
    draws = mcmc.get_samples()
    mean, covariance = pupils_posterior(silos)
    assert draws["a"].shape[1:] == (5,)
    for name, at in (("a", slice(1, 6)), ("b", slice(6, 13))):
        gap = np.abs(np.asarray(draws[name]).mean(0) - mean[at]) / np.sqrt(np.diag(covariance)[at])
        assert gap.max() < 0.5  # 800 correlated draws; a mix-up of elements is several sds
