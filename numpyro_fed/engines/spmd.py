"""Silos over several JAX processes of one organization, on one machine or several.

Every process runs the same program and has the rows of its own silos. Each process does the work of
the server. The process that has a silo answers its calls, and all processes receive the reply.
Private states stay in the process that has the rows. The processes trust each other: each sees all
replies. A process that dies ends the others after JAX's heartbeat.

    python -m numpyro_fed.engines.spmd --processes 2 models/heart_disease.py

starts two processes on this machine, deals the silos of the file's ``silos()`` to them in turn, and
runs FSGLD on its ``model``.
"""

import argparse
import importlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from numpyro_fed._typing import PyTree
from numpyro_fed.data.silos import Silos
from numpyro_fed.density.fingerprint import description, joined_spec
from numpyro_fed.rounds.remote import Carrier, RemoteSilos
from numpyro_fed.rounds.worker import Call, SiloWorker, worker_of


def initialize(coordinator_address: str, num_processes: int, process_id: int) -> None:
    """Call ``jax.distributed.initialize`` with collectives for CPUs.

    The call has to precede any other use of JAX.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator_address, num_processes, process_id)


class Spmd(Carrier):
    """Carrier that gathers replies over all processes.

    :param workers: workers of this process's silos, by number among all silos.
    :param owner: the process of each silo.
    :param silos: silos of this process.
    """

    def __init__(self, workers: dict[int, SiloWorker], owner: list[int], silos: Silos) -> None:
        super().__init__(workers)
        self.owner, self.silos = owner, silos

    def check(self, check: Callable[[Silos], None]) -> None:
        """Have each process check its own silos.

        :raises ValueError: in every process, if the rows of one are wrong.
        """
        said = " "
        try:
            check(self.silos)
        except ValueError as error:
            said = str(error)
        wrong = [text for text in _gather_text(said) if text.strip()]
        if wrong:
            raise ValueError(wrong[0])

    def ask(self, calls: list[Call]) -> list[PyTree]:
        """Return the replies in the order of the calls, which must have replies of one type.

        :raises RuntimeError: if the processes do not make the same calls.
        """
        site = next(iter(self.workers.values()))
        kinds = [
            self.type_of(call, site) for call in calls
        ]  # of all, to note the types that each call writes
        leaves, tree = jax.tree.flatten(kinds[0])
        size = sum(x.size * x.dtype.itemsize for x in leaves)
        sent = np.zeros((len(calls), _HEAD.itemsize + size), np.uint8)
        # JAX dispatches all before the first result is read
        answers = {
            i: self.workers[c.number].answer(c)
            for i, c in enumerate(calls)
            if c.number in self.workers
        }
        for i, call in enumerate(calls):
            sent[i, : _HEAD.itemsize] = _head(call)
            if i in answers:
                reply = jax.tree.leaves(answers[i])
                sent[i, _HEAD.itemsize :] = np.concatenate(
                    [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in reply]
                )
        got = _gathered(sent)
        heads = got[:, :, : _HEAD.itemsize]
        if (heads != heads[0]).any():
            raise RuntimeError(
                "the processes do not make the same calls: a number that decides which (a step "
                "size, a probability, a round's count) differs "
                "between them; expected processors of one make, and the same kernel, seed and "
                "versions in every process"
            )
        return [
            _unpacked(got[self.owner[call.number], i, _HEAD.itemsize :], leaves, tree)
            for i, call in enumerate(calls)
        ]


@cache
def _gathering() -> tuple[jax.Device, NamedSharding, Callable]:
    """Return the device, a sharding with a row in each process, and a program that gathers rows."""
    first = {d.process_index: d for d in reversed(jax.devices())}
    mesh = Mesh(np.array([first[p] for p in sorted(first)]), ("process",))
    spread, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("process",), ()))
    return first[jax.process_index()], spread, jax.jit(lambda x: x, out_shardings=whole)


def _gathered(own: np.ndarray) -> np.ndarray:
    """Return the arrays of all processes, ``(processes, ...)``.

    ``process_allgather`` makes program and sharding anew, and takes five times as long.
    """
    device, spread, to_all = _gathering()
    part = jax.device_put(own[None], device)
    rows = jax.make_array_from_single_device_arrays(
        (jax.process_count(), *own.shape), spread, [part]
    )
    return np.asarray(to_all(rows).addressable_data(0))


_HEAD = np.dtype((np.int64, 4))  # the silo's number, the slot written, and those read: two at most


def _head(call: Call) -> np.ndarray:
    slots = [-1 if call.write is None else call.write, *jax.tree.leaves(call.read), -1, -1]
    return np.array([call.number, *slots[:3]], np.int64).view(np.uint8)


def _unpacked(data: np.ndarray, leaves: list, tree: jax.tree_util.PyTreeDef) -> PyTree:
    out, start = [], 0
    for x in leaves:
        stop = start + x.size * x.dtype.itemsize
        out.append(data[start:stop].copy().view(x.dtype).reshape(x.shape))
        start = stop
    return jax.tree.unflatten(tree, out)


def connect(silos: Silos) -> RemoteSilos:
    """Return all silos as remote silos; every process calls this with its own.

    :param silos: silos of this process.
    :raises ValueError: naming the process, if its silos do not fit the others.
    """
    told = [json.loads(text) for text in _gather_text(json.dumps(description(silos, values=True)))]
    known = joined_spec(told, [f"process {i}" for i in range(len(told))], silos.shared)
    owner = [process for process, other in enumerate(told) for _ in other["names"]]
    sites = {known.names.index(name): worker_of(silos, name, known) for name in silos.names}
    return RemoteSilos(known, Spmd(sites, owner, silos))


def _gather_text(text: str) -> list[str]:
    """Return the texts of all processes."""
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = _gathered(np.array(len(data), np.int32))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(data)] = data
    every = _gathered(padded)
    return [row[:n].tobytes().decode() for row, n in zip(every, sizes, strict=True)]


def dealt(silos: Silos, process: int, num_processes: int) -> Silos:
    """Return the silos of one process, if silos are dealt to processes in turn.

    :raises ValueError: if there are more processes than silos.
    """
    names = silos.names[process::num_processes]
    if not names:
        raise ValueError(
            f"{num_processes} processes for {len(silos)} silos; expected at most one process a silo"
        )
    where = np.isin(np.arange(len(silos)), np.arange(process, len(silos), num_processes))
    sizes = {g: tuple(np.asarray(n)[where].tolist()) for g, n in silos.sizes.items()}
    own = {g: np.flatnonzero(where[silos.silo_of_row(g)]) for g in silos.sizes}
    rows = {leaf: x[own[silos.group[leaf]]] for leaf, x in silos.rows.items()}
    order = {g: jnp.arange(len(kept), dtype=jnp.int32) for g, kept in own.items()}
    return silos.like(names, sizes, rows, order)


def _one_process(args: argparse.Namespace) -> None:
    import numpyro_fed as fed

    _share_cores(args.process, args.processes)
    initialize(args.coordinator, args.processes, args.process)
    sys.path.insert(0, str(Path(args.file).resolve().parent))
    module = importlib.import_module(Path(args.file).stem)
    silos = connect(dealt(module.silos(), args.process, args.processes))
    first = args.process == 0
    mcmc = fed.RemoteMCMC(
        fed.FSGLD(module.model),
        num_warmup=args.warmup,
        num_samples=args.samples,
        num_chains=args.chains,
        progress_bar=first,
    )
    mcmc.run(jax.random.key(args.seed), silos)
    if first:
        mcmc.print_summary()
        print(mcmc.sampler.ledger(mcmc.last_state))
        if args.out is not None:
            fed.to_inference_data(mcmc, silos).to_netcdf(args.out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the processes on this machine, wait, and return the first exit code other than zero."""
    parser = argparse.ArgumentParser(
        description="FSGLD of a model file over several JAX processes on this machine."
    )
    parser.add_argument("file", help="with `model` and `silos()`")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="netCDF file for the result")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.process is not None:
        _one_process(args)
        return 0
    if not Path(args.file).is_file():
        parser.error(f"{args.file}: no such file")
    if args.processes < 1:
        parser.error(f"--processes: expected at least 1, got {args.processes}")
    command = [
        sys.executable,
        "-m",
        "numpyro_fed.engines.spmd",
        *(sys.argv[1:] if arguments is None else arguments),
    ]
    command += ["--coordinator", f"127.0.0.1:{_free_port()}"]
    started = [subprocess.Popen([*command, "--process", str(i)]) for i in range(args.processes)]
    try:
        while any(p.poll() is None for p in started) and not any(p.poll() for p in started):
            time.sleep(0.2)  # the others would wait forever for one that failed
        return next((code for code in [p.poll() for p in started] if code), 0)
    finally:
        for process in started:
            process.kill()


def _share_cores(process: int, processes: int) -> None:
    """Bind this process to its share of the cores, so that processes do not slow each other down.

    A process stays unbound if there are more processes than cores.
    """
    if hasattr(os, "sched_setaffinity"):
        own = sorted(os.sched_getaffinity(0))[process::processes]
        if own:
            os.sched_setaffinity(0, own)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
