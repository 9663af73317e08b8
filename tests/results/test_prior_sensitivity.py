"""Power scaling against the exact posteriors of a conjugate model."""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

import numpyro_fed as fed
from numpyro_fed.results.prior_sensitivity import distance

PRIOR, CENTER = 0.5, 1.0


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, PRIOR))
    with fed.silo_plate("patients", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def made(center):
    rng = np.random.default_rng(0)
    return {f"s{s}": {"y": rng.normal(center, 1, 5 + s).astype(np.float32)} for s in range(3)}


def exact(y, prior_power, data_power):
    precision = prior_power / PRIOR**2 + data_power * len(y)
    return stats.norm(data_power * y.sum() / precision, precision**-0.5)


def sensitivity(y, of_prior):
    """Return the sensitivity by integrals of exact distribution functions."""
    base, found = exact(y, 1, 1), []
    for power in (0.99, 1 / 0.99):
        other = exact(y, power, 1) if of_prior else exact(y, 1, power)
        x = np.linspace(base.mean() - 9 * base.std(), base.mean() + 9 * base.std(), 20_001)
        for sign in (1, -1):
            p, q = (law.cdf(x) if sign > 0 else law.sf(x) for law in (base, other))
            half = (p + q) / 2
            with np.errstate(divide="ignore", invalid="ignore"):
                terms = sum(np.nan_to_num(f * np.log2(f / half)) for f in (p, q))
            # over the range of 4,000 draws, outside of which nothing is known
            inside = np.abs(x - base.mean()) < 3.5 * base.std()
            found.append(np.sqrt(terms[inside].sum() / (2 * half[inside].sum())))
    pairs = np.array(found).reshape(2, 2).max(1)
    return pairs.mean() / abs(np.log2(0.99))


@pytest.mark.parametrize(("center", "words"), [(0.2, "-"), (3.0, "prior-data conflict")])
def test_sensitivities_are_exact(center, words):
    data = made(center)
    silos, y = fed.Silos(data), np.concatenate([d["y"] for d in data.values()])
    table = fed.prior_sensitivity(fed.fit(model, silos, progress_bar=False), model, silos)
    row = table.loc["mu"]
    assert row["diagnosis"] == words
    assert row["prior"] == pytest.approx(sensitivity(y, True), rel=0.15)
    assert row["likelihood"] == pytest.approx(sensitivity(y, False), rel=0.15)


def test_distance_of_equal_and_disjoint_weighings():
    x = np.random.default_rng(0).normal(size=100)
    equal, first = np.full(100, 0.01), (x < np.median(x)) / 50
    assert distance(x, equal, equal) == 0
    assert 0.3 < distance(x, first, 1 / 50 - first) <= 1
    assert distance(x, equal, first) == pytest.approx(distance(3 * x + 1, equal, first))


def test_improper_priors_are_refused():
    def flat(y):
        mu = numpyro.sample("mu", dist.ImproperUniform(dist.constraints.real, (), ()))
        with fed.silo_plate("patients", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    silos = fed.Silos(made(0.2))
    idata = fed.fit(flat, silos, num_draws=100, progress_bar=False)
    with pytest.raises(ValueError, match="expected proper priors"):
        fed.prior_sensitivity(idata, flat, silos)
