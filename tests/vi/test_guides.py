"""``AutoSiloNormal`` as an ordinary NumPyro guide, and over every model shape of the registry."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from marks import heavy
from numpyro.infer import SVI, Predictive, Trace_ELBO
from registry import ENTRIES
from vi_models import (
    hierarchy,
    hierarchy_data,
    hierarchy_posterior,
    learned_scale,
    wheeze,
    wheeze_data,
)

import numpyro_fed as fed


def fitted(model, steps=1500, guide_options=None, **kwargs):
    guide = fed.AutoSiloNormal(model, **(guide_options or {}))
    optim = optax.adam(optax.exponential_decay(0.05, steps // 3, 0.2))
    svi = SVI(model, guide, optim, Trace_ELBO())
    return guide, svi.run(random.key(0), steps, **kwargs, progress_bar=False)


@pytest.mark.ci
def test_plain_svi_finds_the_exact_posterior():
    guide, result = fitted(hierarchy, y=jnp.asarray(hierarchy_data()))
    mean, covariance, evidence = hierarchy_posterior()
    sd = np.sqrt(np.diag(covariance))
    draws = guide.sample_posterior(random.key(1), result.params, sample_shape=(4000,))
    found = np.concatenate([draws["mu"][:, None], draws["z"]], 1)
    error = 4.5 * sd / np.sqrt(4000)
    assert (np.abs(found.mean(0) - mean) < error + 0.02 * sd).all()
    np.testing.assert_allclose(np.cov(found.T), covariance, atol=0.12 * sd.max() ** 2)
    assert -result.losses[-50:].mean() == pytest.approx(evidence, abs=0.05)


@pytest.mark.ci
def test_predictive_and_log_density_work_unchanged():
    y, x = (jnp.asarray(v) for v in wheeze_data(20))
    guide, result = fitted(wheeze, steps=100, y=y, x=x)
    predictive = Predictive(wheeze, guide=guide, params=result.params, num_samples=7)
    assert predictive(random.key(0), y=y, x=x)["y"].shape == (7, 20, 4)
    posterior = Predictive(guide, params=result.params, num_samples=7)(random.key(0), y=y, x=x)
    assert posterior["z"].shape == (7, 20, 1)
    assert (posterior["sigma"] > 0).all()


@pytest.mark.ci
def test_learned_parameters_belong_to_svi_as_ever():
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.normal(size=(30, 2)))
    guide, result = fitted(learned_scale, steps=300, x=x, y=x @ jnp.array([2.0, -1.0]))
    assert float(result.params["tau"]) > 1
    assert guide.sample_posterior(random.key(0), result.params)["beta"].shape == (2,)


# those that a guide may treat in different ways; others differ in the density alone (test_check.py)
STRUCTURES = (
    "cholesky", "constrained_globals", "dynamic_support", "local_correlation", "local_simplex",
    "nested_plates", "pupils_in_classes_in_schools", "silo_plate_innermost", "women_in_districts",
)  # fmt: skip


@pytest.mark.parametrize("name", heavy(STRUCTURES, *set(STRUCTURES) - {"constrained_globals"}))
def test_one_round_is_the_same_in_one_silo_and_in_several(name):
    entry = ENTRIES[name]
    with jax.enable_x64(True):
        losses, params = [], []
        for by in (entry.by, np.zeros_like(entry.by)):
            guide = fed.AutoSiloNormal(entry.model)
            svi = fed.SFVI(entry.model, guide, optax.sgd(1e-4), 1, 1, validate=False)
            silos = entry.silos(by)
            state, loss = svi.update(svi.init(random.key(0), silos), silos)
            losses.append(float(loss))
            params.append(svi.get_params(state)["auto_loc"])
        assert np.isfinite(losses[0])
        assert losses[0] == pytest.approx(losses[1], rel=1e-10)
        np.testing.assert_allclose(params[0], params[1], rtol=1e-9, atol=1e-12)


@pytest.mark.ci
def test_full_local_covariance_holds_correlated_latents():
    """Latents of a silo that depend on each other given theta are one unit.

    Its factor is triangular.
    """

    def walk(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with fed.silo_plate("times", y.shape[0]):
            z = numpyro.sample("z", dist.Normal(mu, 1))
            numpyro.sample("y", dist.Normal(jnp.cumsum(z), 0.5), obs=y)

    with jax.enable_x64(True):
        data = {
            s: {"y": np.random.default_rng(i).normal(size=n)}
            for i, (s, n) in enumerate((("a", 3), ("b", 4)))
        }
        silos = fed.Silos(data)
        optim = optax.adam(optax.exponential_decay(0.05, 1000, 0.2))
        guide = fed.AutoSiloNormal(walk, local_cov="full", scale_coupling=False)
        svi = fed.SFVI(walk, guide, optim, 2, 1, validate=False)
        result = svi.run(random.key(0), 4000, silos, progress_bar=False)
        evidence = 0.0
        precision, shift = 1.0, 0.0
        for kwargs in data.values():
            n = len(kwargs["y"])
            cumulative = np.tril(np.ones((n, n)))
            marginal = cumulative @ cumulative.T + 0.25 * np.eye(n)
            direction = np.linalg.solve(marginal, cumulative.sum(1))
            precision += cumulative.sum(1) @ direction
            shift += kwargs["y"] @ direction
            evidence += -0.5 * (
                kwargs["y"] @ np.linalg.solve(marginal, kwargs["y"])
                + np.linalg.slogdet(2 * np.pi * marginal)[1]
            )
        evidence += 0.5 * shift**2 / precision - 0.5 * np.log(precision)
        assert -result.losses[-200:].mean() == pytest.approx(evidence, abs=0.01)
        assert float(result.params["auto_loc"][0]) == pytest.approx(shift / precision, abs=0.01)
        # elements are not independent here: weights inside elements would be wrong, so the silo is
        # the unit
        assert svi.setup(silos).config.families[0].group is None
        element = fed.SFVI(walk, fed.AutoSiloNormal(walk), optim, 1, 4, validate=False)
        assert element.setup(silos).config.families[0].group is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"global_cov": "banded"},
            r'global_cov: expected "full", "diag" or a rank > 0, got \'banded\'',
        ),
        ({"global_cov": 0}, r"rank > 0, got 0"),
        ({"local_cov": "block"}, r'local_cov: expected "diag", "element" or "full", got \'block\''),
        ({"init_scale": 0.0}, r"init_scale: expected a number > 0, got 0.0"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        fed.AutoSiloNormal(hierarchy, **options)


def test_guide_says_what_it_needs():
    with pytest.raises(TypeError, match=r"expected a model \(a callable\), got str"):
        fed.AutoSiloNormal("model")
    guide = fed.AutoSiloNormal(hierarchy)
    with pytest.raises(RuntimeError, match=r"expected a guide that has been called"):
        guide.sample_posterior(random.key(0), {})
    assert repr(guide).startswith("AutoSiloNormal(global_cov='full', local_cov='element'")

    def unmarked(y):
        numpyro.sample("y", dist.Normal(numpyro.sample("mu", dist.Normal(0, 1)), 1), obs=y)

    svi = SVI(unmarked, fed.AutoSiloNormal(unmarked), optax.adam(0.1), Trace_ELBO())
    with pytest.raises(ValueError, match=r"the model has no silo plate"):
        svi.init(random.key(0), y=jnp.zeros(3))
