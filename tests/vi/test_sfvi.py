"""SFVI: the same for every partition, and NumPyro's own steps on one silo.

It reaches the exact posterior where the family holds it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from marks import heavy
from numpyro.distributions import constraints
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.initialization import init_to_median
from small_models import intercepts, intercepts_silos
from vi_models import (
    GROUP_SD,
    PRIOR_SD,
    ROW_SD,
    best_scale,
    hierarchy,
    hierarchy_guide,
    hierarchy_posterior,
    hierarchy_silos,
    learned_scale,
    three_kinds,
    three_kinds_silos,
    wheeze,
    wheeze_silos,
)

import numpyro_fed as fed
from numpyro_fed.data.views import MAX_BATCH, systematic
from numpyro_fed.vi import first_params, inline
from numpyro_fed.vi.bound import silo_bound
from numpyro_fed.vi.loop import _converged
from numpyro_fed.vi.participation import Participation

N = 70
PARTITIONS = {
    "one": np.zeros(N, int),
    "two": np.arange(N) % 2,
    "seven": np.arange(N) % 7,
    "unequal": np.random.default_rng(0).permutation(np.repeat(np.arange(5), [1, 3, 6, 20, 40])),
}


def after(svi, silos, rounds=200, seed=0):
    """Parameters after some rounds, without averaging."""
    state = svi.run(random.key(seed), rounds, silos, progress_bar=False).state
    return svi.get_params(state)


def largest_gap(one, other):
    assert set(one) == set(other)
    return max(float(np.abs(one[k] - other[k]).max() / np.abs(other[k]).max()) for k in one)


# invariances


@pytest.mark.ci
def test_partitions_give_the_same_parameters():
    with jax.enable_x64(True):
        found = {}
        for name in ("one", "seven", "unequal"):
            svi = fed.SFVI(
                wheeze,
                fed.AutoSiloNormal(wheeze),
                optax.adam(0.02),
                num_local_particles=3,
                validate=False,
            )
            found[name] = after(svi, wheeze_silos(PARTITIONS[name]))
        for name in ("seven", "unequal"):
            assert largest_gap(found[name], found["one"]) <= 1e-9, name
        moved = np.abs(found["one"]["auto_loc"]).max()
        assert moved > 0.3  # it went somewhere


@pytest.mark.ci
@pytest.mark.parametrize(
    ("particles", "options"),
    [
        (1, {}),
        (2, {}),
        (1, {"global_cov": "diag", "local_cov": "diag"}),
        (1, {"global_cov": 1, "coupling": False}),
        (1, {"scale_coupling": False}),
    ],
)
def test_steps_are_those_of_numpyros_svi(options, particles):
    with jax.enable_x64(True):
        silos = wheeze_silos(PARTITIONS["unequal"])
        svi = fed.SFVI(
            wheeze,
            fed.AutoSiloNormal(wheeze, **options),
            optax.adam(0.02),
            particles,
            1,
            validate=False,
        )
        state = svi.init(random.key(3), silos)
        guide = fed.AutoSiloNormal(wheeze, **options)
        plain = SVI(wheeze, guide, optax.adam(0.02), Trace_ELBO(particles))
        other = plain.init(random.key(3), init_params=svi.get_params(state), **silos.pooled)
        update = jax.jit(lambda s: plain.update(s, **silos.pooled))
        for _ in range(50):
            state, loss = svi.update(state, silos)
            other, expected = update(other)
            assert float(loss) == pytest.approx(float(expected), rel=1e-10)
        assert largest_gap(svi.get_params(state), plain.get_params(other)) <= 1e-9


@pytest.mark.ci
def test_masked_rows_contribute_nothing():
    """Silos of 1 to 40 children share a stack of 40: the parameters of padding never move."""
    with jax.enable_x64(True):
        by = PARTITIONS["unequal"]
        silos = wheeze_silos(by)
        svi = fed.SFVI(wheeze, fed.AutoSiloNormal(wheeze), optax.adam(0.02), num_local_particles=2)
        setup = svi.setup(silos)
        assert len(setup.stacks) == 1
        assert dict(setup.stacks[0].pad) == {"rows": 40}
        state = svi.init(random.key(0), silos)
        state, _ = svi.update(state, silos)
        for number, size in enumerate(silos.sizes["rows"]):
            padding = jax.tree.map(lambda x, s=number, n=size: x[s, n:], state.silos[0].params)
            start = jax.tree.map(
                lambda x, s=number, n=size: x[s, n:], svi.init(random.key(0), silos).silos[0].params
            )
            for one, other in zip(jax.tree.leaves(padding), jax.tree.leaves(start), strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.ci
def test_going_on_is_as_not_stopping():
    silos = wheeze_silos(PARTITIONS["two"])
    svi = fed.SFVI(
        wheeze, fed.AutoSiloNormal(wheeze), optax.adam(0.02), num_local_particles=2, validate=False
    )
    whole = svi.run(random.key(1), 60, silos, progress_bar=False)
    half = svi.run(random.key(1), 25, silos, progress_bar=False)
    rest = svi.run(random.key(9), 35, silos, progress_bar=False, init_state=half.state)
    np.testing.assert_allclose(np.concatenate([half.losses, rest.losses]), whole.losses, rtol=1e-5)
    assert largest_gap(rest.params, whole.params) <= 1e-5
    assert rest.ledger.rounds == (60, 60)


@pytest.mark.ci
def test_a_second_run_traces_nothing():
    calls = []

    def counted(y, x):
        calls.append(1)
        wheeze(y, x)

    silos = wheeze_silos(PARTITIONS["two"])
    svi = fed.SFVI(counted, fed.AutoSiloNormal(counted), optax.adam(0.02), num_local_particles=2)
    svi.run(random.key(1), 210, silos, progress_bar=False)
    before = len(calls)
    svi.run(random.key(2), 450, silos, progress_bar=False)
    assert len(calls) - before <= 1  # the ledger's sizes


@pytest.mark.ci
def test_the_starts_program_does_not_hold_the_rows():
    """Were they constants of it, the compiler would fold them, anew for each data set."""
    silos = wheeze_silos(PARTITIONS["two"])
    moved = fed.split({"y": silos.pooled["y"], "x": silos.pooled["x"] + 1}, by=PARTITIONS["two"])
    svi = fed.SFVI(wheeze, fed.AutoSiloNormal(wheeze), optax.adam(0.02), num_local_particles=2)
    svi.init(random.key(1), silos)
    programs = first_params._first_position.alone._cache_size()
    svi.init(random.key(2), moved)
    assert programs
    assert first_params._first_position.alone._cache_size() == programs


# the exact posterior


def joint_moments(params):
    """Mean and covariance of (mu, z) of the family without scale coupling."""
    tril = np.asarray(params["auto_scale_tril"])
    coupling = np.asarray(params["auto_local_coupling"])[:, 0]
    mean = np.concatenate([params["auto_loc"], params["auto_local_loc"][:, 0]])
    across = np.concatenate([tril, coupling])  # of the whitened draw
    own = np.exp(2 * np.asarray(params["auto_local_log_scale"])[:, 0])
    return mean, across @ across.T + np.diag(np.concatenate([[0.0], own]))


def test_conjugate_hierarchy_is_recovered_exactly():
    with jax.enable_x64(True):
        silos = hierarchy_silos(np.array([0, 1, 1, 2, 0, 1, 1, 1, 2]))
        mean, covariance, evidence = hierarchy_posterior()
        guide = fed.AutoSiloNormal(hierarchy, scale_coupling=False)
        svi = fed.SFVI(hierarchy, guide, optax.adam(optax.exponential_decay(0.05, 1000, 0.2)), 4, 1)
        result = svi.run(random.key(0), 4000, silos, progress_bar=False)
        found, spread = joint_moments(result.params)
        sd = np.sqrt(np.diag(covariance))
        assert np.abs((found - mean) / sd).max() <= 0.01
        assert np.abs((spread - covariance) / np.outer(sd, sd)).max() <= 0.01
        assert -result.losses[-200:].mean() == pytest.approx(evidence, abs=0.01)
        # at the exact posterior the estimator has no noise: it sticks the landing
        assert result.losses[-200:].std() < 0.01


@pytest.mark.ci
def test_diagonal_family_underestimates_as_its_closed_form_says():
    """Without coupling the optimum's precisions are the diagonal of the posterior's precision."""
    with jax.enable_x64(True):
        silos = hierarchy_silos(np.arange(9) % 2)
        mean, covariance, _ = hierarchy_posterior()
        guide = fed.AutoSiloNormal(hierarchy, "diag", "diag", coupling=False, scale_coupling=False)
        svi = fed.SFVI(
            hierarchy, guide, optax.adam(optax.exponential_decay(0.05, 1000, 0.2)), 16, 1
        )
        params = svi.run(random.key(0), 4000, silos, progress_bar=False).params
        sds = np.concatenate([params["auto_scale"], np.exp(params["auto_local_log_scale"][:, 0])])
        expected = (
            np.concatenate(
                [[PRIOR_SD**-2 + 9 * GROUP_SD**-2], np.full(9, GROUP_SD**-2 + ROW_SD**-2)]
            )
            ** -0.5
        )
        np.testing.assert_allclose(sds, expected, rtol=0.02)
        locs = np.concatenate([params["auto_loc"], params["auto_local_loc"][:, 0]])
        assert np.abs((locs - mean) / np.sqrt(np.diag(covariance))).max() <= 0.03
        assert sds[0] < 0.6 * np.sqrt(covariance[0, 0])  # what the full family mends


@pytest.mark.ci
def test_a_users_guide_finds_the_exact_posterior_too():
    with jax.enable_x64(True):
        silos = hierarchy_silos(np.array([0, 1, 1, 2, 0, 1, 1, 1, 2]))
        mean, covariance, evidence = hierarchy_posterior()
        svi = fed.SFVI(
            hierarchy, hierarchy_guide, optax.adam(optax.exponential_decay(0.05, 1000, 0.2)), 4, 1
        )
        result = svi.run(random.key(0), 4000, silos, progress_bar=False)
        p = result.params
        assert float(p["loc"]) == pytest.approx(mean[0], abs=0.01 * covariance[0, 0] ** 0.5)
        assert float(p["scale"]) == pytest.approx(covariance[0, 0] ** 0.5, rel=0.01)
        np.testing.assert_allclose(p["shift"] + p["slope"] * mean[0], mean[1:], atol=0.01)
        assert -result.losses[-200:].mean() == pytest.approx(evidence, abs=0.01)


@pytest.mark.ci
def test_learned_scale_maximizes_the_marginal_likelihood():
    with jax.enable_x64(True):
        rng = np.random.default_rng(2)
        x = rng.normal(size=(40, 3))
        y = x @ [1.5, -2.0, 0.5] + rng.normal(size=40)
        silos = fed.split({"x": x, "y": y}, by=np.arange(40) % 3)
        guide = fed.AutoSiloNormal(learned_scale)
        svi = fed.SFVI(
            learned_scale, guide, optax.adam(optax.exponential_decay(0.05, 1000, 0.2)), 4
        )
        params = svi.run(random.key(0), 3000, silos, progress_bar=False).params
        assert float(params["tau"]) == pytest.approx(best_scale(x, y), rel=0.01)


@pytest.mark.ci
def test_three_structures_in_one_federation():
    """The three branches are conjugate given theta: beta's posterior is known by quadrature."""
    with jax.enable_x64(True):
        silos = three_kinds_silos()
        svi = fed.SFVI(three_kinds, fed.AutoSiloNormal(three_kinds), optax.adam(0.02), 4, 32)
        result = svi.run(random.key(0), 3000, silos, progress_bar=False)
        beta = np.linspace(-1, 4, 20001)
        log_density = -0.5 * (beta / 2) ** 2
        for name in silos:
            kwargs = {k: np.asarray(v) for k, v in silos[name].items() if k in ("x", "y", "proxy")}
            if "proxy" in kwargs:
                # y given the proxy: truth ~ N(0.8 proxy, 0.2)
                loc, var = 0.8 * kwargs["proxy"][:, None] * beta, 0.2 * beta**2 + 0.49
            else:
                loc = kwargs["x"][:, None] * beta
                var = (9.0 if silos[name].get("kind") == "rough" else 0.49) * np.ones_like(beta)
            log_density += np.sum(
                -0.5 * (kwargs["y"][:, None] - loc) ** 2 / var - 0.5 * np.log(var), 0
            )
        weight = np.exp(log_density - log_density.max())
        weight /= weight.sum()
        mean = weight @ beta
        sd = np.sqrt(weight @ (beta - mean) ** 2)
        assert abs(float(result.params["auto_loc"][0]) - mean) / sd <= 0.03
        assert float(result.params["auto_scale_tril"][0, 0]) == pytest.approx(sd, rel=0.03)
        assert result.ledger.silos == silos.names


@pytest.mark.ci
def test_structures_draw_their_own_noise_and_learn_all_parameters():
    """Elements of different structures have the same place in their parts.

    Their noise must differ all the same.
    """

    def both_latent(y, kind="a"):
        scale = numpyro.param("scale", 1.0, constraint=constraints.positive) if kind == "b" else 1.0
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with fed.silo_plate("rows", y.shape[0]):
            z = numpyro.sample("z", dist.Normal(mu, scale))
            numpyro.sample("y", dist.Normal(z, 1), obs=y)

    silos = fed.MixedSilos({"one": {"y": np.zeros(3)}, "two": {"y": np.ones(2), "kind": "b"}})
    svi = fed.SFVI(
        both_latent, fed.AutoSiloNormal(both_latent), optax.adam(0.02), 1, 2, validate=False
    )
    setup = svi.setup(silos)
    assert setup.config.learned == ("scale",)
    noise = [
        np.asarray(
            setup.config.families[r.part].noise(random.key(0), jax.tree.map(lambda x: x[0], r), 2)
        )
        for r in setup.stacks
    ]
    assert not np.isclose(noise[0][:, :2], noise[1][:, :2]).any()
    avg = fed.SFVIAvg(
        both_latent, fed.AutoSiloNormal(both_latent), optax.adam(0.02), 5, 1, 2, validate=False
    )
    assert np.isfinite(avg.run(random.key(0), 3, silos, progress_bar=False).losses).all()


@pytest.mark.ci
def test_optimizers_whose_clocks_depend_on_gradients():
    silos = hierarchy_silos(np.arange(9) % 2)
    optim = optax.apply_if_finite(optax.adam(0.02), 3)
    svi = fed.SFVI(hierarchy, fed.AutoSiloNormal(hierarchy), optim, 1, 1, validate=False)
    assert np.isfinite(svi.run(random.key(0), 5, silos, progress_bar=False).losses).all()


# participation


def test_weights_of_a_round_are_one_on_average():
    """Over all keys of a long run, and exactly in their support.

    A control with wrong weights would be off by 1 / f.
    """
    fixed = Participation(2, np.full(5, 0.4))
    draws = np.stack([fixed.weights(random.key(i)) for i in range(200)])
    assert ((draws > 0).sum(1) == 2).all()
    assert set(np.round(draws[draws > 0], 6).tolist()) == {2.5}
    error = 4 * draws.std() / np.sqrt(200)
    assert (
        np.abs(draws.mean(0) - 1).max() < error < 1.4
    )  # unweighted replies would average 0.4 or, rescaled to S, 1.5
    free = Participation(None, np.array([0.2, 0.9]))
    draws = np.stack([free.weights(random.key(i)) for i in range(400)])
    assert (np.abs(draws.mean(0) - 1) < 4 * draws.std(0) / np.sqrt(400)).all()


@pytest.mark.ci
def test_partial_participation_reaches_the_same_optimum():
    with jax.enable_x64(True):
        silos = hierarchy_silos(np.array([0, 1, 1, 2, 0, 1, 3, 3, 2]))
        mean, covariance, _ = hierarchy_posterior()
        svi = fed.SFVI(
            hierarchy,
            fed.AutoSiloNormal(hierarchy, scale_coupling=False),
            optax.adam(optax.exponential_decay(0.05, 2000, 0.2)),
            4,
            1,
        )
        result = svi.run(random.key(0), 8000, silos, progress_bar=False, participation=0.5)
        found, spread = joint_moments(result.params)
        sd = np.sqrt(np.diag(covariance))
        assert np.abs((found - mean) / sd).max() <= 0.03
        assert np.abs(np.sqrt(np.diag(spread)) / sd - 1).max() <= 0.03
        rounds = np.array(result.ledger.rounds)
        assert rounds.sum() == 2 * 8000
        assert np.abs(rounds - 4000).max() < 4 * np.sqrt(8000 * 0.25)


@pytest.mark.ci
def test_an_absent_silo_keeps_its_state_and_is_reported():
    silos = wheeze_silos(PARTITIONS["seven"])
    svi = fed.SFVI(
        wheeze, fed.AutoSiloNormal(wheeze), optax.adam(0.02), num_local_particles=2, validate=False
    )
    with pytest.warns(
        UserWarning, match=r"[34] of 7 silos never took part .*their data are not in the fit"
    ):
        result = svi.run(random.key(0), 2, silos, progress_bar=False, participation=2 / 7)
    start = svi.init(random.key(0), silos).silos[0].params
    for number, rounds in enumerate(result.ledger.rounds):
        same = np.array_equal(result.state.silos[0].params.mean[number], start.mean[number])
        assert same == (rounds == 0)


# minibatches


@pytest.mark.parametrize(("total", "batch"), [(7, 3), (10, 10), (5, 8), (12, 4)])
def test_systematic_sampling_takes_every_row_alike_and_none_twice(total, batch):
    count = min(total, batch)
    hits = np.zeros(total, int)
    for start in range(total):
        place = np.asarray(
            systematic(jnp.asarray(start), jnp.asarray(total), jnp.asarray(count), batch)
        )[:count]
        assert len(set(place.tolist())) == count
        hits[place] += 1
    np.testing.assert_array_equal(hits, count)


def test_the_largest_minibatch_has_no_row_twice():
    at, rows = jnp.asarray, 100_000
    place = systematic(at(rows - 1), at(rows), at(MAX_BATCH), MAX_BATCH)
    assert len(np.unique(place)) == MAX_BATCH
    assert place.min() >= 0
    assert place.max() < rows
    over = systematic(at(0), at(rows), at(60_000), 60_000)  # the control: 32 bits overflow
    assert len(np.unique(over)) < 60_000
    with pytest.raises(ValueError, match=r"batch_size: expected at most 46,340, got 60,000"):
        fed.SFVI(wheeze, fed.AutoSiloNormal(wheeze), optax.adam(0.01), batch_size=60_000)


def wheeze_case():
    return wheeze, wheeze_silos(np.zeros(7, int)), 3, 2


def intercepts_case():
    return intercepts, intercepts_silos().as_one(), 16, 1


def learned_case():
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(9, 2)), "y": rng.normal(size=9)}
    return learned_scale, fed.split(data, by=np.zeros(9, int)), 4, 1


@pytest.mark.parametrize(
    "case", heavy([wheeze_case, intercepts_case, learned_case], wheeze_case, intercepts_case)
)
def test_minibatch_gradients_are_exact_on_average(case, monkeypatch):
    """The mean over all starts of the systematic sample is the whole silo's bound and gradient.

    There are latents of the batch's rows, of a coarser plate, and none. Terms without their weight
    would be a third of it.
    """
    from numpyro_fed.vi import minibatch

    with jax.enable_x64(True):
        model, silos, size, num = case()
        svi = fed.SFVI(
            model,
            fed.AutoSiloNormal(model),
            optax.sgd(1e-3),
            1,
            num,
            batch_size=size,
            validate=False,
        )
        setup = svi.setup(silos)
        family, group = setup.config.families[0], setup.config.batch[0]
        rows = jax.tree.map(
            lambda x, axis: x if axis is None else x[0], setup.stacks[0], setup.stacks[0].axes
        )
        state = svi.init(random.key(0), silos)
        params = setup.config.constrain(state.server.params)
        context = family.context(params, jnp.linspace(-0.5, 0.8, family.factors.dim))
        own = jax.tree.map(
            lambda x: x[0],
            svi.run(random.key(0), 3, silos, progress_bar=False).state.silos[0].params,
        )
        eps = family.noise(random.key(1), rows, num) if family.has_local else None
        learned = {k: params[k] for k in setup.config.learned}

        def bound(batch):
            def own_noise(_key, _rows, _num):
                if eps is None:
                    return None
                return jnp.moveaxis(
                    batch.take(jnp.moveaxis(eps, 1, 0)), 0, 1
                )  # the same for a row in every batch

            term = silo_bound(
                family, batch.take(own), context, learned, own_noise(None, None, None), batch
            )
            return (
                term._replace(local=batch.put(jax.tree.map(jnp.zeros_like, own), term.local))
                if eps is not None
                else term
            )

        whole = bound(minibatch.pick(family, None, random.key(0), rows))

        @jax.jit
        def of_batch(start):
            monkeypatch.setattr(minibatch.random, "randint", lambda *_: start)
            return bound(minibatch.pick(family, (group, size), random.key(0), rows))

        parts = [of_batch(jnp.asarray(start)) for start in range(silos.sizes[group][0])]
        mean = jax.tree.map(lambda *x: sum(x) / len(x), *parts)
        checked = (
            (mean.value, mean.context.theta, mean.params),
            (whole.value, whole.context.theta, whole.params),
        )
        for one, other in zip(
            jax.tree.leaves(checked[0]), jax.tree.leaves(checked[1]), strict=True
        ):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)
        if eps is not None:
            for one, other in zip(
                jax.tree.leaves(mean.local), jax.tree.leaves(whole.local), strict=True
            ):
                np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.ci
def test_units_outside_the_batch_do_not_move():
    silos = wheeze_silos(PARTITIONS["one"])
    svi = fed.SFVI(
        wheeze, fed.AutoSiloNormal(wheeze), optax.sgd(1e-3), 1, 2, batch_size=16, validate=False
    )
    state = svi.init(random.key(0), silos)
    new, _ = svi.update(state, silos)
    moved = np.any(np.asarray(new.silos[0].params.mean != state.silos[0].params.mean)[0], axis=1)
    assert moved.sum() == 16


@pytest.mark.ci
def test_minibatches_reach_the_optimum():
    """Within three seed-to-seed standard deviations of the mean (0.03, from four seeds).

    Without their weights the rows of a batch would give sds at least 1.2 times too large.
    """
    with jax.enable_x64(True):
        silos = hierarchy_silos(np.array([0, 1, 1, 1, 0, 1, 1, 1, 0]))
        mean, covariance, _ = hierarchy_posterior()
        optim = optax.adam(optax.exponential_decay(0.05, 2000, 0.4))
        svi = fed.SFVI(
            hierarchy,
            fed.AutoSiloNormal(hierarchy, scale_coupling=False),
            optim,
            4,
            1,
            batch_size=2,
        )
        found, spread = joint_moments(
            svi.run(random.key(0), 8000, silos, progress_bar=False).params
        )
        sd = np.sqrt(np.diag(covariance))
        assert np.abs((found - mean) / sd).max() <= 0.09
        assert np.abs(np.sqrt(np.diag(spread)) / sd - 1).max() <= 0.03


# stopping


@pytest.mark.ci
def test_tol_stops_when_the_loss_is_flat():
    silos = hierarchy_silos(np.arange(9) % 2)
    svi = fed.SFVI(hierarchy, fed.AutoSiloNormal(hierarchy), optax.adam(0.05), 1, 1)
    result = svi.run(random.key(0), 20_000, silos, progress_bar=False, tol=0.05)
    assert 500 <= len(result.losses) < 5000
    assert not _converged(np.linspace(100, 0, 2000), 1.0)
    assert not _converged(np.linspace(0, 100, 2000), 1.0)
    assert _converged(np.concatenate([np.linspace(100, 0, 500), np.zeros(1500)]), 1.0)


@pytest.mark.ci
def test_a_loss_that_is_not_finite_stops_the_fit_and_keeps_the_last_state():
    silos = wheeze_silos(PARTITIONS["two"])
    svi = fed.SFVI(
        wheeze, fed.AutoSiloNormal(wheeze), optax.sgd(1e6), num_local_particles=2, validate=False
    )
    with pytest.warns(
        UserWarning, match=r"not finite in round \d+, first in silo '[01]'; the fit stopped there"
    ):
        result = svi.run(random.key(0), 500, silos, progress_bar=False)
    assert len(result.losses) < 500
    assert all(np.isfinite(v).all() for v in result.params.values())
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(result.state.server.params))


@pytest.mark.ci
def test_an_interrupted_run_returns_what_it_has(monkeypatch):
    silos = wheeze_silos(PARTITIONS["two"])
    svi = fed.SFVI(
        wheeze, fed.AutoSiloNormal(wheeze), optax.adam(0.02), num_local_particles=2, validate=False
    )
    whole = svi.run(random.key(1), 200, silos, progress_bar=False)
    chunk, calls = inline._many_rounds, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return chunk(*args)

    monkeypatch.setattr(inline, "_many_rounds", interrupted)
    with pytest.warns(
        UserWarning, match=r"interrupted: the result of the first 200 rounds is returned"
    ):
        result = svi.run(random.key(1), 1000, silos, progress_bar=False)
    np.testing.assert_array_equal(result.losses, whole.losses)
    assert largest_gap(result.params, whole.params) == 0


@pytest.mark.ci
def test_a_start_far_away_is_told_and_conducive_rounds_mend_it():
    def model(x, y):
        b = numpyro.sample("b", dist.Normal(0, 1000).expand([2]).to_event(1))
        sd = numpyro.sample("sd", dist.HalfNormal(1000))
        with fed.silo_plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(b[0] + b[1] * x, sd), obs=y)

    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 50)).astype(np.float32)
    y = (3 + 2 * x + rng.normal(size=x.shape)).astype(np.float32)
    silos = fed.Silos({s: {"x": x[i], "y": y[i]} for i, s in enumerate(["oslo", "rome"])})
    guide = fed.AutoSiloNormal(model, init_loc_fn=init_to_median)
    svi = fed.SFVI(model, guide, optax.adam(0.01))
    with pytest.warns(UserWarning, match="still fell.*init_from=fed.ConduciveSFVI"):
        result = svi.run(random.key(0), 1000, silos, progress_bar=False)
    assert "not converged" in repr(result)
    with pytest.warns(match="not converged"), pytest.warns(match="Pareto's k"):
        idata = fed.to_inference_data(svi, result, silos, log_likelihood=False)
    assert idata.posterior.attrs["falling"] > 0
    rounds = fed.ConduciveSFVI(model, guide)
    start = rounds.run(random.key(0), 40, silos, tol=0.1, progress_bar=False)
    result = svi.run(random.key(0), 1000, silos, init_from=start, progress_bar=False)
    assert not result.falling
    design = np.stack([np.ones(x.size), x.ravel()], 1)
    exact = np.linalg.lstsq(design, y.ravel(), rcond=None)[0]
    np.testing.assert_allclose(result.params["auto_loc"][:2], exact, atol=0.02)  # of sds of .1
