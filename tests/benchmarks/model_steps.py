"""Steps per second of SGLD on the models of the papers' experiments.

Beside them are the same models in hand-written JAX.

    python tests/benchmarks/model_steps.py [--models metric_learning,...] [--stay T] [--quick]

Hand-written is :func:`tasks.block_form`, one jitted scan: random numbers and rows of a block of
steps drawn in one go. Both make the same SGLD steps on the pooled rows, with the paper's
minibatches, and are timed in turn in one process. Goal: 0.9 of the hand-written form's steps per
second. DSGLD's and FSGLD's steps (full and diagonal surrogates), which travel, are timed against
SGLD's.

Rows are simulated, of the shape of the experiment's: time does not depend on their values.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from speed import compiled_run, in_turn, kernel_of, kernels, quartiles, verdict
from tasks import Task, block_form, pooled_rows

import numpyro_fed as fed

sys.path.insert(0, str(Path(__file__).parents[2] / "models"))

import metric_learning

__all__ = ["MODELS", "steps_per_second"]

GOAL = 0.9
STEPS = 40_000  # in one timed call


def metric_learning_task(shrink: int = 1) -> Task:
    """Ten silos of 1,000 pairs, m = 256, d = 11: gamma, then mu."""
    rng = np.random.default_rng(0)
    rows, width = metric_learning.NUM_PAIRS // shrink, metric_learning.DIRECTIONS
    w = rng.exponential(1 / width, (10 * rows, width)).astype(np.float32)
    similar = (rng.random(10 * rows) < 1 / (1 + np.exp(3 * w.sum(1) - 3))).astype(np.float32)

    def log_likelihood(theta: Array, rows: dict[str, Array]) -> Array:
        logits = theta[-1] - rows["w"] @ theta[:-1]
        return jnp.sum(rows["similar"] * logits - jax.nn.softplus(logits))

    return Task(
        "metric_learning",
        metric_learning.model,
        fed.split({"w": w, "similar": similar}, by=np.arange(10 * rows) % 10),
        min(metric_learning.BATCH_SIZE, rows),
        metric_learning.STEP_SIZE,
        width + 1,
        lambda theta: -0.5 * jnp.sum(theta**2) / metric_learning.PRIOR_SD**2,
        log_likelihood,
    )


# A model joins with a line here: how its Task is made, given by how much to shrink its silos.
MODELS: dict[str, Callable[[int], Task]] = {"metric_learning": metric_learning_task}


def steps_per_second(
    task: Task, num_local_steps: int, steps: int, turns: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return steps per second of the library's SGLD and of the hand-written block form, by turn."""
    num_samples = max(2, steps // num_local_steps)
    data, hand = pooled_rows(task), block_form(task, num_local_steps, num_samples)
    times = in_turn(
        {
            "library": compiled_run(
                kernel_of("SGLD", task, num_local_steps), task.silos, num_samples
            ),
            "hand-written": lambda key: hand(key, data),
        },
        turns,
    )
    total = num_samples * num_local_steps
    return total / times["library"], total / times["hand-written"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Steps of the papers' models, against hand-written JAX."
    )
    parser.add_argument("--models", default=",".join(MODELS), help=f"which of {', '.join(MODELS)}")
    parser.add_argument(
        "--stay", type=int, nargs="+", default=[40, 200], help="local steps of a round"
    )
    parser.add_argument("--turns", type=int, default=31, help="how often each form is timed")
    parser.add_argument(
        "--quick", action="store_true", help="few rows and turns: to see that it runs"
    )
    args = parser.parse_args(arguments)
    turns, steps = (3, STEPS // 20) if args.quick else (args.turns, STEPS)
    for name in args.models.split(","):
        task = MODELS[name](10 if args.quick else 1)
        for stay in args.stay:
            own, hand = steps_per_second(task, stay, steps, turns)
            ratios = own / hand
            print(
                f"{name}, T = {stay}: {np.median(own):,.0f} steps/s, hand-written "
                f"{np.median(hand):,.0f}: ",
                end="",
            )
            print(
                f"{quartiles(ratios)}   {verdict(bool(np.median(ratios) >= GOAL), str(GOAL))}",
                flush=True,
            )
            print(*kernels(task, stay, steps, turns), sep="\n", flush=True)


if __name__ == "__main__":
    main()
