"""Commands of a study of files, from three tables to a netCDF file."""

import shutil

import arviz as az
import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from ssh_keys import make_key

from numpyro_fed.cli.main import main

STUDY = """
import numpyro, numpyro.distributions as dist, numpyro_fed as fed

def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with fed.silo_plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)

svi = fed.ConduciveSFVI(model, fed.AutoSiloNormal(model))
"""
SIZES = {"oslo": 30, "bern": 25, "rome": 20}


def call(*words, code=0, **options):
    done = CliRunner().invoke(main, [str(w) for w in words], **options)
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture
def places(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    (tmp_path / "study.py").write_text(STUDY)
    (tmp_path / "keys").mkdir()
    make_key(tmp_path / "own")
    for name, n in SIZES.items():
        pd.DataFrame({"y": rng.normal(size=n)}).to_csv(f"{name}.csv", index=False)
        shutil.copy(f"{make_key(tmp_path / name)}.pub", f"keys/{name}.pub")
    return tmp_path


def collect(*more, **options):
    return call(
        *("collect", "folder", "--model", "study.py", "--silos", ",".join(SIZES), "--no-wait"),
        *("--keys", "keys", "--key", "own", "--out", "post.nc", *more), **options
    )  # fmt: skip


def answer(name, *more, message="", **options):
    return call(
        *("answer", f"folder/{name}/{message}", "--model", "study.py", "--data", f"{name}.csv"),
        *("--name", name, "--key", name, "--coordinator", "own.pub", *more), **options
    )  # fmt: skip


@pytest.mark.ci
def test_from_tables_to_a_posterior_by_hand(places):
    for _ in range(20):
        text = collect("--check")
        if "posterior written" in text:
            break
        assert "bring the messages to the silos" in text
        for name in SIZES:
            answer(name, "--yes")
    assert "elpd" in text  # each silo was left out
    assert "RoundLocal" in answer_text(places)
    y = np.concatenate([pd.read_csv(f"{n}.csv")["y"] for n in SIZES])
    precision = len(y) + 0.01
    mu = az.from_netcdf("post.nc").posterior["mu"].to_numpy()
    assert abs(mu.mean() - y.sum() / precision) < 4 * precision**-0.5 / mu.size**0.5
    assert mu.std() * precision**0.5 == pytest.approx(1, abs=4 / (2 * mu.size) ** 0.5)


def answer_text(places):
    """Return what a silo reads before it answers a round, from another folder of its own."""
    shutil.copytree("numpyro-fed-oslo", "before")
    for place in sorted((places / "before" / "replies" / "oslo").glob("*"))[3:]:
        place.unlink()
    return answer("oslo", "--folder", "before", input="n", code=1)


def test_bad_input_in_words(places):
    assert "oslo/0001.reply, bern/0001.reply" in collect()
    text = answer("oslo", input="n", code=1)
    assert "Stays here: all rows" in text
    assert "It asks who is there" in text
    assert not (places / "folder" / "oslo" / "0001.reply").exists()
    own = (places / "oslo").read_bytes()
    (places / "oslo").write_text("no key")
    assert "oslo: expected a private key without passphrase" in answer("oslo", "--yes", code=1)
    make_key(places / "another")
    shutil.copy("another", "oslo")  # another key than the coordinator has
    assert "oslo/0001.reply" in answer("oslo", "--yes")
    assert "expected the signature of silo 'oslo', got another's" in collect()
    (places / "oslo").write_bytes(own)
    assert "as before" in answer("oslo", message="0001.msg")
    assert "it needs bern/0001.reply" in collect()
    assert "no message 0002.msg; 1 were answered" in answer("oslo", "--yes", code=1)
    (places / "study.py").write_text(STUDY.replace("(model))", "(model), secure_sum=True)"))
    assert "a check asks for each silo's log likelihood" in collect("--check", code=1)
    (places / "study.py").write_text(STUDY.replace("svi =", "other ="))
    assert "expected svi = fed.ConduciveSFVI(model, fed" in collect(code=1)
