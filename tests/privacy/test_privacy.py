"""Differential privacy, and sums whose terms nobody sees.

Their laws and accounts, and what a silo refuses.
"""

import json
import math
import re
import shutil
import warnings
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import random
from marks import heavy
from messages import (
    INTERCEPTS,
    LINEAR,
    DyingFits,
    Fits,
    Killed,
    Messages,
    alone,
    introduce,
    private_sums,
)
from small_models import intercepts, linear, linear_silos

import numpyro_fed as fed
from numpyro_fed.density.fingerprint import as_values
from numpyro_fed.engines.silo_side import SiloSide
from numpyro_fed.engines.wire import connect
from numpyro_fed.mcmc.remote import TellLocal
from numpyro_fed.privacy import guard as closed
from numpyro_fed.privacy.differential import (
    Noise,
    cut_to_grid,
    expected_error,
    noised,
    noised_exactly,
)
from numpyro_fed.privacy.discrete_gaussian import Words
from numpyro_fed.privacy.guard import RoundGuard
from numpyro_fed.privacy.secure_sum import LARGEST, Keys, masked, opened
from numpyro_fed.rounds.serialization import pack, unpack
from numpyro_fed.rounds.worker import Call
from numpyro_fed.vi.remote import InitLocal

ADAM = optax.adam(0.05)


# The mechanism


def test_a_gradient_is_cut_to_its_norm_and_no_more():
    small, large = (
        {"a": jnp.array([0.3, 0.4])},
        {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]])},
    )
    quiet = Noise(1.0, 0.0)
    np.testing.assert_allclose(noised(quiet, random.key(0), small)["a"], small["a"])
    cut = noised(quiet, random.key(0), large)
    np.testing.assert_allclose(cut["a"], [0.6, 0.0], rtol=1e-6)
    np.testing.assert_allclose(cut["b"], [[0.8]], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_counts_as_zero(bad):
    out = noised(Noise(1.0, 0.0), random.key(0), {"a": jnp.array([bad, 1.0]), "b": jnp.ones(2)})
    assert all((x == 0).all() for x in jax.tree.leaves(out))


def test_the_noise_is_normal_of_the_sd_that_was_accounted_for():
    num, sd = 20_000, 3.0
    draws = jax.vmap(
        lambda k: noised(Noise(1.0, sd), k, {"a": jnp.array([9.0, 0.0]), "b": jnp.zeros(1)})
    )(random.split(random.key(0), num))
    every = np.concatenate([draws["a"], draws["b"]], axis=1)
    # 4 standard errors
    np.testing.assert_allclose(every.mean(0), [1.0, 0.0, 0.0], atol=4 * sd / math.sqrt(num))
    np.testing.assert_allclose(every.std(0), sd, rtol=4 / math.sqrt(2 * num))
    assert np.abs(np.corrcoef(every.T) - np.eye(3)).max() < 4 / math.sqrt(num)


def test_the_account_is_no_less_than_that_of_the_discrete_mechanism():
    """In one dimension dp-accounting has the discrete Gaussian's own losses.

    Their bound zCDP holds in any.
    """
    from dp_accounting.pld.privacy_loss_distribution import from_discrete_gaussian_mechanism

    privacy = fed.Privacy(epsilon=2.5, delta=1e-6, clip=0.3, num_rounds=4)
    sigma = 20 * privacy.noise_multiplier / 2  # in units that put cut gradients 20 apart
    losses = from_discrete_gaussian_mechanism(sigma, 20, value_discretization_interval=1e-3)
    for rounds in (1, 4):
        exact = losses.self_compose(rounds).get_epsilon_for_delta(1e-6)
        assert exact <= privacy.spent(rounds) <= 1.15 * exact
    assert 2.5 - 1e-6 < privacy.spent(4) <= 2.5
    assert privacy.spent(0) == 0.0


def test_the_noise_is_a_whole_number_of_units():
    privacy = fed.Privacy(epsilon=2.5, delta=1e-6, clip=0.3, num_rounds=700)
    for sharing in (1, 25, 1000):
        noise = privacy.noise(sharing)
        units = noise.sd / noise.grid
        assert units == round(units)
        assert noise.grid == 2.0 ** round(math.log2(noise.grid))
        wanted = 0.3 * privacy.noise_multiplier / math.sqrt(sharing)
        assert wanted <= noise.sd <= wanted + noise.grid
        assert sharing == 1 or noise.grid >= 2.0**-20  # which sums hold exactly
    with pytest.raises(
        ValueError, match=r"clip=1e-06: numbers are on a grid of .* expected a clip of .* at least"
    ):
        fed.Privacy(2.5, 1e-6, 1e-6, 700).noise(10)
    with pytest.raises(
        ValueError, match=r"noise goes beyond 1.07374e.09, the largest number of a sum"
    ):
        fed.Privacy(2.5, 1e-6, 1e7, 700).noise(10)


@pytest.mark.parametrize("size", [1, 20, 1000])
def test_a_cut_gradient_is_on_the_grid_and_no_longer_than_it_was_cut_to(size):
    noise = fed.Privacy(2.5, 1e-6, 0.3, 10).noise(1)
    rng, most = np.random.default_rng(size), math.floor(0.3 / noise.grid)
    for scale in (1e-3, 0.3 / math.sqrt(size), 1.0, 1e30):
        x = scale * rng.normal(size=size)
        whole = cut_to_grid(noise, x)
        assert sum(k * k for k in whole.tolist()) <= most**2
        expected = x * min(1, 0.3 / np.linalg.norm(x))
        assert (
            np.abs(whole * noise.grid - expected).max() <= 2 * noise.grid
        )  # cut to whole units, and towards zero
    for bad in (np.nan, np.inf):
        assert (cut_to_grid(noise, np.append(x, bad)) == 0).all()


def test_exact_noise_has_its_sd_and_is_the_same_for_the_same_words():
    noise = fed.Privacy(2.5, 1e-6, 0.3, 10).noise(1)
    gradient = {"a": np.zeros(20_000, np.float32), "b": np.full((2, 2), 0.1, np.float32)}
    told, again, other = (
        noised_exactly(noise, Words(bytes([i]) * 32), gradient) for i in (0, 0, 1)
    )
    np.testing.assert_array_equal(told["a"], again["a"])
    assert (told["a"] != other["a"]).mean() > 0.99
    assert told["a"].std() == pytest.approx(
        noise.sd, rel=4 / math.sqrt(2 * 20_000)
    )  # 4 standard errors
    assert (np.rint(told["b"] / noise.grid) == told["b"] / noise.grid).all()


# What a reply's low bits give away


def float32_normals():
    """Every value that jax.random.normal has in float32, in order: 2^23 of them."""
    low = np.nextafter(np.float32(-1), np.float32(0))
    share = (np.arange(2**23, dtype=np.uint32) | np.uint32(0x3F800000)).view(
        np.float32
    ) - np.float32(1)
    uniform = np.maximum(low, share * (np.float32(1) - low) + low)
    return np.asarray(np.float32(np.sqrt(2)) * jax.lax.erf_inv(jnp.asarray(uniform)))


def reachable(reply, gradient, noise):
    """How many numbers of a reply some noise makes of a cut gradient, noise being sorted."""
    near = np.searchsorted(noise, reply - gradient)[:, None] + np.arange(-6, 7)
    return int(
        (gradient[:, None] + noise[np.clip(near, 0, len(noise) - 1)] == reply[:, None]).any(1).sum()
    )


def test_of_two_guesses_a_reply_tells_neither():
    """An adversary knows all rows but one and has two guesses for it.

    He is right in half of 400 replies.
    """
    rng, num, clip = np.random.default_rng(0), 20, 0.5
    budget = fed.Privacy(epsilon=0.08, delta=1e-6, clip=clip, num_rounds=1)
    noise = budget.noise(1)
    guesses = [rng.normal(size=num).astype(np.float32) for _ in range(2)]
    guesses = [np.float32(0.9 * clip / np.linalg.norm(g)) * g for g in guesses]
    normals = np.float32(noise.sd) * float32_normals()

    def told_by_bits(reply, truth):
        count = [reachable(reply, g, normals) for g in guesses]
        return rng.random() < 0.5 if count[0] == count[1] else int(np.argmax(count)) == truth

    def told_by_distance(reply, truth):
        return int(np.argmin([np.sum((reply - g) ** 2) for g in guesses])) == truth

    truths = rng.integers(0, 2, 400)
    replies = [
        noised_exactly(noise, Words(int(i).to_bytes(32, "little")), guesses[truth]).astype(
            np.float32
        )
        for i, truth in enumerate(truths)
    ]
    for tell in (told_by_bits, told_by_distance):
        right = np.mean([tell(reply, truth) for reply, truth in zip(replies, truths, strict=True)])
        assert abs(right - 0.5) <= 3 * 0.5 / math.sqrt(400), tell.__name__
    # the control: JAX's noise, which inline silos have, tells every time
    control = [noised(noise, random.key(i), guesses[truth]) for i, truth in enumerate(truths[:100])]
    assert all(
        told_by_bits(np.asarray(reply), truth)
        for reply, truth in zip(control, truths[:100], strict=True)
    )


# Fits


@dataclass(frozen=True)
class Free(fed.Privacy):
    """Of no effect: what is left is the way that gradients take."""

    def noise(self, num_sharing):
        return Noise(1e12, 0.0)


@pytest.mark.ci
def test_without_cuts_and_noise_the_fit_is_the_plain_one():
    guide = fed.AutoSiloNormal(intercepts)
    options = {"num_local_particles": 3}
    plain = fed.SFVI(intercepts, guide, ADAM, **options).run(
        random.key(1), 30, INTERCEPTS, progress_bar=False
    )
    free = fed.SFVI(intercepts, guide, ADAM, privacy=Free(1.0, 1e-5, 1.0, 30), **options)
    got = free.run(random.key(1), 30, INTERCEPTS, progress_bar=False)
    for k, v in plain.params.items():
        np.testing.assert_allclose(got.params[k], v, rtol=2e-3, atol=2e-4, err_msg=k)
    assert np.isnan(got.losses).all()
    assert plain.privacy is None


def gaussian(y):
    import numpyro
    import numpyro.distributions as dist

    mu = numpyro.sample("mu", dist.Normal(0, 10).expand([2]).to_event(1))
    with fed.silo_plate("patients", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1).to_event(1), obs=y)


def gaussian_silos(num, rows=25):
    rng = np.random.default_rng(0)
    return fed.Silos(
        {f"s{i:02}": {"y": rng.normal(0.0, 1.0, (rows, 2)).astype(np.float32)} for i in range(num)}
    )


@pytest.mark.ci
def test_the_mean_is_off_by_what_was_said_beforehand():
    """Errors of q's mean over seeds, in posterior sds, agree with the formula.

    In the control the budget's own noise is left out.
    """
    num, rounds = 50, 1500
    silos = gaussian_silos(num)
    pooled = np.concatenate([silos[n]["y"] for n in silos.names])
    precision = len(pooled) + 0.01
    privacy = fed.Privacy(4.0, 1e-5, math.sqrt(4 / num), rounds)
    # a step of 3e-4 in theta is one of .4 in q's own coordinates: many of them fit into the average
    guide = fed.AutoSiloNormal(gaussian, init_scale=precision**-0.5)
    svi = fed.SFVI(gaussian, guide, optax.sgd(1e-4), privacy=privacy, secure_sum=True)
    errors = []
    for seed in range(12):
        result = svi.run(random.key(seed), rounds, silos, progress_bar=False)
        errors.append(
            (result.params["auto_loc"] - pooled.sum(0) / precision) * math.sqrt(precision)
        )
    rms, expected = float(np.sqrt(np.mean(np.square(errors)))), result.privacy.error
    # of 24 numbers the standard error of a root mean square is 14 percent
    assert 0.5 < rms / expected < 1.6
    plain = fed.SFVI(gaussian, guide, optax.sgd(1e-4)).run(
        random.key(0), rounds, silos, progress_bar=False
    )
    off = (plain.params["auto_loc"] - pooled.sum(0) / precision) * math.sqrt(precision)
    assert np.abs(off).max() < 0.3 * expected
    assert result.privacy.epsilon == pytest.approx(4.0, rel=1e-6)
    assert result.privacy.rounds == rounds


def test_of_a_sum_each_silo_adds_its_share():
    def sd(secure_sum):
        svi = fed.SFVI(
            linear,
            fed.AutoSiloNormal(linear),
            ADAM,
            privacy=fed.Privacy(1.0, 1e-5, 1.0, 10),
            secure_sum=secure_sum,
        )
        return svi.setup(LINEAR).config.noise.sd

    assert sd(False) / sd(True) == pytest.approx(math.sqrt(len(LINEAR)), rel=1e-4)
    noise = Noise(1.0, sd(True))
    assert expected_error(noise, len(LINEAR), 10) == pytest.approx(
        noise.sd * math.sqrt(len(LINEAR) * 81 / 17 / 10)
    )


@pytest.mark.ci
def test_the_result_says_what_was_spent_and_compare_prints_it(tmp_path):
    silos = gaussian_silos(4)
    privacy = fed.Privacy(4.0, 1e-5, 1.0, 40)
    svi = fed.SFVI(gaussian, fed.AutoSiloNormal(gaussian), ADAM, privacy=privacy)
    result = svi.run(random.key(0), 10, silos, progress_bar=False)
    words = (
        r"privacy of each silo's rows, simulated \(silos at hand.*promises nothing\): epsilon \S+ "
        r"of 4 at delta 1e-05, gradients cut to norm 1; its noise moves means by about \S+ "
        r"posterior sds"
    )
    assert re.search(words, repr(result))
    assert result.privacy.epsilon == pytest.approx(privacy.spent(10))
    on = svi.run(random.key(0), 30, silos, progress_bar=False, init_state=result.state)
    assert on.privacy.epsilon == pytest.approx(4.0, rel=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # of Pareto's k: noise, and a fit cut short, are seen by it
        idata = fed.to_inference_data(svi, on, silos, num_draws=200)
        unnoised = fed.SFVI(gaussian, fed.AutoSiloNormal(gaussian), ADAM)
        plain = unnoised.run(random.key(0), 400, silos, progress_bar=False)
        other = fed.to_inference_data(unnoised, plain, silos, num_draws=200)
    idata.to_netcdf(tmp_path / "fit.nc")
    comparison = fed.compare(idata, idata)
    wider = math.hypot(1, on.privacy.error)
    assert f"so sds that include it are {wider:.2f} times the fit's" in str(comparison)
    assert "rivacy" not in str(fed.compare(other, idata))


# Sums


def keys_of(folder, names):
    """Keys of silos that have met."""
    made = {}
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        made[name] = Keys(folder / name, name, name.encode())
    introduce(folder, names)
    return made


def together(sent):
    """Combine replies of one array and one flag as the server has them."""
    return [
        (np.stack([x[0] for x in sent]), np.stack([x[1] for x in sent])),
        np.stack([x[2] for x in sent]),
    ]


SECRET = bytes(32)


def test_masks_cancel_in_the_sum_of_all_and_in_no_other(tmp_path):
    names, rng = ("bern", "oslo", "rome", "york"), np.random.default_rng(0)
    keys = keys_of(tmp_path, names)
    plain = {
        n: [rng.normal(size=(2, 3)).astype(np.float32) * 10**k, np.array(True)]
        for k, n in enumerate(names)
    }
    sent = {n: masked(plain[n], n, keys[n].shared(names), b"round 1", SECRET) for n in names}
    total, flag = opened(together(list(sent.values())), np.dtype(np.float64))
    expected = sum(plain[n][0].astype(np.float64) for n in names)
    # each is rounded by at most half of 2^-20
    np.testing.assert_allclose(total[0], expected, rtol=0, atol=4 * 2.0**-21)
    assert flag.shape == (1,)
    assert flag.all()
    for left_out in names:
        some, flag = opened(
            together([sent[n] for n in names if n != left_out]), np.dtype(np.float64)
        )
        assert np.isnan(some).all()
        assert not flag.any()
        numbers = np.add.reduce([sent[n][0] for n in names if n != left_out], dtype=np.uint64)
        assert (np.abs(numbers.astype(np.int64)) * 2.0**-20 > 1e6).all()
    # another sum has other masks, and the same the same
    again = masked(plain["oslo"], "oslo", keys["oslo"].shared(names), b"round 1", SECRET)
    other = masked(plain["oslo"], "oslo", keys["oslo"].shared(names), b"round 2", SECRET)
    for x, y, z in zip(sent["oslo"], again, other, strict=True):
        np.testing.assert_array_equal(x, y)
        assert (x != z).all()


def test_a_masked_number_is_uniform(tmp_path):
    keys = keys_of(tmp_path, ("a", "b", "c"))
    numbers, flags = masked(
        [np.zeros(100_000, np.float32)], "a", keys["a"].shared(("a", "b", "c")), b"1", SECRET
    )
    for sent, shift in ((numbers, 60), (flags, 28)):
        share = np.bincount((sent >> sent.dtype.type(shift)).astype(int), minlength=16) / len(sent)
        np.testing.assert_allclose(share, 1 / 16, atol=4 * math.sqrt(1 / 16 / len(sent)))
    assert len(set(numbers.tolist())) == len(numbers)


@pytest.mark.parametrize("bad", [np.nan, -np.inf, 2 * LARGEST])
def test_what_has_no_place_in_a_sum_makes_it_nan(tmp_path, bad):
    names = ("a", "b", "c")
    keys = keys_of(tmp_path, names)
    each = {
        n: [np.array([LARGEST, bad if n == "b" else -LARGEST]), np.array(n != "b")] for n in names
    }
    sent = [masked(each[n], n, keys[n].shared(names), b"1", SECRET) for n in names]
    (total,), flag = opened(together(sent), np.dtype(np.float64))
    assert total[0] == 3 * LARGEST
    assert np.isnan(total[1])
    assert not flag.any()


def test_a_sum_tells_neither_how_many_silos_have_no_number_nor_the_sum_of_the_others(tmp_path):
    """Else two sums, with one silo more that has none, gave that silo's number."""
    names = ("a", "b", "c")
    keys = keys_of(tmp_path, names)
    found = []
    for bad in ((), ("b",), ("b", "c")):
        each = {n: [np.full(50, np.nan if n in bad else 1.0), np.array(True)] for n in names}
        sent = [masked(each[n], n, keys[n].shared(names), b"1", n.encode()) for n in names]
        sums = [np.add.reduce([x[k] for x in sent], dtype=sent[0][k].dtype) for k in (0, 1)]
        found.append((sums[0].astype(np.int64) * 2.0**-20, sums[1]))
    (plain, none), *others = found
    assert (plain == 3).all()
    assert not none.any()
    for numbers, marks in others:
        assert (np.abs(numbers) > 1e6).mean() > 0.99  # uniform: 2^20 of 2^44 numbers are as small
        assert len(set(marks.tolist())) == 50
        assert marks.min() > 3  # the count of silos


FITS = {
    "sfvi": lambda **o: fed.SFVI(
        intercepts, fed.AutoSiloNormal(intercepts), ADAM, num_local_particles=3, **o
    ),
    "sfvi_avg": lambda **o: fed.SFVIAvg(
        intercepts,
        fed.AutoSiloNormal(intercepts, global_cov="diag"),
        ADAM,
        num_local_steps=5,
        num_local_particles=3,
        **o,
    ),
    "conducive": lambda **o: fed.ConduciveSFVI(intercepts, fed.AutoSiloNormal(intercepts), **o),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", FITS)
def test_a_fit_of_sums_is_the_fit(tmp_path, name):
    fit, rounds = FITS[name](secure_sum=True), 20 if name == "sfvi" else 5
    plain = FITS[name]()
    expected = plain.run(random.key(1), rounds, INTERCEPTS, progress_bar=False)
    transport = Fits(INTERCEPTS, fit, tmp_path, lambda: FITS[name](secure_sum=True))
    introduce(tmp_path, INTERCEPTS.names)
    remote = connect(transport, intercepts, fit=fit)
    if name != "conducive":  # silos draw by keys of their own
        return _sums_are_those_of_the_replies(transport, fit, remote, rounds)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # conducive rounds have not converged after five
        got = fit.run(random.key(1), rounds, remote, progress_bar=False)
    for k, v in got.params.items():
        scale = np.abs(expected.params[k]).max()
        np.testing.assert_allclose(v, expected.params[k], atol=2e-5 * max(scale, 1), err_msg=k)
    np.testing.assert_allclose(got.losses, expected.losses, rtol=1e-4)
    # what left a silo alone is no number of its own
    rounds_sent = [
        unpack(answer)["replies"] for _, data, answer in transport.sent if b"RoundLocal" in data
    ]
    leaves = [x for replies in rounds_sent for leaves in replies for x in leaves]
    numbers = (
        np.concatenate([x.ravel() for x in leaves if x.dtype == np.uint64]).astype(np.int64)
        * 2.0**-20
    )
    assert {x.dtype for x in leaves} == {np.dtype(np.uint64), np.dtype(np.uint32)}
    assert np.mean(np.abs(numbers) > 1e6) > 0.99
    one, other = (
        fed.to_inference_data(f, r, s, num_draws=100, resample=True)
        for f, r, s in ((fit, got, remote), (plain, expected, INTERCEPTS))
    )
    weights = [i.sample_stats["log_weight"].values.ravel() for i in (one, other)]
    # other candidates of the latents: means agree within 4 standard errors
    error = 4 * np.sqrt(sum(np.var(w) / w.size for w in weights))
    assert abs(weights[0].mean() - weights[1].mean()) < error


def _sums_are_those_of_the_replies(transport, fit, remote, rounds):
    """Assert that the server opens the sum of the replies that the silos' own programs returned."""
    said, heard = [], []
    for side in transport.sides.values():
        reply = side.worker.reply

        def wrapped(call, state, reply=reply):
            got, new = reply(call, state)
            if type(call.local).__name__ == "RoundLocal":
                said.append(
                    [np.asarray(x, np.float64) for x in jax.tree.leaves(got) if x.dtype != bool]
                )
            return got, new

        side.worker.reply = wrapped
    result = fit.run(random.key(1), rounds, remote, progress_bar=False)
    for _, data, answer in transport.sent:
        if b"RoundLocal" in data:
            heard.append([x for x in unpack(answer)["replies"][0] if x.dtype == np.uint64])
    num = len(transport.names)
    for start in range(0, len(said), num):
        pairs = (zip(*each[start : start + num], strict=True) for each in (said, heard))
        for own, masked_ones in zip(*pairs, strict=True):
            total = np.add.reduce(masked_ones, dtype=np.uint64).astype(np.int64) * 2.0**-20
            np.testing.assert_allclose(total, sum(own), rtol=0, atol=num * 2.0**-21)
    assert len(said) == rounds * num
    assert np.isfinite(result.losses).all()


def private_fit():
    return fed.SFVI(
        linear, fed.AutoSiloNormal(linear), ADAM, privacy=fed.Privacy(4.0, 1e-5, 1.0, 5)
    )


@pytest.mark.ci
def test_a_fit_with_privacy_over_a_wire(tmp_path):
    fit = private_fit()
    transport = Fits(LINEAR, fit, tmp_path, private_fit)
    remote = connect(transport, linear, fit=fit)
    result = fit.run(random.key(1), 5, remote, progress_bar=False)
    assert result.privacy.rounds == 5
    idata = fed.to_inference_data(fit, result, remote, num_draws=50)
    assert "pareto_k" not in idata.posterior.attrs
    assert np.isfinite(idata.posterior["beta"]).all()
    with pytest.raises(ValueError, match="silos of a fit with privacy do not weigh draws"):
        fed.to_inference_data(fit, result, remote, num_draws=50, resample=True)
    # the bound is in no reply, and nothing was asked but rounds
    told = [
        json.loads(x)
        for n in LINEAR.names
        for x in (tmp_path / n / "audit.jsonl").read_text().splitlines()
    ]
    asked = {call["kind"] for line in told for call in line.get("calls", [])}
    assert asked == {"InitLocal", "RoundLocal"}
    replies = [unpack(a)["replies"][0] for _, d, a in transport.sent if b"RoundLocal" in d]
    assert all(np.isnan(leaves[0]).all() for leaves in replies)
    noise = fit.setup(remote).config.noise
    assert all(
        (np.rint(x / noise.grid) == x / noise.grid).all() for leaves in replies for x in leaves[2:4]
    )
    assert not result.privacy.simulated
    # noise is the silo's own: the same bytes to the same folder with another secret have another
    # reply
    name, data, answer = next(x for x in reversed(transport.sent) if b"RoundLocal" in x[1])
    shutil.copytree(tmp_path / name, tmp_path / "copy" / name)

    def make():
        return SiloSide(alone(LINEAR, name), linear, tmp_path / "copy" / name, fit=private_fit())

    assert make().answer(data) == answer
    (tmp_path / "copy" / name / "secret.key").write_bytes(bytes(32))
    (tmp_path / "copy" / name / "sent.txt").unlink()  # which would refuse other numbers
    other = unpack(make().answer(data))["replies"][0]
    plain = unpack(answer)["replies"][0]
    assert all(
        (x != y).all() for x, y in zip(other[2:4], plain[2:4], strict=True) if x.dtype != bool
    )
    # the budget is spent, whatever the server says
    with pytest.raises(
        RuntimeError,
        match=r"its budget of privacy is spent: it has answered 5 rounds, expected at most 5",
    ):
        fit.run(random.key(2), 1, remote, progress_bar=False)


def test_a_round_that_is_asked_for_again_spends_nothing(tmp_path):
    fit = private_fit()
    transport = Fits(LINEAR, fit, tmp_path, private_fit)
    remote = connect(transport, linear, fit=fit)
    fit.run(random.key(1), 2, remote, progress_bar=False)
    name, data, answer = next(x for x in reversed(transport.sent) if b"RoundLocal" in x[1])
    lines = (tmp_path / name / "answered.txt").read_text()
    assert len(lines.split()) == 2 * 2
    assert transport.sides[name].answer(data) == answer
    assert transport.make[name]().answer(data) == answer  # nor of a new process
    assert (tmp_path / name / "answered.txt").read_text() == lines
    # what was answered is not forgotten by a file that lost its end
    (tmp_path / name / "answered.txt").write_text(lines[: len(lines) // 2])
    assert (
        "its answered.txt lacks rounds that its sent.txt has"
        in unpack(transport.sides[name].answer(data))["error"]
    )
    (tmp_path / name / "answered.txt").write_text(lines)
    assert transport.sides[name].answer(data) == answer


def sums_fit():
    return fed.SFVI(linear, fed.AutoSiloNormal(linear), ADAM, secure_sum=True)


CLOSED = {"privacy": private_fit, "sums": sums_fit, "both": private_sums}


def asked_again(side, data, **changed):
    """Return the answer to a call of a captured message, changed."""
    request = unpack(data)
    (values,) = unpack(request["calls"].tobytes(), side.checks.own)
    call = Call(0, *values)
    for name, change in changed.items():
        call = call._replace(**{name: change(getattr(call, name))})
    inside = pack([(call.local, call.key, call.message, call.read, call.write)], side.checks.own)
    return unpack(side.answer(pack({**request, "calls": np.frombuffer(inside, np.uint8)})))


@pytest.mark.parametrize("name", heavy(CLOSED, "sums"))
def test_a_fit_whose_server_is_killed_spends_no_round_twice(tmp_path, name):
    place, make = tmp_path / "fit.ckpt", CLOSED[name]
    fit = make()
    transport = DyingFits(LINEAR, fit, tmp_path, make)
    if fit.secure_sum:
        introduce(tmp_path, LINEAR.names)
    remote = connect(transport, linear, fit=fit)
    fit.setup(remote)
    transport.left, transport.after = (
        5,
        True,
    )  # the first states, then three rounds and the replies of a fourth
    with pytest.raises(Killed):
        fit.run(random.key(1), 5, remote, progress_bar=False, checkpoint=place, checkpoint_every=2)
    transport.left = -1
    got = fit.run(
        random.key(1),
        5,
        connect(transport, linear, fit=fit),
        progress_bar=False,
        checkpoint=place,
        checkpoint_every=2,
    )
    for silo in LINEAR.names:
        assert len((tmp_path / silo / "answered.txt").read_text().split()) == 2 * 5
    # and the same fit once more, whose rounds have been answered
    again = fit.run(random.key(1), 5, connect(transport, linear, fit=fit), progress_bar=False)
    for k, v in again.params.items():
        np.testing.assert_array_equal(got.params[k], v)


def test_a_sum_is_asked_for_from_one_state_alone(tmp_path):
    guard = RoundGuard(tmp_path, "oslo", sums_fit(), SECRET)
    for _ in range(2):  # the same message again
        guard._count("round-1", "0" * 64)
    with pytest.raises(ValueError, match="it was asked for this sum before, from another state"):
        guard._count("round-1", "1" * 64)
    assert len(list(guard._lines("answered.txt"))) == 1


@pytest.mark.parametrize("name", CLOSED)
def test_a_server_that_cheats_learns_nothing(tmp_path, name):
    """Each of these gave a silo's numbers away once."""
    make = CLOSED[name]
    fit = make()
    transport = Fits(LINEAR, fit, tmp_path, make)
    if fit.secure_sum:
        introduce(tmp_path, LINEAR.names)
    remote = connect(transport, linear, fit=fit)
    fit.run(random.key(1), 2, remote, progress_bar=False)
    silo, data, answer = next(x for x in reversed(transport.sent) if b"RoundLocal" in x[1])
    side = transport.sides[silo]
    count = len((tmp_path / silo / "answered.txt").read_text().split())
    # another algorithm, whose replies have no noise
    wrong = asked_again(side, data, local=lambda local: type(local)(local.config, "conducive"))
    assert "with an algorithm that is not its own" in wrong["error"]
    # numbers so coarse that noise on their grid shows them
    coarse = asked_again(
        side,
        data,
        message=lambda m: jax.tree.map(
            lambda x: x.astype(np.float16) if x.dtype == np.float32 else x, m
        ),
    )
    assert "it is told numbers of type ['float16']; expected float32" in coarse["error"]
    # another slot to write to changes nothing, nor another key: silos draw by their own
    for changed in ({"write": lambda slot: slot + 1000}, {"key": lambda key: random.key(99)}):
        same = asked_again(side, data, **changed)
        for x, y in zip(same["replies"][0], unpack(answer)["replies"][0], strict=True):
            np.testing.assert_array_equal(x, y)
    assert len((tmp_path / silo / "answered.txt").read_text().split()) == count
    # another state under the same number: the same message, from what other calls led to
    fresh = asked_again(
        side,
        data,
        read=lambda slot: None,
        local=lambda local: InitLocal(local.config, "sfvi"),
        message=lambda m: remote_params(fit, remote),
        write=lambda slot: 10**6,
    )
    assert "replies" in fresh, fresh
    moved = asked_again(side, data, read=lambda slot: 10**6, write=lambda slot: None)
    assert "replies" in moved, moved
    if fit.secure_sum:
        pairs = zip(moved["replies"][0], unpack(answer)["replies"][0], strict=True)
        assert all((x != y).all() for x, y in pairs)  # masks of another history
    # other silos, other sizes, one silo many times
    opened_as = {"what": "open", "server": 1, "fresh": False}
    some = (silo, *[n for n in LINEAR.names if n != silo][:2])
    values = as_values(
        fed.Silos({n: {k: np.asarray(v) for k, v in LINEAR[n].items()} for n in some})
    )
    for names in (some, (silo,) * 3):
        told = {**opened_as, "silos": {**values, "what": (names, *values["what"][1:])}}
        error = unpack(side.answer(pack(told)))["error"]
        assert re.search("other silos|each silo's name once|public keys of", error), error


def remote_params(fit, remote):
    from numpyro_fed.vi.first_params import first_params

    return jax.tree.map(np.asarray, first_params(fit.setup(remote), fit.guide, random.key(5)))


def test_shared_arguments_are_the_silos_own(tmp_path):
    from numpyro_fed.density.fingerprint import from_values

    def model(y, df):
        import numpyro
        import numpyro.distributions as dist

        mu = numpyro.sample("mu", dist.Normal(0, 10))
        with fed.silo_plate("patients", y.shape[0]):
            numpyro.sample("y", dist.StudentT(df, mu, 1.0), obs=y)

    rows = {"oslo": np.arange(4.0, dtype=np.float32), "rome": np.ones(4, np.float32)}
    silos = fed.Silos({n: {"y": y, "df": 3.0} for n, y in rows.items()})
    side = SiloSide(alone_with(silos, "oslo"), model, tmp_path)
    told = as_values(silos)
    assert "model" in unpack(
        side.answer(pack({"what": "open", "server": 1, "fresh": False, "silos": told}))
    )
    other = as_values(fed.Silos({n: {"y": y, "df": 5.0} for n, y in rows.items()}))
    assert from_values(other).shared["df"] == 5.0
    answer = unpack(
        side.answer(pack({"what": "open", "server": 1, "fresh": False, "silos": other}))
    )
    assert "the server has other values than it of ['df']" in answer["error"]


def alone_with(silos, name):
    return fed.Silos({name: {"y": np.asarray(silos[name]["y"]), "df": silos.shared["df"]}})


def test_budgets_are_counted_by_all_processes_of_a_folder(tmp_path):
    """Also where a line was broken off, and where another process has answered meanwhile."""
    fit = private_fit()
    transport = Fits(LINEAR, fit, tmp_path, private_fit)
    remote = connect(transport, linear, fit=fit)
    result = fit.run(random.key(1), 3, remote, progress_bar=False)
    name, data, answer = next(x for x in reversed(transport.sent) if b"RoundLocal" in x[1])
    other = transport.make[name]()
    assert other.answer(data) == answer
    fit.run(random.key(1), 2, remote, progress_bar=False, init_state=result.state)
    another = {
        "message": lambda m: m._replace(context=jax.tree.map(lambda x: x + 1, m.context)),
        "write": lambda slot: None,
    }
    assert "budget of privacy is spent" in asked_again(other, data, **another)["error"]
    with (tmp_path / name / "answered.txt").open("a") as file:
        file.write("broken o")
    name, data, answer = next(x for x in reversed(transport.sent) if b"RoundLocal" in x[1])
    other = transport.make[name]()
    assert other.answer(data) == answer
    assert "budget of privacy is spent" in asked_again(other, data, **another)["error"]


def test_a_secret_that_is_none_is_refused(tmp_path):
    (tmp_path / LINEAR.names[0]).mkdir()
    (tmp_path / LINEAR.names[0] / "secret.key").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"secret\.key holds 0 bytes, expected 32 of a key; give another folder"
    ):
        Fits(LINEAR, private_fit(), tmp_path, private_fit)


def test_closed_fits_answer_no_questions(tmp_path):
    """Not chains' calls: of a fit with privacy not even the weights of draws."""
    fit = private_fit()
    remote = connect(Fits(LINEAR, fit, tmp_path, private_fit), linear, fit=fit)
    call = Call(0, TellLocal(), random.key(0), jnp.ones(2), None, 5)
    with pytest.raises(
        RuntimeError, match="takes part in a fit with privacy, and does not answer TellLocal"
    ):
        remote.ask([call])
    chains = connect(Messages(LINEAR, linear, tmp_path / "open"), linear)
    assert chains.ask([call])[0] is not None  # the control


# What a lying server could take from sums


def sum_of(transport, tweak, **changed):
    """Return the sum of the silos' answers to the last round, asked for anew with another label.

    :param tweak: added to the message, so that the sum is another.
    :param changed: arguments that differ for the first silo.
    :return: the sum that the server opens, and each reply that a silo's own program returned.
    """
    total, own = 0, []
    for i, (silo, side) in enumerate(transport.sides.items()):
        data = next(
            data
            for name, data, _ in reversed(transport.sent)
            if name == silo and b"RoundLocal" in data
        )
        reply, said = side.worker.reply, []

        def wrapped(call, state, reply=reply, said=said):
            got, new = reply(call, state)
            said.append(
                np.concatenate([np.ravel(x) for x in jax.tree.leaves(got) if x.dtype != bool])
            )
            return got, new

        side.worker.reply = wrapped
        nearby = partial(jax.tree.map, partial(np.add, np.float32(tweak)))
        told = {
            "message": lambda m, nearby=nearby: m._replace(context=nearby(m.context)),
            "write": lambda slot: None,
        }
        answer = asked_again(side, data, **told, **(changed if i == 0 else {}))
        side.worker.reply = reply
        assert "replies" in answer, answer
        numbers = [x.ravel() for x in answer["replies"][0] if x.dtype == np.uint64]
        total = total + np.concatenate(numbers)
        own.append(said[0])
    return total.astype(np.int64) * 2.0**-20, own


def keep_the_servers_key(monkeypatch):
    """As it was: silos draw by the key that they are sent."""
    monkeypatch.setattr(closed, "with_own_keys", lambda call, secret, drawn: call)


@pytest.mark.ci
@pytest.mark.parametrize("forgetful", [False, True], ids=["today", "control"])
def test_sums_of_silos_in_other_states_open_none(tmp_path, forgetful, monkeypatch):
    """Two sums that differ in the state of one silo gave its numbers away.

    That was so where a slot's history was empty.
    """
    fit = FITS["sfvi"](secure_sum=True)
    transport = Fits(INTERCEPTS, fit, tmp_path, lambda: FITS["sfvi"](secure_sum=True))
    introduce(tmp_path, INTERCEPTS.names)
    remote = connect(transport, intercepts, fit=fit)
    fit.run(random.key(1), 3, remote, progress_bar=False)
    first = transport.sides[INTERCEPTS.names[0]]
    data = next(
        data for name, data, _ in transport.sent if name == first.name and b"RoundLocal" in data
    )
    start = {
        "read": lambda slot: None,
        "local": lambda local: InitLocal(local.config, "sfvi"),
        "message": lambda m: remote_params(fit, remote),
        "write": lambda slot: 10**6,
    }
    assert "replies" in asked_again(first, data, **start)
    if forgetful:
        keep_the_servers_key(monkeypatch)
        for side in transport.sides.values():
            lines, slots = side.guard._lines, [(str(slot), "") for slot in side.worker.kept]
            side.guard._lines = lambda name, lines=lines, slots=slots: (
                slots if name == "history.txt" else lines(name)
            )
    one, own = sum_of(transport, 1e-6)
    other, its = sum_of(transport, 2e-6, read=lambda slot: 10**6)
    taken, truth = other - one, its[0] - own[0]
    assert np.abs(truth).max() > 0.05
    assert (np.abs(taken - truth).max() < 1e-2) == forgetful
    if not forgetful:  # masks of another history do not cancel
        assert np.mean(np.abs(taken) > 1e6) > 0.99


@pytest.mark.parametrize("old", [False, True], ids=["today", "control"])
def test_sums_whose_minibatches_the_server_chooses_give_no_rows(tmp_path, old, monkeypatch):
    """Two sums that differ in one silo's key gave the difference of two of its minibatches."""

    def make():
        guide = fed.AutoSiloNormal(linear)
        return fed.SFVI(linear, guide, ADAM, batch_size=1, secure_sum=True)

    fit = make()
    transport = Fits(LINEAR, fit, tmp_path, make)
    introduce(tmp_path, LINEAR.names)
    remote = connect(transport, linear, fit=fit)
    fit.run(random.key(1), 2, remote, progress_bar=False)
    if old:
        keep_the_servers_key(monkeypatch)
    right = []
    for i in range(20):
        one, own = sum_of(transport, 1e-6 * (2 * i + 1), key=lambda key, i=i: random.key(i))
        other, its = sum_of(transport, 1e-6 * (2 * i + 2), key=lambda key, i=i: random.key(100 + i))
        taken, truth = other - one, its[0] - own[0]
        right.append(np.abs(taken - truth).max() < 1e-2)
    # today others' rows change, too: all four silos have the same rows in both sums about never
    assert np.mean(right) > 0.95 if old else np.mean(right) < 0.2


@pytest.mark.parametrize("old", [False, True], ids=["today", "control"])
def test_a_copied_secret_gives_no_reply_without_its_mask(tmp_path, old, monkeypatch):
    """Masks had a file of their own: its copy masked other draws in the same way."""
    if old:
        keys = closed.Keys
        monkeypatch.setattr(closed, "Keys", lambda folder, name, _: keys(folder, name, b"own file"))

    silos = linear_silos((10_000, 8, 5, 14))  # two secrets seldom draw the same row of the first

    def make():
        return fed.SFVI(linear, fed.AutoSiloNormal(linear), ADAM, batch_size=1, secure_sum=True)

    def reply(folder):
        """First masked numbers of the first silo in the first round."""
        fit = make()
        transport = Fits(silos, fit, folder, make)
        introduce(folder, silos.names)
        fit.run(random.key(1), 1, connect(transport, linear, fit=fit), progress_bar=False)
        leaves = next(
            unpack(x)["replies"][0] for _, data, x in transport.sent if b"RoundLocal" in data
        )
        return np.concatenate([np.ravel(x) for x in leaves if x.dtype == np.uint64])

    first = reply(tmp_path / "first")
    for name in silos.names if not old else silos.names[1:]:
        (tmp_path / "second" / name).mkdir(parents=True)
        shutil.copy(tmp_path / "first" / name / "secret.key", tmp_path / "second" / name)
    told = (reply(tmp_path / "second") - first).astype(np.int64) * 2.0**-20
    assert np.abs(told).max() < 1e6  # without a mask
    assert (told == 0).all() != old
    if not old:
        told = (reply(tmp_path / "third") - first).astype(np.int64) * 2.0**-20
        assert np.abs(told).min() > 1e7  # another secret: other masks


@pytest.mark.parametrize("old", [False, True], ids=["today", "control"])
def test_a_call_that_fails_leaves_no_state_with_another_history(tmp_path, old):
    """A slot that was written twice had the second call's history with the first one's state.

    That was so where the second call failed.
    """
    fit = FITS["sfvi"](secure_sum=True)
    transport = Fits(INTERCEPTS, fit, tmp_path, lambda: FITS["sfvi"](secure_sum=True))
    introduce(tmp_path, INTERCEPTS.names)
    remote = connect(transport, intercepts, fit=fit)
    fit.run(random.key(1), 3, remote, progress_bar=False)
    params, slot, total = remote_params(fit, remote), 10**6, 0
    for i, (name, side) in enumerate(transport.sides.items()):
        data = next(
            data for n, data, _ in reversed(transport.sent) if n == name and b"RoundLocal" in data
        )
        if i == 0:
            start = {
                "local": lambda local: InitLocal(local.config, "sfvi"),
                "message": lambda m: params,
            }
            assert "replies" in asked_again(
                side, data, read=lambda _: None, write=lambda _: slot, **start
            )
            reply, side.worker.reply = side.worker.reply, None  # which fails
            if old:
                lines = side.guard._lines
                side.guard._lines = lambda n, lines=lines: (
                    x for x in lines(n) if (n, x[0]) != ("history.txt", str(slot))
                )
        nearby = {
            "message": lambda m: m._replace(
                context=jax.tree.map(partial(np.add, np.float32(1e-3)), m.context)
            )
        }
        assert ("error" in asked_again(side, data, write=lambda _: slot, **nearby)) == (i == 0)
        if i == 0:
            side.worker.reply = reply
            if old:
                side.guard._lines = lines
        answer = asked_again(side, data, read=lambda _: slot, write=lambda _: None)
        total = total + np.concatenate(
            [x.ravel() for x in answer["replies"][0] if x.dtype == np.uint64]
        )
    opened_sum = np.abs(total.astype(np.int64) * 2.0**-20)
    assert np.mean(opened_sum > 1e6) < 0.01 if old else np.mean(opened_sum > 1e6) > 0.99


@pytest.mark.parametrize("name", ["privacy", "sums"])
def test_the_same_call_has_the_same_numbers_or_none(tmp_path, name):
    """On another machine the program may round otherwise.

    The difference of two replies then has no noise, and no masks.
    """
    make = CLOSED[name]
    fit = make()
    transport = Fits(LINEAR, fit, tmp_path, make)
    introduce(tmp_path, LINEAR.names) if fit.secure_sum else None
    fit.run(random.key(1), 2, connect(transport, linear, fit=fit), progress_bar=False)
    silo, data, answer = next(x for x in reversed(transport.sent) if b"RoundLocal" in x[1])
    side = transport.sides[silo]
    reply = side.worker.reply

    def remote(call, state):
        got, new = reply(call, state)
        context = jax.tree.map(
            lambda x: x * np.linspace(0.9, 1.1, x.size, dtype=x.dtype), got.context
        )
        return got._replace(context=context), new

    side.worker.reply = remote
    assert (
        "the same call has other numbers than the first time" in unpack(side.answer(data))["error"]
    )
    (tmp_path / silo / "sent.txt").unlink()  # the control: without the record the difference shows
    one, other = (unpack(x)["replies"][0] for x in (side.answer(data), answer))
    unit = 2.0**-20 if fit.secure_sum else 1.0
    differ = [
        np.subtract(x, y).view(np.int64 if fit.secure_sum else x.dtype) * unit
        for x, y in zip(one, other, strict=True)
        if x.dtype in (np.uint64, np.float32)
    ]
    assert 0 < np.nanmax(np.abs(np.concatenate([np.ravel(x) for x in differ]))) < 100
    side.worker.reply = reply


@pytest.mark.parametrize("slot", [7.0, True, "7", -1])
def test_slots_are_whole_numbers(tmp_path, slot):
    fit = sums_fit()
    transport = Fits(LINEAR, fit, tmp_path, sums_fit)
    introduce(tmp_path, LINEAR.names)
    fit.run(random.key(1), 2, connect(transport, linear, fit=fit), progress_bar=False)
    silo, data, _ = next(x for x in reversed(transport.sent) if b"RoundLocal" in x[1])
    answer = asked_again(transport.sides[silo], data, read=lambda _: slot)
    assert "expected a whole number" in answer["error"]
    answer = asked_again(transport.sides[silo], data, read=lambda _: 12345)
    assert "what it kept for this run is gone" in answer["error"]


def test_a_silo_checks_its_own_rows(tmp_path):
    import numpyro
    import numpyro.distributions as dist

    def counts(y):
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
        with fed.silo_plate("patients", y.shape[0]):
            numpyro.sample("y", dist.Poisson(rate), obs=y)

    silos = fed.Silos({"oslo": {"y": np.array([1, 2])}, "rome": {"y": np.array([1, -2, 3])}})
    fit = fed.SFVI(counts, fed.AutoSiloNormal(counts), ADAM, privacy=fed.Privacy(4.0, 1e-5, 1.0, 5))
    with pytest.raises(
        ValueError,
        match=r"silo 'rome': factorization check: its log density is not finite at a typical "
        r"position.*errors.log has more",
    ):
        connect(Fits(silos, fit, tmp_path), counts, fit=fit)
    assert "the log density is -inf" in (tmp_path / "rome" / "errors.log").read_text()


def test_keys_that_are_missing_or_broken_are_named(tmp_path):
    fit = FITS["sfvi"](secure_sum=True)
    transport = Fits(INTERCEPTS, fit, tmp_path)
    with pytest.raises(
        ValueError,
        match=r"silo '0': it has public keys of \[\], and the server names \['1'.*expected the "
        r"same: each one's NAME\.pub",
    ):
        connect(transport, intercepts, fit=fit)
    introduce(tmp_path, INTERCEPTS.names)
    (tmp_path / "0" / "peers" / "1.pub").write_text("no key")
    with pytest.raises(
        ValueError, match=r"silo '0': peers/1\.pub is no public key; expected 64 hexadecimal digits"
    ):
        connect(transport, intercepts, fit=fit)


def test_two_silos_hide_nothing_from_each_other(tmp_path):
    two = fed.Silos({n: {k: np.asarray(v) for k, v in LINEAR[n].items()} for n in LINEAR.names[:2]})
    fit = fed.SFVI(linear, fed.AutoSiloNormal(linear), ADAM, secure_sum=True)
    transport = Fits(two, fit, tmp_path)
    introduce(tmp_path, two.names)
    with pytest.raises(ValueError, match="secure_sum with 2 silos; expected 3 to 8192"):
        connect(transport, linear, fit=fit)


def test_numbers_that_are_not_finite_end_a_fit_of_sums(tmp_path):
    """Whose they are nobody hears: it would be a question to one silo."""
    fit = fed.SFVI(linear, fed.AutoSiloNormal(linear), optax.sgd(1e12), secure_sum=True)
    transport = Fits(LINEAR, fit, tmp_path)
    introduce(tmp_path, LINEAR.names)
    remote = connect(transport, linear, fit=fit)
    with pytest.warns(
        UserWarning, match=r"the loss or its gradient was not finite in round \d, first in the sum"
    ):
        fit.run(random.key(0), 5, remote, progress_bar=False)


def test_a_reply_that_is_not_finite_ends_a_sum_of_factors(tmp_path, monkeypatch):
    """Zeros in its place made the sum that of the others: every silo's numbers, in 71 sums."""
    fit = fed.ConduciveSFVI(linear, fed.AutoSiloNormal(linear), secure_sum=True)
    transport = Fits(LINEAR, fit, tmp_path)
    introduce(tmp_path, LINEAR.names)
    remote, first = connect(transport, linear, fit=fit), transport.sides[LINEAR.names[0]]
    whole, asked = first.worker.reply, []

    def reply(call, state):
        asked.append(type(call.local).__name__ == "RoundLocal")
        if sum(asked) == 3:
            far = {k: x * np.nan for k, x in call.message.params.items()}
            broken = call.message._replace(params=far)
            return whole(call._replace(message=broken), state)
        return whole(call, state)

    monkeypatch.setattr(first.worker, "reply", reply)
    stopped = "the loss or its gradient was not finite in round 3, first in the sum"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        result = fit.run(random.key(0), 5, remote, progress_bar=False)
    assert any(stopped in str(w.message) for w in said)
    assert len(result.losses) == 2
    assert np.isfinite(result.params["auto_loc"]).all()


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 0.0}, r"epsilon: expected a number > 0, got 0.0"),
        ({"clip": np.inf}, r"clip: expected a number > 0, got inf"),
        ({"delta": 1.0}, r"delta: expected a probability in \(0, 1\), got 1.0"),
        ({"num_rounds": 1.5}, r"num_rounds: expected a whole number >= 1, got 1.5"),
    ],
)
def test_budgets_in_words(options, message):
    with pytest.raises(ValueError, match=message):
        fed.Privacy(**{"epsilon": 1.0, "delta": 1e-5, "clip": 1.0, "num_rounds": 10, **options})


def test_fits_in_words():
    guide, privacy = fed.AutoSiloNormal(linear), fed.Privacy(1.0, 1e-5, 1.0, 10)
    with pytest.raises(TypeError, match=r"privacy: expected fed.Privacy\(...\) or None, got float"):
        fed.SFVI(linear, guide, ADAM, privacy=1.0)
    with pytest.raises(
        ValueError,
        match="num_particles=2: under privacy each draw of theta would have noise of its own",
    ):
        fed.SFVI(linear, guide, ADAM, num_particles=2, privacy=privacy)
    with pytest.raises(TypeError, match="secure_sum: expected True or False, got 3"):
        fed.SFVI(linear, guide, ADAM, secure_sum=3)
    with pytest.raises(ValueError, match="whose barycenter is no sum"):
        fed.SFVIAvg(linear, guide, ADAM, secure_sum=True)
    svi = fed.SFVI(linear, guide, ADAM, privacy=privacy)
    with pytest.raises(ValueError, match="num_rounds=11: the budget of privacy is for 10 rounds"):
        svi.run(random.key(0), 11, LINEAR, progress_bar=False)
    with pytest.raises(ValueError, match=r"tol=0.1: under privacy no bound leaves the silos"):
        svi.run(random.key(0), 10, LINEAR, progress_bar=False, tol=0.1)
    sums = fed.SFVI(linear, guide, ADAM, secure_sum=True)
    with pytest.raises(ValueError, match="secure_sum=True: a sum needs the replies of all silos"):
        sums.run(random.key(0), 10, LINEAR, progress_bar=False, participation=0.5)


def test_a_guide_of_ones_own_is_refused():
    import numpyro
    import numpyro.distributions as dist

    def guide(x, y):
        loc = numpyro.param("loc", jnp.zeros(2))
        numpyro.sample("beta", dist.Normal(loc, 0.1).to_event(1))

    svi = fed.SFVI(linear, guide, ADAM, privacy=fed.Privacy(1.0, 1e-5, 1.0, 10))
    with pytest.raises(ValueError, match=r"privacy: expected fed.AutoSiloNormal\(model\)"):
        svi.run(random.key(0), 5, LINEAR, progress_bar=False)


def test_missing_packages_are_named(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ImportError, match=r'pip install "numpyro-fed\[privacy\]"'):
        fed.Privacy(1.0, 1e-5, 1.0, 10)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.x25519", None)
    with pytest.raises(ImportError, match=r'pip install "numpyro-fed\[privacy\]"'):
        Keys(tmp_path, "oslo", bytes(32))


def keys_in(tree):
    leaves = [
        x for x in jax.tree.leaves(tree) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    ]
    return {
        tuple(words) for x in leaves for words in np.reshape(random.key_data(x), (-1, 2)).tolist()
    }


KEYED = {
    "latents": lambda **o: fed.SFVI(
        intercepts, fed.AutoSiloNormal(intercepts), ADAM, num_local_particles=3, **o
    ),
    "rows of pairs": lambda **o: fed.ConduciveSFVI(
        linear, fed.AutoSiloNormal(linear), batch_size=2, **o
    ),
}


@pytest.mark.parametrize("kind", ["sums", "own keys", "control"])
@pytest.mark.parametrize("name", KEYED)
def test_a_silo_draws_by_no_key_that_the_server_has_sent(tmp_path, name, kind):
    """Sums at latents of the server's choosing gave every row.

    So did sums at its pairs of rows and points.
    """
    make = partial(KEYED[name], secure_sum=kind == "sums")
    fit, silos = make(), INTERCEPTS if name == "latents" else LINEAR
    transport = Fits(silos, fit, tmp_path, make, own_keys=kind != "control")
    if kind == "sums":
        introduce(tmp_path, silos.names)
    who = silos.names[0]
    side, asked = transport.sides[who], []
    remote = connect(transport, fit.model, fit=fit)
    reply = side.worker.reply

    def kept(call, state):
        asked.append((call.key, call.message))
        return reply(call, state)

    side.worker.reply = kept
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of fits so short
        fit.run(random.key(1), 3, remote, progress_bar=False)
    sent = [
        unpack(d)["calls"].tobytes()
        for n, d, _ in transport.sent
        if n == who and b"RoundLocal" in d
    ]
    told = set().union(
        *(keys_in(values[1:3]) for data in sent for values in unpack(data, side.checks.own))
    )
    drawn = set().union(*(keys_in(one) for one in asked))
    assert len(told) >= (6 if name == "latents" else 3)
    assert bool(told & drawn) == (kind == "control")


def test_a_round_has_as_many_draws_as_the_study(tmp_path):
    fit = sums_fit()
    transport = Fits(LINEAR, fit, tmp_path, sums_fit)
    introduce(tmp_path, LINEAR.names)
    fit.run(random.key(1), 2, connect(transport, linear, fit=fit), progress_bar=False)
    silo, data, _ = next(x for x in reversed(transport.sent) if b"RoundLocal" in x[1])
    more = {"message": lambda m: m._replace(key=random.split(random.key(0), 64))}
    error = asked_again(transport.sides[silo], data, **more)["error"]
    assert "the message of RoundLocal has other parts or shapes" in error
    request = unpack(data)
    del request["independent"]
    answer = unpack(transport.sides[silo].answer(pack(request)))
    assert "not told whether elements are independent" in answer["error"]
