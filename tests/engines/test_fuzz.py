"""Messages and replies that are not what was sent: some of what tests/benchmarks/fuzz.py sends."""

import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import fuzz

from numpyro_fed.rounds.serialization import pack, unpack

COUNT, SECONDS = 5_000, 1.5  # of each type: as many as there is time for


@pytest.mark.ci
@pytest.mark.parametrize("name", fuzz.SETTINGS)
def test_changed_messages_and_replies(name, tmp_path):
    cases = fuzz.recorded(name, tmp_path)
    assert {"reply" in case.type for case in cases} == {True, False}
    for case in cases:
        assert fuzz.became(case, case.data)[0] in (
            "answered",
            "taken",
        )  # else nothing behind it is reached
        tally = fuzz.fuzz(case, COUNT, 1, SECONDS)
        assert not tally.failures, f"{case.type}: {tally.failures[:3]}"
        assert tally.became["refused"] > tally.count / 5, tally


@pytest.mark.ci
def test_a_run_over_a_silo_whose_replies_are_changed_ends_in_draws_or_words(tmp_path):
    ends = [fuzz.whole_run(tmp_path / str(seed), seed) for seed in range(3)]
    assert all(end == "draws" or end.startswith("refused") for end in ends), ends


def test_mutations_are_of_all_kinds():
    rng, data = np.random.default_rng(0), pack({"a": np.ones(3, np.float32), "b": [1, "text"]})
    made = [fuzz.mutated(rng, data, data) for _ in range(500)]

    def words(changed):
        try:
            return "a value" if unpack(changed) is not None else "nothing"
        except ValueError as error:
            return str(error)

    found = {words(x) for x in made}
    for part in (
        "checksum",
        "text of another length",
        "no JSON",
        "not put together",
        "no known kind",
        "a value",
    ):
        assert any(part in x for x in found), part


@pytest.mark.parametrize(
    ("take", "words"),
    [
        (lambda data: 1 / 0, "raised ZeroDivisionError"),
        (lambda data: None, "returned NoneType"),
        (lambda data: pack({"sum": int(np.ones(20_000_000).sum())}), "took 1.. MiB"),
        (lambda data: time.sleep(9), "took more than 2 s"),
    ],
)
def test_what_is_wrong_is_noticed(take, words, monkeypatch):
    monkeypatch.setattr(fuzz, "LIMIT", 2)
    assert re.match(words, fuzz.became(fuzz.Case("control", b"", [], take), b"")[1])
