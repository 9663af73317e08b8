"""Results of variational fits: ArviZ groups, importance weights, predictions, the bound's figure.

The approximations are written down, not fitted: Gaussian models, whose posterior the family holds
exactly.
"""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import xarray as xr
from matplotlib import pyplot
from numpyro.infer import log_likelihood
from numpyro.infer.svi import SVIRunResult
from scipy import stats
from small_models import (
    GROUP_SD,
    PRIOR_SD,
    ROW_SD,
    intercepts,
    intercepts_posterior,
    intercepts_silos,
)

import numpyro_fed as fed
from numpyro_fed._arviz import from_groups, groups_of, import_arviz, pareto_smoothed
from numpyro_fed.results import weighing
from numpyro_fed.results.elbo_figure import running_mean
from numpyro_fed.vi import draws as vi_draws
from numpyro_fed.vi.importance import smoothed, tail_of_spreads

az = import_arviz()
SILOS = intercepts_silos()
MEAN, COVARIANCE = intercepts_posterior(SILOS)
SD = np.sqrt(np.diag(COVARIANCE))
SLOPE = COVARIANCE[1:, 0] / COVARIANCE[0, 0]  # of each intercept's mean, given mu
GIVEN_MU = np.sqrt(np.diag(COVARIANCE)[1:] - SLOPE * COVARIANCE[1:, 0])
N, K = 8000, 4.5  # draws, and standard errors that a correct number may be off


@cache
def with_particles(particles: int) -> fed.SFVI:
    guide = fed.AutoSiloNormal(intercepts)
    return fed.SFVI(
        intercepts, guide, optax.adam(0.01), num_local_particles=particles, validate=False
    )


@cache
def three_rounds() -> Any:
    """Return a result in which only the parameters' shapes, the losses and the ledger count."""
    return with_particles(1).run(jax.random.key(0), 3, SILOS, progress_bar=False)


def fitted(
    shift: float = 0.0,
    widen: float = 1.0,
    local_shift: float = 0.0,
    local_widen: float = 1.0,
    particles: int = 1,
) -> Any:
    """Return SFVI and a result of it: the exact posterior.

    In it q(mu) or every q(a | mu) is moved and widened by so many sds.
    """
    svi, result = with_particles(particles), three_rounds()
    params = {
        "auto_loc": MEAN[:1] + shift * SD[0],
        "auto_scale_tril": widen * SD[:1, None],
        "auto_local_loc": (MEAN[1:] + SLOPE * shift * SD[0] + local_shift * GIVEN_MU)[:, None],
        "auto_local_log_scale": np.log(local_widen * GIVEN_MU)[:, None],
        "auto_local_coupling": (SLOPE * widen * SD[0])[:, None, None],
        "auto_local_scale_coupling": np.zeros((18, 1, 1)),
    }
    assert {k: v.shape for k, v in params.items()} == {k: v.shape for k, v in result.params.items()}
    return svi, replace(result, params={k: jnp.asarray(v, jnp.float32) for k, v in params.items()})


@pytest.fixture(scope="module")
def exact() -> Any:
    svi, result = fitted()
    return svi, result, fed.to_inference_data(svi, result, SILOS, num_draws=N)


def flat(idata: Any) -> np.ndarray:
    """Draws of (mu, a), shape (draws, 19)."""
    return np.column_stack(
        [idata.posterior["mu"].values[0], idata.posterior["a"].values[0]]
    ).astype(float)


def log_evidence() -> float:
    """Return log p(y) of the random intercepts."""
    y, group = np.asarray(SILOS.pooled["y"], float), np.asarray(SILOS.pooled["group"])
    same = group[:, None] == group
    return stats.multivariate_normal.logpdf(
        y, cov=PRIOR_SD**2 + GROUP_SD**2 * same + ROW_SD**2 * np.eye(72)
    )


# The groups of the InferenceData


@pytest.mark.ci
def test_draws_are_the_posterior_element_by_element(exact: Any) -> None:
    draws = flat(exact[2])
    np.testing.assert_array_less(abs(draws.mean(0) - MEAN), K * SD / N**0.5)
    variances = np.diag(COVARIANCE)
    error = np.sqrt((variances[:, None] * variances + COVARIANCE**2) / N)
    np.testing.assert_array_less(abs(np.cov(draws.T) - COVARIANCE), K * error)
    # negative control: the order of the silos' storage is another, and would be seen
    stored = 1 + np.concatenate([SILOS[name]["groups"] for name in SILOS])
    assert (abs(MEAN[stored] - MEAN[1:]) > 2 * K * SD[1:] / N**0.5).sum() > 12


def test_elements_have_pooled_coordinates_and_their_silo(exact: Any) -> None:
    posterior = exact[2].posterior
    assert posterior["a"].dims == ("chain", "draw", "groups")
    np.testing.assert_array_equal(posterior["groups"], np.arange(18))
    for name in SILOS:
        np.testing.assert_array_equal(
            posterior["groups"][posterior["groups_silo"] == name], SILOS[name]["groups"]
        )
        rows = exact[2].observed_data["y"][exact[2].observed_data["rows_silo"] == name]
        np.testing.assert_array_equal(rows, SILOS[name]["y"])


def test_log_likelihood_is_numpyros(exact: Any) -> None:
    idata = exact[2]
    draws = {k: v.values[0] for k, v in idata.posterior.data_vars.items()}
    expected = log_likelihood(intercepts, draws, **SILOS.pooled, parallel=True)["y"]
    np.testing.assert_allclose(idata.log_likelihood["y"].values[0], expected, rtol=1e-5, atol=1e-5)
    means = draws["a"][:, np.asarray(SILOS.pooled["group"])]
    closed = stats.norm.logpdf(np.asarray(SILOS.pooled["y"]), means, ROW_SD)
    np.testing.assert_allclose(idata.log_likelihood["y"].values[0], closed, rtol=1e-4, atol=1e-5)
    without = fed.to_inference_data(*exact[:2], SILOS, num_draws=5, log_likelihood=False)
    assert "log_likelihood" not in groups_of(without)


def test_trace_of_the_bound_ledger_and_netcdf(exact: Any, tmp_path: Path) -> None:
    _, result, idata = exact
    idata.to_netcdf(str(tmp_path / "fit.nc"))
    read = az.from_netcdf(str(tmp_path / "fit.nc"))
    assert sorted(groups_of(read)) == [
        "log_likelihood",
        "observed_data",
        "optimization",
        "posterior",
        "sample_stats",
    ]
    for data in (idata, read):
        np.testing.assert_array_equal(data.optimization["elbo"], -result.losses)
        assert data.optimization["elbo"].dims == ("round",)
        attrs = data.posterior.attrs
        assert json.loads(attrs["silos"]) == list(SILOS.names)
        assert json.loads(attrs["rounds"]) == [4, 4, 4]  # three, and one that weighed draws
        # theta, u, a log weight and two keys go down for each draw, and one number comes up
        each = {"gradient_evaluations": 0, "bytes_down": 4 * (1 + 1 + 1) + 16, "bytes_up": 4}
        for entry, size in each.items():
            added = np.subtract(json.loads(attrs[entry]), getattr(result.ledger, entry))
            assert added.tolist() == [size * data.posterior.sizes["draw"]] * 3
            assert min(json.loads(attrs[entry])) > 0
        assert json.loads(attrs["learned"]) == {}
        np.testing.assert_array_equal(data.posterior["groups_silo"], idata.posterior["groups_silo"])
    xr.testing.assert_equal(read.posterior["a"], idata.posterior["a"])


def test_compare_with_exact_draws(exact: Any) -> None:
    draws = np.random.default_rng(0).multivariate_normal(MEAN, COVARIANCE, (4, 5000))
    reference = from_groups(
        {"posterior": {"mu": draws[..., 0], "a": draws[..., 1:]}}, dims={"a": ["groups"]}
    )
    comparison = fed.compare(exact[2], reference)
    assert len(comparison.table) == 19
    assert (comparison.table["verdict"] == "agrees").sum() >= 18
    assert comparison.closing_line().endswith(
        f"approximation {exact[2].posterior.attrs['pareto_k']:.2f}, not above 0.7."
    )


def test_what_does_not_belong_together_is_refused(exact: Any) -> None:
    svi, result, idata = exact
    with pytest.raises(TypeError, match=r"expected the result of svi.run\(...\), got dict"):
        fed.to_inference_data(svi, result.params, SILOS)
    with pytest.raises(
        ValueError, match=r"expected the silos of the run, \['0', '1', '2'\], got \['a', 'b'\]"
    ):
        fed.to_inference_data(
            svi, result, fed.Silos({"a": dict(SILOS["0"]), "b": dict(SILOS["1"])})
        )
    with pytest.raises(ValueError, match=r"expected the silos of the run, .*, got dict"):
        fed.to_inference_data(svi, result, dict(SILOS.pooled))
    for num in (0, 2.5):
        with pytest.raises(
            ValueError, match=rf"num_draws: expected a whole number >= 1, got {num}"
        ):
            fed.to_inference_data(svi, result, SILOS, num_draws=num)
    with pytest.raises(
        ValueError, match=r"expected an MCMC that has run over a kernel of numpyro_fed"
    ):
        fed.to_inference_data(
            numpyro.infer.MCMC(numpyro.infer.NUTS(intercepts), num_warmup=1, num_samples=1), SILOS
        )
    with pytest.raises(
        ValueError, match=r"silo='oslo': expected a silo of the fit, \['0', '1', '2'\], or None"
    ):
        fed.predict(intercepts, idata, jax.random.key(0), {**SILOS["0"], "y": None}, silo="oslo")
    with pytest.raises(
        ValueError, match=r"expected a fit with silo coordinates, from fed.to_inference_data"
    ):
        fed.predict(
            intercepts, {"mu": np.zeros((1, 3))}, jax.random.key(0), {**SILOS["0"], "y": None}
        )


# Importance weights


def test_weights_of_the_exact_posterior_are_the_evidence(exact: Any) -> None:
    np.testing.assert_allclose(exact[2].sample_stats["log_weight"], log_evidence(), atol=2e-4)
    assert exact[2].posterior.attrs["pareto_k"] == 0


def test_pareto_k_judges_no_noise() -> None:
    """It knows no scale: of weights that hardly differ it would judge the rounding."""
    rng = np.random.default_rng(0)
    u, ties = rng.normal(size=4000), 1e-5 * (rng.normal(size=4000) > 1)
    assert pareto_smoothed(ties - ties.max())[1] == np.inf  # the control
    for log_weight in (ties - 187, 0.01 * u**3 - 187, np.zeros(1)):
        weight, k = smoothed(log_weight)
        assert k == 0
        np.testing.assert_allclose(weight, np.exp(log_weight) / np.exp(log_weight).sum())
    weight, k = smoothed(np.log1p(abs(rng.standard_cauchy(4000))))
    assert 0.7 < k < 1.3  # in the limit 1
    assert weight.sum() == pytest.approx(1)
    weight, k = smoothed(np.array([0.0, np.nan, 1.0]))
    assert k == np.inf
    np.testing.assert_array_equal(weight, [0.5, 0, 0.5])


def test_pareto_k_of_a_variance():
    """Weights of the tail index a, times the square of a normal tail, have k = 1 / a.

    Weights of a position that grows with them have three times that: its variance is judged.
    """
    rng = np.random.default_rng(0)
    log_weight = rng.exponential(size=40_000) * 0.3  # Pareto's law, k = .3
    calm, wide = rng.normal(size=40_000), rng.choice([-1, 1], 40_000) * np.exp(log_weight)
    weight, k = smoothed(log_weight)
    assert 0.2 < k < 0.4
    found, at = tail_of_spreads(weight, np.stack([calm] * 300 + [wide], 1))
    assert at == 300
    assert 0.75 < found < 1.05  # .3 + 2 x .3
    assert tail_of_spreads(weight, calm[:, None])[0] < 0.5  # the control


@pytest.mark.ci
def test_resampling_mends_a_shifted_approximation() -> None:
    svi, result = fitted(shift=1.0, widen=1.5)
    plain = fed.to_inference_data(svi, result, SILOS, num_draws=N, log_likelihood=False)
    mu = flat(plain)[:, 0]
    weight = (
        log_evidence()
        + stats.norm.logpdf(mu, MEAN[0], SD[0])
        - stats.norm.logpdf(mu, MEAN[0] + SD[0], 1.5 * SD[0])
    )
    np.testing.assert_allclose(plain.sample_stats["log_weight"][0], weight, atol=1e-3)
    mended = fed.to_inference_data(
        svi, result, SILOS, num_draws=N, resample=True, log_likelihood=False
    )
    moved, draws = (flat(x) for x in (plain, mended))
    assert abs(moved[:, 0].mean() - MEAN[0] - SD[0]) < K * 1.5 * SD[0] / N**0.5
    # 4 N candidates are worth 2.5 N draws of the posterior, and N of them are taken
    np.testing.assert_array_less(abs(draws.mean(0) - MEAN), K * SD * (1 / N + 1 / (2.5 * N)) ** 0.5)
    np.testing.assert_allclose(draws.std(0), SD, rtol=K * (1.4 / (2 * N)) ** 0.5)
    assert (abs(moved.mean(0) - MEAN) > 3 * abs(draws.mean(0) - MEAN)).mean() > 0.8  # a follows mu
    assert mended.posterior["a"].shape == plain.posterior["a"].shape
    assert len(np.unique(draws[:, 0])) > 0.8 * N


def test_draws_are_judged_by_their_spreads_too() -> None:
    rng = np.random.default_rng(0)
    config = SimpleNamespace(factors=SimpleNamespace(owners=("calm", "wild")))
    calm, wild = rng.normal(size=4000), rng.standard_t(1.5, 4000)
    for other in (wild, rng.permutation(calm)):
        draws = SimpleNamespace(
            log_weight=0.5 * rng.normal(size=4000), theta=np.stack([calm, other], 1)
        )
        _, k, judged = weighing._judged(config, draws, False)
        assert (k > 0.7) == (other is wild)
        assert (judged == "the spread of wild") or other is not wild


@pytest.mark.ci
def test_latents_are_resampled_inside_the_silos(exact: Any) -> None:
    """Every q(a | mu) is half an sd off and too wide: one candidate keeps that, many mend it."""
    error = K * SD[1:] / GIVEN_MU / 2000**0.5
    for particles, left in ((1, 0.5), (200, 0.0)):
        svi, result = fitted(local_shift=0.5, local_widen=1.4, particles=particles)
        with (
            nullcontext()
            if particles > 1
            else pytest.warns(UserWarning, match=r"Pareto's k .* \(the spread of mu\)")
        ):
            draws = flat(
                fed.to_inference_data(svi, result, SILOS, num_draws=2000, log_likelihood=False)
            )
        np.testing.assert_array_less(
            abs((draws[:, 1:].mean(0) - MEAN[1:]) / GIVEN_MU - left), 1.4 * error
        )
    np.testing.assert_allclose(draws.std(0), SD, rtol=K / 4000**0.5)
    # where q(a | mu) is exact, the mean of 200 equal weights is one of them
    same = fed.to_inference_data(
        *fitted(particles=200), SILOS, num_draws=2000, log_likelihood=False
    )
    np.testing.assert_allclose(same.sample_stats["log_weight"], log_evidence(), atol=2e-4)


def heavy(y: Any) -> None:
    """Sample with data that say nothing: the posterior is a Cauchy, whose tails no Gaussian has."""
    mu = numpyro.sample("mu", dist.Cauchy(0, 1))
    with fed.silo_plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(0 * mu, 1), obs=y)


def test_pareto_k_finds_what_the_family_cannot_hold() -> None:
    silos = fed.Silos({"oslo": {"y": np.ones(2)}, "rome": {"y": np.zeros(3)}})
    svi = fed.SFVI(heavy, fed.AutoSiloNormal(heavy), optax.adam(0.01), validate=False)
    result = svi.run(jax.random.key(0), 3, silos, progress_bar=False)
    with pytest.warns(
        UserWarning,
        match=r"Pareto's k of the approximation is \d\.\d\d \(.*\), above 0\.7: q\(theta\) misses",
    ):
        idata = fed.to_inference_data(svi, result, silos, num_draws=2000)
    assert 0.7 < idata.posterior.attrs["pareto_k"] < 3
    assert ", above 0.7:" in fed.compare(idata, idata).closing_line()


# Silos of different structure


def proxied(y: Any, proxy: Any = None) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with fed.silo_plate("rows", y.shape[0] if y is not None else proxy.shape[0]):
        z = numpyro.sample("z", dist.Normal(mu, 1))
        if proxy is not None:
            numpyro.sample("proxy", dist.Normal(z, 0.5), obs=proxy)
        numpyro.sample("y", dist.Normal(z, 1), obs=y)


@pytest.mark.ci
def test_a_plates_elements_are_not_those_of_one_with_a_longer_name():
    def model(x, y, seen=True):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        for name, data in (("rows", x), ("rows_more", y)):
            with fed.silo_plate(name, data.shape[0]):
                z = numpyro.sample(f"z_{name}", dist.Normal(mu, 1))
                numpyro.sample(f"obs_{name}", dist.Normal(z, 1), obs=data if seen else None)

    rows = {
        s: {"x": np.arange(n) * 1.0, "y": np.arange(n + 2) * 1.0} for s, n in (("a", 2), ("b", 3))
    }
    silos = fed.Silos(rows, rows={"x": "rows", "y": "rows_more"})
    svi = fed.SFVI(model, fed.AutoSiloNormal(model), optax.adam(0.01), validate=False)
    result = svi.run(jax.random.key(0), 2, silos, progress_bar=False)
    with pytest.warns(UserWarning, match=r"Pareto's k"):  # after two rounds
        idata = fed.to_inference_data(svi, result, silos, num_draws=100)
    data = {**rows["a"], "seen": False}
    drawn = fed.predict(model, idata, jax.random.key(1), data, silo="a")
    assert {k: drawn[k].shape[-1] for k in ("obs_rows", "obs_rows_more")} == {
        "obs_rows": 2,
        "obs_rows_more": 4,
    }


@pytest.mark.ci
def test_silos_of_different_structure_have_names_of_their_own() -> None:
    data = {"oslo": (2, False), "rome": (3, True), "bern": (1, False)}
    rows = {
        name: {"y": np.arange(n) + 10.0, **({"proxy": np.arange(n) - 1.0} if has else {})}
        for name, (n, has) in data.items()
    }
    silos = fed.MixedSilos(rows)
    svi = fed.SFVI(
        proxied,
        fed.AutoSiloNormal(proxied),
        optax.adam(0.01),
        num_local_particles=2,
        validate=False,
    )
    result = svi.run(jax.random.key(0), 3, silos, progress_bar=False)
    with pytest.warns(UserWarning, match=r"Pareto's k"):  # after three rounds
        idata = fed.to_inference_data(svi, result, silos, num_draws=100)
    assert {k: v.dims[2:] for k, v in idata.posterior.data_vars.items()} == {
        "mu": (),
        "z_0": ("rows_0",),
        "z_1": ("rows_1",),
    }
    assert idata.posterior["rows_0_silo"].values.tolist() == ["oslo", "oslo", "bern"]
    assert idata.posterior["rows_1_silo"].values.tolist() == ["rome"] * 3
    assert (
        set(idata.observed_data.data_vars)
        == set(idata.log_likelihood.data_vars)
        == {"y_0", "y_1", "proxy_1"}
    )
    assert idata.observed_data["y_0"].values.tolist() == [10, 11, 10]
    assert json.loads(idata.posterior.attrs["silos"]) == ["oslo", "rome", "bern"]
    closed = stats.norm.logpdf([-1, 0, 1], idata.posterior["z_1"], 0.5)
    np.testing.assert_allclose(idata.log_likelihood["proxy_1"], closed, rtol=1e-4, atol=1e-5)
    data = {"y": None, "proxy": rows["rome"]["proxy"][:1]}
    with pytest.raises(ValueError, match=r"silo 'rome' has 3 elements of 'rows' in the fit, got"):
        fed.predict(proxied, idata, jax.random.key(1), data, silo="rome")
    # a silo's latents are those of the fit, not new ones
    again = fed.predict(
        proxied, idata, jax.random.key(1), {"y": None, "proxy": rows["rome"]["proxy"]}, silo="rome"
    )
    assert set(again) >= {"y"}
    assert "z" not in again


# Predictions


def test_predictions_for_a_silo_of_the_fit(exact: Any) -> None:
    idata = exact[2]
    for name in SILOS:
        groups, group = (np.asarray(SILOS[name][k]) for k in ("groups", "group"))
        data = {"y": None, "group": group, "groups": groups}
        y = fed.predict(intercepts, idata, jax.random.key(3), data, silo=name)["y"]
        mean, sd = MEAN[1 + groups[group]], np.sqrt(SD[1 + groups[group]] ** 2 + ROW_SD**2)
        np.testing.assert_array_less(abs(y.mean(0) - mean), K * sd / N**0.5)
        np.testing.assert_allclose(y.std(0), sd, rtol=K / (2 * N) ** 0.5)
        # draw by draw: what is left beside the silo's own intercepts is the rows' noise
        own = idata.posterior["a"].values[0][:, groups[group]]
        np.testing.assert_allclose((y - own).std(0), ROW_SD, rtol=K / (2 * N) ** 0.5)


def test_predictions_for_new_rows_of_a_silo(exact: Any) -> None:
    groups = np.asarray(SILOS["1"]["groups"])
    data = {"y": None, "group": np.array([5, 0, 5]), "groups": groups}
    found = fed.predict(intercepts, exact[2], jax.random.key(4), data, silo="1")
    assert set(found) == {"y"}
    mean, variance = MEAN[1 + groups[[5, 0, 5]]], np.diag(COVARIANCE)[1 + groups[[5, 0, 5]]]
    assert found["y"].shape == (N, 3)
    np.testing.assert_array_less(
        abs(found["y"].mean(0) - mean), K * np.sqrt((variance + ROW_SD**2) / N)
    )
    total = variance[0] + ROW_SD**2
    assert (
        abs(np.cov(found["y"][:, 0], found["y"][:, 2])[0, 1] - variance[0])
        < K * np.hypot(total, variance[0]) / N**0.5
    )


def test_positions_outside_their_plate_are_refused(exact: Any) -> None:
    data = {"y": None, "group": np.array([0, 0, 1]), "groups": np.asarray(SILOS["1"]["groups"])}
    size = len(data["groups"])
    data["group"][1] = size
    message = (
        rf"'group' points to the rows of 'groups': expected positions from 0 to {size - 1}, got "
        rf"{size} in row 1"
    )
    with pytest.raises(ValueError, match=message):
        fed.predict(intercepts, exact[2], jax.random.key(4), data, silo="1")


def test_predictions_from_a_fit_without_the_latent_are_refused(exact: Any) -> None:
    """Its draws would be its prior's."""

    def renamed(y: Any, group: Any, groups: Any) -> None:
        center = numpyro.sample("center", dist.Normal(0, PRIOR_SD))
        with fed.silo_plate("rows", len(group)):
            numpyro.sample("y", dist.Normal(center, ROW_SD), obs=y)

    data = {"y": None, "group": np.array([0, 1, 1]), "groups": np.arange(2)}
    with pytest.raises(ValueError, match="site 'center' is in no silo plate, and the fit has no"):
        fed.predict(renamed, exact[2], jax.random.key(5), data)


def test_predictions_for_a_new_silo(exact: Any) -> None:
    data = {"y": None, "group": np.array([0, 1, 1]), "groups": np.arange(2)}
    found = fed.predict(intercepts, exact[2], jax.random.key(5), data)
    assert {k: v.shape for k, v in found.items()} == {"a": (N, 2), "y": (N, 3)}
    between = COVARIANCE[0, 0] + GROUP_SD**2
    expected = np.array(
        [
            [between, COVARIANCE[0, 0], COVARIANCE[0, 0]],
            [COVARIANCE[0, 0], between, between],
            [COVARIANCE[0, 0], between, between],
        ]
    ) + ROW_SD**2 * np.eye(3)
    variances = np.diag(expected)
    np.testing.assert_array_less(abs(found["y"].mean(0) - MEAN[0]), K * np.sqrt(variances / N))
    error = np.sqrt((variances[:, None] * variances + expected**2) / N)
    np.testing.assert_array_less(abs(np.cov(found["y"].T) - expected), K * error)


# The bound, and its figure


def test_a_loss_that_still_falls_is_not_converged() -> None:
    """Noise alone falls by chance, within its standard errors."""
    noise = np.random.default_rng(0).normal(0, 5, 4_000)
    for slope, falls in ((0.0, False), (0.01, True), (-0.01, False)):
        result = replace(three_rounds(), losses=noise - slope * np.arange(4_000))
        assert ("not converged" in repr(result)) == (result.falling > 0) == falls
        if falls:  # 1,000 rounds of slope .01, within 4 standard errors of two means of 1,000
            assert abs(result.falling - 10.0) < 4 * 5 * (2 / 1000) ** 0.5
    assert replace(three_rounds(), losses=-1e3 * np.arange(150.0)).falling == 0.0


def losses(values: Any) -> SVIRunResult:
    return SVIRunResult(params={}, state=None, losses=np.asarray(values))


def test_running_mean_is_centered_and_cut_at_the_ends() -> None:
    x = np.array([1.0, 2.0, 6.0, np.nan, 4.0])
    np.testing.assert_allclose(running_mean(x, 1), x)
    np.testing.assert_allclose(running_mean(x, 2), [1.5, 4, 6, 4, 4])
    np.testing.assert_allclose(running_mean(x, 3), [1.5, 3, 4, 5, 4])
    np.testing.assert_allclose(running_mean(x, 100), np.full(5, 13 / 4))
    assert np.isnan(running_mean(np.full(3, np.inf), 3)).all()
    # a cold start costs no digits later
    np.testing.assert_allclose(running_mean(np.array([1e38, 1.0, 2.0, 3.0]), 2)[1:], [1.5, 2.5, 3])


def test_figure_shows_the_bound_and_leaves_the_cold_start_out(exact: Any, tmp_path: Path) -> None:
    rounds = np.arange(1, 1001)
    trace = 50 + 1e6 * np.exp(-rounds / 10) + np.random.default_rng(0).normal(size=1000)
    figure = fed.plot_elbo(losses(trace))
    (axis,) = figure.axes
    raw, mean = axis.lines
    np.testing.assert_allclose(raw.get_ydata(), -trace)
    np.testing.assert_array_equal(raw.get_xdata(), rounds)
    np.testing.assert_allclose(mean.get_ydata(), running_mean(-trace, 20))
    low, high = axis.get_ylim()
    assert -56 < low < -52
    assert -48 < high < -44
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("round", "evidence lower bound (nats)")
    figure.savefig(tmp_path / "elbo.png")
    assert (tmp_path / "elbo.png").stat().st_size > 5000
    assert (
        "running mean of 7"
        in fed.plot_elbo(losses(trace), smooth=7).axes[0].get_legend().get_texts()[1].get_text()
    )
    pyplot.close("all")


def test_figure_of_a_result_and_of_its_inference_data_are_the_same(exact: Any) -> None:
    _, result, idata = exact
    whole = pyplot.figure().subfigures(1, 2)
    for part, fit in zip(whole, (result, idata), strict=True):
        assert fed.plot_elbo(fit, figure=part) is part
        np.testing.assert_array_equal(part.axes[0].lines[0].get_ydata(), -result.losses)
    broken = fed.plot_elbo(losses([np.nan, 3.0, np.inf, 2.0]))
    assert np.isfinite(broken.axes[0].get_ylim()).all()
    pyplot.close("all")


def test_figure_refuses_what_has_no_bound() -> None:
    with pytest.raises(
        TypeError, match=r"variable elbo in the group optimization.*got (InferenceData|DataTree)"
    ):
        fed.plot_elbo(from_groups({"posterior": {"mu": np.zeros((1, 4))}}))
    with pytest.raises(ValueError, match=r"smooth: expected a whole number of rounds >= 1, got 0"):
        fed.plot_elbo(losses([1.0]), smooth=0)
    with pytest.raises(ValueError, match=r"finite in some round, got 2 that are not"):
        fed.plot_elbo(losses([np.nan, np.inf]))


@pytest.mark.parametrize(
    ("num", "numbers", "together"),
    [(16_000, 60_000, 64), (100, 1, 100), (16_000, 1 << 30, 1), (13, 1 << 20, 4)],
)
def test_draws_are_made_together_without_a_rest_where_that_is_near(num, numbers, together):
    assert vi_draws.at_once(num, numbers) == together


@pytest.mark.ci
def test_data_that_a_plate_repeats_have_the_shape_of_their_likelihood() -> None:
    """A plate may observe one row of data several times: its dimensions are the likelihood's."""

    def model(x: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        with fed.silo_plate("rows", len(x), dim=-1), numpyro.plate("times", 3, dim=-2):
            numpyro.sample("y", dist.Normal(mu, 1), obs=x)

    silos = fed.split({"x": np.arange(4.0)}, by=np.array(["a", "a", "b", "b"]))
    svi = fed.SFVI(model, fed.AutoSiloNormal(model), optax.adam(0.01))
    result = svi.run(jax.random.key(0), 2, silos, progress_bar=False)
    with pytest.warns(UserWarning, match="Pareto's k"):
        idata = fed.to_inference_data(svi, result, silos, num_draws=5)
    assert idata.observed_data.y.dims == ("times", "rows")
    np.testing.assert_array_equal(idata.observed_data.y, np.tile(np.arange(4.0), (3, 1)))
    assert idata.log_likelihood.y.shape == (1, 5, 3, 4)
