"""The Langevin kernels inside numpyro.infer.MCMC, Gibbs, Predictive and arviz.

Nothing of NumPyro's may notice.
"""

import pickle
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from marks import heavy
from numpyro.infer import MCMC, NUTS, Gibbs, Predictive
from numpyro.infer.util import log_likelihood
from small_models import INTERCEPTS_CALLS, intercepts, intercepts_silos, scale_model, scale_silos

import numpyro_fed as fed
from numpyro_fed._arviz import groups_of, import_arviz

SILOS = scale_silos()
LOCAL = intercepts_silos()


def langevin(**options):
    return fed.DSGLD(scale_model, 0.01, 5, **options)


def run(kernel=None, silos=SILOS, seed=0, extra_fields=(), init_params=None, **options):
    options = {"num_warmup": 10, "num_samples": 30, "progress_bar": False, **options}
    mcmc = MCMC(langevin() if kernel is None else kernel, **options)
    mcmc.run(random.key(seed), silos, extra_fields=extra_fields, init_params=init_params)
    return mcmc


@pytest.fixture(scope="module")
def reference():
    """Two chains, drawn one after the other."""
    return run(num_chains=2, chain_method="sequential")


@pytest.fixture(scope="module")
def local_run():
    """Two chains of a model with local latents."""
    kernel = fed.FSGLD(intercepts, num_local_steps=5)
    fields = ("i", "eps", "visits")
    return run(kernel, LOCAL, num_chains=2, chain_method="vectorized", extra_fields=fields)


def assert_same_draws(first, second, **tolerance):
    a, b = (m.get_samples(group_by_chain=True) for m in (first, second))
    assert set(a) == set(b)
    for name in a:
        np.testing.assert_allclose(
            a[name], b[name], err_msg=name, **{"rtol": 2e-4, "atol": 1e-5, **tolerance}
        )


# Chains


@pytest.mark.parametrize(
    "method",
    heavy(["vectorized", "parallel", jax.vmap], "vectorized", "parallel"),
    ids=["vectorized", "parallel", "callable"],
)
def test_chain_methods_draw_the_same(reference, method):
    assert_same_draws(run(num_chains=2, chain_method=method), reference)


def test_chains_differ_and_are_grouped(reference):
    grouped, flat = reference.get_samples(group_by_chain=True), reference.get_samples()
    assert {k: v.shape for k, v in grouped.items()} == {
        "mu": (2, 30),
        "sigma": (2, 30),
        "ratio": (2, 30),
    }
    np.testing.assert_array_equal(flat["mu"], grouped["mu"].reshape(-1))
    assert np.abs(np.asarray(grouped["mu"][0] - grouped["mu"][1])).max() > 0.01
    np.testing.assert_allclose(flat["ratio"], flat["mu"] / flat["sigma"], rtol=1e-5)
    assert (np.asarray(flat["sigma"]) > 0).all()


def test_one_chain_is_the_chain_of_its_key():
    one = run(seed=3)
    keys = random.split(random.key(0), 2).at[1].set(random.key(3))
    two = MCMC(
        langevin(),
        num_warmup=10,
        num_samples=30,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    two.run(keys, SILOS)
    np.testing.assert_allclose(
        one.get_samples()["mu"], two.get_samples(group_by_chain=True)["mu"][1], rtol=2e-4, atol=1e-5
    )
    assert one.get_samples(group_by_chain=True)["mu"].shape == (1, 30)


def test_thinning_keeps_every_third_draw():
    whole, thinned = run(), run(thinning=3)
    np.testing.assert_allclose(
        thinned.get_samples()["mu"], whole.get_samples()["mu"][2::3], rtol=1e-5
    )


@pytest.mark.ci
def test_run_goes_on_after_warmup():
    whole = run(num_warmup=0, num_samples=40)
    parts = MCMC(langevin(), num_warmup=10, num_samples=30, progress_bar=False)
    parts.warmup(random.key(0), SILOS, collect_warmup=True)
    assert parts.get_samples()["mu"].shape == (10,)
    np.testing.assert_allclose(parts.get_samples()["mu"], whole.get_samples()["mu"][:10], rtol=1e-5)
    assert int(parts.post_warmup_state.i) == 10
    parts.run(parts.post_warmup_state.rng_key, SILOS)
    np.testing.assert_allclose(parts.get_samples()["mu"], whole.get_samples()["mu"][10:], rtol=1e-5)
    assert int(parts.last_state.i) == 40
    assert int(parts.last_state.visits.sum()) == 40


@pytest.mark.ci
def test_run_goes_on_from_the_last_state_of_vectorized_chains():
    options = {"num_chains": 2, "chain_method": "vectorized"}
    whole = run(num_warmup=0, num_samples=40, **options)
    parts = run(num_warmup=0, num_samples=20, **options)
    parts.post_warmup_state = parts.last_state
    parts.run(parts.last_state.rng_key, SILOS)
    np.testing.assert_allclose(
        parts.get_samples(group_by_chain=True)["mu"],
        whole.get_samples(group_by_chain=True)["mu"][:, 20:],
        rtol=1e-4,
    )


@pytest.mark.ci
def test_default_and_extra_fields(local_run):
    fields = local_run.get_extra_fields(group_by_chain=True)
    collected = {
        "diverging",
        "silo",
        "cut_rate",
        "local_accept_prob",
        "local_stuck",
        "step_size",
        "inflation",
        "residual",
    }
    assert set(fields) == collected | {"i", "eps", "visits"}
    assert fields["residual"].shape == (2, 30, local_run.sampler.factors.dim)
    assert fields["eps"].shape == (2, 30, 18, 1)
    np.testing.assert_array_equal(fields["i"], np.tile(np.arange(11, 41), (2, 1)))
    assert set(np.unique(fields["silo"])) <= {0, 1, 2}
    np.testing.assert_array_equal(fields["visits"].sum(-1), fields["i"])
    assert not fields["diverging"].any()
    assert np.asarray(fields["local_accept_prob"]).mean() > 0.9
    assert not fields["local_stuck"].any()


@pytest.mark.ci
def test_visits_follow_the_selection():
    f = [0.7, 0.1, 0.2]
    mcmc = run(langevin(selection=f), num_samples=400)
    share = np.bincount(np.asarray(mcmc.get_extra_fields()["silo"]), minlength=3) / 400
    error = np.sqrt(np.array(f) * (1 - np.array(f)) / 400)
    assert (np.abs(share - f) < 4 * error).all()
    assert np.abs(share - 1 / 3).max() > 8 * error.max()  # negative control


def test_init_params_are_unconstrained_and_in_pooled_order():
    start = {"mu": jnp.array(2.0), "sigma": jnp.array(-1.0)}
    mcmc = run(num_warmup=0, num_samples=1, init_params=start)
    assert int(mcmc.last_state.i) == 1
    kernel = langevin()
    state = kernel.init(random.key(0), 0, start, model_args=(SILOS,))
    assert {k: float(v) for k, v in state.z.items()} == {"mu": 2.0, "sigma": -1.0}
    several = {"mu": jnp.array([1.0, 2.0, 3.0]), "sigma": jnp.zeros(3)}
    state = kernel.init(random.split(random.key(0), 3), 0, several, model_args=(SILOS,))
    np.testing.assert_array_equal(state.z["mu"], [1, 2, 3])
    far = {"mu": jnp.array([100.0, -100.0]), "sigma": jnp.zeros(2)}
    chains = run(
        num_warmup=0, num_samples=2, num_chains=2, chain_method="sequential", init_params=far
    )
    mu = np.asarray(chains.get_samples(group_by_chain=True)["mu"])
    assert (mu[0] > mu[1] + 10).all()


@pytest.mark.ci
def test_local_latents_come_out_constrained_and_in_pooled_order(local_run):
    draws = local_run.get_samples()
    assert draws["a"].shape == (60, 18)
    y, group = (np.asarray(LOCAL.pooled[k]) for k in ("y", "group"))
    means = np.array([y[group == g].mean() for g in range(18)])
    assert np.corrcoef(np.asarray(draws["a"]).mean(0), means)[0, 1] > 0.95
    flat = np.asarray(LOCAL.order["groups"])
    assert (
        np.corrcoef(np.asarray(draws["a"]).mean(0), means[flat])[0, 1] < 0.7
    )  # negative control: flat order


# What compiled programs remember


OTHER = scale_silos(shift=40.0)


def fsgld():
    return fed.FSGLD(scale_model, num_local_steps=5)


@pytest.fixture(scope="module")
def fresh():
    """Draws of kernels that have seen nothing else, on two data sets of the same shapes."""
    return run(fsgld()), run(fsgld(), OTHER)


@pytest.mark.ci
@pytest.mark.parametrize("jit_model_args", [False, True])
def test_one_kernel_serves_several_data_sets(fresh, jit_model_args):
    """A second fit on data of the same shapes must not use the first's surrogates and step size."""
    mcmc = run(fsgld(), jit_model_args=jit_model_args)
    assert_same_draws(mcmc, fresh[0])
    mcmc.run(random.key(0), OTHER)
    assert_same_draws(mcmc, fresh[1])
    mcmc.sampler.init(
        random.split(random.key(0), 2), 0, model_args=(OTHER,)
    )  # as vectorized chains do
    mcmc.run(random.key(0), SILOS)
    assert_same_draws(mcmc, fresh[0])
    gap = (
        np.asarray(fresh[0].get_samples()["mu"]).mean()
        - np.asarray(fresh[1].get_samples()["mu"]).mean()
    )
    assert abs(gap) > 5


CALLS = []


def counted(y):
    CALLS.append(1)
    mu = numpyro.sample("mu", dist.Normal(0, 3))
    with fed.silo_plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


@pytest.mark.ci
def test_the_model_is_called_only_while_tracing():
    silos = fed.Silos({"a": {"y": jnp.arange(3.0)}, "b": {"y": jnp.arange(4.0)}})
    kernel = fed.FSGLD(counted, num_local_steps=5)
    CALLS.clear()
    mcmc = run(kernel, silos, num_samples=200)
    assert 0 < len(CALLS) <= 30  # for 1,050 local steps
    CALLS.clear()
    mcmc.run(random.key(1), silos)
    run(fed.FSGLD(counted, num_local_steps=5), silos)
    other = fed.Silos({"a": {"y": 2 + jnp.arange(3.0)}, "b": {"y": jnp.ones(4)}})
    run(fed.FSGLD(counted, fed.Step(bias_target=0.05), num_local_steps=5), other)
    assert not CALLS


@pytest.mark.ci
def test_a_model_with_local_latents_is_called_only_while_tracing(local_run):
    keys = random.split(random.key(0), 2)
    once = fed.FSGLD(
        intercepts, num_local_steps=5
    )  # programs compiled before may have been cleared for their memory
    once.sample(once.init(keys, 0, model_args=(LOCAL,)), (LOCAL,), {})
    INTERCEPTS_CALLS.clear()
    local_run.sampler.init(random.key(1), 0, model_args=(LOCAL,))
    other = intercepts_silos(seed=3)
    kernel = fed.FSGLD(intercepts, num_local_steps=5)
    kernel.sample(kernel.init(keys, 0, model_args=(other,)), (other,), {})
    assert other.sizes == LOCAL.sizes
    assert not INTERCEPTS_CALLS


# The rest of NumPyro and arviz


@pytest.mark.ci
def test_pickling():
    mcmc = MCMC(fsgld(), num_warmup=10, num_samples=30, progress_bar=False)
    before = pickle.loads(pickle.dumps(mcmc))
    before.run(random.key(0), SILOS)
    after = pickle.loads(pickle.dumps(before))
    assert_same_draws(after, before)
    kernel = after.sampler
    assert kernel.surrogates is not None
    assert kernel.ledger(after.last_state) == before.sampler.ledger(before.last_state)
    after.post_warmup_state = after.last_state
    after.run(after.last_state.rng_key, SILOS)
    assert int(after.last_state.i) == 70
    after.post_warmup_state = None
    after.run(random.key(0), SILOS)
    assert_same_draws(after, before)


@pytest.fixture
def shown(monkeypatch):
    """Progress bars, which NumPyro leaves out in continuous integration."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)


@pytest.mark.ci
def test_progress_bar_shows_diagnostics(shown, capsys, local_run):
    kernel = fed.FSGLD(intercepts, num_local_steps=5)
    mcmc = run(kernel, LOCAL, progress_bar=True, num_warmup=2, num_samples=4)
    assert "silo" in capsys.readouterr().err
    time.sleep(0.11)  # it is renewed as often as the bar is drawn
    text = kernel.get_diagnostics_str(mcmc.last_state)
    assert (
        text == f"step size 1.00e-01, silo {int(mcmc.last_state.silo)}, local acc. 1.00, cut 0.000"
    )


def test_an_interrupted_run_leaves_everything_usable(shown, monkeypatch):
    kernel = langevin()
    mcmc = MCMC(kernel, num_warmup=10, num_samples=30, progress_bar=True)
    calls = []

    def interrupt(state):
        calls.append(int(state.i))
        if len(calls) == 5:
            raise KeyboardInterrupt
        return ""

    with monkeypatch.context() as patch:
        patch.setattr(kernel, "get_diagnostics_str", interrupt)
        with pytest.raises(KeyboardInterrupt):
            mcmc.run(random.key(0), SILOS)
    assert calls == [1, 2, 3, 4, 5]
    mcmc.run(random.key(0), SILOS)
    assert_same_draws(mcmc, run(kernel))


def test_print_summary_counts_divergences(reference, capsys):
    reference.print_summary()
    printed = capsys.readouterr().out
    assert "sigma" in printed
    assert "ratio" not in printed
    assert "Number of divergences: 0" in printed


@pytest.mark.ci
def test_arviz_reads_the_run(local_run):
    az = import_arviz()
    data = az.from_numpyro(local_run)
    assert {"posterior", "sample_stats", "log_likelihood", "observed_data"} <= set(groups_of(data))
    assert data.posterior["a"].shape == (2, 30, 18)
    assert {"diverging", "silo", "step_size"} <= set(data.sample_stats)
    pooled = LOCAL.pooled
    np.testing.assert_array_equal(data.observed_data["y"], pooled["y"])
    expected = log_likelihood(intercepts, local_run.get_samples(), **pooled)["y"].reshape(2, 30, -1)
    np.testing.assert_allclose(data.log_likelihood["y"], expected, rtol=1e-5)
    # negative control: rows in storage order are not the pooled ones
    assert np.abs(np.asarray(pooled["y"]) - np.asarray(LOCAL.rows["y"])).max() > 0.1


def test_predictive_takes_the_silos(reference):
    kernel = reference.sampler
    draws = reference.get_samples()
    again = Predictive(kernel.model, draws, return_sites=["ratio", "y"])(random.key(0), SILOS)
    np.testing.assert_allclose(again["ratio"], draws["ratio"], rtol=1e-5)
    np.testing.assert_array_equal(again["y"][0], SILOS.pooled["y"])
    new = Predictive(kernel.model, draws)(random.key(0), **{**SILOS.pooled, "y": None})
    assert new["y"].shape == (60, 24)
    assert len(np.unique(new["y"])) > 1000


def dynamic(y):
    top = numpyro.sample("top", dist.LogNormal(1, 0.3))
    level = numpyro.sample("level", dist.Uniform(0, top))
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    with fed.silo_plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(level + weights[0], 1), obs=y)


@pytest.mark.ci
def test_supports_that_depend_on_values_and_simplices():
    silos = fed.Silos({"a": {"y": jnp.ones(4)}, "b": {"y": jnp.full(5, 1.5)}})
    mcmc = run(fed.DSGLD(dynamic, 0.01, 5), silos)
    draws = {k: np.asarray(v) for k, v in mcmc.get_samples().items()}
    assert ((draws["level"] > 0) & (draws["level"] < draws["top"])).all()
    assert draws["weights"].shape == (30, 3)
    np.testing.assert_allclose(draws["weights"].sum(1), 1, rtol=1e-5)
    assert mcmc.last_state.z["weights"].shape == (2,)


def two_blocks(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(mu + slope * x, 1), obs=y)


@pytest.mark.ci
def test_gibbs_block_beside_nuts_has_the_exact_posterior():
    """Within 4 Monte-Carlo s.e. (16 independent chains) and the discretization's 1.3 % of sd."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=20) + 0.4).astype(np.float32)
    y = (0.5 + 0.8 * x + rng.normal(size=20)).astype(np.float32)
    silos = fed.split({"x": x, "y": y}, by=np.arange(20) % 3)
    kernel = fed.FSGLD(two_blocks, num_local_steps=20)
    blocks = Gibbs([(kernel, ["mu"]), (NUTS(kernel.model), ["slope"])])
    mcmc = run(
        blocks, silos, num_warmup=100, num_samples=1000, num_chains=16, chain_method="sequential"
    )
    draws = mcmc.get_samples(group_by_chain=True)
    draws = np.stack([np.asarray(draws[k], np.float64) for k in ("mu", "slope")], -1)
    design = np.stack([np.ones(20), x], 1).astype(np.float64)
    covariance = np.linalg.inv(design.T @ design + np.diag([0.25, 1]))
    mean, sd = covariance @ design.T @ y, np.sqrt(np.diag(covariance))
    z = (draws - mean) / sd

    def worst(z, allowed):
        first, second = z.mean(1), (z**2).mean(1)
        errors = [np.abs(m.mean(0)) / (m.std(0, ddof=1) / np.sqrt(16)) for m in (first, second - 1)]
        excess = np.abs(second.mean(0) - 1) - allowed
        return max(errors[0].max(), (excess / (second.std(0, ddof=1) / np.sqrt(16))).max())

    assert worst(z, 0.03) < 4
    assert worst(z * np.sqrt(1.3), 0.03) > 8  # negative control
    assert blocks.model == kernel.model


@pytest.mark.ci
def test_gibbs_block_with_a_simplex_starts_in_unconstrained_space():
    """Gibbs hands the first values over constrained: three numbers for the two of a simplex."""

    def model(y):
        weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
        shift = numpyro.sample("shift", dist.Normal(0, 1))
        with fed.silo_plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(shift + weights[0], 1), obs=y)

    silos = fed.Silos({"a": {"y": jnp.ones(4)}, "b": {"y": jnp.zeros(5)}})
    kernel = fed.DSGLD(model, 0.01, 5)
    blocks = Gibbs([(kernel, ["weights"]), (NUTS(kernel.model), ["shift"])])
    start = blocks.init(random.key(0), 0, {"weights": jnp.array([0.2, 0.3, 0.5])}, (silos,), {})
    weights = dist.transforms.StickBreakingTransform()(start.z["weights"])
    np.testing.assert_allclose(weights, [0.2, 0.3, 0.5], rtol=1e-5)


@pytest.mark.ci
def test_wrapping_and_refreshing():
    kernel = langevin()
    state = kernel.init(random.key(0), 0, model_args=(SILOS,))
    wrapped = kernel.wrap_model(lambda model: numpyro.handlers.scale(model, 2.0))
    assert wrapped.factors is None
    assert kernel.factors is not None
    z = {"mu": jnp.array(0.5), "sigma": jnp.array(0.1)}
    whole, double = (k.init(random.key(0), 0, z, model_args=(SILOS,)) for k in (kernel, wrapped))
    assert float(double.z["mu"]) == 0.5
    for k, s in ((kernel, whole), (wrapped, double)):
        assert k.refresh(s, (SILOS,), {}) is s
    assert not np.allclose(
        kernel.sample(whole, (SILOS,), {}).z["mu"], wrapped.sample(double, (SILOS,), {}).z["mu"]
    )
    assert set(state.z) == {"mu", "sigma"}
