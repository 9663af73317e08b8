"""Microseconds of an SGLD step: numpyro_fed, the package `posteriors` (PyTorch), and C.

    python -m venv ELSEWHERE && ELSEWHERE/bin/pip install torch posteriors
    taskset -c 0 python tests/benchmarks/others.py --torch-python ELSEWHERE/bin/python
        [--tasks a,b,c] [--quick] [--turns 31]

The tasks are those of tasks.py, from the same data, with the same minibatch sizes and step sizes,
each on one core by taskset. `posteriors` lives in an environment of its own, outside the checkout,
and runs in a subprocess (posteriors_sgld.py). C (sgld.c) is compiled here by gcc, once for each set
of flags of ``FLAGS``. Without the interpreter or gcc, those rows are left out. Our steps are those
inside :class:`numpyro.infer.MCMC`, without the bar, compiled as in speed.py.

Before anything is timed, gradients of the other programs at one position and minibatch are held
against that of the NumPyro model, and on task a the draws of all against the law of SGLD: a linear
recursion, whose mean is the posterior's and whose sd is known (larger than the posterior's, as
minibatches add noise). Most of that sd is due to minibatches, so the Gaussian noise of the others
is checked by itself, on the first steps of task c. The command ends where one is wrong.

Then all are called in turn; the ratios are taken within each turn, and their medians and quartiles
printed.
"""

import argparse
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.infer.util import log_density
from speed import LONG, compiled_run, in_turn, kernel_of, quartiles, verdict
from tasks import LAYERS, TASKS, Task, pooled_rows

FLAGS = ("-O3 -march=native -ffast-math", "-O3 -march=native", "-O3")
HERE = Path(__file__).parent
OURS, TORCH = "numpyro_fed", "posteriors"
STEPS = {  # in one timed call: about a tenth of a second on an idle core
    "a": {OURS: 200_000, TORCH: 200, "C": 2_000_000},
    "b": {OURS: 8_000, TORCH: 200, "C": 8_000},
    "c": {OURS: 4_000, TORCH: 80, "C": 4_000},
}
DRAWS = {
    OURS: 20_000,
    TORCH: 400,
    "C": 20_000,
}  # 40 steps apart, where those of task a are all but independent
OVER_TORCH = {"a": 1000.0, "b": 60.0, "c": 35.0}
OVER_C = 1.25  # task b, flags of the first set
SURE = 4.5  # standard errors


class Program:
    """A program that answers lines by lines of numbers."""

    def __init__(self, command: list[str], stack: ExitStack) -> None:
        self.command = " ".join(command)
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        stack.callback(self.process.communicate)  # no more input ends it

    def ask(self, line: str) -> np.ndarray:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.command} ended with {self.process.wait()}")
        return np.array(answer.split(), float)


def write(task: Task, folder: Path) -> tuple[Array, np.ndarray]:
    """Write data for both programs; return the position and minibatch of the gradient."""
    rows: dict[str, Any] = {k: np.asarray(v) for k, v in pooled_rows(task).items()}
    rng = np.random.default_rng(0)
    theta = rng.normal(0, 0.3, task.dim).astype(np.float32)
    index = rng.integers(0, len(rows["y"]), task.batch_size)
    np.savez(folder / "data.npz", theta=theta, index=index, **rows)
    for name, values in (rows | {"theta": theta}).items():
        values.astype(np.float32).tofile(folder / f"{name}.bin")
    index.astype(np.uint32).tofile(folder / "index.bin")
    return jnp.asarray(theta), index


def programs(
    task: Task, folder: Path, torch_python: Path | None, stack: ExitStack
) -> dict[str, Program]:
    """`posteriors` and C, as far as they are there."""
    arguments = [task.name, str(folder), str(len(pooled_rows(task)["y"])), str(task.step_size)]
    found = {}
    if torch_python is not None:
        script = str(HERE / "posteriors_sgld.py")
        found[TORCH] = Program([str(torch_python), "-W", "ignore", script, *arguments], stack)
    if shutil.which("gcc"):
        for i, flags in enumerate(FLAGS):
            binary = str(folder / f"sgld{i}")
            subprocess.run(
                ["gcc", *flags.split(), str(HERE / "sgld.c"), "-o", binary, "-lm"], check=True
            )
            found[f"C {flags}"] = Program([binary, *arguments], stack)
    return found


def model_gradient(task: Task, theta: Array, index: np.ndarray) -> np.ndarray:
    """Of the log density of the NumPyro model, with the minibatch scaled to all rows."""
    data = pooled_rows(task)
    batch = {k: v[index] for k, v in data.items()}
    without_rows = handlers.block(task.model, hide=["y"])
    trace = handlers.trace(handlers.seed(task.model, 0)).get_trace(**batch)
    sites = {
        k: v["value"] for k, v in trace.items() if v["type"] == "sample" and not v["is_observed"]
    }
    unravel = ravel_pytree(sites)[1]

    def log_posterior(theta: Array) -> Array:
        joint, prior = (
            log_density(model, (), batch, unravel(theta))[0] for model in (task.model, without_rows)
        )
        return prior + len(data["y"]) / task.batch_size * (joint - prior)

    return np.asarray(jax.grad(log_posterior)(theta))


def check_gradients(found: dict[str, Program], expected: np.ndarray) -> Iterator[str]:
    for name, program in found.items():
        error = np.abs(program.ask("gradient") - expected).max() / np.abs(expected).max()
        yield f"  gradient of {name:<34} differs by {error:.1e} of its largest entry"
        if not error < 1e-4:
            raise SystemExit(f"the gradient of {name} is wrong by {error}")


def law(task: Task) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean and sd of SGLD's positions on task a, and the sd of the posterior."""
    y = np.asarray(pooled_rows(task)["y"], float)
    h, m, rows = task.step_size, task.batch_size, len(y)
    precision = rows + 0.01
    noise = h + (h / 2 * rows) ** 2 / m * y.var(0)
    sd = np.sqrt(noise / (1 - (1 - h / 2 * precision) ** 2))
    return y.sum(0) / precision, sd, np.full(2, precision**-0.5)


def check_draws(task: Task, found: dict[str, Program], draws: dict[str, int]) -> Iterator[str]:
    mean, sd, posterior_sd = law(task)
    yield (
        f"  law of SGLD's draws: mean {mean.round(4)}, sd {sd.round(4)} (of the posterior: "
        f"{posterior_sd.round(4)})"
    )
    run = compiled_run(kernel_of("SGLD", task, 40), task.silos, draws[OURS])
    for name in (OURS, *found):
        number = draws.get(name, draws["C"])
        if name == OURS:
            mu = np.asarray(run(random.key(0))["mu"], float)
            own = np.stack([mu.mean(0), mu.std(0)])
        else:
            own = found[name].ask(f"draws {number}").reshape(2, 2)
        errors = np.stack([(own[0] - mean) / sd, 2**0.5 * (own[1] / sd - 1)]) * number**0.5
        line = f"  {name:<34} mean {own[0].round(4)}, sd {own[1].round(4)}, {number:,} draws: "
        yield line + f"at most {np.abs(errors).max():.1f} standard errors off"
        if not np.abs(errors).max() < SURE:
            raise SystemExit(f"the draws of {name} are wrong")


def check_noise(task: Task, found: dict[str, Program]) -> Iterator[str]:
    """At zero, all gradients of task c but those of the last biases vanish.

    The first steps are noise.
    """
    last_biases = slice(sum(LAYERS[1:-1]), sum(LAYERS[1:]))
    for name, program in found.items():
        xi = np.delete(program.ask("steps 16"), last_biases) / (16 * task.step_size) ** 0.5
        errors = np.abs([xi.mean(), (xi.std() - 1) * 2**0.5]) * len(xi) ** 0.5
        yield (
            f"  noise of {name:<34} mean {xi.mean():.3f}, sd {xi.std():.3f}: at most "
            f"{errors.max():.1f} standard errors off"
        )
        if not errors.max() < SURE:
            raise SystemExit(f"the noise of {name} is wrong")


def asking(program: Program, line: str) -> Callable[[Array], np.ndarray]:
    """As a form that :func:`speed.in_turn` calls. The programs have random numbers of their own."""
    return lambda key: program.ask(line)


def steps_of(task: Task, name: str, shrink: int) -> int:
    """In one timed call."""
    return STEPS[task.name]["C" if name.startswith("C ") else name] // shrink


def table(
    task: Task, found: dict[str, Program], num_local_steps: int, turns: int, shrink: int
) -> Iterator[str]:
    """All in turn: theirs over ours."""
    num_samples = steps_of(task, OURS, shrink) // num_local_steps
    forms: dict[str, Callable[[Array], Any]] = {
        OURS: compiled_run(kernel_of("SGLD", task, num_local_steps), task.silos, num_samples)
    }
    steps = {OURS: num_samples * num_local_steps} | {
        name: steps_of(task, name, shrink) for name in found
    }
    for name, program in found.items():
        forms[name] = asking(program, f"steps {steps[name]}")
    times = {name: own / steps[name] for name, own in in_turn(forms, turns).items()}
    yield (
        f"{task.name}, T = {num_local_steps}: us/step; for posteriors its time over ours, for C "
        "ours over its"
    )
    for name, own in times.items():
        line = f"  {name:<34}{1e6 * np.median(own):10.3f} us/step"
        if name == TORCH:
            ratios, goal = own / times[OURS], OVER_TORCH[task.name]
            line += (
                f"  {quartiles(ratios)}   "
                f"{verdict(bool(np.median(ratios) >= goal), f'at least {goal:.0f}')}"
            )
        elif name != OURS:
            ratios = times[OURS] / own
            line += f"  {quartiles(ratios)}"
            if task.name == "b" and name == f"C {FLAGS[0]}":
                line += f"   {verdict(bool(np.median(ratios) <= OVER_C), f'at most {OVER_C}')}"
        yield line


def measure(task: Task, torch_python: Path | None, turns: int, shrink: int) -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        theta, index = write(task, Path(folder))
        found = programs(task, Path(folder), torch_python, stack)
        print(f"{task.name}: checks")
        for line in check_gradients(found, model_gradient(task, theta, index)):
            print(line, flush=True)
        if task.name == "a":
            print(
                *check_draws(task, found, {k: v // shrink for k, v in DRAWS.items()}),
                sep="\n",
                flush=True,
            )
        if task.name == "c":
            for line in check_noise(task, found):
                print(line, flush=True)
        for num_local_steps in (40, LONG[task.name]):
            print(*table(task, found, num_local_steps, turns, shrink), sep="\n", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="SGLD against posteriors and C.")
    parser.add_argument(
        "--torch-python", type=Path, help="the interpreter that has torch and posteriors"
    )
    parser.add_argument("--tasks", default="a,b,c", help="which of a, b, c")
    parser.add_argument(
        "--quick", action="store_true", help="few rows and turns: to see that it runs"
    )
    parser.add_argument("--turns", type=int, help="how often each form is timed")
    args = parser.parse_args(arguments)
    if args.torch_python is None:
        print("no --torch-python: the rows of posteriors are left out")
    if not shutil.which("gcc"):
        print("no gcc: the rows of C are left out")
    for name in args.tasks.split(","):
        shrink = 10 if args.quick else 1
        measure(
            TASKS[name](shrink), args.torch_python, args.turns or (5 if args.quick else 31), shrink
        )


if __name__ == "__main__":
    main()
