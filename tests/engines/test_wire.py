"""Bytes between a server and its silos: the same draws, and nothing that was not declared.

Also what happens when either side is killed.
"""

import hashlib
import json
import pickle
import re
import warnings
from dataclasses import dataclass, replace
from functools import cache
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
from messages import INTERCEPTS, LINEAR, Dies, DyingFits, Fits, Killed, Messages, alone, run
from small_models import intercepts, intercepts_posterior, linear

import numpyro_fed as fed
from numpyro_fed.data.views import largest
from numpyro_fed.density.factorize import factorize
from numpyro_fed.density.fingerprint import as_values, fingerprint
from numpyro_fed.density.local_map import Units
from numpyro_fed.engines import silo_side, wire
from numpyro_fed.engines.silo_side import SiloSide
from numpyro_fed.engines.wire import connect
from numpyro_fed.mcmc.remote_chains import VisitLocal
from numpyro_fed.privacy.own_keys import with_own_keys
from numpyro_fed.rounds.serialization import pack, unpack
from numpyro_fed.rounds.task import TASKS, SiloTask
from numpyro_fed.rounds.worker import Call
from numpyro_fed.surrogates.local_score import Message, ScoreLocal

_UNEVEN = r"silos answered unequally often \('silo 1' 0 of \d+ visits; the others all\)"


def draws(mcmc):
    return np.concatenate([np.ravel(x) for _, x in sorted(mcmc.get_samples().items())])


@pytest.fixture(scope="module")
def undisturbed():
    """Draws over a carrier without bytes."""
    pairs = {"linear": (LINEAR, linear), "intercepts": (INTERCEPTS, intercepts)}

    @cache
    def drawn(name):
        silos, model = pairs[name]
        return draws(run(silos, model, fed.RemoteSilos(silos, fed.Loopback(silos))))

    return drawn


# Values as bytes


def test_values_come_back():
    from numpyro_fed.mcmc.langevin import Chain

    value = {
        "none": None,
        "numbers": [1, -2.5, True, float("inf"), "text", (1, (2,))],
        "arrays": [
            np.arange(6, dtype=np.float32).reshape(2, 3),
            np.zeros((0, 4)),
            np.array(3, np.int8),
            np.array([True]),
        ],
        "chain": Chain(jnp.ones(2), jnp.array(4)),
        "type": jax.ShapeDtypeStruct((3, 1), jnp.float32),
        "own": linear,
    }
    got = unpack(pack(value, {"model": linear}), {"model": "the reader's"})
    assert got["none"] is None
    assert got["numbers"] == value["numbers"]
    assert [type(x) for x in got["numbers"]] == [type(x) for x in value["numbers"]]
    for x, y in zip(got["arrays"], value["arrays"], strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.dtype == y.dtype
    assert isinstance(got["chain"], Chain)
    assert got["type"] == value["type"]
    assert got["own"] == "the reader's"
    key = random.fold_in(random.key(1), 7)
    np.testing.assert_array_equal(random.key_data(unpack(pack(key))), random.key_data(key))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda x: x, "expected numbers, texts, arrays and what is made of them, got function"),
        (np.array(["a"]), "expected arrays of numbers, got one of <U1"),
        ({1: 2}, "expected dictionaries whose keys are texts"),
        (Path("x"), "got PosixPath"),
    ],
)
def test_what_cannot_be_packed_is_named(value, message):
    with pytest.raises(TypeError, match=message):
        pack(value)


def sealed(text, rest=b""):
    """Bytes with a checksum that is right, whatever the text says."""
    body = len(text).to_bytes(8, "little") + text + rest
    return b"fed2" + hashlib.blake2b(body, digest_size=16).digest() + body


def test_sealed_bytes_are_packed_ones():
    np.testing.assert_array_equal(
        unpack(sealed(b'{"array":["float64",[3]]}', np.ones(3).tobytes())), np.ones(3)
    )
    assert sealed(b"1") == pack(1)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        pickle.dumps({"replies": []}),
        pack([np.ones(3)])[:-1],
        pack([np.ones(3)]) + b"x",
        pack({"a": 1}).replace(b'"dict"', b'"dirt"'),
        sealed(b"{"),
        sealed(b"[1]"),
        sealed(b'{"dirt":{"a":1}}'),
        sealed(b'{"of":"os:path","fields":{}}'),
        sealed(b'{"of":"numpyro_fed.engines.wire:connect","fields":{}}'),
        sealed(b'{"of":"antigravity:Thing","fields":{}}'),
        sealed(b'{"of":"Chain","fields":{"no":1}}'),
        sealed(b'{"array":["float64",[9]]}', np.ones(3).tobytes()),
        sealed(b'{"array":["float64",[3]]}', np.ones(4).tobytes()),
        sealed(b'{"array":["float64",[-1]]}'),
        sealed(b'{"array":["float64",[1099511627776,1099511627776]]}'),
        sealed(b'{"array":["object",[1]]}', bytes(8)),
        sealed(b'{"array":[",",[1]]}', bytes(8)),
        sealed(b'{"type":["float64",[true]]}'),
        sealed(b'{"key":["none",{"array":["uint32",[2]]}]}', bytes(8)),
        sealed(b'{"list":' * 20_000),
        sealed(b"9" * 10_000),
    ],
)
def test_bytes_that_are_no_value_are_refused(data):
    import sys

    with pytest.raises(ValueError, match="packed"):
        unpack(data)
    assert "antigravity" not in sys.modules


# The same draws


@pytest.mark.parametrize(
    "fresh",
    heavy([False, True], False),
    ids=["one process", "a new process for every message"],
)
@pytest.mark.parametrize("name", heavy(["linear", "intercepts"], "intercepts"))
def test_draws_are_those_without_bytes(undisturbed, tmp_path, name, fresh):
    silos, model = (LINEAR, linear) if name == "linear" else (INTERCEPTS, intercepts)
    remote = connect(Messages(silos, model, tmp_path, fresh=fresh), model)
    mcmc = fed.RemoteMCMC(
        fed.FSGLD(model), num_warmup=2, num_samples=12, num_chains=2, progress_bar=False
    )
    mcmc.sampler.set_up(remote, {})

    def kept():
        return [len(list((tmp_path / n).glob("slot-*.bin"))) for n in silos.names]

    before = kept()
    mcmc.run(random.key(3), remote)
    np.testing.assert_array_equal(draws(mcmc), undisturbed(name))
    assert kept() == before  # nothing of a finished run but the local map
    assert bool(before[0]) == (name == "intercepts")


@pytest.mark.ci
def test_a_message_that_comes_twice_is_answered_twice_alike(undisturbed, tmp_path):
    class Twice(Messages):
        def answer(self, side, data):
            first, again = side.answer(data), side.answer(data)
            assert first == again
            return again

    np.testing.assert_array_equal(
        draws(run(INTERCEPTS, intercepts, Twice(INTERCEPTS, intercepts, tmp_path))),
        undisturbed("intercepts"),
    )


def narrower_prior(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 0.5).expand([2]).to_event(1))
    with fed.silo_plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, 1), obs=y)


@pytest.mark.ci
@pytest.mark.parametrize(("at", "after"), [(3, False), (6, True), (9, False), (13, True)])
def test_a_server_that_is_killed_goes_on_where_it_was(undisturbed, tmp_path, at, after):
    place = tmp_path / "run.ckpt"
    transport = Dies(INTERCEPTS, intercepts, tmp_path)
    remote = connect(transport, intercepts)
    kernel = fed.FSGLD(intercepts)
    kernel.set_up(remote, {})
    transport.left, transport.after = at, after

    def one(remote):
        mcmc = fed.RemoteMCMC(
            kernel,
            num_warmup=2,
            num_samples=12,
            num_chains=2,
            progress_bar=False,
            checkpoint=place,
            checkpoint_every=4,
        )
        mcmc.run(random.key(3), remote)
        return mcmc

    with pytest.raises(Killed):
        one(remote)
    assert place.exists() == (at > 6)  # two messages to start, then four rounds
    again = connect(Messages(INTERCEPTS, intercepts, tmp_path), intercepts)
    np.testing.assert_array_equal(draws(one(again)), undisturbed("intercepts"))
    # and once more: all rounds are made
    before = sum(t.messages for t in again.carrier.traffic.values())
    np.testing.assert_array_equal(draws(one(again)), undisturbed("intercepts"))
    assert sum(t.messages for t in again.carrier.traffic.values()) - before == 3 * 2


@pytest.mark.ci
def test_checkpoints_of_other_runs_are_refused(tmp_path):
    place = tmp_path / "run.ckpt"
    remote = fed.RemoteSilos(LINEAR, fed.Loopback(LINEAR))
    run(LINEAR, linear, remote, 3, checkpoint=place)
    with pytest.raises(
        ValueError,
        match=r"checkpoint of another run: num_chains, num_warmup, num_samples \[2, 2, 3\], "
        r"expected \[2, 2, 4\]",
    ):
        run(LINEAR, linear, remote, 4, checkpoint=place)
    other = fed.RemoteMCMC(
        fed.DSGLD(linear, step_size=0.01),
        num_warmup=2,
        num_samples=3,
        num_chains=2,
        checkpoint=tmp_path / "dsgld",
    )
    other.run(random.key(3), remote)
    for kernel, what in (
        (fed.DSGLD(narrower_prior, step_size=0.01), "model"),
        (fed.DSGLD(linear, step_size=0.01, num_local_steps=3), "stays"),
    ):
        wrong = fed.RemoteMCMC(
            kernel, num_warmup=2, num_samples=3, num_chains=2, checkpoint=tmp_path / "dsgld"
        )
        with pytest.raises(ValueError, match=f"checkpoint of another run: {what}"):
            wrong.run(random.key(3), remote)
    with pytest.raises(ValueError, match="checkpoint of another run: sites"):
        run(
            INTERCEPTS,
            intercepts,
            fed.RemoteSilos(INTERCEPTS, fed.Loopback(INTERCEPTS)),
            3,
            checkpoint=place,
        )
    place.write_bytes(place.read_bytes()[:100])
    with pytest.raises(
        ValueError,
        match=r"run.ckpt: expected \d+ bytes of data, got \d+; it was cut off: .* delete it",
    ):
        run(LINEAR, linear, remote, 3, checkpoint=place)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        fed.RemoteMCMC(
            fed.FSGLD(linear), num_warmup=1, num_samples=1, checkpoint=tmp_path / "no" / "run.ckpt"
        )
    with pytest.raises(ValueError, match="checkpoint_every: expected a whole number >= 1, got 0"):
        fed.RemoteMCMC(
            fed.FSGLD(linear), num_warmup=1, num_samples=1, checkpoint=place, checkpoint_every=0
        )


# Keys of the silos' own


def mu_of(folder, rounds=120):
    transport = Messages(INTERCEPTS, intercepts, folder, own_keys=True)
    mcmc = run(INTERCEPTS, intercepts, transport, rounds=rounds)
    return mcmc.get_samples(group_by_chain=True)["mu"]


@pytest.mark.ci
def test_draws_by_the_silos_own_keys_have_the_law_of_those_at_hand(tmp_path, monkeypatch):
    """The mean and sd of mu are within 4 Monte-Carlo standard errors.

    They are not where each call has the same noise.
    """
    mean, cov = intercepts_posterior(INTERCEPTS)

    def errors(found):
        """Of mean and sd, in standard errors of so many effective draws."""
        size = float(numpyro.diagnostics.effective_sample_size(np.asarray(found)))
        sd = cov[0, 0] ** 0.5
        return abs(np.mean(found) - mean[0]) / sd * size**0.5, abs(np.std(found) / sd - 1) * (
            2 * size
        ) ** 0.5

    found = mu_of(tmp_path / "a")
    assert max(errors(found)) < 4
    again = [mu_of(tmp_path / place, 5) for place in ("a", "a", "c")]
    np.testing.assert_array_equal(again[0], again[1])  # the same folder, so the same keys
    assert (again[0] != again[2]).any()
    monkeypatch.setattr(silo_side, "hashed", lambda *parts: "")
    monkeypatch.setattr(silo_side, "secret_of", lambda *_: bytes(32))  # else this is by chance
    constant = mu_of(tmp_path / "b")
    assert max(errors(constant)) > 4


def test_every_key_of_a_call_is_replaced():
    message = {"keys": random.split(random.key(7), (3, 2)), "theta": jnp.ones(2)}
    call = Call(0, None, random.key(1), message)
    one, again, other = (with_own_keys(call, b"s" * 32, name) for name in ("a", "a", "b"))
    words = [
        np.ravel(random.key_data(k)).tolist()
        for c in (call, one, other)
        for k in (c.key, c.message["keys"])
    ]
    words = [tuple(pair) for flat in words for pair in np.reshape(flat, (-1, 2)).tolist()]
    assert len(set(words)) == 3 * 7
    assert one.message["theta"] is call.message["theta"]
    np.testing.assert_array_equal(
        random.key_data(one.message["keys"]), random.key_data(again.message["keys"])
    )
    stranger = with_own_keys(call, b"t" * 32, "a")
    assert not (random.key_data(stranger.key) == random.key_data(one.key)).any()


# Variational fits


ADAM = optax.adam(0.05)
FITS = {
    "sfvi": lambda: fed.SFVI(
        intercepts, fed.AutoSiloNormal(intercepts), ADAM, num_local_particles=3
    ),
    "sfvi_avg": lambda: fed.SFVIAvg(
        intercepts, fed.AutoSiloNormal(intercepts), ADAM, num_local_steps=5
    ),
    "conducive": lambda: fed.ConduciveSFVI(intercepts, fed.AutoSiloNormal(intercepts)),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", FITS)
def test_fits_are_those_without_bytes(tmp_path, name):
    fit, rounds = FITS[name](), 3 if name == "conducive" else 8
    there = fed.RemoteSilos(INTERCEPTS, fed.Loopback(INTERCEPTS))
    expected = FITS[name]().run(random.key(1), rounds, there, progress_bar=False)
    # silos have a fit of their own, which is made of the same numbers
    transport = Fits(INTERCEPTS, fit, tmp_path, FITS[name], fresh=name == "sfvi")
    remote = connect(transport, intercepts, fit=fit)
    got = fit.run(random.key(1), rounds, remote, progress_bar=False)
    np.testing.assert_array_equal(got.losses, expected.losses)
    assert set(got.params) == set(expected.params)
    for k, v in expected.params.items():
        np.testing.assert_array_equal(got.params[k], v, err_msg=k)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["sfvi", "conducive"])
def test_a_fit_whose_server_is_killed_goes_on_where_it_was(tmp_path, name):
    place, fit, rounds = tmp_path / "fit.ckpt", FITS[name](), 5

    def one(remote, **more):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # conducive rounds have not converged
            return fit.run(random.key(1), rounds, remote, progress_bar=False, **more)

    expected = one(fed.RemoteSilos(INTERCEPTS, fed.Loopback(INTERCEPTS)))
    transport = DyingFits(INTERCEPTS, fit, tmp_path, FITS[name])
    remote = connect(transport, intercepts, fit=fit)
    fit.setup(remote)
    transport.left, transport.after = (
        5,
        True,
    )  # the first states, then three rounds and the replies of a fourth
    with pytest.raises(Killed):
        one(remote, checkpoint=place, checkpoint_every=2)
    transport.left = -1
    before = len(transport.sent)
    got = one(connect(transport, intercepts, fit=fit), checkpoint=place, checkpoint_every=2)
    asked = [data for n, data, _ in transport.sent[before:] if n == "0" and b"RoundLocal" in data]
    assert len(asked) == 3  # two were in the checkpoint
    np.testing.assert_array_equal(got.losses, expected.losses)
    for k, v in expected.params.items():
        np.testing.assert_array_equal(got.params[k], v, err_msg=k)
    with pytest.raises(ValueError, match=r"fit\.ckpt is the checkpoint of another run: seed"):
        fit.run(
            random.key(2),
            rounds,
            connect(transport, intercepts, fit=fit),
            progress_bar=False,
            checkpoint=place,
        )


def test_silos_at_hand_have_no_checkpoint(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"checkpoint: silos in this process keep nothing; expected None, and "
        r"init_state=result.state",
    ):
        FITS["sfvi"]().run(
            random.key(1), 2, INTERCEPTS, progress_bar=False, checkpoint=tmp_path / "fit.ckpt"
        )


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (lambda: None, "has another model: fit of chains, expected SFVI"),
        (
            lambda: fed.SFVI(
                intercepts, fed.AutoSiloNormal(intercepts), optax.adam(0.01), num_local_particles=3
            ),
            "has another model: optimizers",
        ),
        (
            lambda: fed.SFVI(
                intercepts, fed.AutoSiloNormal(intercepts), ADAM, num_local_particles=4
            ),
            "has another model: options",
        ),
    ],
    ids=["none", "step size", "particles"],
)
def test_silos_with_another_fit_are_named(tmp_path, theirs, message):
    fit = FITS["sfvi"]()
    with pytest.raises(ValueError, match=f"silo '0' {message}"):
        connect(Fits(INTERCEPTS, fit, tmp_path, theirs), intercepts, fit=fit)


def test_a_fit_that_silos_were_not_told_of_is_named(tmp_path):
    remote = connect(Messages(INTERCEPTS, intercepts, tmp_path), intercepts)
    with pytest.raises(
        RuntimeError,
        match=r"silo '0': it has no fit; expected SiloSide\(\.\.\., fit=\.\.\.\) with",
    ):
        FITS["sfvi"]().run(random.key(1), 2, remote, progress_bar=False)


# What crosses


def test_the_audit_lists_every_byte_and_planted_values_are_in_none(tmp_path):
    data = {name: {k: np.array(v) for k, v in LINEAR[name].items()} for name in LINEAR.names}
    first = LINEAR.names[0]
    data[first]["y"][1] = planted = np.float32(1.2345679)
    silos = fed.Silos(data)
    transport = Messages(silos, linear, tmp_path)
    remote = connect(transport, linear)
    run(silos, linear, remote, 4)
    raw = b"".join(data + answer for _, data, answer in transport.sent)
    assert planted.tobytes() not in raw
    assert (
        transport.sides[first].worker.silos.rows["y"][1].tobytes() == planted.tobytes()
    )  # the control: the silo has it
    crossed = [answer for _, data, answer in transport.sent if b"VisitLocal" in data][-1]
    kept = unpack(crossed)["replies"][0][0]
    assert kept.tobytes() in raw  # the control: what crosses is found
    for name in silos.names:
        own = [(data, answer) for n, data, answer in transport.sent if n == name]
        lines = [
            json.loads(line) for line in (tmp_path / name / "audit.jsonl").read_text().splitlines()
        ]
        assert [line["sent"]["sha256"] for line in lines] == [
            hashlib.sha256(answer).hexdigest() for _, answer in own
        ]
        assert [line["received"]["bytes"] for line in lines] == [len(data) for data, _ in own]
        # what was said while it met the silos is not in the carrier's count
        calls = [
            len(answer)
            for (_, answer), line in zip(own, lines, strict=True)
            if line["what"] == "calls"
        ]
        assert remote.carrier.traffic[name].bytes_up == sum(calls)


def asked(kernel, model, silos, folder, num_chains):
    """Return the calls of a short run, each with the number of numbers in its reply."""
    remote, seen = connect(Messages(silos, model, folder), model), []
    ask = remote.carrier.ask

    def ask_and_note(calls):
        replies = ask(calls)
        for call, reply in zip(calls, replies, strict=True):
            seen.append((call, sum(np.size(x) for x in jax.tree.leaves(reply))))
        return replies

    remote.carrier.ask = ask_and_note
    mcmc = fed.RemoteMCMC(
        kernel, num_warmup=1, num_samples=1, num_chains=num_chains, progress_bar=False
    )
    mcmc.run(random.key(3), remote)
    return seen


RUNS = [  # all tasks of kernels
    ("chains", lambda: fed.FSGLD(intercepts), intercepts, INTERCEPTS, 1),
    ("chains", lambda: fed.FSGLD(linear, 0.01, surrogate="laplace"), linear, LINEAR, 1),
    ("hmc", lambda: fed.HMC(intercepts), intercepts, INTERCEPTS, 1),
    (
        "network",
        lambda: fed.PushSumLangevin(intercepts, fed.graphs.ring(3), 0.01),
        intercepts,
        INTERCEPTS,
        3,
    ),
]


@pytest.mark.ci
def test_replies_have_as_many_numbers_as_a_person_at_the_silo_reads(tmp_path):
    """The count at the start of ``numbers``; times or plus what the call itself says."""
    seen = set()
    for n, (method, make, model, silos, num_chains) in enumerate(RUNS):
        kernel = make()
        for call, found in asked(kernel, model, silos, tmp_path / str(n), num_chains):
            task, d = call.local, kernel.factors.dim
            formula = re.match(r"[\d d+^]*(?= numbers)|", task.numbers).group() or "1"
            count = eval(re.sub(r"(\d) d", r"\1 * d", formula).replace("^", "**"), {"d": d})
            match task.wire_name:
                case "ScoreLocal":
                    last = d * (1 + 2 * d + d * (d + 1) // 2) if task.last else 0
                    count += len(call.message.points) + last
                case "PilotLocal":
                    count = len(call.message[1]) * (count + task.length)
            assert found == count, (task.wire_name, found, count)
            seen.add((task.wire_name, method))
    known = {(name, method) for name, task in TASKS.items() for method in task.methods}
    assert seen - known == set()
    assert {name for name, method in known if method != "fit"} == {name for name, _ in seen}


@dataclass(frozen=True)
class Leak(SiloTask):
    """A call whose reply is as long as the silo has rows."""

    wire_name = "Leak"
    leaves, numbers, ceiling = "rows", "", 10

    def __call__(self, key, message, state, view):
        return view.whole()[0]["y"], None


del TASKS["Leak"]  # silos know it by name, and do not answer it


def test_silos_refuse_other_calls_and_replies_as_long_as_rows(tmp_path, monkeypatch):
    transport = Messages(LINEAR, linear, tmp_path)
    remote = connect(transport, linear)
    call = Call(0, Leak(), random.key(0), None)
    with pytest.raises(RuntimeError, match="silo 'silo 0': it does not answer Leak"):
        remote.ask([call])
    monkeypatch.setitem(TASKS, "Leak", Leak)
    for side in transport.sides.values():
        side.ceilings["Leak"] = 10
    with pytest.raises(
        RuntimeError,
        match=r"silo 'silo 0': the reply to Leak would be longer with one row more \(\(\d+,\) for "
        r"\(\d+,\)\)",
    ):
        remote.ask([call])


def test_silos_refuse_settings_that_single_out_rows(tmp_path):
    transport = Messages(INTERCEPTS, intercepts, tmp_path)
    remote = connect(transport, intercepts)
    factors = remote.carrier.factors
    own = Units(factors, "groups", largest(remote))
    few = replace(own, pad=tuple((group, 1) for group, _ in own.pad))
    point = Message(
        np.zeros(1, np.float32),
        np.eye(1, dtype=np.float32),
        np.zeros((2, 1), np.float32),
        np.ones(2, np.float32),
    )

    def ask(local, message):
        with pytest.raises(RuntimeError) as error:
            remote.ask([Call(0, local, random.key(0), message)])
        return str(error.value)

    kernel = fed.FSGLD(intercepts)
    kernel.set_up(remote, {})
    batch, kept = (
        VisitLocal(replace(kernel._config, **x))
        for x in ({"batch": ("groups", 1)}, {"num_kept": 2})
    )
    for local in (batch, kept):
        # what it would start from does not matter: the server's own look at types would fail first
        call = (local, random.key(0), None, None, None)
        head = {"what": "calls", "server": remote.carrier.server, "forget": []}
        data = pack({**head, "calls": np.frombuffer(pack([call], remote.carrier._own), np.uint8)})
        assert (
            "a minibatch that is not its own; expected calls of all its rows"
            in unpack(transport.sides["0"].answer(data))["error"]
        )
    assert "a number of elements that is not its own" in ask(ScoreLocal(factors, few, 1), point)
    assert (
        remote.ask([Call(0, ScoreLocal(factors, own, 1), random.key(0), point)])[0] is not None
    )  # the control


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda answer: pickle.dumps([1, 2]), "a packed value"),
        (lambda answer: pack({"replies": [[np.ones(3, np.float32)]]}), "expected"),
        (
            lambda answer: pack(
                {
                    "replies": [
                        [np.ones((1, *x.shape), x.dtype) for x in r]
                        for r in unpack(answer)["replies"]
                    ]
                }
            ),
            "expected",
        ),
        (lambda answer: answer + bytes(10**7), "bytes, expected at most"),
        (lambda answer: pack([1]), "neither replies nor an error"),
        (lambda answer: pack({"replies": []}), "zip"),
    ],
    ids=["pickled", "too few arrays", "wrong shapes", "huge", "a list", "too few"],
)
def test_a_hostile_reply_is_refused_with_the_silos_name_and_the_run_goes_on(tmp_path, bad, message):
    class Hostile(Messages):
        def exchange(self, messages):
            out = super().exchange(messages)
            if "silo 1" in out and b"VisitLocal" in messages["silo 1"]:
                out["silo 1"] = bad(out["silo 1"])
            return out

    transport = Hostile(LINEAR, linear, tmp_path)
    remote = connect(transport, linear)
    refused = f"silo 'silo 1' sent what is no reply .*{message}.*; it counts as not answered"
    with pytest.warns(UserWarning, match=_UNEVEN), pytest.warns(UserWarning, match=refused):
        mcmc = run(LINEAR, linear, remote)
    silent = np.asarray(mcmc.last_state.unanswered).sum(0)
    assert silent[1] == np.asarray(mcmc.last_state.visits).sum(0)[1] > 0
    assert silent.sum() == silent[1]
    assert len(remote.carrier.refused["silo 1"]) > 0
    assert np.isfinite(draws(mcmc)).all()


def test_a_silo_that_returns_nan_counts_as_not_answered(tmp_path):
    class Nan(Messages):
        def exchange(self, messages):
            out = super().exchange(messages)
            if "silo 1" in out and b"VisitLocal" in messages["silo 1"]:
                answer = unpack(out["silo 1"])
                answer["replies"] = [
                    [np.full_like(r[0], np.nan), *r[1:]] for r in answer["replies"]
                ]
                out["silo 1"] = pack(answer)
            return out

    said = r"silo 'silo 1' returned NaN \d+ times; these visits count as not answered"
    with pytest.warns(UserWarning, match=_UNEVEN), pytest.warns(UserWarning, match=said):
        mcmc = run(LINEAR, linear, Nan(LINEAR, linear, tmp_path))
    assert np.asarray(mcmc.last_state.unanswered).sum(0)[1] > 0
    assert np.isfinite(draws(mcmc)).all()


# Silos that do not fit


def other_model(y, x):
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with fed.silo_plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(x.sum(-1), sigma), obs=y)


def narrower(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    with fed.silo_plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, 0.25), obs=y)


def swapped(tmp_path, silos, model=linear, name="silo 1"):
    """Return a transport whose silo of this name is another."""
    transport = Messages(LINEAR, linear, tmp_path)
    transport.sides[name] = SiloSide(silos, model, tmp_path / "other")
    return transport


def changed(name, **columns):
    data = {k: np.asarray(v) for k, v in LINEAR["silo 1"].items()}
    return fed.Silos(
        {name: {k: columns.get(k, lambda v: v)(v) for k, v in data.items()}},
        rows=dict(LINEAR.group),
    )


@pytest.mark.parametrize(
    ("silos", "model", "message"),
    [
        (
            lambda: alone(LINEAR, "silo 1"),
            other_model,
            r"silo 'silo 1' has another model: global sites",
        ),
        (
            lambda: alone(LINEAR, "silo 1"),
            narrower,
            r"silo 'silo 1' has another model: program \w+, expected \w+",
        ),
        (lambda: changed("silo 9"), linear, r"silo 'silo 1' says that it is \['silo 9'\]"),
        (
            lambda: changed("silo 1", y=lambda v: v.astype(np.int32)),
            linear,
            "silo 'silo 1' has silos of another kind than silo 'silo 0': rows",
        ),
        (
            lambda: changed("silo 1", x=lambda v: v[:, :1]),
            linear,
            "silo 'silo 1' has silos of another kind",
        ),
    ],
    ids=["model", "number in the model", "name", "type", "column"],
)
def test_silos_that_do_not_fit_are_named(tmp_path, silos, model, message):
    try:
        transport = swapped(tmp_path, silos(), model)
    except ValueError:  # the model itself does not run on such rows
        pytest.fail("the silo's own side should start")
    with pytest.raises(ValueError, match=message):
        connect(transport, linear)


def test_another_version_is_named(tmp_path, monkeypatch):
    transport = Messages(LINEAR, linear, tmp_path)
    monkeypatch.setattr(silo_side, "versions", lambda: {**wire.versions(), "jax": "0.1"})
    with pytest.raises(ValueError, match=r"silo 'silo 0' has another version: jax 0.1, expected"):
        connect(transport, linear)
    monkeypatch.setattr(wire, "PROTOCOL", 7)
    with pytest.raises(
        ValueError,
        match="silo 'silo 0': the server speaks protocol 7, expected 2; install one version",
    ):
        connect(transport, linear)


def scaled(matrix):
    """Sample a model with an array inside a function that is compiled by itself."""

    @jax.jit
    def mean(x, beta):
        return x @ matrix @ beta

    def model(x, y):
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
        with fed.silo_plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(mean(x, beta), 1), obs=y)

    return model


def test_arrays_inside_compiled_functions_are_part_of_the_fingerprint():
    one, other = (
        fingerprint(factorize(m, LINEAR), LINEAR)
        for m in (scaled(np.eye(2)), scaled(2 * np.eye(2)))
    )
    assert one["program"] != other["program"]
    assert one == fingerprint(factorize(scaled(np.eye(2)), LINEAR), LINEAR)


@pytest.mark.ci
def test_the_fingerprint_does_not_depend_on_what_was_traced_before():
    factors = factorize(intercepts, INTERCEPTS)
    first = fingerprint(factors, INTERCEPTS)
    kernel = fed.FSGLD(intercepts)
    kernel.set_up(INTERCEPTS, {})  # which traces the same functions for other shapes
    assert fingerprint(factors, INTERCEPTS) == first
    with jax.ensure_compile_time_eval():
        assert fingerprint(factors, INTERCEPTS) == first


def test_what_differs_between_silos_does_not_leave_before_it_is_seen(tmp_path):
    def model(y, level):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with fed.silo_plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu + level, 1), obs=y)

    planted = [np.float32(1.2345679), np.float32(7.6543210)]
    transport = Messages(LINEAR, linear, tmp_path)
    transport.names = ("a", "b")
    transport.sides = {
        name: SiloSide(
            fed.Silos({name: {"y": np.ones(4, np.float32), "level": jnp.asarray(v)}}),
            model,
            tmp_path / name,
        )
        for name, v in zip("ab", planted, strict=True)
    }
    with pytest.raises(
        ValueError,
        match=r"has the shared arguments \['level'\], the server \[\].*shared={argument: value}",
    ):
        connect(transport, model)
    with pytest.raises(
        ValueError, match=r"silo 'b': the server has other values than it of \['level'\]"
    ) as error:
        connect(transport, model, shared={"level": jnp.asarray(planted[0])})
    raw = b"".join(answer for *_, answer in transport.sent) + str(error.value).encode()
    assert not any(v.tobytes() in raw or str(v).encode() in raw for v in planted)


def test_a_silo_that_is_another_after_a_restart_is_refused(tmp_path):
    connect(Messages(LINEAR, linear, tmp_path), linear)
    folder = tmp_path / "silo 1"
    SiloSide(alone(LINEAR, "silo 1"), linear, folder)  # the control
    with pytest.raises(
        ValueError,
        match=r"silo 'silo 1': other rows than before; its folder .* give another folder",
    ):
        SiloSide(changed("silo 1", y=lambda v: v + 1), linear, folder)
    with pytest.raises(ValueError, match="silo 'silo 1': other model than before"):
        SiloSide(alone(LINEAR, "silo 1"), narrower, folder)
    longer = {k: np.concatenate([np.asarray(v)] * 2) for k, v in LINEAR["silo 1"].items()}
    with pytest.raises(ValueError, match=r"rows, the server says .* give another folder"):
        SiloSide(fed.Silos({"silo 1": longer}), linear, folder)


def test_one_server_at_a_time(tmp_path):
    transport = Messages(LINEAR, linear, tmp_path)
    first, second = connect(transport, linear), connect(transport, linear)
    with pytest.raises(
        RuntimeError, match="another server has connected since; expected one at a time"
    ):
        run(LINEAR, linear, first)
    run(LINEAR, linear, second, 2)


@pytest.mark.ci
def test_a_fresh_start_leaves_nothing_of_servers_before(tmp_path):
    transport = Messages(INTERCEPTS, intercepts, tmp_path)
    run(INTERCEPTS, intercepts, connect(transport, intercepts), 2)
    assert list(tmp_path.glob("*/slot-*.bin"))
    connect(transport, intercepts)
    assert list(tmp_path.glob("*/slot-*.bin"))  # a checkpoint may need them
    connect(transport, intercepts, fresh=True)
    assert not list(tmp_path.glob("*/slot-*.bin"))


def test_draws_so_far_are_kept_where_a_silo_cannot_go_on(tmp_path):
    class Full(Messages):
        rounds = 0

        def answer(self, side, data):
            self.rounds += b"VisitLocal" in data
            if self.rounds > 12:
                return pack({"error": "OSError while it answered; its own errors.log has more"})
            return side.answer(data)

    with pytest.warns(
        UserWarning,
        match=r"interrupted \(SiloError: silo 'silo .': OSError while it answered.*\): the first "
        r"\d+ draws are kept",
    ):
        mcmc = run(LINEAR, linear, Full(LINEAR, linear, tmp_path), 30)
    assert 0 < len(mcmc.get_samples(group_by_chain=True)["beta"][0]) < 30


def test_silos_that_are_silent_at_first_are_named(tmp_path):
    transport = Messages(LINEAR, linear, tmp_path)
    transport.exchange = lambda messages: {
        k: transport.sides[k].answer(v) for k, v in messages.items() if k != "silo 2"
    }
    with pytest.raises(
        RuntimeError,
        match=r"silos \['silo 2'\] did not answer; expected silos that are up, under these names",
    ):
        connect(transport, linear)


def test_a_silo_says_in_words_what_is_wrong_and_quotes_no_rows(tmp_path):
    side = SiloSide(alone(LINEAR, "silo 0"), linear, tmp_path / "a")
    assert (
        "called before a server connected" in unpack(side.answer(pack({"what": "calls"})))["error"]
    )
    assert "expected a packed value" in unpack(side.answer(b"nothing"))["error"]
    with pytest.raises(ValueError, match=r"expected fed\.Silos of one silo"):
        SiloSide(LINEAR, linear, tmp_path / "b")
    assert (
        "expected to be among the silos"
        in unpack(
            side.answer(
                pack(
                    {
                        "what": "open",
                        "silos": as_values(alone(LINEAR, "silo 1")),
                        "server": 1,
                        "fresh": False,
                    }
                )
            )
        )["error"]
    )


def test_a_folder_that_was_emptied_is_said(tmp_path):
    transport = Messages(LINEAR, linear, tmp_path)
    remote = connect(transport, linear)
    kernel = fed.FSGLD(linear)
    kernel.set_up(remote, {})
    original = transport.exchange

    def exchange(messages):
        if any(b"VisitLocal" in data for data in messages.values()):
            for name in messages:
                transport.sides[name].worker.kept.clear()
        return original(messages)

    transport.exchange = exchange
    mcmc = fed.RemoteMCMC(kernel, num_warmup=0, num_samples=2, progress_bar=False)
    with pytest.raises(
        RuntimeError,
        match=r"silo 'silo .': what it kept for this run is gone; expected the folder of before",
    ):
        mcmc.run(random.key(0), remote)


def test_another_model_or_a_function_does_not_go_over_the_wire(tmp_path):
    remote = connect(Messages(LINEAR, linear, tmp_path), linear)
    with pytest.raises(
        ValueError,
        match=r"needs cannot go over a wire .*; expected the model, and the fit, that silos were "
        r"connected with",
    ):
        fed.RemoteMCMC(fed.FSGLD(narrower), num_warmup=0, num_samples=2, progress_bar=False).run(
            random.key(0), remote
        )
    kernel = fed.FSGLD(linear, step_size=lambda i: 1e-3 / (i + 1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(
            ValueError,
            match=r"got function.*step sizes that are numbers or schedules of fed, not functions",
        ):
            fed.RemoteMCMC(kernel, num_warmup=0, num_samples=2, progress_bar=False).run(
                random.key(0), remote
            )
