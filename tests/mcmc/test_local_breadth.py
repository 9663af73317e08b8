"""Local latents a statistician brings: vectors, simplices, one observation a silo.

Also prediction for old and new silos.
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC
from small_models import (
    GROUP_SD,
    PRIOR_SD,
    ROW_SD,
    intercepts,
    intercepts_posterior,
    intercepts_silos,
)

import numpyro_fed as fed


def run(model, silos, num_samples=400, **options):
    kernel = fed.FSGLD(model, **options)
    mcmc = MCMC(
        kernel,
        num_warmup=100,
        num_samples=num_samples,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), silos)
    return mcmc


def slopes(x, y=None):
    mean = numpyro.sample("mean", dist.Normal(0, 1).expand([2]).to_event(1))
    with fed.silo_plate("groups", x.shape[0], dim=-2):
        own = numpyro.sample(
            "own", dist.MultivariateNormal(mean, jnp.array([[1.0, 0.5], [0.5, 0.6]]))
        )
        with numpyro.plate("times", x.shape[1], dim=-1):
            numpyro.sample("y", dist.Normal(own[..., 0] + own[..., 1] * x, 0.5), obs=y)


def slopes_silos():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(9, 4)).astype(np.float32)
    own = rng.multivariate_normal([1, -1], [[1.0, 0.5], [0.5, 0.6]], size=9)
    y = (own[:, :1] + own[:, 1:] * x + 0.5 * rng.normal(size=x.shape)).astype(np.float32)
    return fed.split({"x": x, "y": y}, by=rng.permutation(np.repeat(["a", "b", "c"], 3)))


def slopes_posterior(silos):
    """Exact mean and sd of (mean, own of each group in pooled order)."""
    x, y = (np.asarray(silos.pooled[k], float) for k in "xy")
    inner = np.linalg.inv([[1.0, 0.5], [0.5, 0.6]])
    precision, linear = np.zeros((20, 20)), np.zeros(20)
    precision[:2, :2] = np.eye(2)
    for g in range(9):
        at, link = slice(2 + 2 * g, 4 + 2 * g), np.zeros((2, 20))
        link[:, :2], link[:, at] = -np.eye(2), np.eye(2)
        precision += link.T @ inner @ link
        design = np.stack([np.ones(4), x[g]], 1)
        precision[at, at] += design.T @ design / 0.25
        linear[at] += design.T @ y[g] / 0.25
    covariance = np.linalg.inv(precision)
    return covariance @ linear, np.sqrt(np.diag(covariance))


@pytest.fixture(scope="module")
def slopes_run():
    silos = slopes_silos()
    return silos, run(slopes, silos, 1500)


@pytest.mark.ci
def test_vectors_of_latents_have_their_exact_posterior_in_pooled_order(slopes_run):
    silos, mcmc = slopes_run
    draws = mcmc.get_samples(group_by_chain=True)
    got = np.concatenate(
        [np.asarray(draws["mean"]), np.asarray(draws["own"]).reshape(4, 1500, 18)], -1
    )
    mean, sd = slopes_posterior(silos)
    error = np.abs(got.mean((0, 1)) - mean) / sd
    assert error.max() < 0.12
    ratio = got.std((0, 1)) / sd
    assert 0.93 < ratio.min() < ratio.max() < 1.07
    swapped = np.concatenate(
        [mean[:2], mean[2:].reshape(9, 2)[::-1].ravel()]
    )  # negative control: groups in another order
    assert (np.abs(got.mean((0, 1)) - swapped) / sd).max() > 1
    assert mcmc.sampler._tuning.latents.rows.tril.shape == (9, 2, 2)
    assert (
        float(np.mean(mcmc.get_extra_fields()["local_accept_prob"])) > 0.85
    )  # of two latents wide proposals are accepted six times in ten


@pytest.mark.ci
def test_prediction_for_an_old_silo_new_rows_and_a_new_silo(slopes_run):
    silos, mcmc = slopes_run
    idata = fed.to_inference_data(mcmc, silos, log_likelihood=False)
    at = jnp.zeros((3, 1))
    old = fed.predict(slopes, idata, random.key(1), {"x": at}, silo="b")["y"][..., 0]
    new = fed.predict(slopes, idata, random.key(1), {"x": at})["y"][..., 0]
    assert old.shape == new.shape == (6000, 3)
    own = np.asarray(idata.posterior["own"].values)[
        ..., idata.posterior["groups_silo"].values == "b", 0, 0
    ]
    np.testing.assert_allclose(old.mean(0), own.reshape(6000, 3).mean(0), atol=0.05)
    # a new group varies by itself, the global mean and the noise: sd^2 = 1 + var(mean) + 0.25
    expected = np.sqrt(1 + np.asarray(idata.posterior["mean"].values)[..., 0].var() + 0.25)
    np.testing.assert_allclose(new.std(0), expected, rtol=0.05)
    assert old.std(0).max() < 0.8 * expected  # negative control: an old silo is known better


@pytest.mark.ci
def test_simplices_and_silos_of_one_observation():
    def shares(counts):
        concentration = numpyro.sample("concentration", dist.Gamma(4, 0.5))
        with fed.silo_plate("schools", counts.shape[0]):
            p = numpyro.sample("p", dist.Dirichlet(concentration * jnp.array([0.5, 0.3, 0.2])))
            numpyro.sample("counts", dist.Multinomial(20, p), obs=counts)

    rng = np.random.default_rng(5)
    counts = np.stack([rng.multinomial(20, rng.dirichlet([4, 2.4, 1.6])) for _ in range(12)])
    silos = fed.split(
        {"counts": counts}, by=np.repeat([0, 1, 2, 3], [1, 1, 4, 6])
    )  # two silos with one school each
    mcmc = run(shares, silos)
    p = np.asarray(mcmc.get_samples()["p"])
    np.testing.assert_allclose(p.sum(-1), 1, atol=1e-5)
    concentration = np.asarray(mcmc.get_samples()["concentration"])
    # given the concentration each school's law is Dirichlet: its mean averaged over the draws
    exact = (
        (concentration[:, None, None] * np.array([0.5, 0.3, 0.2]) + counts)
        / (concentration[:, None, None] + 20)
    ).mean(0)
    np.testing.assert_allclose(p.mean(0), exact, atol=0.015)
    assert np.abs(p.mean(0) - counts / 20).max() > 0.03  # negative control: no shrinkage
    assert fed.diagnose(mcmc).verdict != "unsound"


@pytest.mark.ci
@pytest.mark.parametrize("model", ["rows point to elements", "rows are elements"])
def test_minibatches_of_elements_have_the_law_of_all(model):
    """Random intercepts with known variances: means are within 4 s.e.

    The sds are no further off than the step's inflation.
    """
    silos = intercepts_silos()
    mean, covariance = intercepts_posterior(silos)
    if model == "rows are elements":  # the same data, four to a row
        y = np.asarray(silos.pooled["y"]).astype(float)
        group = np.asarray(silos.pooled["group"])
        table = np.stack([y[group == g] for g in range(18)]).astype(np.float32)
        silos = fed.split(
            {"y": table},
            by=np.asarray(silos.silo_of_row("groups"))[
                np.argsort(np.asarray(silos.order["groups"]))
            ],
        )
    kernel = fed.FSGLD(
        intercepts if model.startswith("rows point") else tables, num_local_steps=10, batch_size=2
    )
    mcmc = MCMC(
        kernel,
        num_warmup=200,
        num_samples=800,
        num_chains=16,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), silos)
    samples = mcmc.get_samples(group_by_chain=True)
    draws = np.concatenate([np.asarray(samples["mu"])[..., None], np.asarray(samples["a"])], -1)
    sd = np.sqrt(np.diag(covariance))
    z = (draws - mean) / sd
    error = z.mean((0, 1)) / (z.mean(1).std(0, ddof=1) / 4)
    assert np.abs(error).max() < 4.5  # Student's t with 15 degrees of freedom, 19 of them
    ratio = z.std((0, 1))
    inflation = float(mcmc.get_extra_fields()["inflation"][0])
    assert ratio[0] < 1.5 * inflation - 0.5 + 0.05
    assert 0.95 < ratio.min() < ratio.max() < 1.08
    swapped = mean.copy()
    two = 1 + np.argsort(mean[1:])[[0, -1]]
    swapped[two] = mean[two[::-1]]
    assert (np.abs(draws.mean((0, 1)) - swapped) / sd).max() > 0.5  # negative control


def tables(y):
    mu = numpyro.sample("mu", dist.Normal(0, PRIOR_SD))
    with fed.silo_plate("groups", y.shape[0]):
        a = numpyro.sample("a", dist.Normal(mu, GROUP_SD))
        numpyro.sample("y", dist.Normal(a[:, None], ROW_SD).to_event(1), obs=y)


@pytest.mark.ci
def test_elements_that_depend_on_each_other_are_said_to_move_together():
    def walk(y):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        with fed.silo_plate("times", y.shape[0]):
            z = numpyro.sample("z", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(scale * jnp.cumsum(z), 0.5), obs=y)

    silos = fed.Silos({"a": {"y": np.array([0.3, 0.1, -0.4])}, "b": {"y": np.array([0.5, 0.2])}})
    kernel, said = (
        fed.FSGLD(walk, validate=False),
        r"elements of 'y' are not independent .* latents \['z'\] of a silo are one unit",
    )
    with pytest.warns(UserWarning, match=said):
        kernel.init(random.key(0), 0, model_args=(silos,))
    assert kernel._config.units.group is None


def test_more_silos_than_rows():
    with pytest.raises(ValueError, match="silo 'c'"):
        fed.Silos({"a": {"y": np.ones(1)}, "b": {"y": np.ones(1)}, "c": {"y": np.ones(0)}})
