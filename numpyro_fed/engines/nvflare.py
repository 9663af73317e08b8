"""NVFLARE as the transport: a controller, an executor, a job folder and the simulator.

The server's part is a function ``run(transport)``. A silo's part is an object with ``name`` and
``answer(data: bytes) -> bytes``, which ``make_side(name, directory)`` returns. A job names both by
import path (``"package.module:function"`` or ``"/path/file.py:function"``). Bytes alone cross;
nothing is pickled. A message may reach a silo more than once, and must then have the same answer.

    from numpyro_fed.engines.nvflare import simulate
    result = simulate("my_study:run", "my_study:make_side", ["oslo", "rome"], "workspace")
"""

import copy
import importlib
import importlib.util
import json
import logging
import os
import queue
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from numpyro_fed.engines.side import not_importable

try:
    from nvflare.apis.app_validation import AppValidationKey
    from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
    from nvflare.apis.event_type import EventType
    from nvflare.apis.executor import Executor
    from nvflare.apis.fl_constant import FLContextKey, ReturnCode
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.impl.controller import Controller
    from nvflare.apis.job_launcher_spec import JobProcessArgs
    from nvflare.apis.shareable import Shareable, make_reply
    from nvflare.apis.signal import Signal
    from nvflare.apis.workspace import Workspace
    from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
    from nvflare.app_common.job_launcher.process_launcher import ProcessHandle
    from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
    from nvflare.private.fed.client.shell_cmd import ShellCommandProcessor
    from nvflare.utils.process_utils import ProcessAdapter
except ImportError as error:
    raise not_importable("NVFLARE", "nvflare", "nvflare", error) from error

from numpyro_fed._typing import Facts
from numpyro_fed.engines.nvflare_jobs import (
    ALLOWED,
    ERROR,
    NAME,
    PERIOD,
    RESULT,
    SETTINGS,
    SILOS,
    TASK,
    prepare_kit,
    simulate,
    write_job,
)
from numpyro_fed.engines.side import Side

__all__ = [
    "FedController",
    "Rejoin",
    "SideExecutor",
    "Transport",
    "prepare_kit",
    "simulate",
    "write_job",
]

DATA, REJOIN = "data", "rejoin.json"
_MOST_ERRORS = 1 << 20  # bytes of a file of errors, which a server may cause without end
_logger = logging.getLogger("nvflare.numpyro_fed")


def load(path: str) -> Callable:
    """Return the function at an import path.

    :param path: ``"package.module:function"`` or ``"/path/file.py:function"``.
    :raises ValueError: if there is no such function.
    """
    where, _, name = path.rpartition(":")
    if not where or not name:
        raise ValueError(
            f'{path!r} is no import path; expected "package.module:function" or '
            '"/path/file.py:function"'
        )
    if where.endswith(".py"):
        if not Path(where).is_file():
            raise ValueError(f"{path!r}: there is no file {where}")
        spec = importlib.util.spec_from_file_location(Path(where).stem, where)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(spec.name, module)
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"{path!r}: {error}; expected a module that is installed at every site"
            ) from error
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{path!r}: {where} has no function {name}")
    return getattr(module, name)


def load_allowed(path: str) -> Callable:
    """Return the function at an import path of a job, if this machine allows it.

    The environment variable ``NUMPYRO_FED_ALLOWED`` lists the paths that jobs may name.

    :raises PermissionError: if the path is not in the list.
    """
    allowed = [x for x in os.environ.get(ALLOWED, "").split(",") if x]
    if path not in allowed:
        raise PermissionError(
            f"the job asks for {path!r}; expected one of {allowed}, which this site lists in its "
            f"environment variable {ALLOWED}"
        )
    return load(path)


def _settings(fl_ctx: FLContext) -> tuple[Facts, Workspace, str]:
    """Return the job's settings, the workspace, and the job's id."""
    workspace, job = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT), fl_ctx.get_job_id()
    return (
        json.loads((Path(workspace.get_app_config_dir(job)) / SETTINGS).read_text()),
        workspace,
        job,
    )


class Transport:
    """Transport over NVFLARE, for the server's part of a fit.

    :param controller: the controller, which sends the tasks.
    :param fl_ctx: NVFLARE's context.
    :param abort: NVFLARE's signal that stops the job.
    :param names: names of the silos, in the coordinator's order.
    :param patience: time after which an exchange continues without silent silos, in seconds.
    """

    def __init__(
        self,
        controller: Controller,
        fl_ctx: FLContext,
        abort: Signal,
        names: Sequence[str],
        patience: float,
    ) -> None:
        self.names = tuple(names)
        self._controller, self._fl_ctx, self._abort, self._patience = (
            controller,
            fl_ctx,
            abort,
            patience,
        )

    def exchange(self, messages: dict[str, bytes]) -> dict[str, bytes]:
        """Send one message to each silo in ``messages``, and return the replies by name.

        A silo that restarted is sent its message again. A silo without a reply within ``patience``
        is missing from the result.

        :param messages: the message to each silo, by name.
        :raises ValueError: naming the silos that are not in this job.
        :raises RuntimeError: if the job was stopped.
        """
        unknown = sorted(set(messages) - set(self.names))
        if unknown:
            raise ValueError(
                f"silos {unknown} are not of this job; expected some of {list(self.names)}"
            )
        done: queue.Queue = queue.Queue()
        tasks = {name: self._send(name, data, done) for name, data in messages.items()}
        replies: dict[str, bytes] = {}
        again: dict[str, float] = {}
        end = time.monotonic() + self._patience
        while len(replies) < len(messages) and (now := time.monotonic()) < end:
            for name in [name for name, when in again.items() if when <= now]:
                del again[name]
                tasks[name] = self._send(name, messages[name], done)
            try:
                task, name, reply = done.get(timeout=min(0.2, end - now))
            except queue.Empty:
                if self._abort.triggered:
                    raise RuntimeError("the job was stopped while silos were asked") from None
                continue
            if reply is not None:
                replies[name] = reply
            elif task is tasks[name] and name not in again and name not in replies:
                again[name] = now + 1.0
        for name in messages.keys() - replies.keys():
            self._controller.cancel_task(tasks[name], TaskCompletionStatus.TIMEOUT, self._fl_ctx)
            _logger.warning("silo %r has not answered within %g s", name, self._patience)
        return {name: replies[name] for name in messages if name in replies}

    def _send(self, name: str, data: bytes, done: queue.Queue) -> Task:
        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:
            result = client_task.result
            reply = result.get(DATA) if result.get_return_code() == ReturnCode.OK else None
            done.put((client_task.task, name, reply if isinstance(reply, bytes) else None))
            client_task.result = None

        def ended(task: Task, fl_ctx: FLContext) -> None:  # also if NVFLARE has given up the silo
            done.put((task, name, None))

        task = Task(
            TASK, Shareable({DATA: bytes(data)}), result_received_cb=received, task_done_cb=ended
        )
        self._controller.broadcast(task, self._fl_ctx, targets=[name], min_responses=1)
        return task


class FedController(Controller):
    """Controller of a job, which calls ``run(transport)`` at the server.

    It writes the bytes that ``run`` returns to ``result.bin`` in the job's run directory.
    """

    def __init__(self) -> None:
        super().__init__(task_check_period=PERIOD)

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Start nothing: :meth:`control_flow` does all."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Stop nothing."""

    def process_result_of_unknown_task(self, *args: object, **kwargs: object) -> None:
        """Ignore a reply that comes too late."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Call ``run`` if all silos are there; an error ends the job, and goes to ``error.txt``."""
        told, workspace, job = _settings(fl_ctx)
        kept = Path(workspace.get_run_dir(job))
        try:
            here = {client.name for client in self._engine.get_clients()}
            absent = [name for name in told["names"] if name not in here]
            if absent:
                raise ValueError(
                    f"expected silos {absent} did not appear; this job has {sorted(here)}"
                )
            transport = Transport(self, fl_ctx, abort_signal, told["names"], told["patience"])
            result = load_allowed(told["run"])(transport, **told["arguments"])
            if result is not None and not isinstance(result, bytes):
                raise TypeError(
                    f"{told['run']} returned {type(result).__name__}; expected bytes or None"
                )
        except Exception as error:
            (kept / ERROR).write_text(traceback.format_exc())
            self.system_panic(f"{type(error).__name__}: {error}", fl_ctx)
            return
        partial = kept / (RESULT + ".part")
        partial.write_bytes(result or b"")
        partial.replace(kept / RESULT)


class SideExecutor(Executor):
    """Executor of a job at a silo, whose first message makes the silo's side.

    The side stays in memory until the job ends. The silo takes from the job the name of an allowed
    function, and nothing else. Errors are written to ``error.txt`` in the silo's folder, or in the
    job's folder before the function is allowed. The server receives no text of an error, which may
    hold data.
    """

    def __init__(self) -> None:
        super().__init__()
        self._side: Side | None = None

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        """Answer a message by the side; the reply to one that fails has a return code alone."""
        if task_name != TASK:
            return make_reply(ReturnCode.TASK_UNKNOWN)
        name = fl_ctx.get_identity_name()
        told, workspace, job = _settings(fl_ctx)
        where = Path(workspace.get_run_dir(job))
        try:
            make_side = load_allowed(told["make_side"])
            where = silo_directory(workspace.get_root_dir(), told["make_side"], name)
            if self._side is None:
                where.mkdir(parents=True, exist_ok=True)
                self._side = self._made(make_side, name, where)
            data = self._side.answer(shareable[DATA])
            if not isinstance(data, bytes):
                raise TypeError(
                    f"the side of silo {name!r} answered with {type(data).__name__}; expected bytes"
                )
        except Exception:
            with (where / ERROR).open("a") as file:
                if file.tell() < _MOST_ERRORS:
                    file.write(traceback.format_exc())
            _logger.error("silo %r could not answer; the reason is in %s", name, where / ERROR)
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        reply = make_reply(ReturnCode.OK)
        reply[DATA] = data
        return reply

    @staticmethod
    def _made(make_side: Callable, name: str, directory: Path) -> Side:
        side = make_side(name, directory)
        if side.name != name:
            raise ValueError(
                f"the side calls itself {side.name!r}; expected {name!r}, the name of the client"
            )
        return side


def silo_directory(root: str | Path, make_side: str, name: str) -> Path:
    """Return the folder of a silo's private state; each allowed function has one of its own.

    The folder is in ``NUMPYRO_FED_SILOS``, or else in ``_silos`` of the workspace. NVFLARE has no
    job of this name; a server may have the folders of jobs deleted.

    :param root: root of the silo's workspace.
    :param make_side: import path of the function.
    :param name: name of the client.
    :raises ValueError: for a name that could lead out of the folder.
    """
    if not NAME.fullmatch(name):
        raise ValueError(
            f"the client's name is {name!r}; expected letters, digits, '.', '_' and '-', a letter "
            "or digit first, as in its certificate"
        )
    slug = re.sub(r"[^A-Za-z0-9._-]", "_", make_side)
    return Path(os.environ.get(SILOS) or Path(root) / "_silos") / slug / name


class Rejoin(ClientProcessJobLauncher):
    """Launcher of a silo's process, which restarts it if it was killed or the client restarted.

    NVFLARE itself ends the job if the process dies, and does not start a process for a client that
    comes back. :func:`prepare_kit` puts this launcher in place of ``ClientProcessJobLauncher``. It
    belongs to a client's installation, not to a job.

    It refuses jobs that bring code. It removes from NVFLARE's client the commands by which a server
    reads the client's files (``cat``, ``grep``, ``ls``). The token of the client in the job lies
    beside the job, readable to the owner alone, until the job ends.
    """

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Remove the commands that read files, and go back to unfinished jobs after a restart."""
        super().handle_event(event_type, fl_ctx)
        engine = fl_ctx.get_engine()
        if event_type == EventType.SYSTEM_BOOTSTRAP:  # before the client answers anything
            processors = ClientRequestProcessors.request_processors
            processors[:] = [x for x in processors if not isinstance(x, ShellCommandProcessor)]
        elif event_type == EventType.JOB_COMPLETED:
            (
                Path(engine.args.workspace) / fl_ctx.get_prop(FLContextKey.CURRENT_JOB_ID) / REJOIN
            ).unlink(missing_ok=True)
        elif event_type == EventType.SYSTEM_START:
            for kept in sorted(Path(engine.args.workspace).glob(f"*/{REJOIN}")):
                meta = json.loads((kept.parent / "meta.json").read_text())
                known = copy.copy(engine.client)  # with the token that the job's server knows
                known.token, known.token_signature, known.ssid = json.loads(kept.read_text())
                _logger.warning("silo %r goes back to job %s", known.client_name, kept.parent.name)
                executor, context = engine.client_executor, engine.new_context()
                executor.start_app(
                    known, kept.parent.name, meta, engine.args, None, None, None, context
                )

    def launch_job(self, job_meta: dict, fl_ctx: FLContext) -> "Lasting":
        """Start a silo's process, and write the token that it needs to come back.

        :raises PermissionError: for a job that brings code.
        """
        if job_meta.get(AppValidationKey.BYOC):  # this client itself has looked for code
            raise PermissionError(
                "the job brings code; expected one that names what the site has installed and "
                "allows, as write_job makes it"
            )
        arguments = fl_ctx.get_prop(FLContextKey.JOB_PROCESS_ARGS)
        told = [
            arguments[x][1]
            for x in (
                JobProcessArgs.AUTH_TOKEN,
                JobProcessArgs.TOKEN_SIGNATURE,
                JobProcessArgs.SSID,
            )
        ]
        kept = Path(arguments[JobProcessArgs.WORKSPACE][1]) / job_meta["job_id"] / REJOIN
        kept.unlink(missing_ok=True)
        with os.fdopen(os.open(kept, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(told, file)
        launch = super().launch_job
        return Lasting(lambda: launch(job_meta, fl_ctx).adapter)


class Lasting(ProcessHandle):
    """Process that starts again after a signal ended it.

    It stays down after three ends in a row, each within half a minute of its start.

    :param launch: starts the process and returns its adapter.
    """

    adapter: ProcessAdapter

    def __init__(self, launch: Callable[[], ProcessAdapter]) -> None:
        super().__init__(process_adapter=launch())
        self._launch, self._stopped = launch, False

    def terminate(self) -> None:
        self._stopped = True
        super().terminate()

    def wait(self) -> None:
        short = 0
        while True:
            start = time.monotonic()
            self.adapter.wait()
            code = self.adapter.poll()
            short = short + 1 if time.monotonic() - start < 30.0 else 0
            if self._stopped or code is None or code >= 0 or short == 3:
                return
            _logger.warning("a silo's process was ended by signal %d, and is started again", -code)
            self.adapter = self._launch()
