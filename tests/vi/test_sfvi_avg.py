"""SFVI-Avg: SFVI's own steps in one silo, and exact averages of exact silos.

The conditional law is the same after each average.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import random
from vi_models import (
    hierarchy,
    hierarchy_posterior,
    hierarchy_silos,
    learned_scale,
    wheeze,
    wheeze_silos,
)

import numpyro_fed as fed
from numpyro_fed.vi.barycenter import barycenter
from numpyro_fed.vi.result import stacked_params
from numpyro_fed.vi.sfvi_avg import Reply, SiloState, federated, row_count

OPTIM = optax.adam(optax.exponential_decay(0.05, 500, 0.3))


def gaussian_silos(sizes, slopes=(1.0, 1.0)):
    rng = np.random.default_rng(0)
    data = {}
    for s, (n, slope) in enumerate(zip(sizes, slopes, strict=True)):
        x = rng.normal(size=(n, 2))
        data[f"s{s}"] = {"x": x, "y": x @ [slope, -1.0] + rng.normal(size=n)}
    return fed.Silos(data)


def linear(x, y):
    import numpyro
    import numpyro.distributions as dist

    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2]).to_event(1))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, 1), obs=y)


def silo_posterior(kwargs, factor):
    """Posterior with the likelihood to the power N / N_s."""
    x, y = np.asarray(kwargs["x"]), np.asarray(kwargs["y"])
    covariance = np.linalg.inv(np.eye(2) / 4 + factor * x.T @ x)
    return covariance @ (factor * x.T @ y), covariance


@pytest.mark.parametrize("kind", ["full", "diag"])
def test_one_round_is_the_barycenter_of_the_silos_rescaled_posteriors(kind):
    with jax.enable_x64(True):
        silos = gaussian_silos((12, 30), (0.5, 1.5))
        guide = fed.AutoSiloNormal(linear, global_cov=kind)
        avg = fed.SFVIAvg(linear, guide, OPTIM, num_local_steps=3000, num_particles=4)
        params = avg.run(random.key(0), 1, silos, progress_bar=False).params
        own = [silo_posterior(silos[f"s{i}"], 42 / n) for i, n in enumerate((12, 30))]
        weights = jnp.array([12 / 42, 30 / 42])
        means = jnp.stack([m for m, _ in own])
        if kind == "full":
            expected = barycenter(means, jnp.stack([c for _, c in own]), weights)
            found = params["auto_scale_tril"] @ params["auto_scale_tril"].T
            np.testing.assert_allclose(found, expected.covariance, rtol=0.02, atol=2e-4)
        else:  # the best diagonal Gaussian has the diagonal of the precision
            variances = jnp.stack([1 / np.diag(np.linalg.inv(c)) for _, c in own])
            expected = barycenter(means, variances, weights)
            np.testing.assert_allclose(params["auto_scale"] ** 2, expected.covariance, rtol=0.05)
        sd = np.sqrt(np.diag(own[0][1])).min()
        assert np.abs(params["auto_loc"] - expected.mean).max() < 0.05 * sd
        # a control: equal weights would give another
        other = barycenter(means, jnp.stack([c for _, c in own]))
        assert np.abs(other.mean - expected.mean).max() > 0.2 * sd


@pytest.mark.ci
def test_one_silo_reaches_the_exact_posterior():
    with jax.enable_x64(True):
        silos = hierarchy_silos(np.zeros(9, int))
        mean, covariance, _ = hierarchy_posterior()
        avg = fed.SFVIAvg(
            hierarchy, fed.AutoSiloNormal(hierarchy, scale_coupling=False), OPTIM, 200, 4, 1
        )
        params = avg.run(random.key(0), 15, silos, progress_bar=False).params
        assert abs(float(params["auto_loc"][0]) - mean[0]) < 0.02 * covariance[0, 0] ** 0.5
        assert float(params["auto_scale_tril"][0, 0]) == pytest.approx(
            covariance[0, 0] ** 0.5, rel=0.02
        )
        np.testing.assert_allclose(params["auto_local_loc"][:, 0], mean[1:], atol=0.02)


@pytest.mark.ci
def test_local_maps_are_rewritten_for_the_average():
    """After a round a silo's q(z | theta) is the same function of theta, in the new coordinates."""
    with jax.enable_x64(True):
        silos = wheeze_silos(np.arange(20) % 2)
        avg = fed.SFVIAvg(
            wheeze, fed.AutoSiloNormal(wheeze), optax.adam(0.02), 30, 1, 4, validate=False
        )
        result = avg.run(random.key(0), 2, silos, progress_bar=False)
        setup = avg.setup(silos)
        family, config = setup.config.families[0], setup.config
        theta, eps = jnp.array([0.3, -0.2, 0.1]), jnp.ones((10, 1))
        new = stacked_params(avg.setup(silos), result.params)[0]
        for number in range(2):
            silo = result.state.silos[0]
            local, base = jax.tree.map(lambda x, s=number: x[s], (silo.params, silo.base))
            own = local.forward(family.whiten(config.constrain(base), theta), eps)
            there = jax.tree.map(lambda x, s=number: x[s], new)
            again = there.forward(
                family.whiten(config.constrain(result.state.server.params), theta), eps
            )
            np.testing.assert_allclose(again, own, rtol=1e-8)


@pytest.mark.ci
def test_a_warm_start_is_the_result_it_comes_from():
    with jax.enable_x64(True):
        silos = wheeze_silos(np.arange(20) % 3)
        guide = fed.AutoSiloNormal(wheeze)
        avg = fed.SFVIAvg(wheeze, guide, optax.adam(0.02), 30, 1, 4, validate=False)
        start = avg.run(random.key(0), 2, silos, progress_bar=False)
        svi = fed.SFVI(wheeze, guide, optax.adam(0.02), 1, 4, validate=False)
        found = svi.get_params(svi.init(random.key(1), silos, init_from=start))
        assert set(found) == set(start.params)
        for name, value in found.items():
            np.testing.assert_allclose(value, start.params[name], rtol=1e-9, atol=1e-12)
        other = fed.SFVI(
            wheeze, fed.AutoSiloNormal(wheeze, prefix="q"), optax.adam(0.02), 1, 4, validate=False
        )
        with pytest.raises(
            ValueError, match=r"init_from: expected a result of the same model, guide and silos"
        ):
            other.init(random.key(1), silos, init_from=start)
        with pytest.raises(TypeError, match=r"init_from: expected the result of a run, got dict"):
            svi.init(random.key(1), silos, init_from=start.params)


def test_absent_silos_and_learned_parameters_in_the_merge():
    """The average weighted by rows is phi.

    Whatever an absent silo sends, NaN included, does not count.
    """
    with jax.enable_x64(True):
        rng = np.random.default_rng(1)
        x = rng.normal(size=(12, 2))
        silos = fed.Silos(
            {f"s{i}": {"x": x[i * 2 : 12 - i], "y": x[i * 2 : 12 - i, 0]} for i in range(3)}
        )
        guide = fed.AutoSiloNormal(learned_scale, global_cov="diag")
        avg = fed.SFVIAvg(learned_scale, guide, optax.adam(0.02), 2, validate=False)
        setup = avg.setup(silos)
        algorithm = federated(setup.config, setup.stacks)
        state = avg.init(random.key(0), silos)
        tau = jnp.array([1.0, 2.0, 4.0])
        constrained = {
            "tau": tau,
            "auto_loc": jnp.arange(6.0).reshape(3, 2),
            "auto_scale": jnp.array([[1.0, 1.0], [2.0, 3.0], [jnp.nan, 1.0]]),
        }
        params = jax.vmap(setup.config.unconstrain)(constrained)
        count = jnp.concatenate([row_count(setup.config, rows) for rows in setup.stacks])
        assert count.tolist() == [12, 9, 6]
        replies = Reply(
            jnp.array([1.0, 2.0, jnp.nan]), params, count, jnp.array([True, True, False])
        )
        merge = jax.jit(algorithm.merge)
        server, info = merge(state.server, replies, jnp.array([1.0, 1.0, 0.0]))
        new = setup.config.constrain(server.params)
        share = np.array([12, 9]) / 21
        assert float(new["tau"]) == pytest.approx(share @ [1, 2])
        np.testing.assert_allclose(new["auto_loc"], share @ np.arange(6.0).reshape(3, 2)[:2])
        np.testing.assert_allclose(new["auto_scale"], [share @ [1, 2], share @ [1, 3]])
        assert bool(info.finite)
        _, info = merge(state.server, replies)
        assert not bool(info.finite)
        assert int(info.silo) == 2


@pytest.mark.ci
def test_local_parameters_and_optimizer_states_stay():
    """What crosses the border is listed: q's parameters, phi, a value, a count, a flag.

    Nothing is as long as rows.
    """
    silos = wheeze_silos(np.arange(20) % 2)
    avg = fed.SFVIAvg(wheeze, fed.AutoSiloNormal(wheeze), optax.adam(0.02), 3, 1, 4, validate=False)
    setup = avg.setup(silos)
    state = avg.init(random.key(0), silos)
    assert isinstance(state.silos[0], SiloState)
    assert Reply._fields == ("value", "params", "count", "finite")
    result = avg.run(random.key(0), 5, silos, progress_bar=False)
    dim = setup.config.factors.dim
    q = 4 * (dim + dim * (dim + 1) // 2)
    assert result.ledger.bytes_up == (5 * (q + 4 + 4 + 1),) * 2
    assert result.ledger.gradient_evaluations == (5 * 3 * 4,) * 2


def test_what_it_cannot_average_is_refused():
    with pytest.raises(
        ValueError, match=r"global_cov=1: a barycenter of low-rank Gaussians is of full rank"
    ):
        fed.SFVIAvg(wheeze, fed.AutoSiloNormal(wheeze, global_cov=1), optax.adam(0.02), 3)
    with pytest.raises(
        TypeError,
        match=r"SFVI-Avg averages Gaussians: expected fed.AutoSiloNormal\(model\), got function",
    ):
        fed.SFVIAvg(wheeze, lambda y, x: None, optax.adam(0.02), 3)
    with pytest.raises(ValueError, match=r"num_local_steps: expected a whole number >= 1, got 0"):
        fed.SFVIAvg(wheeze, fed.AutoSiloNormal(wheeze), optax.adam(0.02), 0)
