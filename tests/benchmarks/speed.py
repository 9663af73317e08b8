"""Steps per second of the Langevin kernels, against hand-written JAX and against each other.

    python tests/benchmarks/speed.py [--tasks a,b,c] [--quick]

All numbers to compare are taken in turn in one process, ratios within each turn, and their median
and quartiles are printed: absolute times move with the machine and with what else runs on it.

With the bar off, :meth:`numpyro.infer.MCMC.run` compiles its loop anew in each run (NUTS's, too).
So that steps are timed and not the compiler, the whole run is compiled once by :func:`jax.jit`
here; the last table has plain runs.
"""

import argparse
import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array, random
from numpyro.infer import MCMC
from numpyro.infer.mcmc import MCMCKernel
from tasks import TASKS, Task, block_form, plain, pooled_rows

import numpyro_fed as fed

STEPS = {"a": 80_000, "b": 6_000, "c": 2_000}  # in one timed call
LONG = {"a": 1000, "b": 200, "c": 200}  # local steps of a long visit
AGAINST_PLAIN = {"a": 10.0, "b": 1.5, "c": 1.4}
Forms = dict[str, Callable[[Array], Any]]


def kernel_of(name: str, task: Task, num_local_steps: int) -> MCMCKernel:
    """SGLD, DSGLD, or FSGLD with surrogates that cost nothing to fit."""
    settings: dict[str, Any] = {
        "step_size": fed.Step(task.step_size, preconditioner=None),
        "num_local_steps": num_local_steps,
        "batch_size": task.batch_size,
    }
    if name in ("SGLD", "DSGLD"):
        return getattr(fed, name)(task.model, **settings)
    shape = (len(task.silos), task.dim)
    precision = (
        np.ones(shape) if name == "FSGLD diagonal" else np.tile(np.eye(task.dim), (shape[0], 1, 1))
    )
    surrogates = fed.surrogates.analytic(task.silos, np.zeros(shape), precision)
    return fed.FSGLD(task.model, surrogate=surrogates, **settings)


def compiled_run(kernel: MCMCKernel, silos: fed.Silos, num_samples: int) -> Callable[[Array], Any]:
    """Return a run of MCMC without the bar, one program."""
    kernel.init(random.key(0), 0, model_args=(silos,))

    @jax.jit
    def run(key: Array) -> Any:
        mcmc = MCMC(kernel, num_warmup=0, num_samples=num_samples, progress_bar=False)
        mcmc.run(key, silos)
        return mcmc.get_samples()

    return run


def run_with_bar(kernel: MCMCKernel, silos: fed.Silos, num_samples: int) -> Callable[[Array], Any]:
    """Return a run of MCMC with the bar, drawn to nowhere."""
    mcmc = MCMC(kernel, num_warmup=0, num_samples=num_samples, progress_bar=True)

    def run(key: Array) -> Any:
        with open(os.devnull, "w") as typed_worker, contextlib.redirect_stderr(typed_worker):
            mcmc.run(key, silos)
        return mcmc.get_samples()

    return run


def seconds(run: Callable[[Array], Any], key: Array) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run(key))
    return time.perf_counter() - start


def in_turn(forms: Forms, repetitions: int) -> dict[str, np.ndarray]:
    """Seconds of every form in every turn, after one call of each that compiles."""
    keys = random.split(random.key(1), repetitions + 1)
    for run in forms.values():
        seconds(run, keys[0])
    turns = [{name: seconds(run, key) for name, run in forms.items()} for key in keys[1:]]
    return {name: np.array([turn[name] for turn in turns]) for name in forms}


def quartiles(ratios: np.ndarray) -> str:
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    return f"{middle:7.3f}  [{low:.3f}, {high:.3f}]"


def verdict(reached: bool, goal: str) -> str:
    return f"goal {goal}: {'reached' if reached else 'NOT reached'}"


def speed(task: Task, num_local_steps: int, steps: int, repetitions: int) -> Iterator[str]:
    """SGLD inside MCMC against both hand-written forms."""
    num_samples = max(2, steps // num_local_steps)
    data, size = pooled_rows(task), (num_local_steps, num_samples)
    hand, scan = block_form(task, *size), plain(task, *size)
    forms: Forms = {
        "hand-written, block form": lambda key: hand(key, data),
        "hand-written, plain scan": lambda key: scan(key, data),
        "SGLD": compiled_run(kernel_of("SGLD", task, num_local_steps), task.silos, num_samples),
        "SGLD with bar": run_with_bar(
            kernel_of("SGLD", task, num_local_steps), task.silos, num_samples
        ),
    }
    times = in_turn(forms, repetitions)
    yield (
        f"{task.name}, T = {num_local_steps}: steps/s over the block form's, over the plain scan's"
    )
    for name, own in times.items():
        over_block, over_plain = (
            times[f"hand-written, {form}"] / own for form in ("block form", "plain scan")
        )
        line = f"  {name:<26}{1e6 * np.median(own) / np.prod(size):9.3f} us/step  "
        line += f"{quartiles(over_block)}   {np.median(over_plain):6.2f}"
        if name == "SGLD":
            line += "   " + verdict(bool(np.median(over_block) >= 0.95), "0.95")
            goal = AGAINST_PLAIN[task.name]
            line += "; " + verdict(bool(np.median(over_plain) >= goal), f"{goal} x plain")
        elif name == "SGLD with bar":
            line += "   " + verdict(bool(np.median(over_block) >= 0.9), "0.9")
        yield line


def kernels(task: Task, num_local_steps: int, steps: int, repetitions: int) -> Iterator[str]:
    """DSGLD and FSGLD against SGLD."""
    goals = {"SGLD": 1.0, "DSGLD": 1.05, "FSGLD diagonal": 1.1, "FSGLD full": 1.25}
    if task.dim > 500:
        goals.pop("FSGLD full")
    num_samples = max(2, steps // num_local_steps)
    forms: Forms = {
        name: compiled_run(kernel_of(name, task, num_local_steps), task.silos, num_samples)
        for name in goals
    }
    times = in_turn(forms, repetitions)
    yield f"{task.name}, T = {num_local_steps}: time over SGLD's"
    for name, own in times.items():
        ratios = own / times["SGLD"]
        line = (
            f"  {name:<26}{1e6 * np.median(own) / (num_samples * num_local_steps):9.3f} us/step  "
            f"{quartiles(ratios)}"
        )
        if name != "SGLD":
            line += "   " + verdict(bool(np.median(ratios) <= goals[name]), f"{goals[name]}")
        yield line


def repeats(task: Task, num_local_steps: int) -> Iterator[str]:
    """Seconds, and calls of the model, of the first run, the second, and a new object's."""
    calls = 0

    @functools.wraps(task.model)
    def counted(**kwargs: Array) -> Any:
        nonlocal calls
        calls += 1
        return task.model(**kwargs)

    def mcmc(bar: bool) -> MCMC:
        kernel = kernel_of("SGLD", task._replace(model=counted), num_local_steps)
        return MCMC(kernel, num_warmup=0, num_samples=10, progress_bar=bar)

    yield (
        f"{task.name}: seconds of 10 rounds of {num_local_steps} steps (almost all is compiling), "
        "calls of the model"
    )
    for bar in (False, True):
        same = mcmc(bar)
        for name, one in (("first run", same), ("second run", same), ("new object", mcmc(bar))):
            before = calls

            def run(key: Array, one: MCMC = one) -> Any:
                with (
                    open(os.devnull, "w") as typed_worker,
                    contextlib.redirect_stderr(typed_worker),
                ):
                    one.run(key, task.silos)
                return one.get_samples()

            line = (
                f"  {name + (', with bar' if bar else ''):<26}{seconds(run, random.key(0)):9.2f} "
                f"s   {calls - before:3d} calls"
            )
            if name != "first run" or bar:
                line += "   " + verdict(calls == before, "0 calls")
            yield line


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Speed of the Langevin kernels.")
    parser.add_argument("--tasks", default="a,b,c", help="which of a, b, c")
    parser.add_argument(
        "--quick", action="store_true", help="few rows and turns: to see that it runs"
    )
    parser.add_argument("--turns", type=int, help="how often each form is timed")
    args = parser.parse_args(arguments)
    turns = args.turns or (5 if args.quick else 31)
    for name in args.tasks.split(","):
        task = TASKS[name](10 if args.quick else 1)
        steps = STEPS[name] // (5 if args.quick else 1)
        for num_local_steps in (40, LONG[name]):
            print(*speed(task, num_local_steps, steps, turns), sep="\n", flush=True)
        print(*kernels(task, 40, steps, turns), sep="\n", flush=True)
        print(*repeats(task, 40), sep="\n", flush=True)


if __name__ == "__main__":
    main()
