"""Starts of fits under wide priors."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import seed, substitute

import numpyro_fed as fed
from numpyro_fed.vi.guides.start import init_near_center

RNG = np.random.default_rng(0)
X = RNG.normal(size=(400, 2))
ROWS = {"x": X, "y": RNG.binomial(1, 1 / (1 + np.exp(-(X @ [1.0, -0.5] + 0.3))))}
SILOS = fed.split(ROWS, by=np.arange(400) % 4)


def logistic(sd):
    def model(x, y):
        a = numpyro.sample("a", dist.Normal(0, sd))
        b = numpyro.sample("b", dist.Normal(0, sd).expand([2]).to_event(1))
        with fed.silo_plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=a + x @ b), obs=y)

    return model


@pytest.mark.parametrize("number", [0, 1])
def test_rounds_do_not_grow_with_the_width_of_a_prior(number):
    """From NumPyro's start, the median of 15 draws, forty rounds do not get there."""
    rounds, means = {}, {}
    for sd in (10.0, 1000.0):
        svi = fed.ConduciveSFVI(logistic(sd), fed.AutoSiloNormal(logistic(sd)))
        result = svi.run(jax.random.key(number), 40, SILOS, tol=0.1, progress_bar=False)
        rounds[sd], means[sd] = len(result.losses), result.params["auto_loc"]
    assert max(rounds.values()) <= 10
    np.testing.assert_allclose(means[10.0], means[1000.0], atol=0.02)


@pytest.mark.parametrize(
    ("prior", "center", "within"),
    [
        (dist.Normal(250, 1e4), 250, 2),
        (dist.MultivariateNormal(np.array([9.0, -9.0]), 1e6 * np.eye(2)), [9, -9], 2),
        (dist.StudentT(3, 5, 100), 5, 2),
        (dist.HalfNormal(1e3), 674, 600),  # on the log scale a wide prior is no wider
        (dist.Cauchy(0, 1), 0, 3),  # no mean
    ],
)
def test_a_start_is_near_the_center_of_the_prior(prior, center, within):
    model = seed(lambda: numpyro.sample("a", prior), jax.random.key(3))
    start = substitute(model, substitute_fn=init_near_center)()
    np.testing.assert_allclose(start, center, atol=within)
