"""The commands: what a silo is shown, what is refused, and with which text.

Also a federation of processes, one of which is killed.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import click
import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

import numpyro_fed as fed
from numpyro_fed.cli.main import main
from numpyro_fed.cli.model_file import load_model_file, silo_of_file

MODEL = """
import numpyro, numpyro.distributions as dist, numpyro_fed as fed, numpy as np

def model(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 2.5).expand([x.shape[-1]]).to_event(1))
    with fed.silo_plate("patients", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)

def silo(table):
    x = table[["age", "chol"]].to_numpy(np.float32)
    return {"x": x, "y": table["disease"].to_numpy(np.float32)}
"""
PLAIN = """
import numpyro, numpyro.distributions as dist, numpyro_fed as fed

def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 2.5))
    with fed.silo_plate("patients", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)
"""
SVI = "svi = fed.ConduciveSFVI(model, fed.AutoSiloNormal(model))\n"
SIZES = {"oslo": 37, "rome": 61, "bern": 23}


@pytest.fixture
def study(tmp_path):
    """Write a model file, and three silos' tables."""
    (tmp_path / "study.py").write_text(MODEL)
    (tmp_path / "plain.py").write_text(PLAIN)
    rng = np.random.default_rng(0)
    for name, n in SIZES.items():
        x = rng.normal(size=(n, 2))
        disease = rng.random(n) < 1 / (1 + np.exp(-x @ [1.0, -0.5]))
        table = pd.DataFrame({"age": x[:, 0], "chol": x[:, 1], "disease": disease.astype(int)})
        table.to_csv(tmp_path / f"{name}.csv", index=False)
    return tmp_path


def inline_rounds(study, method="", model=MODEL):
    """Return the study's module with the method in its file, and its silos in this process."""
    (study / "study.py").write_text(model + method)
    module = load_model_file(study / "study.py")
    tables = {name: silo_of_file(module, name, study / f"{name}.csv")[name] for name in SIZES}
    return module, fed.Silos(
        {name: {k: np.asarray(v) for k, v in t.items()} for name, t in tables.items()}
    )


def silo(study, *options, model="study.py", data="oslo.csv", **given):
    command = ["silo", "--model", str(study / model), "--data", str(study / data), "--name", "oslo"]
    return CliRunner().invoke(
        main, [*command, "--folder", str(study / "private"), *options], **given
    )


def test_a_silo_is_shown_what_will_leave(study):
    found = silo(study, "--check")
    assert found.exit_code == 0, found.output
    assert "Silo 'oslo': 37 rows of" in found.output
    assert re.search(r"VisitLocal +The silo sends a chain's position", found.output)
    assert "2 global parameters" in found.output


@pytest.mark.parametrize(
    ("line", "shown", "hidden"),
    [
        ("", ["VisitLocal", "ScoreLocal"], ["RoundLocal", "NodeLocal", "Masked", "noise:"]),
        (f"{SVI}", ["RoundLocal", "EstimateLocal"], ["VisitLocal", "Masked", "noise:"]),
        (
            "import optax\nnoise = fed.Privacy(epsilon=8, delta=1e-5, clip=1.0, num_rounds=50)\n"
            "svi = fed.SFVI(model, fed.AutoSiloNormal(model), optax.adam(0.1), privacy=noise, "
            "secure_sum=True)",
            [
                "RoundLocal",
                "With noise: epsilon 8, delta 1e-05, spent after 50 rounds",
                "Masked: of the answers",
            ],
            ["VisitLocal", "ScoreLocal", "EstimateLocal"],
        ),
    ],
    ids=["chains", "fit", "closed fit"],
)
def test_a_silo_is_shown_what_its_study_asks(study, line, shown, hidden):
    (study / "study.py").write_text(f"{MODEL}\n{line}\n")
    found = silo(study, "--check")
    assert found.exit_code == 0, found.output
    for words in shown:
        assert words in found.output
    for words in hidden:
        assert words not in found.output


def test_columns_are_arguments_where_the_model_file_says_nothing(study):
    pd.DataFrame({"y": [1.5, 2.0, 0.1], "other": ["a", "b", "c"]}).to_csv(
        study / "y.csv", index=False
    )
    found = silo(
        study, "--check", "--min-rows", "0", "--max-parameters", "0", model="plain.py", data="y.csv"
    )
    assert found.exit_code == 0, found.output
    assert "3 rows" in found.output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x,y\n1,2,3\n1,2,3\n", "Length of header or names does not match"),
        ("x,y,x\n1,2,3\n", "its header has 'x' twice"),
    ],
    ids=["a field more than names", "a name twice"],
)
def test_tables_whose_columns_have_no_one_name_are_refused(study, text, words):
    """By default pandas takes the first field for the rows' names, and renames columns."""
    (study / "y.csv").write_text(text)
    found = silo(study, "--check", model="plain.py", data="y.csv")
    assert found.exit_code == 1
    assert words in found.output


def test_a_model_file_sees_the_allowed_columns_and_nothing_beside_them(tmp_path):
    """An index of a Parquet file, and its attrs, are columns that nobody allowed."""
    table = pd.DataFrame({"y": np.arange(12.0), "age": np.arange(30.0, 42.0)}).set_index("age")
    table.attrs["ages"] = list(range(30, 42))
    table.to_parquet(tmp_path / "data.parquet")
    (tmp_path / "study.py").write_text(
        "def silo(table):\n    SEEN.append(table)\n    return {'y': table['y'].to_numpy()}\n"
        "SEEN = []\ndef model(y): pass\n"
    )
    module = load_model_file(tmp_path / "study.py")
    for columns in (None, ("y",)):
        silo_of_file(module, "oslo", tmp_path / "data.parquet", columns)
    everything, allowed = module.SEEN
    assert everything.index[0] == 30  # the control
    assert (list(allowed), list(allowed.index), allowed.attrs) == (["y"], list(range(12)), {})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "guard min_rows: silo 'oslo' has 3 rows of 'y'; expected at least 10"),
        (
            ("--min-rows", "0"),
            "guard max_parameters_per_row: the model has 1 global parameters for 3 rows",
        ),
        (("--columns", "other"), "guard columns: the study wants 'y' of"),
        (("--columns", "y,z"), "guard columns: .* has no columns"),
        (("--ceiling", "VisitLocal"), "--ceiling VisitLocal: expected KIND=N"),
    ],
)
def test_guards_and_ceilings_of_the_command(study, options, words):
    pd.DataFrame({"y": [1.5, 2.0, 0.1], "other": ["a", "b", "c"]}).to_csv(
        study / "y.csv", index=False
    )
    found = silo(study, "--check", *options, model="plain.py", data="y.csv")
    assert found.exit_code == 1
    assert re.search(words, found.output), found.output


def test_ceilings_are_shown(study):
    found = silo(study, "--check", "--ceiling", "VisitLocal=77")
    assert found.exit_code == 0, found.output
    assert "(at most 77 times; 0 so far)" in found.output
    assert (
        "Guards passed: Guards(min_rows=10, min_level_rows=3, max_parameters_per_row=0.1"
        in found.output
    )


def test_nothing_is_sent_before_yes(study):
    found = silo(study, "--server", "127.0.0.1:1", "--ca", str(study / "study.py"), input="n\n")
    assert found.exit_code == 1
    assert "Take part as 'oslo', at 127.0.0.1:1? [y/N]" in found.output
    assert "Aborted" in found.output
    # as a service, where nobody can answer
    found = silo(study, "--server", "127.0.0.1:1", "--ca", str(study / "study.py"), input="")
    assert found.exit_code == 1
    assert "nobody answered; without a terminal, give --yes" in found.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": "plain.csv", "model": "plain.py"}, "does not exist"),
        (
            {"data": "oslo.csv", "model": "plain.py"},
            "it has no column 'y'; it has ['age', 'chol', 'disease']",
        ),
        ({"data": "text.csv", "model": "plain.py"}, "column 'y' holds"),
        ({"data": "bytes.parquet"}, "expected a table in CSV or Parquet"),
        ({"model": "nothing.py"}, "it has no function model"),
    ],
    ids=["no file", "no column", "words", "no table", "no model"],
)
def test_bad_files_are_named(study, arguments, message):
    (study / "nothing.py").write_text("x = 1\n")
    pd.DataFrame({"y": ["a", "b"]}).to_csv(study / "text.csv", index=False)
    (study / "bytes.parquet").write_bytes(b"no table")
    found = silo(study, "--check", **arguments)
    assert found.exit_code != 0
    assert message in " ".join(found.output.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--server": "https://rome/:99"}, "--server https://rome/:99: expected host:port"),
        ({"--give-up": "-5"}, "Invalid value for '--give-up'"),
        ({"--ceiling": "VisitLocal=²"}, "--ceiling VisitLocal=²: expected KIND=N"),
        ({}, "study.py: expected a certificate in PEM"),
        ({"--key": "study.py"}, "study.py: expected a private key in OpenSSH's format"),
    ],
)
def test_a_silo_is_told_before_it_connects(study, options, message):
    pytest.importorskip("flwr")
    given = {"--server": "127.0.0.1:1", "--ca": str(study / "study.py"), **options}
    if "--key" in given:
        given["--key"] = str(study / given["--key"])
    found = silo(study, "--yes", *(x for pair in given.items() for x in pair))
    assert found.exit_code != 0
    assert message in " ".join(found.output.split())


def test_a_silo_needs_a_server_or_check(study):
    found = silo(study)
    assert found.exit_code == 2
    assert "expected --server and --ca, or --check" in found.output


def test_a_missing_extra_says_which_to_install(study, monkeypatch):
    for name in [n for n in sys.modules if n.startswith("numpyro_fed.engines.flower")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("numpyro_fed.engines.flower", raising=False)
    monkeypatch.setitem(sys.modules, "flwr.app", None)
    found = silo(study, "--server", "127.0.0.1:1", "--ca", str(study / "study.py"), "--yes")
    assert found.exit_code == 1
    assert 'pip install "numpyro-fed[flower]"' in found.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--silos", "oslo,oslo", "--keys", "."], "expected each name once"),
        (["--silos", "oslo,rome", "--keys", "."], "server.key"),
        (["--silos", "oslo", "--keys", "."], "oslo.pub"),
        (["--silos", "oslo"], "Missing option '--keys'"),
    ],
)
def test_the_coordinator_is_told_what_is_missing(study, options, message):
    base = [
        "run",
        "--model",
        str(study / "study.py"),
        "--tls",
        str(study),
        "--out",
        str(study / "fit.nc"),
    ]
    found = CliRunner().invoke(main, [*base, *options])
    assert found.exit_code in (1, 2)
    assert message in found.output


@pytest.mark.ci
def test_the_method_is_the_model_files(study):
    pytest.importorskip("flwr")
    from jax import random

    from numpyro_fed.cli.coordinator import posterior

    told, checkpoint = (
        {"chains": 2, "warmup": 5, "samples": 50, "rounds": 0, "seed": 3},
        study / "checkpoint",
    )
    module, silos = inline_rounds(study)
    found, words = posterior(
        module, fed.RemoteSilos(silos, fed.Loopback(silos)), told, study / "chains"
    )
    assert found.posterior["beta"].shape == (2, 50, 2)
    assert "kB up" in words
    module, silos = inline_rounds(study, SVI)
    remote = fed.RemoteSilos(silos, fed.Loopback(silos))
    found, words = posterior(module, remote, told, checkpoint)
    assert "Pareto's k" in words
    key_rounds, key_draws = random.split(random.key(3))
    result = module.svi.run(key_rounds, 1000, remote, tol=1e-3, progress_bar=False)
    assert words.startswith(f"q(theta) converged in {len(result.losses)} conducive rounds")
    expected = fed.to_inference_data(
        module.svi, result, remote, num_draws=100, rng_key=key_draws, resample=True
    )
    np.testing.assert_array_equal(found.posterior["beta"], expected.posterior["beta"])
    again, same = posterior(
        module, remote, told, checkpoint
    )  # it has converged, and makes no further round
    np.testing.assert_array_equal(again.posterior["beta"], found.posterior["beta"])
    assert same == words


@pytest.mark.ci
def test_a_fit_whose_weights_fail_goes_on(study, monkeypatch):
    """Its silos answer the calls of HMC, too; those of a fit with sums alone do not."""
    from numpyro_fed.cli.posterior import posterior
    from numpyro_fed.front import steps

    monkeypatch.setattr(steps, "POOR", -10.0)  # no k is good enough
    module, silos = inline_rounds(study, SVI)
    told = {"chains": 2, "samples": 50, "rounds": 0, "seed": 3}
    words = posterior(module, fed.RemoteSilos(silos, fed.Loopback(silos)), told)[1]
    assert "(unsound, so chains went on); HMC with latents integrated out" in words
    rounds = int(re.search(r"chains of \d+ draws, ([\d,]+) rounds", words)[1].replace(",", ""))
    (line,) = [line for line in words.splitlines() if line.startswith("oslo ")]
    assert int(line.split()[1].replace(",", "")) > rounds  # those before count, too
    assert "LeapfrogLocal" in silo(study, "--check").output
    sums = SVI.replace("(model))", "(model), secure_sum=True)")
    (study / "study.py").write_text(MODEL + sums)
    assert "LeapfrogLocal" not in silo(study, "--check").output


@pytest.mark.ci
def test_hmc_is_a_kernel_of_a_study(study):
    from numpyro_fed.cli.posterior import posterior

    module, silos = inline_rounds(study, "kernel = fed.HMC(model)\n")
    told = {"chains": 2, "warmup": 20, "samples": 30, "seed": 3}
    found = posterior(module, fed.RemoteSilos(silos, fed.Loopback(silos)), told)[0]
    assert found.posterior["beta"].shape == (2, 30, 2)
    shown = silo(study, "--check").output
    assert "LeapfrogLocal" in shown
    assert "VisitLocal" not in shown


class Leaving(fed.Loopback):
    """A silo that is not there any more after some rounds."""

    rounds = 0

    def ask(self, calls):
        replies = super().ask(calls)
        self.rounds += type(calls[0].local).__name__ == "RoundLocal"
        return [
            None if self.rounds > 2 and c.number == 1 else r
            for c, r in zip(calls, replies, strict=True)
        ]


# twelve rounds are too few for a q that its k lets pass
@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:Pareto's k:UserWarning")
def test_a_fit_that_breaks_off_is_no_result(study):
    pytest.importorskip("flwr")
    from numpyro_fed.cli.coordinator import posterior

    line = "import optax\nsvi = fed.SFVI(model, fed.AutoSiloNormal(model), optax.adam(0.1))\n"
    module, silos = inline_rounds(study, line)
    told = {"chains": 1, "warmup": 0, "samples": 50, "rounds": 12, "seed": 3}
    with (
        pytest.warns(UserWarning, match="did not answer"),
        pytest.raises(
            RuntimeError,
            match=r"silos \['rome'\] did not answer, asked 5 times, in round 3; started again",
        ),
    ):
        posterior(module, fed.RemoteSilos(silos, Leaving(silos)), told, study / "fit")
    found, words = posterior(
        module, fed.RemoteSilos(silos, fed.Loopback(silos)), told, study / "fit-2"
    )
    assert words.startswith("12 rounds")
    assert found.posterior["beta"].shape == (1, 50, 2)


@pytest.mark.ci
def test_a_network_and_public_sites(study):
    pytest.importorskip("flwr")
    from numpyro_fed.cli.coordinator import posterior

    public = MODEL.replace(
        "    with fed", "    numpyro.sample('c', dist.Normal(beta[0], 1), obs=0.5)\n    with fed"
    )
    line = "\nkernel = fed.PushSumLangevin(model, fed.graphs.complete(3), 0.001, public=('c',))\n"
    module, silos = inline_rounds(study, line, public)
    found = silo(study, "--check")
    assert found.exit_code == 0, found.output
    told = {"chains": 3, "warmup": 5, "samples": 20, "rounds": 0, "seed": 3}
    drawn, _ = posterior(
        module, fed.RemoteSilos(silos, fed.Loopback(silos)), told, study / "network"
    )
    assert drawn.posterior.node.values.tolist() == list(SIZES)
    options = ["--model", str(study / "study.py"), "--silos", ",".join(SIZES), "--tls", str(study)]
    options += ["--keys", str(study)]
    found = CliRunner().invoke(main, ["run", *options, "--out", str(study / "fit.nc")])
    assert "--chains 4: a network has one per silo; expected a multiple of 3" in found.output


@pytest.mark.ci
def test_a_fit_with_privacy_has_no_k(study):
    pytest.importorskip("flwr")
    from numpyro_fed.cli.coordinator import posterior

    line = (
        "import optax\nnoise = fed.Privacy(epsilon=8, delta=1e-5, clip=1.0, num_rounds=5)\n"
        "svi = fed.SFVI(model, fed.AutoSiloNormal(model), optax.adam(0.1), privacy=noise)\n"
    )
    module, silos = inline_rounds(study, line)
    told = {"chains": 1, "warmup": 0, "samples": 20, "rounds": 0, "seed": 3}
    found, words = posterior(
        module, fed.RemoteSilos(silos, fed.Loopback(silos)), told, study / "fit"
    )
    assert words.startswith("5 rounds\n")
    assert "epsilon 8" in words
    assert found.posterior["beta"].shape == (1, 20, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("x @ beta), obs=y", "x @ beta), obs=y - 5"), "-inf"),
        (("table.size", "table.nothing"), "silo(table) of"),
        (("return {", "return 3; return {"), "gave int; expected a dict of the model's arguments"),
        (
            ('y": table["disease"].to_numpy(np.float32)', 'y": np.ones(9, np.float32)'),
            "the model fails on the rows of a silo",
        ),
    ],
    ids=["outside the support", "error", "no dict", "other length"],
)
def test_a_table_that_the_fit_would_refuse_is_refused_at_once(study, change, message):
    text = MODEL.replace("    return {", "    table.size\n    return {")
    (study / "study.py").write_text(text.replace(*change))
    found = silo(study, "--check")
    assert found.exit_code == 1, found.output
    assert message in " ".join(found.output.split())


def test_what_a_killed_coordinator_left_is_ended(tmp_path, capsys):
    pytest.importorskip("flwr")
    from numpyro_fed.cli.coordinator import end_former

    sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
    former = subprocess.Popen([*sleeping, "flower-superlink"])
    other = subprocess.Popen(sleeping)  # its number was a former run's
    try:
        (tmp_path / "link").write_text(str(former.pid))
        (tmp_path / "process").write_text(str(other.pid))
        end_former(tmp_path)
        assert former.wait(5) == -signal.SIGTERM
        assert other.poll() is None
        said = capsys.readouterr().err
        assert said == f"ending flower-superlink of a former run, process {former.pid}\n"
    finally:
        for process in (former, other):
            process.kill()
            process.wait()


def test_a_run_that_goes_on_is_not_ended(study, tmp_path):
    pytest.importorskip("flwr")
    from numpyro_fed.cli.run import coordinated
    from numpyro_fed.rounds.files import locked

    with (
        locked(tmp_path / "run"),
        pytest.raises(click.ClickException, match="got one that another process uses"),
    ):
        coordinated(study / "study.py", ["oslo"], study, study, tmp_path, {})


def test_a_bar_is_kept_for_who_waits(tmp_path):
    pytest.importorskip("flwr")
    from numpyro_fed.cli.coordinator import Bar

    bar = Bar(tmp_path / "progress")
    for text in ("\r  0%| | 0/40", "\r 10%|#| 4/40", "\n", "a warning\n"):
        bar.write(text)
    assert (tmp_path / "progress").read_text() == "10%|#| 4/40"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--address": "nonsense"}, "expected host:port"),
        ({"--silos": "oslo,,rome"}, "the silo's name ''"),
        ({"--out": "study.py"}, "expected a netCDF file"),
        ({"--rounds": "600"}, "--rounds 600: the study's budget of privacy is for 5"),
        ({"--silos": "oslo,rome"}, "wants three silos at least, got 2"),
        ({"--patience": "-3"}, "Invalid value for '--patience'"),
    ],
)
def test_the_coordinator_is_told_at_once(study, options, message):
    line = (
        "import optax\nnoise = fed.Privacy(epsilon=8, delta=1e-5, clip=1.0, num_rounds=5)\n"
        "svi = fed.SFVI(model, fed.AutoSiloNormal(model), optax.adam(0.1), privacy=noise, "
        "secure_sum=True)\n"
    )
    inline_rounds(study, line)
    for name in ("server.crt", "server.key", "ca.crt", *(f"{name}.pub" for name in SIZES)):
        (study / name).write_text("")
    given = {
        "--model": study / "study.py",
        "--silos": ",".join(SIZES),
        "--tls": study,
        "--out": study / "fit.nc",
    }
    given |= {"--keys": study, **options}
    found = CliRunner().invoke(main, ["run", *(str(x) for pair in given.items() for x in pair)])
    assert found.exit_code != 0
    assert message in found.output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("kernel = fed.SGLD(model, 0.1)", "kernel: expected fed.FSGLD, fed.DSGLD, fed.HMC"),
        (
            "import nowhere_to_be_found",
            "study.py: ModuleNotFoundError: No module named 'nowhere_to_be_found'",
        ),
        ("svi = fed.SFVI(model, fed.AutoSiloNormal(model), 3)", "study.py: TypeError"),
        (
            "svi = fed.AutoSiloNormal(model)",
            "svi: expected fed.SFVI, fed.SFVIAvg or fed.ConduciveSFVI of this file's model, got",
        ),
        (
            "other = lambda x, y: None\nsvi = fed.ConduciveSFVI(other, fed.AutoSiloNormal(other))",
            "this file's model",
        ),
        ("kernel = fed.FSGLD", "kernel: expected fed.FSGLD, fed.DSGLD, fed.HMC"),
        ("kernel = fed.FSGLD(model)\nsvi = 1", "svi and kernel; expected one of them"),
    ],
)
def test_a_method_that_is_none_is_refused(study, line, message):
    (study / "study.py").write_text(f"{MODEL}\n{line}\n")
    found = silo(study, "--check")
    assert found.exit_code == 1
    assert message in " ".join(found.output.split())


# A federation of processes

WARMUP, SAMPLES, CHAINS = 5, 35, 2


class Federation:
    """The coordinator and three silos, each a process of its own, over TLS with registered keys."""

    def __init__(self, study: Path) -> None:
        from flower_deployment import free_port, make_certificates, make_key

        self.study, self.port = study, free_port()
        self.entrance = self.port  # where silos knock
        self.tls = make_certificates(study / "tls")
        (study / "keys").mkdir()
        for name in SIZES:
            make_key(study / f"{name}.key").with_suffix(".pub").rename(
                study / "keys" / f"{name}.pub"
            )
        self.started: list[subprocess.Popen] = []
        self.silos: dict[str, subprocess.Popen] = {}

    def start(self, who, *arguments):
        log = (self.study / f"{who}.log").open("ab")
        command = [
            sys.executable,
            "-c",
            "from numpyro_fed.cli.main import main; main()",
            *map(str, arguments),
        ]
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "FLWR_HOME": str(self.study / "home" / who)}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=self.study)
        log.close()
        self.started.append(process)
        return process

    def proxy(self):
        """Start the proxy of docs/flower.md, on a port of its own."""
        from flower_deployment import free_port

        page = (Path(__file__).parents[2] / "docs" / "flower.md").read_text()
        block = page.split("```nginx")[1].split("```")[0]
        self.entrance = free_port()
        block = block.replace("listen 9443", f"listen 127.0.0.1:{self.entrance}").replace(
            "9092", str(self.port)
        )
        block = block.replace("/srv/study/tls", str(self.tls))
        own = [
            f"{kind}_temp_path temp-{kind};"
            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        ]
        http = "\n".join(["access_log proxy-access.log;", *own, block])
        settings = (
            "daemon off; pid proxy.pid; error_log stderr; events {}\nhttp {\n" + http + "\n}\n"
        )
        (self.study / "proxy.conf").write_text(settings)
        command = [shutil.which("nginx"), "-p", str(self.study), "-c", "proxy.conf"]
        with (self.study / "proxy.log").open("ab") as log:
            self.started.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=self.study))

    def silo(self, name):
        options = [
            "--data",
            f"{name}.csv",
            "--name",
            name,
            "--server",
            f"127.0.0.1:{self.entrance}",
            "--ca",
            self.tls / "ca.crt",
        ]
        options += [
            "--key",
            f"{name}.key",
            "--folder",
            f"private-{name}",
            "--give-up",
            100,
            "--yes",
        ]
        options += ["--server-keys"]  # so that draws are those of the inline run
        self.silos[name] = self.start(name, "silo", "--model", "study.py", *options)

    def run(self, out):
        options = ["--warmup", WARMUP, "--samples", SAMPLES, "--chains", CHAINS, "--out", out]
        return self._coordinator("run", *options)

    def check(self, result):
        return self._coordinator("check", result, "--refit")

    def _coordinator(self, command, *options):
        members = ["--model", "study.py", "--silos", ",".join(SIZES), "--keys", "keys"]
        link = ["--address", f"127.0.0.1:{self.port}", "--tls", self.tls]
        return self.start(command, command, *members, *link, *options)

    def logs(self):
        return "\n".join(
            f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(self.study.glob("*.log"))
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in reversed(self.started):
            process.terminate()
        for process in self.started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def stays(study, name):
    place = study / f"private-{name}" / "audit.jsonl"
    return place.read_text().count("VisitLocal") if place.exists() else 0


@pytest.mark.ci
def test_a_silo_that_is_killed_and_started_again_changes_no_draw(study):
    pytest.importorskip("flwr")
    import arviz as az
    from jax import random

    with Federation(study) as fit:
        coordinator = fit.run("fit.nc")
        for name in SIZES:
            fit.silo(name)
        at, end = int(np.random.default_rng().integers(2, 10)), time.monotonic() + 400
        while stays(study, "rome") < at and time.monotonic() < end and coordinator.poll() is None:
            time.sleep(0.02)
        assert stays(study, "rome") >= at, fit.logs()
        time.sleep(0.5)  # for replies that are cut off the server waits 180 s
        fit.silos["rome"].send_signal(signal.SIGKILL)
        fit.silos["rome"].wait()
        fit.silo("rome")
        coordinator.wait(500)
        assert coordinator.returncode == 0, fit.logs()
    log = (study / "run.log").read_text()
    assert "posterior written to" in log
    for name in SIZES:
        said = (study / f"{name}.log").read_text()
        (key,) = set(re.findall(r"^Key: (SHA256:\S+);", said, flags=re.M))
        assert f"key of {name}: {key}\n" in log
        assert "The coordinator says: the run has ended" in said
    # the undisturbed run, within this process
    module, silos = inline_rounds(study)
    mcmc = fed.RemoteMCMC(
        fed.FSGLD(module.model),
        num_warmup=WARMUP,
        num_samples=SAMPLES,
        num_chains=CHAINS,
        progress_bar=False,
    )
    mcmc.run(random.key(0), fed.RemoteSilos(silos, fed.Loopback(silos)))
    drawn = az.from_netcdf(study / "fit.nc").posterior["beta"].to_numpy()
    np.testing.assert_array_equal(drawn, np.asarray(mcmc.get_samples(group_by_chain=True)["beta"]))
    audit = [
        json.loads(line)
        for line in (study / "private-rome" / "audit.jsonl").read_text().splitlines()
    ]
    assert sum(line["what"] == "calls" for line in audit) > at


@pytest.mark.ci
def test_a_coordinator_that_is_stopped_leaves_no_server(study):
    pytest.importorskip("flwr")

    def listens(port):
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", port)) == 0

    with Federation(study) as fit:
        coordinator, end = fit.run("fit.nc"), time.monotonic() + 60
        while not listens(fit.port) and time.monotonic() < end:
            time.sleep(0.1)
        assert listens(fit.port), fit.logs()
        place, end = study / "numpyro-fed-run" / "process", time.monotonic() + 100
        # the run in it waits for silos
        while not (place.exists() and place.read_text()) and time.monotonic() < end:
            time.sleep(0.1)
        number = int(place.read_text())
        os.kill(number, 0)
        coordinator.terminate()
        assert coordinator.wait(60) == 128 + signal.SIGTERM
        assert not listens(fit.port)
        left = subprocess.run(["ps", "-o", "stat=", "-p", str(number)], capture_output=True)
        assert not left.stdout.strip() or left.stdout.startswith(b"Z")  # nobody waits for it


@pytest.mark.ci
@pytest.mark.skipif(
    shutil.which("nginx") is None,
    reason="the proxy of docs/flower.md is nginx, which is not installed",
)
def test_a_variational_fit_through_the_proxy(study):
    pytest.importorskip("flwr")
    import arviz as az
    import requests
    from jax import random

    module, silos = inline_rounds(study, SVI)
    with Federation(study) as fit:
        fit.proxy()
        coordinator = fit.run("fit.nc")
        for name in SIZES:
            fit.silo(name)
        end = time.monotonic() + 200
        while not (study / "private-oslo" / "audit.jsonl").exists() and time.monotonic() < end:
            time.sleep(0.1)  # until a silo has been let in
        # what a stranger may not reach: where runs are started
        where = f"https://127.0.0.1:{fit.entrance}"
        for path in ("/v1/control/list-runs", "/v1/runtime/pull-messages", "/"):
            answer = requests.post(
                where + path, data=b"", verify=str(fit.tls / "ca.crt"), timeout=20
            )
            assert answer.status_code == 403, (path, fit.logs())
        inside = f"https://127.0.0.1:{fit.port}/v1/control/list-runs"
        answer = requests.post(inside, data=b"", verify=str(fit.tls / "ca.crt"), timeout=20)
        assert answer.status_code != 403, fit.logs()  # without the proxy it is there
        coordinator.wait(500)
        assert coordinator.returncode == 0, fit.logs()
        checking = fit.check("fit.nc")  # the silos have stayed, and connect again
        checking.wait(300)
        assert checking.returncode == 0, fit.logs()
    log = (study / "run.log").read_text()
    assert "posterior written to" in log
    assert "Pareto's k" in log
    key_rounds, key_draws = random.split(random.key(0))
    remote, num_draws = fed.RemoteSilos(silos, fed.Loopback(silos)), CHAINS * SAMPLES
    result = module.svi.run(key_rounds, 1000, remote, tol=1e-3, progress_bar=False)
    here = fed.to_inference_data(
        module.svi, result, remote, num_draws=num_draws, rng_key=key_draws, resample=True
    )
    there = az.from_netcdf(study / "fit.nc")
    assert there.posterior.attrs["verdict"] == "sound"
    assert "all silos are here" in log
    np.testing.assert_array_equal(there.posterior["beta"], here.posterior["beta"])
    found = fed.check(here, module.model, remote, refit=True)
    assert str(found) in (study / "check.log").read_text()
    assert (study / "proxy-access.log").read_text().count("/v1/fleet/") > 20
