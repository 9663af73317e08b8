"""The NVFLARE carrier: its two sides by themselves, the simulator, and a deployment with TLS whose processes are killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("nvflare")

import nvflare_sides
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.utils.process_utils import spawn_process
from nvflare_deployment import NAMES, SIDES, Deployment, free_port, provisioned

from numpyro_fed.engines import nvflare as carrier
from numpyro_fed.engines import nvflare_jobs

RUN, MAKE_SIDE = f"{SIDES}:run", f"{SIDES}:make_side"


def undisturbed(directory, names, rounds):
    """What ``run`` returns with silos that are in this process."""
    sides = {}
    for name in names:
        (directory / name).mkdir(parents=True)
        sides[name] = nvflare_sides.make_side(name, directory / name)

    def exchange(messages):
        return {name: sides[name].answer(data) for name, data in messages.items()}

    return nvflare_sides.run(SimpleNamespace(names=tuple(names), exchange=exchange), rounds)


# The two sides by themselves


def test_without_nvflare_the_extra_is_named():
    code = "import sys; sys.modules['nvflare'] = None; import numpyro_fed.engines.nvflare"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode
    assert 'pip install "numpyro-fed[nvflare]"' in run.stderr.splitlines()[-1]


def test_import_of_the_package_leaves_nvflare_out():
    code = "import sys, numpyro_fed; print('nvflare' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nothing", "no import path"),
        ("/nowhere/x.py:f", "no file"),
        ("no_such_module_here:f", "installed at every site"),
        (f"{SIDES}:missing", "no function missing"),
    ],
)
def test_import_paths_in_words(path, words):
    with pytest.raises(ValueError, match=words):
        carrier.load(path)


@pytest.mark.parametrize(
    ("names", "more", "words"),
    [
        (["a", "b", "a"], {}, r"\['a'\] are listed more than once"),
        (["a b"], {}, r"\['a b'\]"),
        (["server"], {}, "not 'server'"),
        ([], {}, "expected names"),
        (["a"], {"patience": 0}, "above zero"),
        (["a"], {"period": 0}, "above zero"),
        (["a"], {"directory": "../other"}, "a plain name"),
        (["a"], {"directory": "/etc"}, "a plain name"),
    ],
)
def test_jobs_in_words(tmp_path, names, more, words):
    with pytest.raises(ValueError, match=words):
        carrier.write_job(tmp_path / "job", RUN, MAKE_SIDE, names, **more)


def test_a_kit_is_prepared_once(tmp_path):
    (tmp_path / "local").mkdir()
    launcher = "nvflare.app_common.job_launcher.client_process_launcher.ClientProcessJobLauncher"
    told = {"class_allow_list": ["a.B"], "allow_log_streaming": True, "components": [{"id": "p", "path": launcher}]}
    (tmp_path / "local" / "resources.json.default").write_text(json.dumps(told))
    for _ in range(2):
        resources = json.loads(carrier.prepare_kit(tmp_path).read_text())
        assert resources["class_allow_list"] == ["a.B", nvflare_jobs.PACKAGE]
        assert resources["components"][0]["path"] == "numpyro_fed.engines.nvflare.Rejoin"
        assert not resources["allow_log_streaming"]
    with pytest.raises(ValueError, match="nvflare provision"):
        carrier.prepare_kit(tmp_path / "elsewhere")


class Sending:
    """A controller whose clients answer at once, as told: bytes, an error, or not at all."""

    def __init__(self, answers):
        self.answers, self.sent, self.cancelled = answers, [], []

    def broadcast(self, task, fl_ctx, targets, min_responses):
        (name,) = targets
        self.sent.append(name)
        answer = self.answers[name].pop(0) if self.answers[name] else None
        if answer is None:
            return
        result = make_reply(ReturnCode.OK if isinstance(answer, bytes) else ReturnCode.EXECUTION_EXCEPTION)
        result["data"] = answer
        client_task = SimpleNamespace(task=task, result=result)
        task.result_received_cb(client_task, fl_ctx)
        task.task_done_cb(task, fl_ctx)

    def cancel_task(self, task, completion_status, fl_ctx):
        self.cancelled.append(task.targets)


def messenger(answers, patience=5.0, stopped=False):
    controller = Sending(answers)
    return controller, carrier.Messenger(controller, None, SimpleNamespace(triggered=stopped), answers, patience)


def test_replies_by_name():
    controller, silos = messenger({"a": [b"1"], "b": [b"2"]})
    assert silos.names == ("a", "b")
    assert silos.exchange({"b": b"x"}) == {"b": b"2"}
    assert controller.sent == ["b"]


def test_a_message_is_sent_again_after_an_error():
    controller, silos = messenger({"a": [RuntimeError, b"1"], "b": [b"2"]})
    assert silos.exchange({"a": b"x", "b": b"y"}) == {"a": b"1", "b": b"2"}
    assert sorted(controller.sent) == ["a", "a", "b"]


def test_a_silent_silo_is_absent():
    controller, silos = messenger({"a": [], "b": [b"2"]}, patience=0.3)
    assert silos.exchange({"a": b"x", "b": b"y"}) == {"b": b"2"}
    assert len(controller.cancelled) == 1


def test_a_stranger_is_refused():
    with pytest.raises(ValueError, match=r"\['c'\] are not of this job; expected some of \['a'\]"):
        messenger({"a": []})[1].exchange({"c": b""})


def test_a_stopped_job_ends_the_wait():
    with pytest.raises(RuntimeError, match="stopped"):
        messenger({"a": []}, stopped=True)[1].exchange({"a": b""})


class Context:
    """What an executor is told of its site."""

    def __init__(self, root):
        self.root = root

    def get_identity_name(self):
        return "s0"

    def get_job_id(self):
        return "job"

    def get_prop(self, key, default=None):
        return SimpleNamespace(
            get_root_dir=lambda: self.root,
            get_run_dir=lambda job: self.root / job,
            get_app_config_dir=lambda job: self.root / "config",
        )


def executed(tmp_path, told, messages):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "fed.json").write_text(json.dumps({"arguments": {}, "directory": None, **told}))
    executor, context = carrier.SideExecutor(), Context(tmp_path)
    return [executor.execute("answer", Shareable({"data": m}), context, None) for m in messages]


@pytest.fixture
def allowed(monkeypatch):
    monkeypatch.setenv(carrier.ALLOWED, f"other:side,{MAKE_SIDE}")


@pytest.mark.usefixtures("allowed")
def test_a_side_is_made_once(tmp_path):
    replies = executed(tmp_path, {"make_side": MAKE_SIDE}, [b"1 x", b"2 y", b"2 y"])
    assert [r.get_return_code() for r in replies] == [ReturnCode.OK] * 3
    assert replies[1]["data"] == replies[2]["data"] != replies[0]["data"]
    assert len((tmp_path / "job" / "silo" / "made.txt").read_text().split()) == 1


@pytest.mark.usefixtures("allowed")
def test_the_text_of_an_error_stays_at_the_silo(tmp_path, caplog):
    told = {"make_side": MAKE_SIDE, "arguments": {"broken": "s0"}}
    (reply,) = executed(tmp_path, told, [b"1 x"])
    assert reply.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert "42.5" not in repr(reply) + caplog.text
    assert "42.5" in (tmp_path / "job" / "silo" / "error.txt").read_text()


@pytest.mark.parametrize("listed", [None, f"other:side,{MAKE_SIDE}"])
def test_a_site_makes_only_what_it_allows(tmp_path, monkeypatch, listed):
    monkeypatch.delenv(carrier.ALLOWED, raising=False)
    if listed is not None:
        monkeypatch.setenv(carrier.ALLOWED, listed)
    (reply,) = executed(tmp_path, {"make_side": "os:listdir"}, [b"1 x"])
    assert reply.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert "PermissionError: the job asks for 'os:listdir'" in (tmp_path / "job" / "silo" / "error.txt").read_text()


def controlled(tmp_path, told, here):
    """What a job's server process panics with."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "fed.json").write_text(json.dumps({"arguments": {}, "patience": 1, **told}))
    (tmp_path / "job").mkdir()
    controller, said = carrier.FedController(), []
    controller._engine = SimpleNamespace(get_clients=lambda: [SimpleNamespace(name=name) for name in here])
    controller.system_panic = lambda reason, fl_ctx: said.append(reason)
    controller.control_flow(SimpleNamespace(triggered=False), Context(tmp_path))
    assert not (tmp_path / "job" / "result.bin").exists()
    return said[0]


def test_silos_that_do_not_appear_are_named(tmp_path):
    said = controlled(tmp_path, {"names": NAMES, "run": RUN}, ["s1"])
    assert said == "ValueError: expected silos ['s0', 's2'] did not appear; this job has ['s1']"


def test_a_server_calls_only_what_it_allows(tmp_path, monkeypatch):
    monkeypatch.delenv(carrier.ALLOWED, raising=False)
    said = controlled(tmp_path, {"names": ["s1"], "run": "os:listdir"}, ["s1"])
    assert said.startswith("PermissionError: the job asks for 'os:listdir'; expected one of []")


@pytest.mark.slow
def test_a_simulation_goes_on_from_the_silos_states(tmp_path):
    more = {"directory": "fit", "timeout": 200}
    for rounds in (2, 3):  # the second call's first two messages are old ones, of which the silos remember the last
        carrier.simulate(RUN, MAKE_SIDE, ["s0"], tmp_path / "w", run_arguments={"rounds": rounds}, **more)
    state = json.loads((tmp_path / "w" / "silos" / "fit" / "s0" / "state.json").read_text())
    assert state[0] == 3
    assert len((tmp_path / "w" / "silos" / "fit" / "s0" / "made.txt").read_text().split()) == 2


def test_a_process_that_a_signal_ends_is_started_again():
    seen = []

    def launch():
        code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)" if len(seen) < 2 else "pass"
        seen.append(spawn_process([sys.executable, "-c", code], dict(os.environ)))
        return seen[-1]

    process = carrier.Lasting(launch)
    process.wait()
    assert len(seen) == 3
    assert process.poll() == 0
    seen.clear()
    always = carrier.Lasting(lambda: seen.append(1) or spawn_process(["/bin/sh", "-c", "kill -9 $$"], {}))
    always.wait()
    assert len(seen) == 3


def test_a_job_that_is_over_is_not_gone_back_to(tmp_path):
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "rejoin.json").write_text("[]")
    engine = SimpleNamespace(args=SimpleNamespace(workspace=tmp_path))
    context = SimpleNamespace(get_engine=lambda: engine, get_prop=lambda key: "job")
    carrier.Rejoin().handle_event(EventType.JOB_COMPLETED, context)
    assert not (tmp_path / "job" / "rejoin.json").exists()


# The simulator


def test_simulated_silos_answer_as_silos_at_hand(tmp_path):
    result = carrier.simulate(RUN, MAKE_SIDE, NAMES, tmp_path / "w", run_arguments={"rounds": 4}, timeout=200)
    assert result == undisturbed(tmp_path / "here", NAMES, 4)
    for name in NAMES:  # one process for all rounds
        made = tmp_path / "w" / "nvflare" / name / "simulate_job" / "silo" / "made.txt"
        assert len(made.read_text().split()) == 1


@pytest.mark.slow
def test_more_silos_than_threads(tmp_path):
    more = {"run_arguments": {"rounds": 2}, "threads": 2, "timeout": 400}
    assert carrier.simulate(RUN, MAKE_SIDE, NAMES, tmp_path / "w", **more) == undisturbed(tmp_path / "here", NAMES, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "words"),
    [("fail", "the fit has no rounds"), ("ask_a_stranger", r"silos \['paris'\] are not of this job")],
)
def test_a_run_that_fails_says_why(tmp_path, function, words):
    with pytest.raises(RuntimeError, match=words):
        carrier.simulate(f"{SIDES}:{function}", MAKE_SIDE, ["s0"], tmp_path / "w", timeout=200)


# A deployment: a server and three clients on loopback, mutual TLS


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    port = free_port()
    directory = tmp_path_factory.mktemp("nvflare")
    deployed = Deployment(provisioned(directory / "ours", port))
    deployed.foreign = provisioned(directory / "theirs", port)  # of another authority
    try:
        for site in ("localhost", "s0", "s2"):
            deployed.start(site)
        yield deployed
    finally:
        for site in list(deployed.processes):
            deployed.kill(site)


@pytest.mark.slow
def test_a_certificate_of_another_authority_is_refused(deployment, tmp_path):
    deployment.wait_for(["s0", "s2"])
    forged = tmp_path / "forged"
    shutil.copytree(deployment.kits / "s1", forged)
    for file in ("client.crt", "client.key"):
        shutil.copy(deployment.foreign / "s1" / "startup" / file, forged / "startup" / file)
    deployment.start("s1", forged)
    try:
        time.sleep(15)
        assert deployment.connected() == {"s0", "s2"}
    finally:
        deployment.kill("s1")
    assert "Successfully registered" not in (forged / "out.txt").read_text()
    deployment.start("s1")  # the control: its own certificate
    deployment.wait_for(NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["nothing", "the silo's process", "the client and the silo's process"])
def test_a_deployment_whose_processes_are_killed(deployment, tmp_path, killed):
    if "s1" not in deployment.processes:
        deployment.start("s1")
    deployment.wait_for(NAMES)
    rounds = 40
    job = carrier.write_job(tmp_path / "job", RUN, MAKE_SIDE, NAMES, run_arguments={"rounds": rounds}, patience=100)

    def kill_the_process():
        (worker,) = deployment.workers("s1")
        os.kill(worker.pid, signal.SIGKILL)

    def kill_both():
        deployment.kill("s1")
        deployment.start("s1")

    disturb = {"nothing": None, "the silo's process": kill_the_process}.get(killed, kill_both)
    expected = ("FINISHED:COMPLETED", undisturbed(tmp_path / "here", NAMES, rounds))
    assert deployment.fit(job, disturb) == expected
    assert not list((deployment.kits / "s1").glob("*/rejoin.json"))


@pytest.mark.slow
def test_a_silo_that_stays_away_is_absent_and_comes_back(deployment, tmp_path):
    if "s1" not in deployment.processes:
        deployment.start("s1")
    deployment.wait_for(NAMES)
    more = {"run_arguments": {"rounds": 40}, "patience": 4.0}
    job = carrier.write_job(tmp_path / "job", f"{SIDES}:who_answers", MAKE_SIDE, NAMES, **more)

    def stop_for_a_while():
        (worker,) = deployment.workers("s1")
        worker.suspend()
        time.sleep(10)
        worker.resume()

    status, result = deployment.fit(job, stop_for_a_while, after=5)
    answered = json.loads(result)
    assert status == "FINISHED:COMPLETED"
    assert all({"s0", "s2"} <= set(names) for names in answered)
    away = [n for n, names in enumerate(answered) if "s1" not in names]
    assert 1 <= len(away) <= 4
    assert "s1" in answered[-1]
