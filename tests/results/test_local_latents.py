"""Latents that a silo draws for itself: against their closed form given theta."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

import numpyro_fed as fed

BETWEEN, WITHIN, DRAWS = 0.7, 1.2, 1000


def model(x, y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 3))
    with fed.silo_plate("patients", x.shape[0]):
        z = numpyro.sample("z", dist.Normal(mu, BETWEEN))
        numpyro.sample("y", dist.Normal(x * z, WITHIN), obs=y)


def silos_of(names):
    rng = np.random.default_rng(0)
    data = {
        s: {"x": rng.normal(size=n) + 2, "y": 2 + rng.normal(size=n)}
        for s, n in {"bern": 4, "oslo": 6}.items()
    }
    return fed.Silos({name: data[name] for name in names})


@pytest.fixture(scope="module")
def posterior():
    mu = np.random.default_rng(1).normal(1, 0.5, (1, DRAWS))
    return {"mu": mu.astype(np.float32)}


@pytest.fixture(scope="module")
def completed(posterior):
    return fed.local_latents(posterior, model, silos_of(["oslo"]), rng_key=jax.random.key(2))


def test_latents_have_their_law_given_theta(completed):
    x, y = (silos_of(["oslo"])["oslo"][k] for k in ("x", "y"))
    mu, z = completed.posterior["mu"].values[0], completed.posterior["z"].values[0]
    precision = BETWEEN**-2 + (x / WITHIN) ** 2
    scores = (z - (mu[:, None] / BETWEEN**2 + x * y / WITHIN**2) / precision) * precision**0.5
    error = DRAWS**-0.5
    assert np.abs(scores.mean(0)).max() < 4 * error
    assert np.abs(scores.var(0) - 1).max() < 4 * error * 2**0.5
    # the control: latents without the rows
    assert np.abs((z - mu[:, None]) / BETWEEN).mean(0).max() > 10 * error


def test_a_silo_predicts_its_rows_and_has_their_densities(completed):
    own = silos_of(["oslo"])["oslo"]
    drawn = fed.predict(model, completed, jax.random.key(3), {"x": own["x"]}, silo="oslo")["y"]
    z = completed.posterior["z"].values[0]
    assert np.abs((drawn - z * own["x"]).mean(0)).max() < 4 * WITHIN * DRAWS**-0.5
    density = stats.norm(z * own["x"], WITHIN).logpdf(own["y"])
    np.testing.assert_allclose(completed.log_likelihood["y"].values[0], density, atol=1e-4)
    assert completed.posterior["patients_silo"].values.tolist() == ["oslo"] * 6


def test_bad_input_in_words(posterior):
    silos = silos_of(["bern", "oslo"])
    with pytest.raises(TypeError, match="a silo draws its latents itself"):
        fed.local_latents(posterior, model, fed.RemoteSilos(silos, fed.Loopback(silos)))
    with pytest.raises(ValueError, match="expected the posterior of this model"):
        fed.local_latents({"nu": posterior["mu"]}, model, silos)

    def flat(x, y):
        mu = numpyro.sample("mu", dist.Normal(0, 3))
        with fed.silo_plate("patients", x.shape[0]):
            numpyro.sample("y", dist.Normal(x * mu, WITHIN), obs=y)

    with pytest.raises(ValueError, match="no local latents"):
        fed.local_latents(posterior, flat, silos)
