"""The last round: laws with wider tails have the density they say.

What they cannot mend is flagged.
"""

import warnings
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from scipy.special import logsumexp
from scipy.stats import kstest
from scipy.stats import norm as normal
from scipy.stats import t as student
from vi_models import hierarchy, hierarchy_posterior, hierarchy_silos

import numpyro_fed as fed
from numpyro_fed.results import weighing
from numpyro_fed.vi.draws import positions
from numpyro_fed.vi.importance import smoothed
from numpyro_fed.vi.proposals import halves, nodes_at, stretched_normal, wider_candidates

QUIET = {"progress_bar": False}


def conducive(model):
    return fed.ConduciveSFVI(model, fed.AutoSiloNormal(model))


@pytest.mark.parametrize("dim", [1, 2, 5])
def test_draws_with_wider_tails_have_the_density_they_say(dim):
    """Weighed by the standard normal's density over theirs they are standard normal.

    That holds for mass, squares, and products of squares.
    """
    keys = random.split(random.key(0), 40_000)
    noise = random.normal(random.key(1), (len(keys), dim))
    u, log_ratio = jax.jit(jax.vmap(stretched_normal))(keys, noise)
    weight = np.exp(-np.asarray(log_ratio, float))
    squares = np.asarray(u, float) ** 2
    for x in (
        np.ones(len(keys)),
        squares[:, 0],
        squares[:, 0] * squares[:, -1] / (3 if dim == 1 else 1),
    ):
        assert abs(np.mean(weight * x) - 1) < 4 * np.std(weight * x) / len(keys) ** 0.5
    assert np.mean(squares) > 2  # the control: without the weights they are not


def test_the_density_is_exact_however_far_out_a_draw_is():
    """In double precision. Of two coordinates far out one may have e^280 times the other's ratio.

    A sum of ratios in single precision lost the pair, and a draw had e^24 times its weight.
    """
    keys, dim = random.split(random.key(0), 200_000), 6
    noise = random.normal(random.key(1), (len(keys), dim))
    u, log_ratio = (np.asarray(x, float) for x in jax.jit(jax.vmap(stretched_normal))(keys, noise))
    tails = student.logpdf(u, 3, 0, 3.0) - normal.logpdf(u)
    pairs = [tails[:, i] + tails[:, j] for i in range(dim) for j in range(i)]
    one, two = logsumexp(tails, 1) - np.log(dim), logsumexp(pairs, 0) - np.log(15)
    exact = logsumexp([np.zeros(len(u)), one, two], 0, [[0.5], [0.25], [0.25]])
    assert np.abs(u).max() > 50
    np.testing.assert_allclose(log_ratio, exact, rtol=1e-5, atol=1e-4)
    # the control
    largest = tails.max(1, keepdims=True)
    single = np.exp((tails - largest).astype(np.float32))
    with np.errstate(divide="ignore"):
        before = np.log(np.cumsum(single, 1)[:, :-1]) + largest
    lost = logsumexp(before + tails[:, 1:], 1) - np.log(15)
    assert np.max(two - lost) > 20


@pytest.mark.parametrize("dim", [1, 3])
def test_candidates_with_wider_tails_have_the_density_they_say(dim):
    eps = (
        random.normal(random.key(0), (40_000, 2, dim)).at[:, 1, 1:].set(0)
    )  # the second unit has one coordinate of its own
    wide, log_ratio = wider_candidates(random.key(1), eps, jnp.array([dim, 1]), jnp.arange(2))
    weight = np.exp(-np.asarray(log_ratio, float))
    assert weight.max() <= 2.001
    for x in (np.ones(len(eps)), np.asarray(wide[:, :, 0], float).T ** 2):
        for unit in range(2):
            products = weight[:, unit] * (x if x.ndim == 1 else x[unit])
            assert abs(products.mean() - 1) < 4 * products.std() / len(eps) ** 0.5
    assert np.mean(np.asarray(wide) ** 2) > 1.1 / dim  # the control


@partial(jax.jit, static_argnums=(0, 3))
def weighed_nodes(dim, loc, scale, num=20_000):
    """Return nodes ``(K, num, dim)`` and their log weights where a normal law is to be found."""
    shift = random.uniform(random.key(5), (num, dim))
    eps, log_ratio = nodes_at(shift, jnp.ones((num, dim), bool))
    law = dist.Normal(loc, scale).expand([dim]).to_event(1)
    base = dist.Normal(0, 1).expand([dim]).to_event(1)
    return eps, law.log_prob(eps) - base.log_prob(eps) - log_ratio


@pytest.mark.parametrize(
    ("dim", "loc", "scale", "error"),
    [(1, 0.0, 1.0, 1e-5), (1, 2.0, 0.7, 5e-3), (1, 0.0, 3.0, 5e-4), (2, 0.5, 1.0, 1e-2)],
)
def test_nodes_have_the_integral_and_the_law(dim, loc, scale, error):
    eps, log_weight = weighed_nodes(dim, loc, scale)
    sums = np.mean(np.exp(np.asarray(log_weight, float)), axis=0)
    assert np.abs(sums - 1).max() < error
    chosen = random.categorical(random.key(6), log_weight, axis=0)
    z = np.asarray(eps)[chosen, np.arange(len(chosen))]
    assert kstest((z[:, -1] - loc) / scale, "norm").pvalue > 1e-3
    even = random.randint(random.key(7), chosen.shape, 0, len(eps))  # the control
    z = np.asarray(eps)[even, np.arange(len(even))]
    assert kstest((z[:, -1] - loc) / scale, "norm").pvalue < 1e-9


@pytest.mark.parametrize("dim", [1, 2])
def test_nodes_that_are_too_far_apart_are_right_on_average_and_flagged(dim):
    _, log_weight = weighed_nodes(dim, 0.1, 0.02)
    sums = np.mean(np.exp(np.asarray(log_weight, float)), axis=0)
    assert np.std(sums) > 0.5
    assert abs(np.mean(sums) - 1) < 4 * np.std(sums) / len(sums) ** 0.5

    def k(loc, scale):
        """Pareto's k of one half of the nodes over the other, chosen at random."""
        weight = jax.nn.softmax(weighed_nodes(dim, loc, scale)[1], axis=0)
        pair = np.log(np.asarray(halves(weight, jnp.array(0), dim), float))
        sign = np.random.default_rng(0).choice([-1, 1], pair.shape[1])
        return smoothed((pair[0] - pair[1]) * sign)[1]

    assert k(0.1, 0.02) > 0.7
    assert k(50.0, 1.0) > 0.7  # all of the law is beyond the outermost node
    assert k(0.5, 1.0) < 0.5


@pytest.mark.ci
def test_a_units_candidates_are_judged():
    """Exact maps have equal weights.

    Maps a third as wide leave tails unseen, and the worst child is named.
    """
    silos = hierarchy_silos(np.arange(9) % 4)
    fit = conducive(hierarchy)
    result = fit.run(random.key(0), 6, silos, **QUIET)
    attrs = fed.to_inference_data(fit, result, silos, num_draws=500).posterior.attrs
    assert attrs["pareto_k_unit"] == 0
    narrow = {
        **result.params,
        "auto_local_log_scale": result.params["auto_local_log_scale"].at[4].add(-1.1),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theta's k is bad, too
        attrs = fed.to_inference_data(
            fit, replace(result, params=narrow), silos, num_draws=500
        ).posterior.attrs
    assert attrs["pareto_k_unit"] > 0.5
    assert attrs["pareto_k_unit_at"].startswith("row 4 of ")
    wide = fed.to_inference_data(
        fit, replace(result, params=narrow), silos, num_draws=500, resample=True
    ).posterior.attrs
    assert wide["pareto_k_unit"] < attrs["pareto_k_unit"]


@pytest.mark.ci
def test_maps_that_are_elsewhere_are_replaced_by_the_modes(monkeypatch):
    """Maps 30 sds off: candidates around the modes have the exact law.

    The control: around the maps they miss it, and are flagged.
    """
    silos = hierarchy_silos(np.arange(9) % 4)
    fit = conducive(hierarchy)
    result = fit.run(random.key(0), 6, silos, **QUIET)
    off = {**result.params, "auto_local_loc": result.params["auto_local_loc"] + 30.0}
    found = fed.to_inference_data(
        fit, replace(result, params=off), silos, num_draws=4000, resample=True
    ).posterior
    assert found.attrs["placed"] == 1
    assert found.attrs["pareto_k_unit"] < 0.3
    mean, covariance, _ = hierarchy_posterior()
    z, sd = found["z"].values[0], np.sqrt(np.diag(covariance))[1:]
    assert (np.abs(z.mean(0) - mean[1:]) < 4.5 * sd / 4000**0.5).all()
    assert (np.abs(z.std(0) / sd - 1) < 4.5 / 8000**0.5).all()
    monkeypatch.setattr(weighing, "can_place", lambda *_: False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = fed.to_inference_data(
            fit, replace(result, params=off), silos, num_draws=500, resample=True
        ).posterior
    assert found.attrs["placed"] == 0
    assert found.attrs["pareto_k_unit"] > 0.7


def funnel(width, dim):
    def model(y):
        v = numpyro.sample("v", dist.Normal(0, width))
        b = numpyro.sample("b", dist.Normal(0, jnp.exp(v)).expand([dim]).to_event(1))
        with fed.silo_plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(b.sum(), 1000.0), obs=y)

    silos = fed.split({"y": np.arange(6, dtype=np.float32)}, by=[0, 0, 0, 1, 1, 1])
    fit = conducive(model)
    result = fit.run(random.key(0), 60, silos, progress_bar=False, tol=1e-3)
    return fit, result, silos


@pytest.mark.ci
def test_a_funnel_is_mended_by_the_last_round_or_flagged(monkeypatch):
    """Rows that say nothing: the posterior is the prior, sd of b exp(width^2)."""
    fit, result, silos = funnel(0.5, 1)
    assert np.linalg.norm(result.params["auto_scale_tril"][0]) < 0.75 * np.exp(0.25)  # q alone
    posterior = fed.to_inference_data(fit, result, silos, num_draws=4000, resample=True).posterior
    assert posterior["b"].values.std() == pytest.approx(np.exp(0.25), rel=0.06)
    assert posterior.attrs["pareto_k"] < 0.5
    fit, result, silos = funnel(0.8, 5)
    for most in (4, 0):  # mixtures mend some of it, and it is still flagged
        monkeypatch.setattr("numpyro_fed.results.weighing._MIXTURES", most)
        with pytest.warns(UserWarning, match="Pareto's k"):
            posterior = fed.to_inference_data(
                fit, result, silos, num_draws=4000, resample=True
            ).posterior
    # rightly: a few draws have most of the weight, and the sd is off either way
    assert abs(posterior["b"].values.std() / np.exp(0.64) - 1) > 0.1


def test_draws_far_out_have_no_weight():
    """There a density may be false in single precision, as of a negative binomial."""

    def model(y):
        shape = numpyro.sample("shape", dist.LogNormal(1, 1))
        with fed.silo_plate("visits", y.shape[0]):
            numpyro.sample("y", dist.NegativeBinomial2(3.0, shape), obs=y)

    counts = np.random.default_rng(0).negative_binomial(3, 0.5, 300).astype(np.float32)
    silos = fed.split({"y": counts}, by=np.arange(300) % 3)
    svi = fed.ConduciveSFVI(model, fed.AutoSiloNormal(model))
    result = svi.run(jax.random.key(0), 40, silos, tol=0.1, progress_bar=False)
    setup = svi.setup(silos)
    u = jnp.array([[0.0], [29.0], [31.0], [90.0]])
    args = setup.config, svi.fitted(result, silos), setup.stacks[0], jax.random.key(1), 4, True
    weights = positions(*args, (u, jnp.zeros(4))).log_weight
    assert np.isfinite(weights).tolist() == [True, True, False, False]
