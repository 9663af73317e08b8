"""Peak memory of a run on task c (2.7 million rows), each way in a process of its own.

    python tests/benchmarks/memory.py [--quick]

The goal is the data once, 2.5 x the kept samples, and 600 MiB for Python, JAX and its compiler.

:class:`numpyro.infer.MCMC` closes over its arguments, and JAX writes what a program closes over
into the program: two to three further copies of the data, and one more with each later run without
the bar. Two settings avoid that. JAX's own, ``JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS=1`` in the
environment, which is to become its default, hands such arrays to the program as arguments;
``MCMC(..., jit_model_args=True)`` does so too, but copies them in each round of a run with the bar.
Neither changes a draw.
"""

import argparse
import os
import resource
import subprocess
import sys
from collections.abc import Sequence

FLAG = "JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS"
MIB = 1 << 20


def child(shrink: int, jit_model_args: bool, bar: bool, runs: int) -> None:
    """Make the data, run, and print MiB.

    Of the data, of the samples, and the peak before and after.
    """
    import jax
    from numpyro.infer import MCMC
    from tasks import TASKS

    import numpyro_fed as fed

    task = TASKS["c"](shrink)
    before = peak()
    kernel = fed.SGLD(task.model, task.step_size, 40, task.batch_size)
    mcmc = MCMC(
        kernel, num_warmup=0, num_samples=500, progress_bar=bar, jit_model_args=jit_model_args
    )
    for seed in range(runs):
        mcmc.run(jax.random.key(seed), task.silos)
    samples = jax.block_until_ready(mcmc.get_samples())
    data = sum(v.nbytes for v in jax.tree.leaves(task.silos))
    print(data / MIB, sum(v.nbytes for v in samples.values()) / MIB, before, peak())


def peak() -> float:
    """Largest resident size so far, in MiB (ru_maxrss is in KiB, on macOS in bytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        MIB if sys.platform == "darwin" else 1024
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Peak memory of a run.")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows")
    parser.add_argument("--child", nargs=4, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        shrink, jit_model_args, bar, runs = args.child
        return child(shrink, bool(jit_model_args), bool(bar), runs)

    shrink = 10 if args.quick else 1
    print(f"{'MiB':<44}{'data':>7}{'samples':>9}{'data made':>11}{'peak':>7}{'goal':>7}")
    for name, flag, jit_model_args, bar, runs in (
        ("as it comes", 0, 0, 0, 1),
        ("as it comes, with bar", 0, 0, 1, 1),
        ("as it comes, run three times", 0, 0, 0, 3),
        ("jit_model_args=True", 0, 1, 0, 1),
        (f"{FLAG}=1", 1, 0, 0, 1),
        (f"{FLAG}=1, with bar", 1, 0, 1, 1),
        (f"{FLAG}=1, three times", 1, 0, 0, 3),
    ):
        command = [
            sys.executable,
            __file__,
            "--child",
            *map(str, (shrink, jit_model_args, bar, runs)),
        ]
        environment = {**os.environ, FLAG: str(flag)}
        done = subprocess.run(command, env=environment, check=True, text=True, capture_output=True)
        data, samples, before, after = map(float, done.stdout.split())
        goal = data + 2.5 * samples + 600
        met = "reached" if after <= goal else "NOT reached"
        print(
            f"{name:<44}{data:7.0f}{samples:9.1f}{before:11.0f}{after:7.0f}{goal:7.0f}   {met}",
            flush=True,
        )


if __name__ == "__main__":
    main()
