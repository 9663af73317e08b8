"""Attacks on what the docs promise to a hospital: each succeeded once.

A control shows that the test would notice.
"""

import hashlib
import json
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from across_rows import REFUSED, SERIES, WRONG, broadcast, right
from jax import random
from marks import heavy
from messages import LINEAR, Fits, Messages, alone, introduce, private_sums, run
from small_models import linear

import numpyro_fed as fed
from numpyro_fed.data.views import SiloView
from numpyro_fed.decentralized.remote import NodeLocal, NodeStartLocal
from numpyro_fed.density.check import BatchGap, check_factorization
from numpyro_fed.density.factorize import factorize
from numpyro_fed.density.fingerprint import as_values, description, joined_spec
from numpyro_fed.density.local_map import Units
from numpyro_fed.engines import call_checks, silo_side
from numpyro_fed.engines.call_checks import CallChecks
from numpyro_fed.engines.record import call_records
from numpyro_fed.engines.silo_side import SiloSide
from numpyro_fed.engines.wire import connect
from numpyro_fed.mcmc.config import Conducive, LangevinConfig, LatentCoordinates, NodeConfig, Tuning
from numpyro_fed.mcmc.langevin import Chain, federated
from numpyro_fed.mcmc.pilot import PilotLocal
from numpyro_fed.mcmc.remote import TellLocal
from numpyro_fed.mcmc.remote_chains import StartLocal, VisitLocal
from numpyro_fed.privacy.guard import RoundGuard
from numpyro_fed.privacy.own_keys import secret_of
from numpyro_fed.rounds import serialization
from numpyro_fed.rounds.serialization import pack, unpack
from numpyro_fed.rounds.task import TASKS, SiloTask
from numpyro_fed.rounds.worker import Call, rows_of, worker_of
from numpyro_fed.surrogates.local_score import Message, ScoreLocal

# Questions about rows


def visits(age, y):
    a = numpyro.sample("a", dist.Normal(0, 1))
    b = numpyro.sample("b", dist.Normal(0, 1))
    with fed.silo_plate("patients", y.shape[0]):
        z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(a + b * age + z, 1), obs=y)


AGES = np.random.default_rng(0).integers(18, 95, 60).astype(np.float32) / 50
PATIENTS = fed.Silos(
    {
        name: {
            "age": ages,
            "y": np.random.default_rng(len(ages)).normal(0.5 * ages, 1.4).astype(np.float32),
        }
        for name, ages in {"oslo": AGES, "rome": AGES[:20][::-1].copy()}.items()
    }
)


@dataclass(frozen=True)
class OldOwnTerm(SiloTask):
    """A silo's log density at latents of the server's key: what a silo once answered."""

    wire_name = "test OwnTerm"

    factors: Any

    def __call__(self, key, theta, state, view):
        kwargs, weights = view.whole()
        z = {"z": 0.5 * random.normal(random.split(key, 1)[0], (dict(view.pad)["age"],))}
        return self.factors.log_local(theta, z, kwargs, weights), None


def ages_from_terms(ask, pad, n):
    """Solve least squares over a hundred keys at two values of b.

    They give residuals, whose difference gives the ages.
    """
    residuals = []
    for b in (0.0, 1.0):
        theta, rows = {"a": jnp.zeros(()), "b": jnp.asarray(b)}, []
        for seed in range(100):
            z = np.asarray(0.5 * random.normal(random.split(random.key(seed), 1)[0], (pad,)))[:n]
            # log density: - (z^2 + (r - z)^2) / 2, linear in r and in the sum of its squares
            rows.append((np.append(z, 1.0), float(ask(random.key(seed), theta)) + (z**2).sum()))
        design, values = (np.stack(x) for x in zip(*rows, strict=True))
        residuals.append(np.linalg.lstsq(design, values, rcond=None)[0][:n])
    return residuals[0] - residuals[1]


def test_no_silo_says_its_term_at_latents_of_the_servers_choice(tmp_path, monkeypatch):
    transport = Messages(PATIENTS, visits, tmp_path)
    remote = connect(transport, visits)
    local = OldOwnTerm(remote.carrier.factors)

    def ask(key, theta):
        return remote.ask([Call(0, local, key, theta)])[0]

    with pytest.raises(RuntimeError, match="silo 'oslo': it does not answer test OwnTerm"):
        ages_from_terms(ask, 60, 60)
    # the control: a silo that answers gives every age away
    monkeypatch.setitem(TASKS, "test OwnTerm", OldOwnTerm)
    transport.sides["oslo"].ceilings["test OwnTerm"] = 1000
    found = ages_from_terms(ask, 60, 60)
    assert (np.rint(50 * found) == np.rint(50 * AGES)).all()


class OldBatchGap(BatchGap):
    """What a silo once answered, too."""

    wire_name = "test BatchGap"


for kind in ("test OwnTerm", "test BatchGap"):
    del TASKS[kind]  # silos know them by name, and do not answer them


def gaussian(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    sigma = numpyro.sample("sigma", dist.LogNormal(0, 1))
    with fed.silo_plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, sigma), obs=y)


def row_from_gaps(ask):
    """Find a row by bisection.

    A row's term overflows, and the gap is no number, where the row is farther than 1.8e19 sigma.
    """
    low, high = -64.0, 64.0
    for _ in range(30):
        middle, width = (low + high) / 2, (high - low) / 4
        theta = {
            "mu": jnp.asarray(middle - width),
            "sigma": jnp.log(jnp.asarray(width / 1.8446e19)),
        }
        low, high = (low, middle) if np.isfinite(ask(theta)) else (middle, high)
    return (low + high) / 2


def test_no_silo_says_how_far_a_minibatch_is_from_its_rows(tmp_path, monkeypatch):
    y = np.random.default_rng(1).normal(3, 2, 500).astype(np.float32)
    silos = fed.Silos({"oslo": {"y": y}, "rome": {"y": y[:300]}})
    transport = Messages(silos, gaussian, tmp_path)
    remote = connect(transport, gaussian)
    local = OldBatchGap(remote.carrier.factors, "y", 1)

    def ask(theta):
        return float(remote.ask([Call(0, local, random.key(0), theta)])[0])

    with pytest.raises(RuntimeError, match="silo 'oslo': it does not answer test BatchGap"):
        row_from_gaps(ask)
    monkeypatch.setitem(TASKS, "test BatchGap", OldBatchGap)
    transport.sides["oslo"].ceilings["test BatchGap"] = 1000
    assert row_from_gaps(ask) == pytest.approx(float(y[0]), abs=1e-3)  # the control


@pytest.mark.parametrize("own_keys", [True, False])
def test_gradients_at_latents_of_the_servers_keys_give_no_row(tmp_path, own_keys):
    """A hundred keys for one round, whose latents the server computes, and least squares.

    They give every age, or none.
    """
    fit = fed.SFVI(visits, fed.AutoSiloNormal(visits), optax.adam(0.01), num_local_particles=1)
    transport = Fits(PATIENTS, fit, tmp_path, own_keys=own_keys)
    fit.run(random.key(1), 1, connect(transport, visits, fit=fit), progress_bar=False)
    data = next(x for who, x, _ in transport.sent if who == "oslo" and b"RoundLocal" in x)
    side = transport.sides["oslo"]
    ((local, key, message, read, _),) = unpack(unpack(data)["calls"].tobytes(), side.checks.own)
    like = fed.Silos(
        {"oslo": {k: jnp.zeros(60) for k in ("age", "y")}}
    )  # rows that the server makes up
    rows, design, slopes = rows_of(SiloView(like, 0, side.worker.pad)), [], []
    for seed in range(100):
        keys = random.split(random.key(seed), 1)
        inside = pack([(local, key, message._replace(key=keys), read, None)], side.checks.own)
        answer = unpack(
            side.answer(
                pack({**unpack(data), "forget": [], "calls": np.frombuffer(inside, np.uint8)})
            )
        )
        assert "error" not in answer, answer
        noise = local.config.families[0].noise(keys[0], rows, 1)
        design.append(np.append(noise.ravel()[:60], 1.0))
        slopes.append(np.concatenate([np.ravel(x) for x in answer["replies"][0][1:]]))
    found = np.linalg.lstsq(np.stack(design), np.stack(slopes), rcond=None)[0][:60]
    nearest = max(abs(np.corrcoef(AGES, column)[0, 1]) for column in found.T if column.std() > 0)
    assert nearest < 0.6 if own_keys else nearest > 0.9999, nearest


def answered(side, data, calls):
    """Return the answer to other calls in the place of a message's own."""
    inside = np.frombuffer(pack(calls, side.checks.own), np.uint8)
    return unpack(side.answer(pack({**unpack(data), "forget": [], "calls": inside})))


def one_round(folder, **options):
    """Return a silo after one round of a fit, that round's message, and its call."""

    def make():
        adam = optax.adam(0.01)
        return fed.SFVI(visits, fed.AutoSiloNormal(visits), adam, num_local_particles=1, **options)

    transport = Fits(PATIENTS, make(), folder, make, own_keys=True)
    make().run(random.key(1), 1, connect(transport, visits, fit=make()), progress_bar=False)
    data = next(x for who, x, _ in transport.sent if who == "oslo" and b"RoundLocal" in x)
    side = transport.sides["oslo"]
    return side, data, *unpack(unpack(data)["calls"].tobytes(), side.checks.own)


def test_raw_words_in_the_place_of_a_key_are_refused(tmp_path):
    """JAX takes them for a key, and a silo would not replace it by its own."""
    side, data, (local, key, message, read, _) = one_round(tmp_path)
    raw = np.asarray(random.key_data(key))
    np.testing.assert_array_equal(random.normal(raw, (3,)), random.normal(key, (3,)))  # the danger
    told = message._replace(key=np.asarray(random.key_data(message.key)))
    assert "replies" in answered(side, data, [(local, key, message, read, None)])
    assert "its key is none" in answered(side, data, [(local, raw, message, read, None)])["error"]
    assert "of type uint32" in answered(side, data, [(local, key, told, read, None)])["error"]
    keys = random.split(key, 2)
    assert "its key is none" in answered(side, data, [(local, keys, message, read, None)])["error"]


@pytest.mark.parametrize("guarded", heavy([True, False], False))
def test_no_server_writes_the_state_that_a_round_starts_from(tmp_path, monkeypatch, guarded):
    """With a scale of nothing for each row's latent, a hundred states give the ages.

    They are found by least squares.
    """
    side, data, (local, key, message, read, _) = one_round(tmp_path, batch_size=60)
    state = jax.tree.map(np.zeros_like, jax.device_get(side.worker.kept[read]))
    rng, design, slopes = np.random.default_rng(5), [], []
    if not guarded:
        monkeypatch.setattr(call_checks, "_classes", lambda message: ())
        monkeypatch.setattr(CallChecks, "_check_shapes", lambda *_: None)
        monkeypatch.setattr(CallChecks, "state", lambda self, call: read_any(self, call))

    def read_any(self, call):
        return jax.tree.map(self.worker.kept.__getitem__, call.read)

    for slot in range(10**6, 10**6 + (100 if not guarded else 1)):
        z = rng.normal(size=(60, 1)).astype(np.float32)
        params = replace(state.params, mean=z, log_scale=np.full((60, 1), -20, np.float32))
        forged = answered(
            side, data, [(TellLocal(), key, state._replace(params=params), None, slot)]
        )
        answer = answered(side, data, [(local, key, message, slot, None)])
        if guarded:
            assert "it tells" in forged["error"]
            assert "it kept for this run is gone" in answer["error"]
            told = answered(side, data, [(TellLocal(), key, np.zeros(2, np.float32), None, slot)])
            assert "replies" in told
            answer = answered(side, data, [(local, key, message, slot, None)])
            assert "a state that TellLocal wrote; expected one of InitLocal" in answer["error"]
            return
        design.append(np.append(z.ravel(), 1.0))
        slopes.append(np.concatenate([np.ravel(x) for x in answer["replies"][0][1:]]))
    found = np.linalg.lstsq(np.stack(design), np.stack(slopes), rcond=None)[0][:60]
    assert max(abs(np.corrcoef(AGES, c)[0, 1]) for c in found.T if c.std() > 1e-3) > 0.9999


@pytest.mark.ci
def test_a_map_of_all_latents_together_is_none_of_each(tmp_path, monkeypatch):
    """Read by rows, it has the first row's coefficients for all: that row's age."""
    messenger = Messages(PATIENTS, visits, tmp_path, own_keys=True)
    connect(messenger, visits)
    side, key = messenger.sides["oslo"], random.key(0)
    factors, data = side.checks.own["factors"], pack({"what": "calls", "server": side._server})
    joint, single = (Units(factors, group, side.worker.pad) for group in (None, "age"))
    theta = np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32)
    message = Message(
        *(np.asarray(x, np.float32) for x in (np.zeros(2), np.eye(2), theta, np.ones(16)))
    )
    fit = ScoreLocal(factors, joint, 16, last=True)
    assert "replies" in answered(side, data, [(fit, key, message, None, 1)])
    config = NodeConfig(factors, single, None, 2)
    start = (NodeStartLocal(config, 1), key, np.int32(0), 1, 2)
    assert "other units of latents" in answered(side, data, [start])["error"]
    monkeypatch.setattr(CallChecks, "units", lambda self, local: "")  # the control
    side.checks.kept[1] = side.checks.kept[1]._replace(units="")
    assert "replies" in answered(side, data, [start])
    zero, one = np.zeros(2, np.float32), np.ones((), np.float32)
    latents = LatentCoordinates(zero, 1e4 * np.eye(2, dtype=np.float32), None)
    tuning = Tuning(one, one, np.ones(1, np.float32), zero, None, None, latents, one)
    assert "replies" in answered(side, data, [(TellLocal(), key, tuning, None, 3)])
    near = np.full(2, 1e-7, np.float32)
    slope = answered(side, data, [(NodeLocal(config), key, near, (3, 2), 4)])["replies"][0][0]
    assert 50 * slope[1] / slope[0] == pytest.approx(50 * AGES[0], abs=0.5)


@pytest.mark.parametrize("guarded", heavy([True, False], False))
def test_equal_states_with_other_histories_have_other_noise(tmp_path, monkeypatch, guarded):
    """Else the same noise tells that they are equal: so it is where a row's gradient overflows."""

    def make():
        privacy = fed.Privacy(1.0, 1e-5, 1.0, 60)
        adam = optax.adam(0.01)
        return fed.SFVI(visits, fed.AutoSiloNormal(visits), adam, privacy=privacy)

    if not guarded:
        monkeypatch.setattr(RoundGuard, "_drawn", lambda self, label, digest: digest)
    messenger = Fits(PATIENTS, make(), tmp_path, make)
    make().run(random.key(1), 1, connect(messenger, visits, fit=make()), progress_bar=False)
    data = next(x for who, x, _ in messenger.sent if who == "oslo" and b"RoundLocal" in x)
    side = messenger.sides["oslo"]
    ((local, key, message, read, _),) = unpack(unpack(data)["calls"].tobytes(), side.checks.own)

    def call(theta, start, write):
        context = message.context._replace(theta=np.asarray([theta], np.float32))
        calls = [(local, key, message._replace(context=context), start, write)]
        return answered(side, data, calls)["replies"][0]

    def after(theta, slot):
        """Return a round's reply after one whose gradient in the latents may not be finite."""
        call(theta, read, slot)
        return call([0.0, 0.0], slot, None)

    never = after([np.nan, np.nan], 10**6)
    limit = 1.8446743e19 / AGES.max()  # where the oldest one's overflows
    same = [
        all(np.array_equal(x, y, equal_nan=True) for x, y in zip(never, reply, strict=True))
        for reply in (after([0.0, 1.01 * limit], 10**6 + 1), after([0.0, 0.99 * limit], 10**6 + 2))
    ]
    assert same == ([False, False] if guarded else [True, False])


def test_an_absurd_reply_ends_a_fit_and_its_silo_is_named():
    """Its square is infinite in float32: the optimizer would never move again, without a word."""
    carrier = fed.Loopback(PATIENTS)
    fit = fed.SFVI(visits, fed.AutoSiloNormal(visits), optax.adam(0.01), num_local_particles=1)
    whole, asked = carrier.workers[1].reply, []

    def reply(call, state):
        got, new = whole(call, state)
        asked.append(type(call.local).__name__ == "RoundLocal")
        if sum(asked) == 3:
            got = got._replace(context=jax.tree.map(lambda x: x * 0 + 1e25, got.context))
        return got, new

    carrier.workers[1].reply = reply
    silos = fed.RemoteSilos(PATIENTS, carrier)
    with pytest.warns(UserWarning, match="not finite in round 3, first in silo 'rome'"):
        result = fit.run(random.key(0), 5, silos, progress_bar=False)
    assert len(result.losses) == 2


def test_what_a_call_starts_from_is_a_slot_or_some(tmp_path):
    """Else it would be answered, and no line of it written."""
    side, data, (local, key, message, read, _) = one_round(tmp_path)
    lines = len((side.folder / "audit.jsonl").read_text().splitlines())
    for odd in ([read], {"a": read}, (read, read)):
        assert "error" in answered(side, data, [(local, key, message, odd, None)])
    assert len((side.folder / "audit.jsonl").read_text().splitlines()) == lines + 3


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (
            lambda f, u: (NodeStartLocal(NodeConfig(f, u, None, 2), 1 << 20), np.int32(0)),
            "networks=",
        ),
        (lambda f, u: (ScoreLocal(f, u, 1 << 17), points(8)), "points_at_once="),
        (lambda f, u: (TellLocal(), np.zeros((0, 1 << 20), np.float32)), "has no numbers"),
        (lambda f, u: (TellLocal(), [0.0] * 2000), "2,000 arrays"),
        (lambda f, u: (PilotLocal(LangevinConfig(f, u, 1, None, False, None), 2), walks), "walks"),
        (lambda f, u: (ScoreLocal(f, u, 1, last=True), points(1 << 17)), "a local map at"),
        (lambda f, u: (ScoreLocal(f, replace(u, group=None), 1), points(8)), "latents as one unit"),
    ],
)
def test_small_messages_do_not_take_the_memory_of_large_ones(tmp_path, monkeypatch, kind, why):
    monkeypatch.setattr(call_checks, "MAX_MAP", 1 << 20)
    monkeypatch.setattr(call_checks, "MAX_JOINT", 50)  # the silo has 60 patients
    transport = Messages(PATIENTS, visits, tmp_path)
    connect(transport, visits)
    side = transport.sides["oslo"]
    factors = side.checks.own["factors"]
    local, message = kind(factors, Units(factors, "age", side.worker.pad))
    data = pack({"what": "calls", "server": side._server})
    before = sum(f.stat().st_size for f in side.folder.iterdir())
    assert why in answered(side, data, [(local, random.key(0), message, None, 1)])["error"]
    assert sum(f.stat().st_size for f in side.folder.iterdir()) - before < 100_000


walks = (np.zeros(1, np.float32), np.zeros((300, 2), np.float32))


def points(n):
    return Message(*(np.ones(s, np.float32) for s in ((2,), (2,), (n, 2), (n,))))


def packed_text(tree):
    head = json.dumps(tree).encode()
    body = len(head).to_bytes(8, "little") + head
    return b"fed2" + hashlib.blake2b(body, digest_size=16).digest() + body


def test_keys_of_many_shapes_are_refused(tmp_path, monkeypatch):
    """JAX compiles a program for each, which stays: 150 messages took 1.6 GiB."""
    monkeypatch.setattr(serialization, "_KEY_SHAPES", set())
    zeros = [random.split(random.key(0), n) for n in range(1, 18)]
    assert len(unpack(pack(zeros[:10]))) == 10
    with pytest.raises(ValueError, match="after 16 others; expected at most 16 shapes"):
        unpack(pack(zeros[8:]))
    assert len(unpack(pack(zeros[:16]))) == 16
    empty = {"key": ["threefry2x32", {"array": ["uint32", [0, 9, 2]]}]}
    with pytest.raises(ValueError, match=r"random keys of shape \(0, 9, 2\)"):
        unpack(packed_text(empty))
    with pytest.raises(ValueError, match="none in replies"):
        unpack(pack(zeros[0]), keys=False)
    side = SiloSide(alone(LINEAR, "silo 0"), linear, tmp_path)
    assert "random keys" in unpack(side.answer(pack({"what": "hello", "x": zeros[0]})))["error"]


def test_two_processes_of_a_silo_have_one_ceiling(tmp_path):
    """Each counts what the other answers, also while that computes."""
    transport = Messages(PATIENTS, visits, tmp_path)
    connect(transport, visits)
    side = transport.sides["oslo"]
    other = SiloSide(alone(PATIENTS, "oslo"), visits, side.folder, own_keys=False)
    for one in (side, other):
        one.ceilings["TellLocal"] = 4
        one.worker.reply = partial(slowly, one.worker.reply)
    data = pack({"what": "calls", "server": side._server})

    def ask(one, slots):
        calls = [(TellLocal(), random.key(0), 0.0, None, slot) for slot in slots]
        return [answered(one, data, [call]) for call in calls]

    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(ask, *x) for x in ((side, range(4)), (other, range(10, 14)))]
        answers_of = [answer for found in both for answer in found.result()]
    assert sum("replies" in answer for answer in answers_of) == 4
    assert sum("its ceiling for a study" in answer.get("error", "") for answer in answers_of) == 4


def slowly(reply, *args):
    time.sleep(0.05)
    return reply(*args)


def test_a_message_that_needs_a_package_that_is_not_there_is_none(monkeypatch):
    data = pack(fed.Privacy(1.0, 1e-5, 1.0, 3))
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ValueError, match="not put together as one"):
        unpack(data)


# Shared arguments


def test_no_shared_argument_leaves_a_silo(tmp_path):
    """Neither its value nor a hash leaves.

    A number that can be guessed is found from its hash at once.
    """

    def model(y, ages):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with fed.silo_plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu + ages.sum(), 1), obs=y)

    ages = np.array([41.0, 67.0], np.float32)
    silos = fed.Silos(
        {"oslo": {"y": np.arange(5.0, dtype=np.float32), "ages": ages}}, rows={"y": "rows"}
    )
    side = SiloSide(silos, model, tmp_path)
    asked = [
        {"what": "values"},
        {"what": "hello", "protocol": 2},
        {"what": "open"},
        {"what": "calls"},
    ]
    others = fed.Silos(
        {"oslo": {"y": np.arange(5.0, dtype=np.float32), "ages": ages + 1}}, rows={"y": "rows"}
    )
    asked.append({"what": "open", "silos": as_values(others), "server": 1, "fresh": False})
    left = b"".join(side.answer(pack(message)) for message in asked)
    assert b"the server has other values than it of ['ages']" in left

    def guessed(text):
        """Pairs of ages whose value or hash is in the bytes."""
        pairs = (np.array([i, j], np.float32) for i in range(120) for j in range(120))
        return [
            pair.tolist()
            for pair in pairs
            if pair.tobytes() in text
            or hashlib.sha256(pair.tobytes()).hexdigest()[:16].encode() in text
        ]

    assert guessed(left) == []
    assert guessed(json.dumps(description(silos, values=True)).encode()) == [
        [41.0, 67.0]
    ]  # the control


def test_guesses_at_shared_arguments_come_to_an_end(tmp_path):
    def model(y, age):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with fed.silo_plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu + age, 1), obs=y)

    silos = fed.Silos({"oslo": {"y": np.arange(5.0, dtype=np.float32), "age": np.float32(61)}})

    def guess(transport, ages):
        for age in ages:
            try:
                connect(transport, model, shared={"age": np.asarray(age, np.float32)})
            except ValueError as error:
                if "has refused 20 connections" in str(error):
                    return None
            else:
                return age
        return None

    class One:
        names = ("oslo",)

        def __init__(self, folder):
            self.side = SiloSide(silos, model, folder)

        def exchange(self, messages):
            return {name: self.side.answer(data) for name, data in messages.items()}

    assert guess(One(tmp_path / "a"), range(18, 100)) is None
    assert guess(One(tmp_path / "a"), [61]) is None  # a new process with the folder counts on
    assert (
        guess(One(tmp_path / "b"), range(55, 70)) == 61
    )  # the control: fewer than twenty were wrong


# Servers that were refused, and silos that describe themselves in no known words


@pytest.mark.ci
def test_a_server_that_was_refused_is_not_answered(tmp_path):
    """A list of 400 silos was refused, but then each silo's share of the noise was that of 400."""
    fit = private_sums()
    transport = Fits(LINEAR, fit, tmp_path, private_sums)
    introduce(tmp_path, LINEAR.names)
    remote = connect(transport, linear, fit=fit)
    fit.run(random.key(1), 2, remote, progress_bar=False)
    silo, data, answer = next(x for x in reversed(transport.sent) if b"RoundLocal" in x[1])
    side, rows = (
        transport.sides[silo],
        {name: {k: np.asarray(v) for k, v in LINEAR[name].items()} for name in LINEAR.names},
    )
    many = fed.Silos({**rows, **{f"silo {i}": rows["silo 0"] for i in range(len(rows), 400)}})
    assert (
        fit.planned(many, True).noise.sd < 0.2 * fit.planned(LINEAR, True).noise.sd
    )  # what it was for
    (values,) = unpack(unpack(data)["calls"].tobytes(), side.checks.own)
    nearby = values[2]._replace(context=jax.tree.map(lambda x: x + 1, values[2].context))
    inside = pack([(*values[:2], nearby, values[3], None)], side.checks.own)
    other = pack({**unpack(data), "server": 7, "calls": np.frombuffer(inside, np.uint8)})
    opened = {"what": "open", "server": 7, "fresh": False, "silos": as_values(many)}
    assert "it has public keys of" in unpack(side.answer(pack(opened)))["error"]
    assert "another server has connected since" in unpack(side.answer(other)).get(
        "error", "it was answered"
    )
    assert side.answer(data) == answer  # the server of before goes on


def _index_of_a_list(answer):
    answer["about"]["rows"]["y"][0] = ["x"]


def _more_than_was_asked(answer):
    answer["about"]["more"] = 1


def _array_of_a_version(answer):
    answer["versions"]["jax"] = np.zeros(3)


def _array_of_a_site(answer):
    answer["model"]["global sites"] = [["beta", np.zeros(3)]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_index_of_a_list, "silo 'silo 0' describes rows of no known kind"),
        (_more_than_was_asked, None),
        (_array_of_a_version, "silo 'silo 0' sent what is no answer: an array"),
        (_array_of_a_site, "silo 'silo 0' sent what is no answer: an array"),
    ],
)
def test_a_description_that_is_none_is_refused_by_name(tmp_path, change, words):
    class Odd(Messages):
        def answer(self, side, data):
            answer = unpack(side.answer(data))
            if side.name == "silo 0":
                with suppress(KeyError):  # of the other answer
                    change(answer)
            return pack(answer)

    with pytest.raises(ValueError, match=words) if words else nullcontext():
        connect(Odd(LINEAR, linear, tmp_path), linear)


# Models that read across rows, over every way to remote silos


def prepare_over_bytes(model, folder):
    fed.FSGLD(model).set_up(connect(Messages(SERIES, model, folder), model), {})


WAYS = {
    "at hand": lambda model, folder: fed.FSGLD(model).set_up(SERIES, {}),
    "remote": lambda model, folder: fed.FSGLD(model).set_up(
        fed.RemoteSilos(SERIES, fed.Loopback(SERIES)), {}
    ),
    "bytes": prepare_over_bytes,
}


@pytest.mark.parametrize("way", heavy(WAYS, "bytes"))
@pytest.mark.parametrize("model", WRONG, ids=lambda model: model.__name__)
def test_models_that_read_across_rows_are_refused_in_the_same_words(tmp_path, model, way):
    with pytest.raises(ValueError, match=REFUSED):
        WAYS[way](model, tmp_path)


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_does_not_is_taken(tmp_path, way):
    WAYS[way](right, tmp_path)


@pytest.mark.parametrize("model", WRONG, ids=lambda model: model.__name__)
def test_the_server_needs_no_row_for_that(model):
    class Nobody(fed.Loopback):
        def ask(self, calls):
            raise AssertionError("somebody was asked")

        def check(self, check):
            raise AssertionError("somebody was asked")

    remote = fed.RemoteSilos(SERIES, Nobody(SERIES))
    with pytest.raises(ValueError, match=REFUSED):
        fed.FSGLD(model).set_up(remote, {})
    with pytest.raises(AssertionError, match="somebody was asked"):  # the control
        fed.FSGLD(right).set_up(remote, {})


def test_one_silo_whose_rows_depend_on_each_other_is_spoken_of():
    one = fed.Silos({"all": {"y": np.random.default_rng(0).normal(size=9)}})
    with pytest.warns(UserWarning, match="rows of the one silo 'all' depend on each other"):
        check_factorization(factorize(broadcast, one), one)


# Sizes


@pytest.mark.parametrize("claim", [0, -5, 2**31, 2.5, True, None])
def test_a_size_that_is_none_is_refused_by_name(tmp_path, claim):
    class Claims(Messages):
        def answer(self, side, data):
            answer = unpack(side.answer(data))
            if side.name == "silo 1" and "about" in answer:
                answer["about"]["sizes"] = {key: [claim] for key in answer["about"]["sizes"]}
            return pack(answer)

    with pytest.raises(
        ValueError, match=r"silo 'silo 1' says that it has .* rows of .*; expected 1 to 10,000,000"
    ):
        connect(Claims(LINEAR, linear, tmp_path), linear)


def test_a_claimed_size_costs_the_others_nothing():
    silos = fed.Silos({"oslo": {"y": np.ones(10)}, "rome": {"y": np.arange(9_000.0)}})
    assert dict(worker_of(silos, "oslo").pad) == {"y": 8192}
    assert dict(worker_of(silos, "rome").pad) == {"y": 9000}
    small = fed.Silos({"oslo": {"y": np.ones(10)}, "rome": {"y": np.arange(30.0)}})
    assert dict(worker_of(small, "oslo").pad) == {"y": 30}  # one program for both


# Ceilings, settings, and the record


@pytest.mark.ci
def test_a_silo_answers_no_more_calls_than_its_ceiling(tmp_path):
    transport = Messages(LINEAR, linear, tmp_path)

    def make(name):
        return SiloSide(alone(LINEAR, name), linear, tmp_path / name, ceilings={"VisitLocal": 6})

    transport.sides = {name: make(name) for name in LINEAR.names}
    with pytest.warns(
        UserWarning, match=r"has answered 6 calls of kind VisitLocal.*the first \d+ draws are kept"
    ):
        mcmc = run(LINEAR, linear, transport, 60)
    assert len(mcmc.get_samples()["beta"]) > 0
    again = {name: make(name) for name in LINEAR.names}  # new processes count on
    assert {name: side.counts["VisitLocal"] for name, side in again.items()} == {
        name: side.counts["VisitLocal"] for name, side in transport.sides.items()
    }
    assert max(side.counts["VisitLocal"] for side in again.values()) == 6


def test_a_line_that_was_broken_off_hides_no_other(tmp_path):
    transport = Messages(LINEAR, linear, tmp_path)
    fed.FSGLD(linear).set_up(connect(transport, linear), {})
    side = transport.sides["silo 0"]
    before = side.counts["ScoreLocal"]
    data = next(
        data for name, data, _ in transport.sent if name == "silo 0" and b"ScoreLocal" in data
    )
    with (tmp_path / "silo 0" / "audit.jsonl").open("a") as file:
        file.write('{"what": "calls", "calls": [')
    assert "replies" in unpack(side.answer(data))
    assert transport.make["silo 0"]().counts["ScoreLocal"] > before


def test_ceilings_in_words(tmp_path):
    for wrong in ({"Nothing": 3}, {"VisitLocal": -1}, {"VisitLocal": 2.0}):
        with pytest.raises(ValueError, match="ceilings: expected whole numbers for some of"):
            SiloSide(alone(LINEAR, "silo 0"), linear, tmp_path, ceilings=wrong)


def asked(side, remote, *calls):
    head = {"what": "calls", "server": remote.carrier.server, "forget": []}
    return unpack(
        side.answer(
            pack({**head, "calls": np.frombuffer(pack(list(calls), remote.carrier._own), np.uint8)})
        )
    )


def test_settings_that_would_take_for_ever_are_refused(tmp_path):
    transport = Messages(LINEAR, linear, tmp_path)
    remote = connect(transport, linear)
    kernel = fed.FSGLD(linear)
    kernel.set_up(remote, {})
    side = transport.sides["silo 0"]
    for_ever = VisitLocal(replace(kernel._config, num_local_steps=10**9))
    answer = asked(side, remote, (for_ever, random.key(0), None, None, None))
    assert "num_local_steps=1,000,000,000; expected at most 10,000" in answer["error"]
    many = (
        VisitLocal(kernel._config),
        random.key(0),
        np.zeros((200_000, 2), np.float32),
        None,
        None,
    )
    assert "asked about 200,000 points, expected at most" in asked(side, remote, many)["error"]
    for slot in (7.0, True, -1, "7", [3]):
        answer = asked(side, remote, (VisitLocal(kernel._config), random.key(0), None, None, slot))
        assert "its calls cannot be read" in answer["error"]


def test_the_record_has_the_positions_that_were_asked_about(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(LINEAR, linear, Messages(LINEAR, linear, tmp_path), 4)
    calls = []
    for line in (tmp_path / "silo 1" / "audit.jsonl").read_text().splitlines():
        calls += json.loads(line).get("calls", [])
    stays = [call for call in calls if call["kind"] == "VisitLocal"]
    assert stays
    assert all(len(call["told"][".theta"]) == 2 and len(call["key"]) == 2 for call in stays)


# Guards


def rows(n, ones=5):
    rng = np.random.default_rng(0)
    return {"x": np.stack([rng.normal(size=n), np.arange(n) < ones], 1), "y": rng.normal(size=n)}


@pytest.mark.parametrize(
    ("data", "guards", "words"),
    [
        (
            rows(9),
            fed.Guards(),
            "guard min_rows: silo 'oslo' has 9 rows of 'x'; expected at least 10",
        ),
        (
            rows(30, 2),
            fed.Guards(),
            r"guard min_level_rows: of silo 'oslo' one of the two levels of x\[:, 1\] has 2",
        ),
        (rows(30, 28), fed.Guards(), "guard min_level_rows"),
        (
            rows(19),
            fed.Guards(),
            "guard max_parameters_per_row: the model has 2 global parameters for 19 rows",
        ),
        (
            rows(30),
            fed.Guards(columns=("y",)),
            r"guard columns: the model uses \['x'\] of silo 'oslo'; expected some of",
        ),
    ],
)
def test_guards_refuse_by_name(tmp_path, data, guards, words):
    silos = fed.Silos({"oslo": data})
    with pytest.raises(ValueError, match=words):
        SiloSide(silos, linear, tmp_path, guards=guards)
    SiloSide(silos, linear, tmp_path)  # without guards


def test_guards_let_pass(tmp_path):
    SiloSide(
        fed.Silos({"oslo": rows(30)}), linear, tmp_path / "a", guards=fed.Guards(columns=("x", "y"))
    )
    none = fed.Guards(None, None, None)
    SiloSide(fed.Silos({"oslo": rows(5, 1)}), linear, tmp_path / "b", guards=none)
    with pytest.raises(ValueError, match="min_rows: expected a number > 0, or None, got 0"):
        fed.Guards(min_rows=0)


def test_two_processes_of_a_folder_count_together(tmp_path):
    transport = Messages(LINEAR, linear, tmp_path)
    remote = connect(transport, linear)
    fed.FSGLD(linear).set_up(remote, {})
    side = transport.sides["silo 0"]
    other = transport.make["silo 0"]()
    before = other.counts["ScoreLocal"]
    assert before == side.counts["ScoreLocal"] > 0
    data = next(
        data for name, data, _ in transport.sent if name == "silo 0" and b"ScoreLocal" in data
    )
    for one in (side, other, side, other):
        assert "replies" in unpack(one.answer(data))
    assert other.counts["ScoreLocal"] == before + 4
    side.answer(pack({"what": "hello", "protocol": 2}))
    assert side.counts["ScoreLocal"] == before + 4


def test_an_array_of_no_numbers_costs_the_record_nothing(tmp_path):
    transport = Messages(LINEAR, linear, tmp_path)
    remote = connect(transport, linear)
    kernel = fed.FSGLD(linear)
    kernel.set_up(remote, {})
    empty = np.zeros((1, 3_000_000, 0), np.float32)
    asked(
        transport.sides["silo 0"],
        remote,
        (VisitLocal(kernel._config), random.key(0), empty, None, None),
    )
    assert (tmp_path / "silo 0" / "audit.jsonl").stat().st_size < 1e6
    long = transport.sides["silo 0"].answer(
        pack({"what": "open", "silos": 1, "server": 1, "fresh": "x" * 10**6})
    )
    assert len(long) < 10_000


def test_learned_parameters_count_as_parameters(tmp_path):
    def model(y):
        scale = numpyro.param("scale", jnp.ones(30))
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with fed.silo_plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, scale.mean()), obs=y)

    silos = fed.Silos({"oslo": {"y": np.random.default_rng(0).normal(size=30)}})
    fit = fed.SFVI(model, fed.AutoSiloNormal(model), optax.adam(0.01))
    with pytest.raises(
        ValueError,
        match="guard max_parameters_per_row: the model has 31 global parameters for 30 rows",
    ):
        SiloSide(silos, model, tmp_path, fit=fit, guards=fed.Guards())


def test_a_guides_weights_count_as_parameters(tmp_path):
    """Each weight of a network is a number that a server sets, and whose gradient leaves."""

    def network(age, y):
        w = numpyro.param("w", 0.1 * jnp.ones(10))
        return jnp.stack([w.sum() * y, jnp.log(0.3)])

    def make(**options):
        guide = fed.AutoSiloNormal(visits, global_cov="diag", **options)
        return fed.SFVI(visits, guide, optax.adam(0.01))

    alone = fed.Silos({"oslo": PATIENTS["oslo"]}, rows={"age": "patients", "y": "patients"})
    amortized = make(coupling=False, amortize={"z": network})
    with pytest.raises(ValueError, match="the model has 12 global parameters for 60 rows"):
        SiloSide(alone, visits, tmp_path / "a", fit=amortized, guards=fed.Guards())
    SiloSide(alone, visits, tmp_path / "b", fit=make(), guards=fed.Guards())  # the control


def test_a_message_of_other_shapes_is_refused(tmp_path):
    """Wider networks, or more draws, would be more questions in one call."""
    side, data, (local, key, message, read, _) = one_round(tmp_path)
    assert "replies" in answered(side, data, [(local, key, message, read, None)])
    twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), message)
    other = message._replace(context=message.context._replace(params={"w": np.ones((1, 160))}))
    for changed in (twice, other):
        answer = answered(side, data, [(local, key, changed, read, None)])
        assert "other parts or shapes than those of its fit" in answer["error"]


@pytest.mark.ci
def test_other_sizes_of_other_silos_draw_other_latents(tmp_path, monkeypatch):
    """The same draws at shifted places tell each latent, and with it each age."""
    drawn = []
    keys = silo_side.with_own_keys
    monkeypatch.setattr(silo_side, "with_own_keys", lambda *a: (drawn.append(a[-1]), keys(*a))[1])
    side, data, call = one_round(tmp_path)
    for count in (30, 31, 30):
        sizes = {"oslo": 60, "rome": count}
        columns = {k: np.zeros(0, np.float32) for k in ("age", "y")}
        like = fed.Silos(
            {s: {k: np.zeros(n, np.float32) for k in columns} for s, n in sizes.items()},
            rows={"age": "age", "y": "age"},
        )
        opened = {"what": "open", "silos": as_values(like), "server": count, "fresh": False}
        assert "error" not in unpack(side.answer(pack(opened)))
        local, key, message, read, _ = call
        again = pack(
            [(local, key, message, read, None)], {**side.checks.own, "config": local.config}
        )
        request = {**unpack(data), "server": count, "forget": []}
        answer = side.answer(pack({**request, "calls": np.frombuffer(again, np.uint8)}))
        assert "replies" in unpack(answer), unpack(answer)
    first, other, same = drawn[-3:]
    assert first == same != other


def test_a_connection_that_cannot_be_written_down_changes_nothing(tmp_path):
    transport = Messages(LINEAR, linear, tmp_path)
    connect(transport, linear)
    side = transport.sides["silo 0"]
    before = side.worker
    silos = as_values(LINEAR)
    request = {"what": "open", "silos": silos, "server": 8, "fresh": False, "more": "MORE"}
    # 4 MB of text, which would be 12 MB in the silo's own file
    body = pack(request)[20:].replace(b"MORE", "é".encode() * 2_000_000)
    head = int.from_bytes(body[:8], "little") + 4_000_000 - 4
    body = head.to_bytes(8, "little") + body[8:]
    short = b"fed2" + hashlib.blake2b(body, digest_size=16).digest() + body
    answer = unpack(side.answer(short))
    # what the silo does not need it does not keep, so that nothing is left to fail
    assert "error" not in answer
    assert side.worker is not before
    assert (tmp_path / "silo 0" / "open.bin").stat().st_size < 100_000


def test_the_record_of_one_message_has_a_limit():
    arrays = {str(i): np.zeros(1_000, bool) for i in range(1_000)}
    calls = [Call(0, TellLocal(), random.key(0), arrays) for _ in range(16)]
    lines = call_records([calls[0]._replace(message=np.arange(3.0)), *calls], {})
    assert lines[0]["told"] == {"": [0.0, 1.0, 2.0]}
    assert all(list(line["told"]) == ["sha256"] for line in lines[1:])
    assert len(json.dumps(lines)) < 10_000


@pytest.mark.parametrize("index", [{"before": "visits"}, {"before": "others", "back": "visits"}])
def test_indices_that_point_in_a_circle_turn_no_guard_off(index):
    """A group that an index points to has no guards: here no group had any."""
    columns = {"y": np.array([1.5, 2.5, 4.0], np.float32), "before": np.array([0, 0, 1])}
    groups = {"y": "visits", "before": "visits"}
    if "back" in index:
        columns, groups = {**columns, "back": np.array([0, 1])}, {**groups, "back": "others"}
    silos = fed.Silos({"oslo": columns}, rows=groups, index=index)
    with pytest.raises(ValueError, match=r"guard min_rows: silo 'oslo' has [23] rows"):
        fed.Guards().check(silos, 3)


def test_elements_to_which_rows_point_may_be_few():
    """The control: twelve visits of two patients in one hospital, with a chain of indices."""
    columns = {"y": np.arange(12.0), "patient": np.arange(12) % 2, "hospital": np.array([0, 0])}
    columns["size"] = np.array([3.0])
    groups = {"y": "visits", "patient": "visits", "hospital": "patients", "size": "hospitals"}
    index = {"patient": "patients", "hospital": "hospitals"}
    fed.Guards().check(fed.Silos({"oslo": columns}, rows=groups, index=index), 1)


@pytest.mark.ci
def test_silos_with_copied_folders_have_other_noise(tmp_path, monkeypatch):
    """A folder from an image of machines had one secret for all silos, whose noise canceled."""

    def make():
        privacy = fed.Privacy(epsilon=0.5, delta=1e-6, clip=200.0, num_rounds=9)
        return fed.SFVI(gaussian, fed.AutoSiloNormal(gaussian), optax.adam(0.01), privacy=privacy)

    def replies(folder):
        """Of two silos with rows of one sum, and the same file, in the first round."""
        y = np.arange(20.0) / 8
        silos = fed.Silos({"oslo": {"y": y}, "rome": {"y": y[::-1]}}, rows={"y": "patients"})
        for name in silos.names:
            (folder / name).mkdir(parents=True)
            (folder / name / "secret.key").write_bytes(b"k" * 32)
        transport = Fits(silos, make(), folder, make)
        remote = connect(transport, gaussian, fit=make())
        make().run(random.key(1), 1, remote, progress_bar=False)
        told = [unpack(x)["replies"][0] for _, data, x in transport.sent if b"RoundLocal" in data]
        return [np.concatenate([x.ravel() for x in told[i]]) for i in (0, 1)]

    oslo, rome = replies(tmp_path / "a")
    assert (abs(oslo - rome) > 1).sum() == 2  # the gradient
    monkeypatch.setattr(silo_side, "secret_of", lambda folder, *_: b"k" * 32)
    oslo, rome = replies(tmp_path / "b")
    np.testing.assert_allclose(oslo, rome, atol=1e-2)  # the control: what they say is the same
    assert np.nanmax(abs(oslo)) > 100  # with much noise


def test_a_secret_is_of_one_folder_name_and_rows(tmp_path):
    made = secret_of(tmp_path, "oslo", "rows")
    assert made == secret_of(tmp_path, "oslo", "rows")
    others = (tmp_path, "rome", "rows"), (tmp_path, "oslo", "other rows")
    assert len({made, *(secret_of(*other) for other in others)}) == 3


def test_whitening_has_the_models_dimensions(tmp_path):
    """With p columns it took p^2 numbers of memory, and p^3 of time, for a message of p."""
    transport = Messages(LINEAR, linear, tmp_path)
    remote = connect(transport, linear)
    side = transport.sides["silo 0"]
    task = ScoreLocal(remote.carrier.factors, None, 1)

    def told(p):
        message = Message(*(np.ones(n, np.float32) for n in (2, (2, p), (1, p), 1)))
        return asked(side, remote, (task, random.key(0), message, None, None))

    assert "replies" in told(2)
    assert "ScoreLocal has not 2 dimensions everywhere" in told(3)["error"]


def test_programs_of_other_settings_come_to_an_end(tmp_path, monkeypatch):
    """Each schedule of other numbers is a program of 4 MiB, which stays."""
    monkeypatch.setattr(call_checks, "MAX_PROGRAMS", 4)
    transport = Messages(LINEAR, linear, tmp_path)
    points = np.zeros((1, 2), np.float32)
    eye = np.eye(2, dtype=np.float32)
    message = Message(points[0], eye, points, np.ones(1, np.float32))
    for _ in range(2):  # another connection does not begin to count anew
        remote = connect(transport, linear)
        side, factors = transport.sides["silo 0"], remote.carrier.factors
        answers = [
            asked(side, remote, (ScoreLocal(factors, None, n), random.key(0), message, None, None))
            for n in (1, 2, 4, 1, 8)
        ]
        assert ["replies" in answer for answer in answers] == [True] * 4 + [False]
        assert "compiled 4 programs" in answers[-1]["error"]


def test_words_of_a_silo_do_not_command_the_terminal(tmp_path):
    class Lying(Messages):
        def exchange(self, messages):
            return dict.fromkeys(messages, pack({"error": "\x1b[2J\x1b]0;x\x07all is well"}))

    with pytest.raises(ValueError, match="all is well") as caught:
        connect(Lying(LINEAR, linear, tmp_path), linear)
    assert all(x.isprintable() for x in str(caught.value))


@pytest.mark.parametrize("old", [False, True], ids=["today", "control"])
def test_a_visit_does_not_count_rows_beyond_a_threshold(tmp_path, old, monkeypatch):
    """Shares of latents that moved or stayed, at positions of the server's choice, took all ages.

    At b = sqrt(largest number) / c the terms of rows with ages above c overflow.
    """
    if old:

        def visited(self, key, message, state, view):
            return federated(self.config, state[0]).local(key, message, state[1], view)

        monkeypatch.setattr(VisitLocal, "__call__", visited)
    transport = Messages(PATIENTS, visits, tmp_path)
    remote = connect(transport, visits)
    side, factors = transport.sides["oslo"], remote.carrier.factors
    units = Units(factors, "age", side.worker.pad)
    points = np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32)
    eye, zero, one = np.eye(2, dtype=np.float32), np.zeros(2, np.float32), np.ones((), np.float32)
    score = Message(zero, eye, points, np.ones(16, np.float32))
    config = LangevinConfig(factors, units, 200 + old, None, False, None, 1)
    where = LatentCoordinates(zero, 0 * eye, None)
    tuning = Tuning(0 * one, one, np.ones(2, np.float32), zero, None, None, where, one)
    key = random.key(0)
    for call in (
        (ScoreLocal(factors, units, 16, last=True), key, score, None, 1),
        (StartLocal(config), key, None, 1, 2),
        (TellLocal(), key, tuning, None, 3),
    ):
        assert "replies" in asked(side, remote, call)
    limit, counted = np.finfo(np.float32).max ** 0.5, []
    for c in (0.5, 1.0, 1.5):
        chain = Chain(np.array([0, limit / c], np.float32), np.int32(0))
        answer = asked(side, remote, (VisitLocal(config), key, chain, (3, 2), None))
        counted.append(answer["replies"][0])
    if old:
        shares = [round(60 * float(leaves[4])) for leaves in counted]
        assert shares == [int((c < AGES).sum()) for c in (0.5, 1, 1.5)]
    else:  # position, steps, share of cut steps, and whether all is finite
        assert all([x.shape for x in leaves] == [(2,), (), (), ()] for leaves in counted)
        assert len({str(leaves[2:]) for leaves in counted}) == 1


def test_arrays_that_broadcast_to_others_sizes_are_refused(tmp_path):
    """A location (p, 1) and a precision (1, p) took p^2 numbers of memory for a message of p."""
    transport = Messages(LINEAR, linear, tmp_path)
    remote = connect(transport, linear)
    side, zero, one = transport.sides["silo 0"], np.zeros(2, np.float32), np.ones((), np.float32)
    config = LangevinConfig(remote.carrier.factors, None, 1, None, False, None, 1)
    points = np.zeros((1, 2), np.float32)

    def told(loc, precision):
        conducive = Conducive(zero, precision, zero, zero)
        f = np.ones(len(LINEAR), np.float32)
        tuning = Tuning(one, one, f, loc, None, conducive, None, one)
        call = PilotLocal(config, 2), random.key(0), (tuning, points), None, None
        return asked(side, remote, call)

    assert "replies" in told(zero, np.zeros((2, 2), np.float32))
    for wrong in ((np.zeros((300, 2), np.float32), zero), (zero, np.zeros((2, 300), np.float32))):
        assert "has an array of shape" in told(*wrong)["error"]


def test_connections_with_other_sizes_are_programs_too(tmp_path, monkeypatch):
    """Each took 10 MiB, which stayed, and nothing counted it."""
    monkeypatch.setattr(call_checks, "MAX_PROGRAMS", 3)
    transport = Messages(LINEAR, linear, tmp_path)
    connect(transport, linear)
    side, about = transport.sides["silo 0"], description(alone(LINEAR, "silo 0"))

    def opened(n):
        sizes = {group: [n] for group in about["sizes"]}
        known = joined_spec([about, {**about, "names": ["x"], "sizes": sizes}], ["x"] * 2, {})
        request = {"what": "open", "silos": as_values(known), "server": 7, "fresh": False}
        return unpack(side.answer(pack(request)))

    answers = [opened(n) for n in (20, 30, 20, 40)]
    assert ["error" in answer for answer in answers] == [False, False, False, True]
    assert "compiled 3 programs" in answers[-1]["error"]


@pytest.mark.parametrize("lie", [np.nan, 1e30])
def test_an_absurd_gradient_of_a_node_is_undone_and_its_silo_named(tmp_path, lie):
    class Lying(Messages):
        def answer(self, side, data):
            out = super().answer(side, data)
            self.asked = self.__dict__.get("asked", 0) + (b"NodeLocal" in data)
            if side.name != "silo 1" or b"NodeLocal" not in data or self.asked % 40 > 8:
                return out
            told = unpack(out)
            replies = [[np.full_like(x, lie) for x in leaves] for leaves in told["replies"]]
            return pack({**told, "replies": replies})

    kernel = fed.PushSumLangevin(linear, fed.graphs.ring(4), 0.01)
    mcmc = fed.RemoteMCMC(kernel, num_warmup=0, num_samples=40, num_chains=4, progress_bar=False)
    with pytest.warns(UserWarning, match=r"silo 'silo 1' returned gradients that are NaN or"):
        mcmc.run(random.key(3), connect(Lying(LINEAR, linear, tmp_path), linear))
    draws = np.asarray(mcmc.get_samples()["beta"])
    assert np.abs(draws).max() < 100
    assert len(np.unique(draws[:40], axis=0)) > 20
