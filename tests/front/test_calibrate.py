"""Calibration by simulation: uniform ranks where the fit is right, and controls where it is not."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

import numpyro_fed as fed
from numpyro_fed._arviz import from_groups
from numpyro_fed.front import calibrate as module
from numpyro_fed.results.calibration import Simulator


def model(x, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    with fed.silo_plate("patients", x.shape[0]):
        numpyro.sample("y", dist.Normal(b[0] + b[1] * x, 1), obs=y)


@pytest.fixture(scope="module")
def like():
    return fed.Silos(
        {s: {"x": np.linspace(-1, 1, n), "y": np.zeros(n)} for s, n in {"a": 4, "b": 6}.items()}
    )


def exact(model, silos, widen=1.0):
    """Return exact draws in place of a fit; with ``widen`` their sds are wrong."""
    x, y = (np.asarray(silos.pooled[k], float) for k in ("x", "y"))
    design = np.stack([np.ones(len(x)), x], 1)
    cov = np.linalg.inv(design.T @ design + np.eye(2))
    rng = np.random.default_rng(int(1e6 * abs(y[0])))
    draws = rng.multivariate_normal(cov @ design.T @ y, widen**2 * cov, size=(1, 199))
    idata = from_groups({"posterior": {"b": draws}})
    idata.posterior.attrs["verdict"] = "sound"
    return idata


@pytest.mark.parametrize(("widen", "right"), [(1.0, True), (2.0, False)])
def test_exact_draws_have_uniform_ranks_and_wide_ones_do_not(like, monkeypatch, widen, right):
    monkeypatch.setattr(module, "fit", lambda model, silos, **_: exact(model, silos, widen))
    found = fed.calibrate(model, like, num_simulations=200, num_draws=199, progress_bar=False)
    assert list(found.ranks) == ["b[0]", "b[1]"]
    errors = np.sqrt(0.25 / 200)
    near = np.abs(found.table["in_50"] - 0.5) < 4 * errors
    assert near.all() if right else not near.any()
    p = found.table["p"]
    assert (p > 1e-4).all() if right else (p < 1e-3).all()
    covered = 2 * stats.norm.cdf(widen * stats.norm.ppf(0.75)) - 1
    assert found.table["in_50"].to_numpy() == pytest.approx(covered, abs=4 * errors)


@pytest.mark.ci
def test_a_study_is_calibrated_and_drawn(like):
    found = fed.calibrate(model, like, num_simulations=10, num_draws=200, progress_bar=False)
    assert found.verdicts == ("sound",) * 10
    assert (found.table["p"] > 1e-4).all()
    assert "10 simulations, 10 of them sound" in repr(found)
    assert [a.get_title() for a in found.plot().axes] == ["b[0]", "b[1]"]
    again = fed.calibrate(model, like, num_simulations=10, num_draws=200, progress_bar=False)
    np.testing.assert_array_equal(found.ranks, again.ranks)


def test_rows_that_are_drawn_stay_with_their_covariates():
    def exactly(x, y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with fed.silo_plate("patients", x.shape[0]):
            numpyro.sample("y", dist.Normal(b + 10 * x, 1e-4), obs=y)

    x, group = np.arange(12.0), np.array([0, 1, 2] * 4)
    silos = fed.split({"x": x, "group": group, "y": np.zeros(12)}, by="group")
    theta, found = Simulator(exactly, silos).draw(jax.random.key(0))
    for name in silos:
        np.testing.assert_allclose(found[name]["y"], theta["b"] + 10 * silos[name]["x"], atol=1e-2)


def test_bad_input(like):
    with pytest.raises(TypeError, match=r"expected fed\.Silos"):
        fed.calibrate(model, fed.RemoteSilos(like, fed.Loopback(like)))
    with pytest.raises(ValueError, match="num_simulations: expected 10 or more, got 3"):
        fed.calibrate(model, like, num_simulations=3)

    def computed(x, y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with fed.silo_plate("patients", x.shape[0]):
            numpyro.sample("y", dist.Normal(b * x, 1), obs=y - 1)

    with pytest.raises(ValueError, match=r"'y': expected an argument of the model as it is"):
        fed.calibrate(computed, like, progress_bar=False)

    def flat(x, y):
        b = numpyro.sample("b", dist.ImproperUniform(dist.constraints.real, (), ()))
        with fed.silo_plate("patients", x.shape[0]):
            numpyro.sample("y", dist.Normal(b * x, 1), obs=y)

    with pytest.raises(ValueError, match="expected proper priors"):
        fed.calibrate(flat, like, progress_bar=False)
    with pytest.raises(ValueError, match="num_simulations: expected a whole number, got 'ten'"):
        fed.calibrate(model, like, num_simulations="ten")
