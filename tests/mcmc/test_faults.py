"""Costs of faults: errors in replies, full disks, and two servers.

Also silos that lie, or send numbers that are not finite.
"""

import errno
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from jax import random
from small_models import linear, linear_silos

import numpyro_fed as fed
from numpyro_fed.mcmc import remote_chains
from numpyro_fed.mcmc.pilot import PilotLocal
from numpyro_fed.mcmc.remote_chains import VisitLocal
from numpyro_fed.rounds import files
from numpyro_fed.rounds.checkpoint import Checkpoint
from numpyro_fed.rounds.driver import Run, Slots, drive
from numpyro_fed.rounds.files import locked, read_sealed, write_sealed
from numpyro_fed.surrogates.laplace import LaplaceLocal
from numpyro_fed.surrogates.local_score import ScoreLocal
from numpyro_fed.vi.remote import RoundLocal

LINEAR = linear_silos()
NAMES = LINEAR.names


class Lying(fed.Loopback):
    """Carrier that changes one silo's replies to one kind of call, from the n-th question on."""

    def __init__(self, kind, lie, silo=1, after=0):
        super().__init__(LINEAR)
        self.kind, self.lie, self.silo, self.left = kind, lie, silo, after
        self.asked = 0

    def ask(self, calls):
        replies = super().ask(calls)
        self.asked += 1
        if isinstance(calls[0].local, self.kind):
            self.left -= 1
            if self.left < 0:
                return [
                    self.lie(x) if c.number == self.silo else x
                    for c, x in zip(calls, replies, strict=True)
                ]
        return replies


def run(carrier=None, samples=20, kernel=None, **options):
    mcmc = fed.RemoteMCMC(
        kernel or fed.FSGLD(linear),
        num_warmup=2,
        num_samples=samples,
        num_chains=2,
        progress_bar=False,
        **options,
    )
    mcmc.run(random.key(3), fed.RemoteSilos(LINEAR, carrier or fed.Loopback(LINEAR)))
    return np.asarray(mcmc.get_samples(group_by_chain=True)["beta"])


@pytest.fixture(scope="module")
def expected():
    return run()


# Files


def test_sealed_files_say_what_is_wrong(tmp_path):
    place = tmp_path / "a file"
    with pytest.raises(ValueError, match="a file: expected a slot file, got none"):
        read_sealed(place, "slot")
    write_sealed(place, b"some data", "slot")
    assert read_sealed(place, "slot") == b"some data"
    assert [x.name for x in tmp_path.iterdir()] == ["a file"]
    whole = place.read_bytes()
    for data, kind, said in (
        (whole, "open", "expected a open file, got a slot file"),
        (whole[:-1], "slot", "expected 9 bytes of data, got 8; it was cut off"),
        (whole[:-1] + b"b", "slot", "another: it was changed"),
        (whole.replace(b"file\x01", b"file\x02"), "slot", "version 1, got version 2"),
        (b"something else", "slot", "got 14 bytes of something else"),
        (b"", "slot", "got 0 bytes of something else"),
    ):
        place.write_bytes(data)
        with pytest.raises(ValueError, match=said):
            read_sealed(place, kind)


def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    place = tmp_path / "a file"
    write_sealed(place, b"before", "slot")
    monkeypatch.setattr(files.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_sealed(place, b"after", "slot")
    assert read_sealed(place, "slot") == b"before"
    assert [x.name for x in tmp_path.iterdir()] == ["a file"]


def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


# Checkpoints


def test_a_full_disk_is_spoken_of_once_and_costs_no_draw(expected, tmp_path, monkeypatch):
    place = tmp_path / "run.ckpt"
    monkeypatch.setattr(files.os, "fsync", full_disk)
    with pytest.warns(
        UserWarning, match=r"run\.ckpt: the checkpoint could not be written .*No space"
    ) as said:
        got = run(checkpoint=place, checkpoint_every=3)
    assert len(said) == 1
    assert not place.exists()
    np.testing.assert_array_equal(got, expected)


class Killed(BaseException):
    pass


class FullFrom(fed.Loopback):
    """The disk is full from a round on, and the server is killed later."""

    def __init__(self, silos, monkeypatch, full, dies):
        super().__init__(silos)
        self.patch, self.full, self.dies, self.stays = monkeypatch, full, dies, 0

    def ask(self, calls):
        self.stays += isinstance(calls[0].local, VisitLocal)
        if self.stays == self.full:
            self.patch.setattr(files.os, "fsync", full_disk)
        if self.stays == self.dies:
            raise Killed
        return super().ask(calls)


@pytest.mark.ci
def test_silos_keep_what_the_last_checkpoint_needs_while_the_disk_is_full(tmp_path, monkeypatch):
    from small_models import intercepts, intercepts_silos

    silos, place = intercepts_silos(), tmp_path / "run.ckpt"
    kernel = fed.FSGLD(intercepts)

    def one(carrier, place=None):
        mcmc = fed.RemoteMCMC(
            kernel,
            num_warmup=0,
            num_samples=20,
            progress_bar=False,
            checkpoint=place,
            checkpoint_every=4,
        )
        mcmc.run(random.key(3), fed.RemoteSilos(silos, carrier))
        return np.asarray(mcmc.get_samples()["mu"])

    expected = one(fed.Loopback(silos))
    carrier = FullFrom(silos, monkeypatch, full=6, dies=15)
    with monkeypatch.context() as patch:
        carrier.patch = patch
        with pytest.warns(UserWarning, match="could not be written"), pytest.raises(Killed):
            one(carrier, place)
    carrier.full = carrier.dies = -1
    np.testing.assert_array_equal(one(carrier, place), expected)


def test_slots_are_forgotten_when_neither_run_nor_checkpoint_needs_them(tmp_path):
    carrier, forgotten = fed.Loopback(LINEAR), []
    theirs = carrier.new_slot()
    carrier.forget = lambda slots: forgotten.extend(slots)
    slots = Slots(carrier, Checkpoint(tmp_path / "run.ckpt", 2))
    left = []  # forgotten after each round

    def step(run):
        left.append(list(forgotten))
        new, _ = carrier.new_slot(), carrier.new_slot()  # the second is of a reply that was lost
        if run.made == 4:
            raise RuntimeError("broken")
        return run.after(None, np.array([new]))

    run, error = drive(Run(None, np.array([theirs])), step, 9, slots=slots, progress_bar=False)
    assert (run.made, run.slots.tolist(), str(error)) == (4, [7], "broken")
    # slot 3 is in the checkpoint of two rounds, until that of four has slot 7
    assert left == [[], [2], [2, 1, 4], [2, 1, 4, 6], [2, 1, 4, 6, 3, 5, 8]]
    assert forgotten == [*left[-1], 9, 10]


def test_the_second_server_on_a_checkpoint_asks_nothing(tmp_path):
    place = tmp_path / "run.ckpt"
    carrier = Lying(VisitLocal, lambda reply: reply)
    svi = fed.SFVI(linear, fed.AutoSiloNormal(linear), optax.adam(0.05), validate=False)
    with locked(place):
        with pytest.raises(
            ValueError, match=r"run\.ckpt: expected it free, got one that another process uses"
        ):
            run(carrier, checkpoint=place)
        with pytest.raises(ValueError, match=r"run\.ckpt: expected it free"):
            svi.run(
                random.key(0),
                3,
                fed.RemoteSilos(LINEAR, carrier),
                progress_bar=False,
                checkpoint=place,
            )
    assert carrier.asked == 0
    run(carrier, checkpoint=place)  # the control: free again
    assert carrier.asked > 0


# Replies


def nan(reply):
    return jax.tree.map(lambda x: np.full_like(x, np.nan) if x.dtype.kind == "f" else x, reply)


def raised(reply):
    raise SyntaxError("no such type")


def test_no_error_costs_the_draws(expected):
    with pytest.warns(
        UserWarning,
        match=r"interrupted \(SyntaxError: no such type.*\): the first \d+ draws are kept",
    ):
        got = run(Lying(VisitLocal, raised, after=8))
    assert 6 <= got.shape[1] < 20
    np.testing.assert_array_equal(got, expected[:, : got.shape[1]])
    with pytest.raises(SyntaxError):  # before there is any
        run(Lying(VisitLocal, raised, after=0))


def test_no_error_costs_the_rounds_of_a_fit():
    svi = fed.SFVI(linear, fed.AutoSiloNormal(linear), optax.adam(0.05))

    def fit(carrier, rounds=8):
        return svi.run(random.key(1), rounds, fed.RemoteSilos(LINEAR, carrier), progress_bar=False)

    with pytest.warns(
        UserWarning,
        match="SyntaxError: no such type.*, in round 4: the result of the first 3 rounds",
    ):
        got = fit(Lying(RoundLocal, raised, after=3))
    assert "SyntaxError" in got.stopped
    np.testing.assert_array_equal(got.losses, fit(fed.Loopback(LINEAR), 3).losses)
    with pytest.raises(SyntaxError):
        fit(Lying(RoundLocal, raised, after=0))


@pytest.mark.filterwarnings("ignore:q has not converged")
@pytest.mark.parametrize("algorithm", ["sfvi", "sfvi_avg", "conducive"])
def test_nan_in_a_fit_that_is_said_to_be_finite_names_its_silo(algorithm):
    guide = fed.AutoSiloNormal(linear)
    svi = {
        "sfvi": lambda: fed.SFVI(linear, guide, optax.adam(0.05), validate=False),
        "sfvi_avg": lambda: fed.SFVIAvg(
            linear, guide, optax.adam(0.05), num_local_steps=2, validate=False
        ),
        "conducive": lambda: fed.ConduciveSFVI(linear, guide, validate=False),
    }[algorithm]()
    remote = fed.RemoteSilos(
        LINEAR,
        Lying(
            RoundLocal, lambda reply: nan(reply)._replace(finite=np.array(True)), silo=2, after=1
        ),
    )
    with pytest.warns(UserWarning, match="not finite in round 2, first in silo 'silo 2'"):
        svi.run(random.key(1), 4, remote, progress_bar=False)


def far(reply):
    chain, stats = reply
    return chain._replace(theta=np.full_like(chain.theta, 1e30)), stats


def test_a_position_that_is_absurdly_far_is_not_taken(monkeypatch):
    said = (
        r"silo 'silo 1' returned positions farther than 1,000 sds \d+ times; these visits count "
        r"as not answered"
    )
    with (
        pytest.warns(UserWarning, match=said),
        pytest.warns(UserWarning, match="answered unequally often"),
    ):
        got = run(Lying(VisitLocal, far))
    assert np.abs(got).max() < 10
    said = (
        r"silo 'silo 1' returned positions more than 1,000,000 times as far as they had been \d+ "
        r"times"
    )
    with (
        pytest.warns(UserWarning, match=said),
        pytest.warns(UserWarning, match="answered unequally often"),
    ):
        got = run(Lying(VisitLocal, far), kernel=fed.DSGLD(linear, step_size=0.01))
    assert np.abs(got).max() < 10
    monkeypatch.setattr(remote_chains, "_wrong", lambda *_: None)  # the control: it would be taken
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not np.abs(run(Lying(VisitLocal, far))).max() < 1e20


# Before the first round


@pytest.mark.parametrize("kind", [ScoreLocal, LaplaceLocal, PilotLocal])
def test_nan_while_a_fit_is_prepared_names_its_silo(kind):
    kernel = fed.FSGLD(linear, surrogate="laplace" if kind is LaplaceLocal else "score")
    with pytest.raises(ValueError, match=r"silo 'silo 2'.*expected finite"):
        run(Lying(kind, nan, silo=2), kernel=kernel)


def times(factor):
    return lambda x: x._replace(
        shift=factor * np.asarray(x.shift), precision=factor * np.asarray(x.precision)
    )


@pytest.mark.parametrize("kind", [ScoreLocal, LaplaceLocal])
def test_a_surrogate_that_its_own_values_contradict_names_its_silo(kind):
    kernel = fed.FSGLD(linear, surrogate="laplace" if kind is LaplaceLocal else "score")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such surrogates do not converge
        with pytest.raises(
            ValueError,
            match="silo 'silo 2' returned a surrogate that its own log likelihood contradicts",
        ):
            run(Lying(kind, times(1e6), silo=2), kernel=kernel)
    run(
        Lying(kind, times(1.0), silo=2), kernel=kernel, samples=2
    )  # the control: it is the lie that is refused


# Kills


@pytest.mark.ci
def test_killed_at_random_moments():
    script = Path(__file__).parents[1] / "benchmarks" / "faults.py"
    done = subprocess.run(
        [sys.executable, script, "--trials", "2", "--rounds", "20"],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
