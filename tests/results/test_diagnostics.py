"""A run judged by itself: sound ones pass.

Each way to break one is flagged by the check that is there for it.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC, NUTS

import numpyro_fed as fed
from numpyro_fed.mcmc import visit as rounds


def logistic(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([x.shape[1]]).to_event(1))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def logistic_silos():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 2)) + np.repeat([[0, 0], [1, 0], [0, -1]], 80, axis=0)
    y = rng.random(240) < 1 / (1 + np.exp(-x @ [1.0, -0.5]))
    return fed.split(
        {"x": x.astype(np.float32), "y": y.astype(np.float32)}, by=np.repeat(["a", "b", "c"], 80)
    )


SILOS = logistic_silos()


def run(kernel, num_samples=1500, silos=SILOS):
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


def setup(**options):
    kernel = fed.FSGLD(logistic, **options)
    kernel.init(random.key(0), 0, model_args=(SILOS,))
    return kernel


def failed(mcmc):
    found = fed.diagnose(mcmc)
    return found, set(found.table.index[found.table["verdict"] == "unsound"])


@pytest.mark.ci
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(
            {"selection": "auto", "step_size": fed.Step(noise_correction=True)},
            marks=pytest.mark.ci,
        ),
        {"num_kept": 4},
        pytest.param({"batch_size": 20}, marks=pytest.mark.ci),
    ],
    ids=str,
)
def test_sound_runs_pass(options):
    found, bad = failed(
        run(fed.FSGLD(logistic, **options), 4000 if "batch_size" in options else 1500)
    )
    assert not bad
    assert found.verdict == "sound"
    assert found.summary() == "The run is sound by its checks."
    assert 0.95 < found.table.loc["inflation met", "value"] < 1.06


def test_a_run_without_surrogates_is_judged_by_what_it_has():
    found, bad = failed(run(fed.DSGLD(logistic, 1e-3, num_local_steps=1), 4000))
    assert "inflation met" not in found.table.index
    assert not bad - {"R-hat"}


def test_a_step_ten_times_too_large_is_flagged():
    h = float(setup(batch_size=20)._tuning.step_size)
    found, bad = failed(run(fed.FSGLD(logistic, 10 * h, batch_size=20)))
    assert {"inflation predicted", "inflation met"} <= bad
    assert found.verdict == "unsound"
    assert "Lower step_size or fed.Step(bias_target=)" in found.summary()


@pytest.mark.ci
def test_a_wrong_surrogate_is_flagged_with_its_silo():
    kernel = setup()
    conducive = kernel._tuning.conducive
    scale = np.asarray(kernel._tuning.scale)
    off = conducive.shift.at[1].add(
        3 * np.linalg.inv(scale).T @ np.ones(2)
    )  # its score is off by three in whitened coordinates
    kernel._tuning = kernel._tuning._replace(
        conducive=conducive._replace(shift=off, total_shift=off.sum(0))
    )
    found, bad = failed(run(kernel))
    assert {"inflation met", "silos' pull"} <= bad
    assert found.table.loc["silos' pull", "where"] == "silo 'b'"


def test_a_part_that_chains_have_missed_is_flagged():
    mcmc = run(fed.FSGLD(logistic))
    beta = mcmc._states["z"]["beta"]
    middle = beta[..., 0].mean()
    mcmc._states["z"]["beta"] = beta.at[..., 0].set(middle + jnp.abs(beta[..., 0] - middle))
    found, bad = failed(mcmc)
    assert "surrogate mass left out" in bad
    assert 0.4 < found.table.loc["surrogate mass left out", "value"] < 0.6
    assert "beta" in found.table.loc["surrogate mass left out", "where"]
    mcmc._states["z"]["beta"] = beta  # the control
    assert "surrogate mass left out" not in failed(mcmc)[1]


def test_steps_that_are_cut_in_a_tail_are_flagged():
    """As many cut steps all over are not: they are fewer than 1 % of all."""
    mcmc = run(fed.FSGLD(logistic))
    beta = np.asarray(mcmc._states["z"]["beta"])[..., 0]
    tail = beta <= np.quantile(beta, 0.025)
    mcmc._states["cut_rate"] = jnp.where(tail, 0.2, 0.0)
    found, bad = failed(mcmc)
    assert bad == {"steps cut in a tail"}
    assert found.table.loc["steps cut in a tail", "where"] == "left of beta"
    mcmc._states["cut_rate"] = jnp.full(beta.shape, 0.005)
    assert failed(mcmc)[1] == set()


@pytest.mark.ci
def test_stays_of_a_thousand_steps_are_flagged():
    kernel = setup(surrogate="laplace")
    kernel._config = dataclasses.replace(kernel._config, num_local_steps=1000)
    conducive = kernel._tuning.conducive
    scale = np.linalg.inv(np.asarray(kernel._tuning.scale)).T
    off = conducive.shift + jnp.asarray(np.array([[0.3, 0], [0, 0.3], [-0.3, -0.3]]) @ scale.T)
    kernel._tuning = kernel._tuning._replace(
        conducive=conducive._replace(shift=off, total_shift=off.sum(0))
    )
    short = dataclasses.replace(kernel._config, num_local_steps=4)
    found, bad = failed(run(kernel, 600))
    assert "inflation met" in bad
    reach = 1000 * float(kernel._tuning.step_size)
    assert found.table.loc["steps cut", "limit"] == f"<= {0.04 / reach:.3g}"
    kernel._config = short
    found, bad = failed(run(kernel, 6000))
    assert "inflation met" not in bad  # the same noise in short visits
    assert found.table.loc["steps cut", "limit"] == "<= 0.01"


def test_silos_that_are_not_visited_as_weighted_are_flagged(monkeypatch):
    def equal(config, state, num_silos):
        number = random.randint(random.fold_in(state.key_silos, state.i), (), 0, num_silos)
        return number, jnp.ones((), jnp.int32)

    monkeypatch.setattr(rounds, "_next_silo", equal)
    # a number of steps of its own, so that the round is traced anew
    found, bad = failed(
        run(fed.FSGLD(logistic, num_local_steps=7, selection=[0.6, 0.2, 0.2]), 1500)
    )
    assert "visits" in bad
    assert found.table.loc["visits", "where"] == "silo 'a'"


@pytest.mark.ci
def test_a_step_that_nobody_measured_is_undecided():
    """Its draws mix, with R-hat 1.00, and are more than three times too wide."""
    found = fed.diagnose(run(fed.SGLD(logistic, step_size=0.03, batch_size=10), 1500))
    assert found.table.loc["step size", "verdict"] == found.verdict == "undecided"
    assert "compare with pooled NUTS" in found.summary()
    assert "step size" not in fed.diagnose(run(fed.FSGLD(logistic), 40)).table.index


def effects(y):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    with fed.silo_plate("groups", y.shape[0]):
        a = numpyro.sample("a", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(a[:, None], 1).to_event(1), obs=y)


def effects_silos():
    y = np.random.default_rng(1).normal(size=(60, 4)).astype(np.float32)
    return fed.split({"y": y}, by=np.repeat([0, 1, 2], 20))


@pytest.mark.ci
def test_latents_of_a_silo_that_is_hardly_visited_are_undecided():
    found = fed.diagnose(
        run(fed.FSGLD(effects, selection=[0.495, 0.495, 0.01]), 800, effects_silos())
    )
    row = found.table.loc["effective draws of latents"]
    assert row["verdict"] == "undecided"
    assert row["value"] < 100
    assert "run longer: a latent moves in its silo's rounds alone" in found.summary().lower()


@pytest.mark.ci
def test_a_local_map_that_is_too_narrow_is_flagged():
    silos = effects_silos()
    kernel = fed.FSGLD(effects)
    sound = fed.diagnose(run(kernel, 800, silos)).table
    assert (
        sound.loc[["local moves", "R-hat of latents", "effective draws of latents"], "verdict"]
        == "sound"
    ).all()
    rows = kernel._tuning.latents.rows
    narrow = dataclasses.replace(rows, log_scale=rows.log_scale - 2)
    kernel._tuning = kernel._tuning._replace(latents=kernel._tuning.latents._replace(rows=narrow))
    assert "local moves" in failed(run(kernel, 800, silos))[1]


@pytest.mark.ci
def test_too_few_draws_are_undecided():
    found = fed.diagnose(run(fed.FSGLD(logistic), 40))
    assert found.verdict == "undecided"
    assert found.summary().startswith("The draws do not tell")
    assert "effective draws" in repr(found)
    assert "<table" in found._repr_html_()


def test_other_runs_are_refused():
    with pytest.raises(
        ValueError, match="expected an MCMC that has run over SGLD, DSGLD, FSGLD or HMC, got NUTS"
    ):
        fed.diagnose(MCMC(NUTS(logistic), num_warmup=1, num_samples=1))
    with pytest.raises(
        ValueError, match=r"got FSGLD without a run; call mcmc.run\(rng_key, silos\) first"
    ):
        fed.diagnose(MCMC(fed.FSGLD(logistic), num_warmup=1, num_samples=1))
