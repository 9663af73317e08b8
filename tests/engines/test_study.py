"""A study in a folder: the same fit as without files, in any order, and what is refused."""

import shutil
import sys
from contextlib import suppress

import jax
import numpy as np
import pytest
from messages import INTERCEPTS, alone
from small_models import intercepts
from ssh_keys import make_key

import numpyro_fed as fed
from numpyro_fed.engines.silo_side import SiloSide
from numpyro_fed.engines.study import NotYet, StudyFolder, write_letter
from numpyro_fed.engines.study_desk import Desk
from numpyro_fed.engines.wire import connect
from numpyro_fed.vi.svi import TOL


def conducive():
    return fed.ConduciveSFVI(intercepts, fed.AutoSiloNormal(intercepts))


@pytest.fixture
def office(tmp_path):
    """Keys, a desk for each silo, and a function that opens the study's folder."""
    keys = tmp_path / "keys"
    keys.mkdir()
    own = make_key(tmp_path / "coordinator")
    desks = {}
    for name in INTERCEPTS.names:
        key = make_key(tmp_path / f"{name}.key")
        shutil.copy(f"{key}.pub", keys / f"{name}.pub")
        side = SiloSide(
            alone(INTERCEPTS, name), intercepts, tmp_path / name, fit=conducive(), own_keys=False
        )
        desks[name] = Desk(side, key, tmp_path / "coordinator.pub")

    def opened(folder="study", names=INTERCEPTS.names, **options):
        return StudyFolder(tmp_path / folder, names, own, keys, pause=0.0, **options)

    return opened, desks, tmp_path


def run(svi, silos):
    return svi.run(jax.random.key(1), 20, silos, tol=TOL, progress_bar=False)


def fit(transport):
    svi = conducive()
    return run(svi, connect(transport, intercepts, fit=svi, server=transport.server))


def answer(desk, folder):
    place = folder / desk.side.name / f"{desk.answered + 1:04d}.msg"
    return desk.answer(desk.read(place), folder) if place.exists() else None


@pytest.mark.ci
def test_a_study_that_is_stopped_at_every_message_is_the_fit_at_hand(office):
    opened, desks, tmp_path = office
    there = fed.RemoteSilos(INTERCEPTS, fed.Loopback(INTERCEPTS))
    expected = run(conducive(), there)
    stops, rng = 0, np.random.default_rng(0)
    while True:  # one silo answers, in any order, and the coordinator starts again
        with suppress(NotYet):
            got = fit(opened(waits=False))
            break
        stops += 1
        assert stops < 40
        for name in rng.permutation(list(desks))[: 1 + stops % 3]:
            answer(desks[name], tmp_path / "study")
    assert stops > 4
    np.testing.assert_array_equal(got.losses, expected.losses)
    for k, v in expected.params.items():
        np.testing.assert_array_equal(got.params[k], v, err_msg=k)


def begun(office):
    """Let the coordinator ask who is there."""
    opened, desks, tmp_path = office
    with pytest.raises(NotYet, match=r"it needs .*0/0001.reply.*; bring the messages"):
        fit(opened(waits=False))
    return opened, desks, tmp_path / "study"


def test_a_message_that_comes_twice_has_the_same_reply(office):
    _, desks, study = begun(office)
    desk = desks["0"]
    first = answer(desk, study).read_bytes()
    count = desk.side.record.place.read_text().count("\n")
    letter = desk.read(study / "0" / "0001.msg")
    assert desk.has_answered(letter)
    assert desk.answer(letter, study).read_bytes() == first
    assert desk.side.record.place.read_text().count("\n") == count
    assert desk.answered == 1


def test_what_a_person_reads_before_it_is_answered(office):
    _, desks, study = begun(office)
    desk = desks["0"]
    text = desk.asked(desk.read(study / "0" / "0001.msg"))
    assert "It asks who is there: it gets the silo's name, numbers of rows" in text
    assert "So far 0 messages were answered, with 0 bytes." in text


def test_messages_that_are_refused(office):
    opened, desks, study = begun(office)
    place, desk = study / "0" / "0001.msg", desks["0"]
    with pytest.raises(ValueError, match="a message to silo '1', got one to '0'"):
        desks["1"].read(place)
    whole = place.read_bytes()
    place.write_bytes(whole[:-10])
    with pytest.raises(ValueError, match=r"0001.msg: expected \d+ bytes of data, got .*cut off"):
        desk.read(place)
    place.write_bytes(whole)
    make_key(study.parent / "other")
    stranger = Desk(desk.side, desk.key, study.parent / "other.pub")
    with pytest.raises(ValueError, match="the signature of the coordinator, got another's"):
        stranger.read(place)
    coordinator = study.parent / "coordinator"
    for number in (0, -1):
        odd = write_letter(study, desk.read(place)._replace(number=number), coordinator)
        with pytest.raises(ValueError, match=rf"expected message 1, got {number}; answer them in"):
            desk.read(odd)
    answer(desk, study)
    with pytest.raises(NotYet):
        fit(opened("another", waits=False))
    with pytest.raises(ValueError, match=r"expected a message of study \w+, got one of \w+; a new"):
        desk.read(study.parent / "another" / "0" / "0001.msg")
    for name in ("1", "2"):
        answer(desks[name], study)
    with pytest.raises(NotYet):
        fit(opened(waits=False))
    fresh = SiloSide(alone(INTERCEPTS, "0"), intercepts, study.parent / "new", fit=conducive())
    with pytest.raises(ValueError, match=r"0002.msg: expected message 1, got 2; answer them in"):
        Desk(fresh, desk.key, desk.coordinator).read(study / "0" / "0002.msg")


def test_replies_that_are_refused_are_waited_for_again(office):
    opened, desks, study = begun(office)
    said = []
    places = {name: answer(desks[name], study) for name in desks}
    good = places["0"].read_bytes()
    for bad, why in (
        (places["1"].read_bytes(), "expected the signature of silo '0'"),
        (good[:-3], "it was cut off"),
        (b"", "or the beginning of one"),
    ):
        places["0"].write_bytes(bad)
        with pytest.raises(NotYet, match=r"it needs 0/0001.reply in .*; bring"):
            fit(opened(waits=False, say=said.append))
        assert why in said[-1]
    places["0"].write_bytes(good)
    with pytest.raises(NotYet, match=r"0/0002.reply"):  # the first ones are there
        fit(opened(waits=False))
    shutil.copy(places["0"], study / "0" / "0002.reply")
    with pytest.raises(NotYet):
        fit(opened(waits=False, say=said.append))
    assert "expected number 2, got 1; it answers another message" in said[-1]


def test_without_cryptography_the_extra_is_named(office, monkeypatch):
    opened, desks, tmp_path = office
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.serialization", None)
    with pytest.raises(ImportError, match=r'pip install "numpyro-fed\[privacy\]"'):
        opened("new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(ImportError, match="privacy"):
        Desk(desks["0"].side, desks["0"].key, desks["0"].coordinator)


def test_another_run_in_the_same_folder_is_refused(office):
    opened, desks, study = begun(office)
    for desk in desks.values():
        answer(desk, study)
    with pytest.raises(NotYet):
        connect(opened(waits=False), intercepts, fit=conducive(), server=1)
    with pytest.raises(ValueError, match=r"0002.msg is another message than this run's"):
        connect(opened(waits=False), intercepts, fit=conducive(), server=2)
    with pytest.raises(ValueError, match=r"expected the silos \['0'\], got a study of"):
        opened(names=["0"])
    (study.parent / "keys" / "2.pub").unlink()
    with pytest.raises(ValueError, match=r"no files .*2.pub.*expected each silo's public key"):
        opened()
