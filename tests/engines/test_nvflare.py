"""The NVFLARE carrier: its two sides by themselves, and the simulator.

Also a deployment with TLS whose processes are killed.
"""

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
from jax import random
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReturnCode, SiteType
from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.workspace import Workspace
from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST
from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer
from nvflare.fuel.utils.class_utils import instantiate_class
from nvflare.private.admin_defs import Message
from nvflare.private.defs import SysCommandTopic
from nvflare.private.fed.app.default_app_validator import DefaultAppValidator
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from nvflare.utils.process_utils import spawn_process
from nvflare_deployment import NAMES, SIDES, Deployment, free_port, provisioned

from numpyro_fed.engines import nvflare as carrier
from numpyro_fed.engines import nvflare_jobs
from numpyro_fed.engines.wire import connect

RUN, MAKE_SIDE = f"{SIDES}:run", f"{SIDES}:make_side"
BROKEN, PRIVATE = f"{SIDES}:make_broken", f"{SIDES}:make_private"


def undisturbed(directory, names, rounds):
    """Return the result of ``run`` with silos that are in this process."""
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
    ],
)
def test_jobs_in_words(tmp_path, names, more, words):
    with pytest.raises(ValueError, match=words):
        carrier.write_job(tmp_path / "job", RUN, MAKE_SIDE, names, **more)


def test_a_kit_is_prepared_once(tmp_path):
    (tmp_path / "local").mkdir()
    launcher = "nvflare.app_common.job_launcher.client_process_launcher.ClientProcessJobLauncher"
    listed = ["a.B", "nvflare.app_common.np.np_trainer.NPTrainer", nvflare_jobs.PACKAGE]
    told = {
        "class_allow_list": listed,
        "allow_log_streaming": True,
        "components": [{"id": "p", "path": launcher}],
    }
    (tmp_path / "local" / "resources.json.default").write_text(json.dumps(told))
    for _ in range(2):
        resources = json.loads(carrier.prepare_kit(tmp_path).read_text())
        assert resources["class_allow_list"] == ["a.B", *nvflare_jobs.CLASSES]
        assert resources["components"][0]["path"] == "numpyro_fed.engines.nvflare.Rejoin"
        assert not resources["allow_log_streaming"]
    with pytest.raises(ValueError, match="nvflare provision"):
        carrier.prepare_kit(tmp_path / "remote")


class Sending:
    """Controller whose clients answer at once: with bytes, an error, or not at all."""

    def __init__(self, answers):
        self.answers, self.sent, self.canceled = answers, [], []

    def broadcast(self, task, fl_ctx, targets, min_responses):
        (name,) = targets
        self.sent.append(name)
        answer = self.answers[name].pop(0) if self.answers[name] else None
        if answer is None:
            return
        result = make_reply(
            ReturnCode.OK if isinstance(answer, bytes) else ReturnCode.EXECUTION_EXCEPTION
        )
        result["data"] = answer
        client_task = SimpleNamespace(task=task, result=result)
        task.result_received_cb(client_task, fl_ctx)
        task.task_done_cb(task, fl_ctx)

    def cancel_task(self, task, completion_status, fl_ctx):
        self.canceled.append(task.targets)


def transport(answers, patience=5.0, stopped=False):
    controller = Sending(answers)
    return controller, carrier.Transport(
        controller, None, SimpleNamespace(triggered=stopped), answers, patience
    )


def test_replies_by_name():
    controller, silos = transport({"a": [b"1"], "b": [b"2"]})
    assert silos.names == ("a", "b")
    assert silos.exchange({"b": b"x"}) == {"b": b"2"}
    assert controller.sent == ["b"]


def test_a_message_is_sent_again_after_an_error():
    controller, silos = transport({"a": [RuntimeError, b"1"], "b": [b"2"]})
    assert silos.exchange({"a": b"x", "b": b"y"}) == {"a": b"1", "b": b"2"}
    assert sorted(controller.sent) == ["a", "a", "b"]


def test_a_silent_silo_is_absent():
    controller, silos = transport({"a": [], "b": [b"2"]}, patience=0.3)
    assert silos.exchange({"a": b"x", "b": b"y"}) == {"b": b"2"}
    assert len(controller.canceled) == 1


def test_a_stranger_is_refused():
    with pytest.raises(ValueError, match=r"\['c'\] are not of this job; expected some of \['a'\]"):
        transport({"a": []})[1].exchange({"c": b""})


def test_a_stopped_job_ends_the_wait():
    with pytest.raises(RuntimeError, match="stopped"):
        transport({"a": []}, stopped=True)[1].exchange({"a": b""})


class Context:
    """Context of an executor, with the facts of its site."""

    def __init__(self, root, name="s0"):
        self.root, self.name = root, name

    def get_identity_name(self):
        return self.name

    def get_job_id(self):
        return "job"

    def get_prop(self, key, default=None):
        return SimpleNamespace(
            get_root_dir=lambda: self.root,
            get_run_dir=lambda job: self.root / job,
            get_app_config_dir=lambda job: self.root / "config",
        )


def executed(tmp_path, told, messages, name="s0"):
    for folder in ("config", "job"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / "config" / "fed.json").write_text(json.dumps(told))
    executor, context = carrier.SideExecutor(), Context(tmp_path, name)
    return [executor.execute("answer", Shareable({"data": m}), context, None) for m in messages]


@pytest.fixture
def allowed(monkeypatch):
    monkeypatch.setenv(carrier.ALLOWED, f"other:side,{MAKE_SIDE},{BROKEN},{PRIVATE}")
    monkeypatch.delenv(nvflare_jobs.SILOS, raising=False)


def folder_of(root, make_side=MAKE_SIDE, name="s0", silos="_silos"):
    return root / silos / "".join(x if x.isalnum() or x in "._-" else "_" for x in make_side) / name


@pytest.mark.usefixtures("allowed")
def test_a_side_is_made_once(tmp_path):
    replies = executed(tmp_path, {"make_side": MAKE_SIDE}, [b"1 x", b"2 y", b"2 y"])
    assert [r.get_return_code() for r in replies] == [ReturnCode.OK] * 3
    assert replies[1]["data"] == replies[2]["data"] != replies[0]["data"]
    assert len((folder_of(tmp_path) / "made.txt").read_text().split()) == 1


@pytest.mark.usefixtures("allowed")
def test_the_text_of_an_error_stays_at_the_silo(tmp_path, caplog):
    (reply,) = executed(tmp_path, {"make_side": BROKEN}, [b"1 x"])
    assert reply.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert "42.5" not in repr(reply) + caplog.text
    assert "42.5" in (folder_of(tmp_path, BROKEN) / "error.txt").read_text()


@pytest.mark.usefixtures("allowed")
def test_errors_do_not_fill_a_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(carrier, "_MOST_ERRORS", 2000)
    executed(tmp_path, {"make_side": BROKEN}, [b"1 x"] * 20)
    written = (folder_of(tmp_path, BROKEN) / "error.txt").read_text()
    one = len(written) / written.count("Traceback")
    assert 2000 <= len(written) <= 2000 + one  # the control: the errors are more than that
    assert 20 * one > 4000


@pytest.mark.parametrize("listed", [None, f"other:side,{MAKE_SIDE}"])
def test_a_site_makes_only_what_it_allows(tmp_path, monkeypatch, listed):
    monkeypatch.delenv(carrier.ALLOWED, raising=False)
    if listed is not None:
        monkeypatch.setenv(carrier.ALLOWED, listed)
    (reply,) = executed(tmp_path, {"make_side": "os:listdir"}, [b"1 x"])
    assert reply.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert (
        "PermissionError: the job asks for 'os:listdir'"
        in (tmp_path / "job" / "error.txt").read_text()
    )
    assert not (tmp_path / "_silos").exists()


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize("name", ["..", "../s1", "/etc", "", "s0\n"])
def test_a_name_that_leads_elsewhere_makes_no_folder(tmp_path, name):
    (reply,) = executed(tmp_path, {"make_side": MAKE_SIDE}, [b"1 x"], name)
    assert reply.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert "the client's name is" in (tmp_path / "job" / "error.txt").read_text()
    assert {x.name for x in tmp_path.iterdir()} == {"config", "job"}


@pytest.mark.usefixtures("allowed")
def test_of_a_job_a_silo_takes_no_folder_and_no_argument(tmp_path):
    asked = {"make_side": MAKE_SIDE, "directory": "../../outside", "arguments": {"epsilon": 1e6}}
    (reply,) = executed(tmp_path / "srv" / "site", asked, [b"1 x"])
    assert reply.get_return_code() == ReturnCode.OK
    assert (folder_of(tmp_path / "srv" / "site") / "state.json").exists()
    assert [x.name for x in tmp_path.iterdir()] == ["srv"]
    assert [x.name for x in (tmp_path / "srv").iterdir()] == ["site"]


def private_rounds(site, directory, seed):
    """Two rounds of a budget of two, by a job that asks for a directory."""
    for folder in ("config", "job"):
        (site / folder).mkdir(parents=True, exist_ok=True)
    told = {"make_side": PRIVATE, "directory": directory, "arguments": {}}
    (site / "config" / "fed.json").write_text(json.dumps(told))
    executor, fit = carrier.SideExecutor(), nvflare_sides.private_fit()

    def exchange(messages):
        asked = Shareable({"data": messages["s0"]})
        return {"s0": executor.execute("answer", asked, Context(site), None)["data"]}

    remote = connect(SimpleNamespace(names=("s0",), exchange=exchange), fit.model, fit=fit)
    return len(fit.run(random.key(seed), 2, remote, progress_bar=False).losses)


ASKED = ["fit-1", "fit-2", None, "../../outside"]


@pytest.mark.ci
@pytest.mark.usefixtures("allowed")
def test_a_budget_of_privacy_is_one_over_all_jobs(tmp_path):
    site = tmp_path / "srv" / "site"
    assert private_rounds(site, ASKED[0], 0) == 2
    for seed, directory in enumerate(ASKED[1:], 1):
        with pytest.raises(RuntimeError, match="its budget of privacy is spent"):
            private_rounds(site, directory, seed)
    assert [x.name for x in (site / "_silos").iterdir()] == [folder_of(site, PRIVATE).parent.name]
    assert [x.name for x in tmp_path.iterdir()] == ["srv"]


@pytest.mark.usefixtures("allowed")
def test_a_folder_that_the_job_names_is_another_budget(tmp_path, monkeypatch):
    """The control: were it so, the test above would see it."""
    for seed, directory in enumerate(ASKED[:2]):
        monkeypatch.setattr(
            carrier, "silo_directory", lambda root, _, name, d=directory: root / d / name
        )
        assert private_rounds(tmp_path / "site", directory, seed) == 2


def builds(kit, path):
    """Whether NVFLARE lets a job build a component at a site."""
    site = SimpleNamespace(get_resources_file_path=lambda: str(kit / "local" / "resources.json"))
    try:
        ComponentPathAuthorizer().authorize_component_config(
            {"path": path, "args": {}}, workspace=site
        )
    except UnsafeComponentError:
        return False
    return True


def test_a_job_builds_nothing_else_at_a_site(tmp_path):
    """NVFLARE calls whatever a job names with arguments of the job's.

    Here `simulate` runs any function, as if it were allowed.
    """
    (tmp_path / "local").mkdir()
    place = tmp_path / "local" / "resources.json"
    place.write_text(
        json.dumps({"class_allow_list": [*DEFAULT_CLASS_ALLOW_LIST], "components": []})
    )
    carrier.prepare_kit(tmp_path)
    ours = [
        nvflare_jobs.PACKAGE + x for x in ("simulate", "write_job", "prepare_kit", "load", "Rejoin")
    ]
    reader = "nvflare.app_opt.xgboost.histogram_based_v2.csv_data_loader.CSVDataLoader"
    assert reader in DEFAULT_CLASS_ALLOW_LIST
    assert [x for x in (*ours, *DEFAULT_CLASS_ALLOW_LIST) if builds(tmp_path, x)] == []
    assert all(builds(tmp_path, x) for x in nvflare_jobs.CLASSES)
    # the control: the package in the list, as it was, and what a job could have made of it
    place.write_text(json.dumps({"class_allow_list": [nvflare_jobs.PACKAGE]}))
    assert all(builds(tmp_path, x) for x in ours)
    outside = {
        "folder": str(tmp_path / "outside"),
        "run": "a:b",
        "make_side": "a:b",
        "names": ["a"],
    }
    instantiate_class(nvflare_jobs.PACKAGE + "write_job", outside)
    assert (tmp_path / "outside" / "meta.json").exists()


def test_a_job_that_brings_code_is_not_started(tmp_path):
    for folder in ("config", "custom"):
        (tmp_path / "app" / folder).mkdir(parents=True)
    (tmp_path / "app" / "config" / "config_fed_client.json").write_text('{"format_version": 2}')
    error, found = DefaultAppValidator(SiteType.CLIENT).validate(str(tmp_path / "app"))
    assert not error
    with pytest.raises(PermissionError, match="the job brings code; expected one that names"):
        carrier.Rejoin().launch_job({"job_id": "job", **found}, None)
    shutil.rmtree(
        tmp_path / "app" / "custom"
    )  # the control: without, it comes as far as its arguments
    error, found = DefaultAppValidator(SiteType.CLIENT).validate(str(tmp_path / "app"))
    with pytest.raises(AttributeError, match="get_prop"):
        carrier.Rejoin().launch_job({"job_id": "job", **found}, None)


def test_a_server_reads_no_file_of_a_site(tmp_path, monkeypatch):
    (tmp_path / "rows.csv").write_text("age\n42\n")
    stock = list(ClientRequestProcessors.request_processors)
    monkeypatch.setattr(ClientRequestProcessors, "request_processors", stock)

    def answers():
        """Return a client's answer to a server that asks for a file.

        The client registers its answers.
        """
        asked = Message(SysCommandTopic.SHELL, f"cat {tmp_path / 'rows.csv'}")
        return [x.process(asked, None).body for x in stock if asked.topic in x.get_topics()]

    assert answers() == ["age\n42\n"]  # the control
    others = len(stock) - 1
    carrier.Rejoin().handle_event(
        EventType.SYSTEM_BOOTSTRAP, SimpleNamespace(get_engine=lambda: None)
    )
    assert answers() == []
    assert len(stock) == others


def test_no_job_has_the_name_of_the_silos_folder(tmp_path):
    """A server has a site's folder of a job deleted when it deploys one of that name.

    The folder goes by the job's name.
    """
    for folder in ("startup", "local"):
        (tmp_path / folder).mkdir()
    place = carrier.silo_directory(tmp_path, MAKE_SIDE, "s0").relative_to(tmp_path).parts[0]
    site = Workspace(str(tmp_path), site_name="s0")
    assert site.get_run_dir("silos") == str(tmp_path / "silos")  # the control: the name that it had
    with pytest.raises(ValueError, match="invalid job_id"):
        site.get_run_dir(place)


def controlled(tmp_path, told, here):
    """Return the message that a job's server process panics with."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "fed.json").write_text(
        json.dumps({"arguments": {}, "patience": 1, **told})
    )
    (tmp_path / "job").mkdir()
    controller, said = carrier.FedController(), []
    controller._engine = SimpleNamespace(
        get_clients=lambda: [SimpleNamespace(name=name) for name in here]
    )
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


@pytest.mark.ci
def test_a_simulation_goes_on_from_the_silos_states(tmp_path):
    place = folder_of(tmp_path / "w", silos="silos")
    for rounds, keep in (
        (2, True),
        (3, True),
        (1, False),
    ):  # the second's first two messages are old ones
        more = {"run_arguments": {"rounds": rounds}, "keep": keep, "timeout": 200}
        carrier.simulate(RUN, MAKE_SIDE, ["s0"], tmp_path / "w", **more)
        assert json.loads((place / "state.json").read_text())[0] == rounds
        assert len((place / "made.txt").read_text().split()) == (rounds - 1 if keep else 1)


def test_a_process_that_a_signal_ends_is_started_again():
    seen = []

    def launch():
        code = (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)" if len(seen) < 2 else "pass"
        )
        seen.append(spawn_process([sys.executable, "-c", code], dict(os.environ)))
        return seen[-1]

    process = carrier.Lasting(launch)
    process.wait()
    assert len(seen) == 3
    assert process.poll() == 0
    seen.clear()
    always = carrier.Lasting(
        lambda: seen.append(1) or spawn_process(["/bin/sh", "-c", "kill -9 $$"], {})
    )
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


@pytest.mark.ci
def test_simulated_silos_answer_as_silos_at_hand(tmp_path):
    result = carrier.simulate(
        RUN, MAKE_SIDE, NAMES, tmp_path / "w", run_arguments={"rounds": 4}, timeout=200
    )
    assert result == undisturbed(tmp_path / "here", NAMES, 4)
    for name in NAMES:  # one process for all rounds
        assert (
            len(
                (folder_of(tmp_path / "w", name=name, silos="silos") / "made.txt")
                .read_text()
                .split()
            )
            == 1
        )


@pytest.mark.ci
def test_more_silos_than_threads(tmp_path):
    more = {"run_arguments": {"rounds": 2}, "threads": 2, "timeout": 400}
    assert carrier.simulate(RUN, MAKE_SIDE, NAMES, tmp_path / "w", **more) == undisturbed(
        tmp_path / "here", NAMES, 2
    )


@pytest.mark.ci
@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("fail", "the fit has no rounds"),
        ("ask_a_stranger", r"silos \['paris'\] are not of this job"),
    ],
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


@pytest.mark.ci
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


@pytest.mark.ci
@pytest.mark.parametrize(
    "killed",
    [
        "nothing",
        pytest.param("the silo's process", marks=pytest.mark.ci),
        pytest.param("the client and the silo's process", marks=pytest.mark.ci),
    ],
)
def test_a_deployment_whose_processes_are_killed(deployment, tmp_path, killed):
    if "s1" not in deployment.processes:
        deployment.start("s1")
    deployment.wait_for(NAMES)
    rounds = 40
    job = carrier.write_job(
        tmp_path / "job", RUN, MAKE_SIDE, NAMES, run_arguments={"rounds": rounds}, patience=100
    )

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


@pytest.mark.ci
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
