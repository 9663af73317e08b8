"""The cache of compiled programs, in a process of its own: this one has a cache already."""

import os
import stat
import subprocess
import sys

import jax
import pytest

import numpyro_fed as fed
from numpyro_fed._compat import stderr_without

PROGRAM = """
import jax, numpyro_fed as fed
print(fed.enable_compilation_cache())
jax.jit(lambda x: x + 1)(1.0)
"""


@pytest.mark.ci
def test_programs_are_kept_where_their_owner_alone_reads(tmp_path):
    other = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION")}
    del other["TF_CPP_MIN_LOG_LEVEL"]  # which would hide XLA's words on a program that it loads
    for _ in range(2):
        told = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**other, "XDG_CACHE_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert told.stderr == ""
    place = tmp_path / "numpyro_fed"
    assert told.stdout.strip() == str(place)
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert any(file.name.startswith("jit_") for file in place.iterdir())


def test_other_words_to_the_standard_error_stay(capfd):
    with stderr_without(b"quiet"):
        os.write(2, b"one\nbe quiet\ntwo\n")
    os.write(2, b"quiet again\n")
    assert capfd.readouterr().err == "one\ntwo\nquiet again\n"


def test_a_cache_that_is_there_stays(tmp_path):
    there = jax.config.values["jax_compilation_cache_dir"]
    assert str(fed.enable_compilation_cache(tmp_path / "other")) == there
    assert not (tmp_path / "other").exists()
