"""The cache of compiled programs, in a process of its own: this one has a cache already."""

import os
import stat
import subprocess
import sys

import jax

import numpyro_fed as fed

PROGRAM = """
import jax, numpyro_fed as fed
print(fed.enable_compilation_cache())
jax.jit(lambda x: x + 1)(1.0)
"""


def test_programs_are_kept_where_their_owner_alone_reads(tmp_path):
    other = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION")}
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**other, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    place = tmp_path / "numpyro_fed"
    assert told.strip() == str(place)
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert any(file.name.startswith("jit_") for file in place.iterdir())


def test_a_cache_that_is_there_stays(tmp_path):
    there = jax.config.values["jax_compilation_cache_dir"]
    assert str(fed.enable_compilation_cache(tmp_path / "other")) == there
    assert not (tmp_path / "other").exists()
