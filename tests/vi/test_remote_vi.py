"""Variational fits over remote silos: the same rounds as inline, and nothing of the rows across.

Also silos that are silent.
"""

import itertools
import json
import warnings
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from marks import heavy
from small_models import INTERCEPTS_CALLS, intercepts, intercepts_silos, linear, linear_silos
from spmd_processes import saved_by
from vi_models import (
    hierarchy,
    hierarchy_guide,
    hierarchy_silos,
    learned_scale,
    three_kinds_silos,
    wheeze,
    wheeze_silos,
)

import numpyro_fed as fed
from numpyro_fed.vi.remote import InitLocal, RoundLocal

ADAM, ROUNDS = optax.adam(0.02), 12
WHEEZE = wheeze_silos(np.repeat(np.arange(3), [2, 5, 9]))
HIERARCHY = hierarchy_silos(np.array([0, 1, 1, 2, 0, 1, 1, 1, 2]))
PROBABILITIES = {"silo 0": 0.2, "silo 1": 0.5, "silo 2": 0.1, "silo 3": 0.3}


class Listening(fed.Loopback):
    """A carrier that notes what crosses."""

    def __init__(self, silos):
        super().__init__(silos)
        self.crossed = []

    def ask(self, calls):
        replies = super().ask(calls)
        for x in jax.tree.leaves([[call.message for call in calls], replies]):
            is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            self.crossed.append(np.asarray(random.key_data(x) if is_key else x))
        return replies


def over(silos, carrier=None):
    return fed.RemoteSilos(silos, carrier or fed.Loopback(silos))


def plain(optim=ADAM, **options):
    """Return the fit that most tests make, whose programs they share."""
    return fed.SFVI(linear, fed.AutoSiloNormal(linear), optim, validate=False, **options)


def run(svi, silos, rounds=ROUNDS, seed=3, **options):
    return svi.run(random.key(seed), rounds, silos, progress_bar=False, **options)


def same(ours, theirs, rtol=1e-5):
    """Losses, and the global parameters, which are all that is here."""
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=rtol)
    for name, value in ours.params.items():
        scale = np.abs(theirs.params[name]).max()
        np.testing.assert_allclose(
            value, theirs.params[name], atol=rtol * scale, rtol=0, err_msg=name
        )


def encoder(y, x):
    w = numpyro.param("w", jnp.full((2, 5), 0.1))
    return w @ jnp.concatenate([y, x[None]])


def scaled_learned():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(20, 3))
    y = x @ [1.5, -2.0, 0.5] + rng.normal(size=20)
    return fed.split({"x": x.astype(np.float32), "y": y.astype(np.float32)}, by=np.arange(20) % 3)


# The same rounds


CASES = {
    "global": (plain, linear_silos(), {}),
    "participation": (plain, linear_silos(), {"participation": 0.5}),
    "local latents": (
        lambda: fed.SFVI(wheeze, fed.AutoSiloNormal(wheeze), ADAM, 1, 3, validate=False),
        WHEEZE,
        {},
    ),
    "averages": (
        lambda: fed.SFVIAvg(wheeze, fed.AutoSiloNormal(wheeze), ADAM, 5, 1, 3, validate=False),
        WHEEZE,
        {},
    ),
}
SLOW_CASES = {
    "probabilities": (plain, linear_silos(), {"participation": PROBABILITIES}),
    "minibatch": (
        lambda: fed.SFVI(wheeze, fed.AutoSiloNormal(wheeze), ADAM, 1, 3, batch_size=3),
        WHEEZE,
        {},
    ),
    "conducive": (
        lambda: fed.ConduciveSFVI(hierarchy, fed.AutoSiloNormal(hierarchy)),
        HIERARCHY,
        {},
    ),
    "minibatch of rows": (
        lambda: fed.SFVI(linear, fed.AutoSiloNormal(linear), ADAM, batch_size=4),
        linear_silos(),
        {},
    ),
    "two row groups": (
        lambda: fed.SFVI(intercepts, fed.AutoSiloNormal(intercepts), ADAM, 2, 2),
        intercepts_silos(),
        {},
    ),
    "joint units": (
        lambda: fed.SFVI(wheeze, fed.AutoSiloNormal(wheeze, local_cov="full"), ADAM, 1, 1),
        WHEEZE,
        {},
    ),
    "learned": (
        lambda: fed.SFVI(learned_scale, fed.AutoSiloNormal(learned_scale), ADAM, batch_size=4),
        scaled_learned(),
        {},
    ),
    "a user's guide": (lambda: fed.SFVI(hierarchy, hierarchy_guide, ADAM, 1, 2), HIERARCHY, {}),
    "amortized": (
        lambda: fed.SFVI(wheeze, fed.AutoSiloNormal(wheeze, amortize={"z": encoder}), ADAM, 1, 2),
        WHEEZE,
        {},
    ),
    "averages, diagonal": (
        lambda: fed.SFVIAvg(linear, fed.AutoSiloNormal(linear, "diag"), ADAM, 5, batch_size=3),
        linear_silos(),
        {"participation": 0.75},
    ),
    "conducive, diagonal": (
        lambda: fed.ConduciveSFVI(wheeze, fed.AutoSiloNormal(wheeze, "diag")),
        WHEEZE,
        {"participation": 0.7},
    ),
    "conducive, some rows": (
        lambda: fed.ConduciveSFVI(linear, fed.AutoSiloNormal(linear), batch_size=2),
        linear_silos(),
        {},
    ),
    "conducive, by steps": (
        lambda: fed.ConduciveSFVI(
            wheeze,
            fed.AutoSiloNormal(wheeze, amortize={"z": encoder}),
            ADAM,
            num_points=64,
            num_local_steps=5,
            num_local_particles=2,
        ),
        WHEEZE,
        {},
    ),
}


def check_case(make, silos, options):
    theirs, ours = run(make(), silos, **options), run(make(), over(silos), **options)
    # fixed-point iterations carry rounding on
    same(ours, theirs, 1e-4 if make().algorithm == "conducive" else 1e-5)
    assert set(ours.params) == set(make().setup(silos).config.supports)
    assert repr(ours.ledger) == repr(theirs.ledger)
    for mine, other in zip(ours.whitening or (), theirs.whitening or (), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", heavy(CASES, "local latents", "averages"))
def test_rounds_are_those_at_hand(name):
    check_case(*CASES[name])


@pytest.mark.ci
@pytest.mark.parametrize("name", SLOW_CASES)
def test_rounds_of_other_models_and_guides(name):
    check_case(*SLOW_CASES[name])


@pytest.mark.ci
def test_another_seed_gives_another_fit():
    # the control of the comparisons above
    silos = linear_silos()
    with pytest.raises(AssertionError):
        same(run(plain(), over(silos), seed=4), run(plain(), silos))


@pytest.mark.ci
def test_rounds_trace_nothing():
    svi = fed.SFVI(intercepts, fed.AutoSiloNormal(intercepts), ADAM, 1, 1)
    remote = over(intercepts_silos())
    run(svi, remote, 3)
    before = len(INTERCEPTS_CALLS)
    run(svi, remote, 40, seed=1)
    assert len(INTERCEPTS_CALLS) - before <= 1  # on a made-up row, for the start


@pytest.mark.ci
def test_it_stops_where_the_fit_at_hand_does():
    silos = linear_silos()
    theirs, ours = (run(plain(), s, 5000, tol=0.5) for s in (silos, over(silos)))
    assert 500 <= len(theirs.losses) < 5000
    same(ours, theirs, 1e-4)


# Going on


@pytest.mark.ci
def test_going_on_is_as_not_stopping_and_leaves_the_result_as_it_was():
    remote = over(WHEEZE)
    svi = fed.SFVI(wheeze, fed.AutoSiloNormal(wheeze), ADAM, 1, 3, validate=False)
    whole, half = run(svi, remote), run(svi, remote, 5)
    for _ in range(2):
        rest = run(svi, remote, ROUNDS - 5, seed=9, init_state=half.state)
        np.testing.assert_array_equal(np.concatenate([half.losses, rest.losses]), whole.losses)
        np.testing.assert_array_equal(rest.params["auto_loc"], whole.params["auto_loc"])
        assert rest.ledger == whole.ledger


@pytest.mark.ci
def test_a_warm_start_has_the_silos_own_parameters():
    guide = fed.AutoSiloNormal(wheeze)
    found = []
    for silos in (WHEEZE, over(WHEEZE)):
        start = run(fed.SFVIAvg(wheeze, guide, ADAM, 5, 1, 3, validate=False), silos, 3)
        found.append(
            run(fed.SFVI(wheeze, guide, ADAM, 1, 3, validate=False), silos, init_from=start)
        )
    same(found[1], found[0])
    # the control: without local ones losses are others
    cold = run(fed.SFVI(wheeze, guide, ADAM, 1, 3, validate=False), WHEEZE)
    assert abs(cold.losses[0] / found[0].losses[0] - 1) > 1e-3


# What crosses


@pytest.mark.ci
@pytest.mark.parametrize("method", ["sfvi", "conducive"])
def test_nothing_as_long_as_rows_crosses(method):
    silos = intercepts_silos()
    carrier = Listening(silos)
    guide = fed.AutoSiloNormal(intercepts)
    svi = (
        fed.SFVI(intercepts, guide, ADAM, 1, 2)
        if method == "sfvi"
        else fed.ConduciveSFVI(intercepts, guide)
    )
    result = run(svi, over(silos, carrier), 8)
    rows, groups = set(silos.sizes["rows"]) | {72}, set(silos.sizes["groups"]) | {18}
    seen = {n for x in carrier.crossed for n in x.shape}
    assert len(carrier.crossed) > 50
    assert not seen & (rows | groups)
    assert set(result.params) == {"auto_loc", "auto_scale_tril"}
    private = [leaf for site in carrier.workers.values() for leaf in jax.tree.leaves(site.kept)]
    assert any(
        np.shape(x)[:1] and len(x) in groups for x in private
    )  # the control: sites do hold such


@pytest.mark.filterwarnings("ignore:Pareto's k of the approximation")
def test_planted_values_are_not_among_what_crosses():
    silos = linear_silos()
    data = {name: {k: np.array(v) for k, v in silos[name].items()} for name in silos}
    data["silo 0"]["y"][1] = planted = np.float32(1.2345679)
    carrier = Listening(fed.Silos(data))
    svi = fed.SFVI(linear, fed.AutoSiloNormal(linear), ADAM)
    remote = over(fed.Silos(data), carrier)
    fed.to_inference_data(svi, run(svi, remote), remote, num_draws=10)
    raw = b"".join(x.tobytes() for x in carrier.crossed)
    assert planted.tobytes() not in raw
    assert (
        np.float32(np.asarray(carrier.crossed[-1]).ravel()[0]).tobytes() in raw
    )  # the control: what crosses is found
    assert not any(jax.tree.leaves(remote))


# Silos that do not answer


class Deaf(fed.Loopback):
    """Carrier in which, in the rounds given, some silos do not answer when they are first asked.

    Their reply is lost, or the call is.
    """

    def __init__(self, silos, rounds, deaf=(1,), *, computes=True, again=False):
        super().__init__(silos)
        self.rounds, self.deaf, self.computes, self.again = set(rounds), set(deaf), computes, again
        self.round, self.key, self.asked = 0, None, []

    def ask(self, calls):
        if not isinstance(calls[0].local, RoundLocal):
            return super().ask(calls)
        key = (
            random.key_data(calls[0].message.key).tobytes()
            if hasattr(calls[0].message, "key")
            else None
        )
        first = key is None or key != self.key
        self.round, self.key = self.round + first, key
        self.asked.append([call.number for call in calls])
        silent = self.round in self.rounds and (first or self.again)
        lost = [silent and call.number in self.deaf for call in calls]
        heard = [call for call, gone in zip(calls, lost, strict=True) if not gone or self.computes]
        replies = dict(zip(map(id, heard), super().ask(heard), strict=True))
        return [None if gone else replies[id(call)] for call, gone in zip(calls, lost, strict=True)]


@pytest.mark.ci
@pytest.mark.parametrize("computes", [True, False])
def test_a_silent_silo_is_asked_again_and_leaves_no_trace(computes):
    svi = fed.SFVI(wheeze, fed.AutoSiloNormal(wheeze), ADAM, 1, 3, validate=False)
    carrier = Deaf(WHEEZE, {2, 3, 7}, computes=computes)
    ours, whole = run(svi, over(WHEEZE, carrier)), run(svi, over(WHEEZE))
    np.testing.assert_array_equal(ours.losses, whole.losses)
    np.testing.assert_array_equal(ours.params["auto_loc"], whole.params["auto_loc"])
    assert carrier.asked[1:3] == [[0, 1, 2], [1]]
    assert ours.ledger.rounds == (ROUNDS, ROUNDS + 3, ROUNDS)
    assert ours.ledger.bytes_up == whole.ledger.bytes_up


def test_the_control_of_silent_silos():
    """Left out without a word, the silo is missed."""
    silos = linear_silos()
    ours = run(plain(), over(silos, Deaf(silos, {2, 3, 7})), answering=1.0)
    with pytest.raises(AssertionError):
        same(ours, run(plain(), over(silos)), 1e-3)


def test_a_silo_that_stays_silent_ends_the_fit_which_can_go_on():
    silos = linear_silos()
    carrier = Deaf(silos, {4}, (1, 3), again=True)
    svi, remote = plain(), over(silos, carrier)
    with pytest.warns(
        UserWarning,
        match=r"silos \['silo 1', 'silo 3'\] did not answer, asked 5 times, in round 4: the result "
        r"of the first 3 rounds is returned",
    ):
        half = run(svi, remote)
    carrier.rounds = set()
    rest = run(svi, remote, ROUNDS - 3, init_state=half.state)
    whole = run(svi, over(silos))
    np.testing.assert_array_equal(np.concatenate([half.losses, rest.losses]), whole.losses)
    with pytest.raises(
        RuntimeError, match=r"silos \['silo 1'\] did not answer, asked 5 times, in round 1"
    ):
        run(svi, over(silos, Deaf(silos, {1}, again=True)))


@pytest.mark.ci
def test_known_probabilities_of_answers_leave_the_gradient_unbiased():
    """Over all patterns of silence the mean step of gradient descent is that of all replies.

    Patterns count by their probabilities.
    """
    silos, svi = linear_silos(), plain(optax.sgd(1e-2))
    answering = {"silo 0": 1.0, "silo 1": 0.5, "silo 2": 0.8, "silo 3": 0.3}
    start = svi.init(random.key(0), over(silos))
    assert np.isfinite(np.asarray(start.server.params["auto_loc"])).all()

    def step(silent=(), **options):
        result = run(svi, over(silos, Deaf(silos, {1}, silent)), 1, seed=0, **options)
        return np.concatenate([np.ravel(x) for x in jax.tree.leaves(result.state.server.params)])

    whole, mean, unweighed, moved = step(), 0.0, 0.0, []
    for silent in itertools.chain.from_iterable(
        itertools.combinations((1, 2, 3), n) for n in range(4)
    ):
        probabilities = [1 - p if s in silent else p for s, p in enumerate(answering.values())]
        with pytest.warns(UserWarning, match="never took part") if silent else nullcontext():
            mean = mean + np.prod(probabilities) * step(silent, answering=answering)
        with pytest.warns(UserWarning, match="never took part") if silent else nullcontext():
            other = step(silent, answering=1.0)
        unweighed = unweighed + np.prod(probabilities) * other
        moved.append(np.abs(other - whole).max())
    assert max(moved) > 0.05
    np.testing.assert_allclose(mean, whole, atol=1e-3 * max(moved))
    assert np.abs(unweighed - whole).max() > 0.3 * max(moved)  # the control


def test_all_may_be_silent_where_that_is_known():
    silos = linear_silos()
    result = run(plain(), over(silos, Deaf(silos, {3, 4}, range(4))), 6, answering=0.5)
    assert len(result.losses) == 6
    assert result.state.visits.tolist() == [4] * 4


@pytest.mark.ci
def test_averages_go_on_without_silent_silos():
    silos = linear_silos()
    avg = fed.SFVIAvg(linear, fed.AutoSiloNormal(linear), ADAM, 5, validate=False)
    found = [run(avg, over(silos, Deaf(silos, {2, 3}, computes=c)), 4) for c in (True, False)]
    np.testing.assert_array_equal(found[0].losses, found[1].losses)
    np.testing.assert_array_equal(found[0].params["auto_loc"], found[1].params["auto_loc"])
    assert found[0].state.visits.tolist() == [4, 2, 4, 4]
    assert found[0].ledger.rounds == (4, 4, 4, 4)
    with pytest.raises(
        RuntimeError, match=r"silos \['silo 0', .*\] did not answer, asked 5 times, in round 1"
    ):
        run(avg, over(silos, Deaf(silos, range(9), range(4))), 4)


@pytest.mark.ci
def test_silence_does_not_move_the_fixed_point_of_conducive_rounds():
    avg = fed.ConduciveSFVI(hierarchy, fed.AutoSiloNormal(hierarchy))
    ours, theirs = (
        run(avg, over(HIERARCHY, Deaf(HIERARCHY, {2, 4, 5})), 25),
        run(avg, HIERARCHY, 25),
    )
    sd = float(theirs.whitening[1][0, 0])
    assert abs(float(ours.params["auto_loc"][0] - theirs.params["auto_loc"][0])) < 0.01 * sd
    assert float(ours.params["auto_scale_tril"][0, 0]) == pytest.approx(sd, rel=0.01)


@pytest.mark.ci
def test_an_interrupted_run_returns_what_it_has():
    class Interrupted(Deaf):
        def ask(self, calls):
            replies = super().ask(calls)  # silos have done their part
            if self.round == 5 and not self.computes:
                self.computes = True
                raise KeyboardInterrupt
            return replies

    svi, remote = (
        fed.SFVI(wheeze, fed.AutoSiloNormal(wheeze), ADAM, 1, 3, validate=False),
        over(WHEEZE, Interrupted(WHEEZE, (), computes=False)),
    )
    with pytest.warns(
        UserWarning, match="interrupted: the result of the first 4 rounds is returned"
    ):
        half = run(svi, remote)
    rest = run(svi, remote, ROUNDS - 4, init_state=half.state)
    np.testing.assert_array_equal(
        np.concatenate([half.losses, rest.losses]), run(svi, over(WHEEZE)).losses
    )


def test_preparation_needs_all_silos():
    class Late(fed.Loopback):
        def ask(self, calls):
            replies = super().ask(calls)
            start = isinstance(calls[0].local, InitLocal)
            return [
                None if start and call.number == 2 else x
                for call, x in zip(calls, replies, strict=True)
            ]

    silos = linear_silos()
    carrier = Late(silos)
    with pytest.raises(
        RuntimeError, match=r"silos \['silo 2'\] did not answer while the fit was prepared"
    ):
        run(plain(), over(silos, carrier))
    assert not any(site.kept for site in carrier.workers.values())


@pytest.mark.ci
def test_a_loss_that_is_not_finite_stops_the_fit():
    found = []
    for silos in (WHEEZE, over(WHEEZE)):
        svi = fed.SFVI(wheeze, fed.AutoSiloNormal(wheeze), optax.sgd(1e6), 1, 2, validate=False)
        with pytest.warns(
            UserWarning, match=r"not finite in round \d+, first in .*; the fit stopped there"
        ) as told:
            found.append((run(svi, silos, 50), str(told[0].message)))
    assert found[0][1] == found[1][1]
    assert len(found[1][0].losses) == len(found[0][0].losses) < 50
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found[1][0].state.server.params))


# Results and bad input


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:Pareto's k of the approximation")
@pytest.mark.parametrize("resample", [False, True])
def test_inference_data_has_the_draws_of_a_fit_at_hand(resample, tmp_path):
    found = []
    for silos in (WHEEZE, over(WHEEZE)):
        svi = fed.SFVI(wheeze, fed.AutoSiloNormal(wheeze), ADAM, 1, 3, validate=False)
        result = run(svi, silos)
        found.append(
            fed.to_inference_data(
                svi, result, silos, num_draws=40, log_likelihood=False, resample=resample
            )
        )
    theirs, ours = found
    assert set(ours.posterior.data_vars) == {"beta", "sigma"}
    for name in ("beta", "sigma"):
        np.testing.assert_allclose(
            ours.posterior[name], theirs.posterior[name], rtol=1e-4, atol=1e-5
        )
    np.testing.assert_allclose(
        ours.sample_stats["log_weight"], theirs.sample_stats["log_weight"], atol=1e-3
    )
    assert ours.posterior.attrs["pareto_k"] == pytest.approx(
        theirs.posterior.attrs["pareto_k"], abs=0.02
    )
    # silos at hand first weigh both halves where the fitted maps are, and remote ones do not
    more = 2 * resample
    rounds, expected = (json.loads(x.posterior.attrs["rounds"]) for x in found[::-1])
    assert [n + more for n in rounds] == expected
    ours.to_netcdf(tmp_path / "fit.nc")


@pytest.mark.ci
def test_a_fit_in_one_call():
    remote = over(HIERARCHY)
    ours, theirs = (
        fed.fit(hierarchy, s, num_draws=400, progress_bar=False) for s in (remote, HIERARCHY)
    )
    np.testing.assert_allclose(ours.posterior["mu"], theirs.posterior["mu"], atol=1e-3)
    assert ours.posterior.attrs["verdict"] == theirs.posterior.attrs["verdict"]


@pytest.mark.ci
def test_a_fit_by_chains_in_one_call():
    ours, theirs = (
        fed.fit(hierarchy, s, method="fsgld", num_draws=200, progress_bar=False)
        for s in (over(HIERARCHY), HIERARCHY)
    )
    # chains that differ by rounding part in time: as laws
    np.testing.assert_allclose(ours.posterior["mu"].mean(), theirs.posterior["mu"].mean(), atol=0.1)
    assert set(ours.posterior.data_vars) < set(theirs.posterior.data_vars)  # latents do not leave
    assert "from there FSGLD, 4 chains" in ours.posterior.attrs["report"]


def test_bad_input_in_words():
    silos = linear_silos()
    svi, remote = plain(), over(silos)
    here, there = run(svi, silos, 1), run(svi, remote, 1)
    for options, message in (
        (
            {"answering": 0.0},
            r"answering: expected probabilities in \(0, 1\], got 0.0 for silo 'silo 0'",
        ),
        ({"answering": {"silo 1": 0.5}}, "answering: expected a probability for every silo"),
        (
            {"answering": "often"},
            "answering: expected a probability, or one for each silo's name, got 'often'",
        ),
        ({"participation": 2}, "participation: expected the fraction of silos"),
        (
            {"init_state": here.state},
            "init_state: expected a result of a run over the same carrier",
        ),
        (
            {"init_state": run(svi, over(silos), 1).state},
            "init_state: expected a result of a run over the same carrier",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            run(svi, remote, 1, **options)
    with pytest.raises(ValueError, match=r"answering=0\.5: silos in this process always answer"):
        run(svi, silos, 1, answering=0.5)
    avg = fed.SFVIAvg(linear, fed.AutoSiloNormal(linear), ADAM, 2, validate=False)
    with pytest.raises(ValueError, match=r"answering=0\.5 is for fed\.SFVI"):
        run(avg, remote, 1, answering=0.5)
    with pytest.raises(ValueError, match=r"init_state: expected a state of the same kind of fit"):
        run(avg, remote, 1, init_state=there.state)
    with pytest.raises(
        ValueError, match=r"update\(\) and evaluate\(\) are not built for remote silos"
    ):
        svi.evaluate(there.state, remote)
    with pytest.raises(
        ValueError,
        match=r"expected fed\.Silos, got MixedSilos: remote silos of several structures",
    ):
        fed.RemoteSilos(three_kinds_silos(), fed.Loopback(silos))
    same(
        run(svi, remote, 3, init_from=here), run(svi, silos, 3, init_from=here)
    )  # nothing local is wanted


@pytest.mark.ci
def test_local_parameters_of_another_fit_do_not_fit():
    remote = over(HIERARCHY)
    other = fed.SFVI(
        hierarchy, fed.AutoSiloNormal(hierarchy, coupling=False), ADAM, 1, 1, validate=False
    )
    svi = fed.SFVI(hierarchy, fed.AutoSiloNormal(hierarchy), ADAM, 1, 1, validate=False)
    with pytest.raises(
        ValueError, match="init_from: expected a result of the same model and guide, with local"
    ):
        run(svi, remote, 1, init_from=run(other, remote, 1))
    with pytest.raises(
        ValueError, match="init_from: expected a result of a run over the same carrier"
    ):
        run(svi, remote, 1, init_from=run(svi, HIERARCHY, 1))


def test_data_outside_a_support_and_terms_that_mix_rows_are_refused():
    def outside(y):
        a = numpyro.sample("a", dist.Gamma(1.0, 1.0))
        with fed.silo_plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Beta(a, 2.0), obs=y)

    def mixing(y):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        with fed.silo_plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(a + y.mean(), 2.0), obs=y)

    silos = fed.Silos(
        {"oslo": {"y": jnp.array([0.1, 0.2])}, "rome": {"y": jnp.array([0.5, 1.5, 0.3])}}
    )
    with pytest.raises(ValueError, match="log density is -inf at a typical position, silo 'rome'"):
        run(fed.SFVI(outside, fed.AutoSiloNormal(outside), ADAM), over(silos))
    with pytest.raises(ValueError, match="must not combine rows of different silos"):
        run(fed.SFVI(mixing, fed.AutoSiloNormal(mixing), ADAM, batch_size=1), over(silos))


class Nobody(fed.Loopback):
    def ask(self, calls):
        raise AssertionError("somebody was asked")


@pytest.mark.parametrize(
    ("svi", "silos"),
    [
        (
            fed.SFVI(wheeze, fed.AutoSiloNormal(wheeze), ADAM, 1, 3, batch_size=3, validate=False),
            WHEEZE,
        ),
        (
            fed.SFVI(
                wheeze, fed.AutoSiloNormal(wheeze, local_cov="full"), ADAM, 1, 1, validate=False
            ),
            WHEEZE,
        ),
        (
            fed.SFVI(learned_scale, fed.AutoSiloNormal(learned_scale), ADAM, validate=False),
            scaled_learned(),
        ),
    ],
    ids=["elements", "joint", "learned"],
)
def test_a_silo_makes_the_servers_plan_without_asking(svi, silos):
    config = svi.setup(over(silos)).config
    alone = svi.planned(over(silos, Nobody(silos)), config.families[0].group is not None)
    assert alone == config
    assert hash(alone) == hash(config)
    assert alone.supports == config.supports
    with pytest.raises(AssertionError, match="somebody was asked"):  # the control
        over(silos, Nobody(silos)).ask([])


# Over processes

_PROCESS = """
import sys
import warnings
from contextlib import nullcontext
sys.path.insert(0, {tests!r})
from numpyro_fed.engines import spmd
process = int(sys.argv[1])
spmd.initialize("127.0.0.1:" + sys.argv[2], 2, process)
import numpy as np, numpyro_fed as fed, optax
from jax import random
from vi_models import wheeze, wheeze_silos
silos = spmd.connect(spmd.dealt(wheeze_silos(np.repeat(np.arange(3), [2, 5, 9])), process, 2))
svi = fed.SFVI(wheeze, fed.AutoSiloNormal(wheeze), optax.adam(0.02), 1, 3, validate=False)
result = svi.run(random.key(3), {rounds}, silos, progress_bar=False)
fit = {{"losses": result.losses, "loc": np.asarray(result.params["auto_loc"])}}
np.savez(sys.argv[3] + str(process), **fit, names=np.array(silos.names))
"""


@pytest.mark.ci
def test_two_processes_fit_what_one_fits(tmp_path):
    code = _PROCESS.format(tests=str(Path(__file__).parents[1]), rounds=ROUNDS)
    one, other = saved_by(code, 2, tmp_path, timeout=280)
    np.testing.assert_array_equal(one["losses"], other["losses"])
    np.testing.assert_array_equal(one["loc"], other["loc"])
    in_their_order = fed.Silos(
        {n: {k: np.asarray(v) for k, v in WHEEZE[n].items()} for n in one["names"].tolist()}
    )
    expected = run(
        fed.SFVI(wheeze, fed.AutoSiloNormal(wheeze), ADAM, 1, 3, validate=False), in_their_order
    )
    np.testing.assert_allclose(one["losses"], expected.losses, rtol=1e-5)
    np.testing.assert_allclose(one["loc"], expected.params["auto_loc"], rtol=1e-5, atol=1e-6)


def test_checkpoints_in_words(tmp_path):
    silos, place = linear_silos(), tmp_path / "fit.ckpt"
    svi, remote = plain(), over(silos)

    def go_on(rounds=6, silos=remote, fit=svi, place=place, **options):
        options = {"progress_bar": False, "checkpoint": place, "checkpoint_every": 2, **options}
        return fit.run(random.key(0), rounds, silos, **options)

    first = go_on()
    for options, message in (
        ({"rounds": 4}, r"num_rounds=4: .*fit\.ckpt is of 6 rounds; expected as many or more"),
        ({"participation": 0.5}, r"another run: participation None, expected \[0.5"),
        ({"answering": 0.5}, r"another run: answering None, expected \[0.5"),
        (
            {"init_from": first},
            r"fit\.ckpt is there, and the fit goes on from it; expected no init_from",
        ),
        (
            {"fit": fed.SFVI(linear, fed.AutoSiloNormal(linear), optax.adam(0.3))},
            r"another run: model and fit \{'optimizers': ",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            go_on(**options)
    # silos that have lost what they kept: another carrier
    with pytest.warns(
        UserWarning, match=r"no longer has the states of this run; expected the carrier"
    ):
        assert len(go_on(8, over(silos)).losses) == 6
    data = place.read_bytes()
    for broken in (data[:-40] + bytes(40), data[:100], b""):
        place.write_bytes(broken)
        with pytest.raises(ValueError, match=r"fit\.ckpt: expected .* delete it to start anew"):
            go_on()


@pytest.mark.ci
def test_a_fit_that_converges_between_checkpoints_is_kept(tmp_path, monkeypatch):
    silos, place = over(linear_silos()), tmp_path / "fit.ckpt"
    fit = fed.ConduciveSFVI(linear, fed.AutoSiloNormal(linear))
    options = {"tol": 1e-2, "checkpoint": place, "checkpoint_every": 40, "progress_bar": False}
    first = fit.run(random.key(0), 40, silos, **options)
    assert len(first.losses) < 40
    monkeypatch.setattr(silos, "ask_again", None)  # no round is made anew
    again = fit.run(random.key(0), 40, silos, **options)
    np.testing.assert_array_equal(again.losses, first.losses)


@pytest.mark.ci
def test_a_silos_own_latents_are_not_predicted_from_elsewhere():
    remote = over(HIERARCHY)
    svi = fed.SFVI(hierarchy, fed.AutoSiloNormal(hierarchy), optax.adam(0.05))
    result = svi.run(random.key(0), 3, remote, progress_bar=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of three rounds
        idata = fed.to_inference_data(svi, result, remote, num_draws=5)
    with pytest.raises(
        ValueError,
        match=r"its own latents \[.*\] stayed there, and the fit has none; expected None",
    ):
        fed.predict(hierarchy, idata, random.key(0), {}, silo=HIERARCHY.names[0])
