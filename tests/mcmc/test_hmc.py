"""Hamiltonian Monte Carlo over silos: equal to pooled HMC, exact laws, shapes, refusals."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from messages import Messages, in_order
from numpyro.infer import MCMC
from numpyro.infer.hmc_util import euclidean_kinetic_energy, velocity_verlet
from numpyro.infer.util import potential_energy
from small_models import (
    intercepts,
    intercepts_posterior,
    intercepts_silos,
    linear,
    linear_precisions,
    linear_silos,
    scale_model,
    scale_silos,
)
from two_plates import crossed, crossed_silos

import numpyro_fed as fed
from numpyro_fed.data.views import stack
from numpyro_fed.density.factorize import factorize
from numpyro_fed.engines.wire import connect
from numpyro_fed.mcmc import trajectory
from numpyro_fed.mcmc.leapfrog import federated
from numpyro_fed.mcmc.remote_hmc import LeapfrogLocal
from numpyro_fed.mcmc.trajectory import HMCConfig, depart, first_state, one_draw, windows
from numpyro_fed.rounds.inline import key_among, round_all


def run(model, silos, chains=4, warmup=300, draws=500, seed=0, **options):
    mcmc = MCMC(
        fed.HMC(model, **options),
        num_warmup=warmup,
        num_samples=draws,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(seed), silos)
    return mcmc


def double(silos: fed.Silos) -> fed.Silos:
    """Return the same silos in the present precision."""
    data = {n: {k: np.asarray(v) for k, v in silos[n].items()} for n in silos.names}
    wide = {
        n: {k: v.astype(float) if v.dtype.kind == "f" else v for k, v in own.items()}
        for n, own in data.items()
    }
    return fed.Silos(wide, rows=dict(silos.group), index=dict(silos.index))


def test_twenty_steps_are_those_of_pooled_hmc():
    """Positions of theta and of all latents, and the change of the energy."""
    with jax.enable_x64(True):
        silos = double(intercepts_silos())
        factors = factorize(intercepts, silos)
        config = HMCConfig(factors, 2.0, 0.8, 0)
        rng = np.random.default_rng(0)
        z = {"mu": jnp.asarray(rng.normal(size=2)), "a": jnp.asarray(rng.normal(size=(2, 18)))}
        state = first_state(config, 2, random.key(1), z, silos)
        state = state._replace(step_size=jnp.asarray(0.1))
        walk, _, key = depart(config, state)
        momenta = {"mu": walk.momentum[:, 0], "a": np.zeros((2, 18))}
        step, stacks, local = federated(factors, None, silos.shared), stack(silos), state.local
        for rows, own in zip(stacks, local, strict=True):
            for s, number in enumerate(rows.number):
                drawn = random.normal(key_among(key, 0, number), own.here.at[s].shape)
                count = int(rows.sizes["groups"][s])
                momenta["a"][:, rows.order["groups"][s][:count]] = drawn[:, :count]
        one_step = jax.jit(lambda walk, local: round_all(step, key, walk, local, stacks)[::2])
        for _ in range(20):
            walk, local = one_step(walk, local)
        init, update = velocity_verlet(
            partial(potential_energy, intercepts, (), silos.pooled), euclidean_kinetic_energy
        )
        at = trajectory.positions(
            factors, walk.there.at, [x.there.at for x in local], silos, stacks, False
        )
        for c in range(2):
            pooled = init({k: v[c] for k, v in z.items()}, {k: v[c] for k, v in momenta.items()})
            mass = {("a", "mu"): jnp.ones(19)}
            step_of_all = jax.jit(lambda state, mass=mass: update(0.1, mass, state))
            energy = pooled.potential_energy + 0.5 * sum(
                (v[c] ** 2).sum() for v in momenta.values()
            )
            for _ in range(20):
                pooled = step_of_all(pooled)
            for name in z:
                np.testing.assert_allclose(at[name][c], pooled.z[name], rtol=1e-9)
            end = pooled.potential_energy + 0.5 * sum((v**2).sum() for v in pooled.r.values())
            own = 0.5 * (walk.momentum[c] ** 2 - momenta["mu"][c] ** 2).sum() + walk.gained[c]
            own = own - walk.there.value[c] + state.here.value[c]
            assert float(own) == pytest.approx(float(end - energy), abs=1e-9)


def errors(mcmc: MCMC, names: tuple[str, ...], mean: np.ndarray, sd: np.ndarray) -> np.ndarray:
    """Errors of means and sds, each over its Monte-Carlo error."""
    draws = mcmc.get_samples(group_by_chain=True)
    x = np.concatenate([np.asarray(draws[n]).reshape(*draws[n].shape[:2], -1) for n in names], -1)
    ess = numpyro.diagnostics.effective_sample_size(x)
    ess_sd = numpyro.diagnostics.effective_sample_size((x - x.mean((0, 1))) ** 2)
    off = (x.mean((0, 1)) - mean) / (sd / np.sqrt(ess))
    return np.concatenate([off, (x.std((0, 1)) / sd - 1) * np.sqrt(2 * ess_sd)])


@pytest.mark.ci
def test_draws_are_exact_with_latents_of_any_structure():
    """Elements of one plate, and plates that cross in silos of unequal size."""
    silos = intercepts_silos()
    mean, covariance = intercepts_posterior(silos)
    mcmc = run(intercepts, silos)
    off = errors(mcmc, ("mu", "a"), mean, np.sqrt(np.diag(covariance)))
    assert np.abs(off).max() < 4.5
    silos, mean, sd = crossed_silos()
    assert np.abs(errors(run(crossed, silos), ("mu", "a", "b"), mean, sd)).max() < 4.5


def test_draws_are_exact_without_latents_and_the_control_is_not(monkeypatch):
    silos = linear_silos()
    linear_terms, precisions = linear_precisions(silos)
    cov = np.linalg.inv(np.eye(2) + precisions.sum(0))
    exact = (cov @ linear_terms.sum(0), np.sqrt(np.diag(cov)))
    assert np.abs(errors(run(linear, silos, draws=1000), ("beta",), *exact)).max() < 4
    # without the momenta's energies a trajectory is accepted as if it had none
    monkeypatch.setattr(trajectory, "_kinetic", lambda momentum: jnp.zeros(len(momentum)))
    assert np.abs(errors(run(linear, silos, draws=1000), ("beta",), *exact)).max() > 6


@pytest.mark.ci
def test_a_model_with_constraints_agrees_with_nuts():
    silos = scale_silos()
    nuts = MCMC(
        numpyro.infer.NUTS(scale_model), num_warmup=300, num_samples=4000, num_chains=4,
        chain_method="vectorized", progress_bar=False,
    )  # fmt: skip
    nuts.run(random.key(1), **silos.pooled)
    comparison = fed.compare(
        fed.to_inference_data(run(scale_model, silos, draws=4000), silos), nuts
    )
    assert comparison.verdict == "agrees"


@pytest.mark.ci
@pytest.mark.parametrize("method", ["sequential", "vectorized", "parallel"])
def test_shapes_and_costs(method):
    silos = intercepts_silos()
    mcmc = MCMC(
        fed.HMC(intercepts), num_warmup=10, num_samples=5, num_chains=2, chain_method=method,
        progress_bar=False,
    )  # fmt: skip
    start = {"mu": jnp.zeros(2), "a": jnp.ones((2, 18))}
    mcmc.run(random.key(0), silos, init_params=start, extra_fields=("num_steps",))
    draws = mcmc.get_samples(group_by_chain=True)
    assert draws["mu"].shape == (2, 5)
    assert draws["a"].shape == (2, 5, 18)
    assert mcmc.get_extra_fields(group_by_chain=True)["num_steps"].shape == (2, 5)
    ledger, chains = mcmc.sampler.ledger(mcmc.last_state), 2 if method == "vectorized" else 1
    rounds = int(np.sum(mcmc.last_state.rounds))
    assert ledger.rounds == (rounds,) * 3
    assert ledger.bytes_up == (rounds * 2 * 4 * chains,) * 3
    assert ledger.gradient_evaluations == (rounds * chains,) * 3


def test_the_warm_up_has_the_windows_of_nuts():
    made = windows(300)
    assert np.flatnonzero(made.renews).tolist() == [99, 149, 249]
    assert (made.learns.sum(), made.learns[:75].sum(), made.learns[250:].sum()) == (175, 0, 0)
    assert not windows(0).renews.any()


@pytest.mark.ci
def test_scales_are_learned_from_the_draws():
    """A silo's scales are the sds of its latents, and step sizes are relative to them."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 0.01))
        with fed.silo_plate("rows", y.shape[0]):
            z = numpyro.sample("z", dist.Normal(0, jnp.asarray([100.0, 1.0])[:, None][0]))
            numpyro.sample("y", dist.Normal(z + mu, 1000.0), obs=y)

    silos = fed.Silos({"a": {"y": np.zeros(3, np.float32)}, "b": {"y": np.zeros(5, np.float32)}})
    state = run(model, silos).last_state
    scale = np.concatenate([np.ravel(x.scale) for x in state.local])
    own = scale[scale > 10]  # padding keeps the variance of no draws
    assert len(own) == 8
    assert own == pytest.approx(100, rel=0.2)
    assert float(state.root[0, 0]) == pytest.approx(0.01, rel=0.2)
    assert float(state.step_size) > 0.3


def test_what_is_refused_and_where():
    for options, text in (
        ({"trajectory_length": 0}, "trajectory_length: expected a number 0 < x, got 0"),
        ({"target_accept_prob": 1.0}, "target_accept_prob: expected a number 0 < x < 1, got 1.0"),
        ({"trajectory_length": "long"}, "trajectory_length: expected a number"),
    ):
        with pytest.raises(ValueError, match=text):
            fed.HMC(linear, **options)

    def never(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with fed.silo_plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(jnp.where(mu < 9, jnp.nan, mu), 1), obs=y)

    silos = fed.Silos({"a": {"y": np.zeros(3, np.float32)}})
    with pytest.raises(ValueError, match="not finite at the start of a chain"):
        run(never, silos, validate=False)

    def near(y):  # finite near zero alone
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with fed.silo_plate("rows", y.shape[0]):
            far = jnp.where(jnp.abs(mu) > 0.2, jnp.nan, 1.0)
            numpyro.sample("y", dist.Normal(mu, far), obs=y)

    with pytest.raises(ValueError, match="HMC is no block of Gibbs"):
        fed.HMC(linear).init(random.key(0), 5, None, (linear_silos(),), {"_gibbs_sites": {}})
    kernel = fed.HMC(near, validate=False)
    state = kernel.init(random.split(random.key(0), 4), 5, None, (silos,), {})
    assert np.abs(state.z["mu"]).max() <= 0.1


def test_one_draw_is_compiled_once():
    silos = linear_silos()
    config = HMCConfig(factorize(linear, silos), 2.0, 0.8, 5)
    draw = jax.jit(partial(one_draw, config))
    state = first_state(config, 2, random.key(0), None, silos)
    for _ in range(8):
        state = draw(state, silos)
    assert draw._cache_size() == 1


@pytest.mark.ci
@pytest.mark.parametrize("wire", [False, True], ids=["loopback", "wire"])
@pytest.mark.parametrize("case", ["intercepts", "crossed", "linear"])
def test_remote_silos_have_the_same_draws(case, wire, tmp_path):
    """In double precision, since rounding grows from draw to draw; over a wire for a few draws."""
    model, make = {
        "intercepts": (intercepts, intercepts_silos),
        "crossed": (crossed, lambda: crossed_silos()[0]),
        "linear": (linear, linear_silos),
    }[case]
    warmup = 4 if wire else 20  # 20: with a window in which scales are learned
    options = {"num_warmup": warmup, "num_samples": 2, "num_chains": 2, "progress_bar": False}
    with jax.enable_x64(not wire):
        silos = in_order(make() if wire else double(make()))
        remote = (
            connect(Messages(silos, model, tmp_path), model)
            if wire
            else fed.RemoteSilos(silos, fed.Loopback(silos))
        )
        here = MCMC(fed.HMC(model), chain_method="vectorized", **options)
        here.run(random.key(3), silos)
        there = fed.RemoteMCMC(fed.HMC(model), **options)
        there.run(random.key(3), remote)
        for name, _ in here.sampler.factors.global_sites:
            np.testing.assert_allclose(
                there.get_samples()[name], here.get_samples()[name], rtol=1e-3 if wire else 1e-6
            )
        ledgers = [x.sampler.ledger(x.last_state) for x in (here, there)]
        assert ledgers[0] == ledgers[1]
        posterior = fed.to_inference_data(there, remote).posterior
        assert (posterior.sizes["chain"], posterior.sizes["draw"]) == (2, 2)


class Failing(fed.Loopback):
    """Carrier that breaks after so many questions, and works again."""

    def __init__(self, silos: fed.Silos, after: int) -> None:
        super().__init__(silos)
        self.left = after

    def ask(self, calls):
        self.left -= 1
        if self.left == 0:
            raise ConnectionError("the line is cut")
        return super().ask(calls)


@pytest.mark.ci
def test_a_run_that_breaks_off_goes_on_from_its_checkpoint(tmp_path):
    """And a silo's absurd reply costs a trajectory, not the chain."""
    silos = in_order(intercepts_silos())
    options = {"num_warmup": 5, "num_samples": 6, "num_chains": 2, "progress_bar": False}
    whole = fed.RemoteMCMC(fed.HMC(intercepts), **options)
    whole.run(random.key(1), fed.RemoteSilos(silos, fed.Loopback(silos)))
    rounds = int(whole.last_state.rounds)
    carrier = Failing(silos, rounds)  # in the last trajectory
    place = tmp_path / "chains"
    for _ in range(2):
        mcmc = fed.RemoteMCMC(
            fed.HMC(intercepts), checkpoint=place, checkpoint_every=2, **options
        )  # fmt: skip
        if carrier.left > 0:
            with pytest.warns(UserWarning, match=r"the line is cut\): the first 5 draws are kept"):
                mcmc.run(random.key(1), fed.RemoteSilos(silos, carrier))
        else:
            mcmc.run(random.key(1), fed.RemoteSilos(silos, carrier))
    np.testing.assert_array_equal(mcmc.get_samples()["mu"], whole.get_samples()["mu"])

    class Absurd(fed.Loopback):
        def __init__(self, silos, at_once=False):
            super().__init__(silos)
            self.at_once = at_once

        def ask(self, calls):
            replies = super().ask(calls)
            leaps = isinstance(calls[0].local, LeapfrogLocal)
            if leaps and (self.at_once or calls[0].message.step_size > 0):
                replies[0] = replies[0]._replace(slope=replies[0].slope * 1e30)
            return replies

    mcmc = fed.RemoteMCMC(fed.HMC(intercepts), **options)
    mcmc.run(random.key(1), fed.RemoteSilos(silos, Absurd(silos)))
    assert mcmc.get_extra_fields()["diverging"].all()
    assert np.isfinite(mcmc.get_samples()["mu"]).all()
    with pytest.raises(ValueError, match="not finite at the start of a chain"):
        mcmc.run(random.key(1), fed.RemoteSilos(silos, Absurd(silos, at_once=True)))
