"""SGLD of the package `posteriors` on the tasks of tasks.py, one thread.

others.py runs, checks and times it.

    python posteriors_sgld.py a|b|c FOLDER ROWS STEP_SIZE

The arguments, and the commands on standard input, are those of sgld.c; data are in FOLDER/data.npz.
A model's parameters are a dictionary by site, as in its NumPyro form, and the rows of a step are
drawn by one call and gathered by one more.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import posteriors
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, relu, softplus

BATCH = {"a": 10, "b": 100, "c": 50}
LAYERS = (18, 18, 18, 8, 2)
APART = 40  # steps between two draws
Params = dict[str, Tensor]


def likelihood_a(params: Params, rows: Params) -> Tensor:
    return -0.5 * ((rows["y"] - params["mu"]) ** 2).sum()


def likelihood_b(params: Params, rows: Params) -> Tensor:
    logits = rows["x"] @ params["beta"]
    return (rows["y"] * logits - softplus(logits)).sum()


def likelihood_c(params: Params, rows: Params) -> Tensor:
    last, h = len(LAYERS) - 2, rows["x"]
    for i in range(last):
        h = relu(linear(h, params[f"w{i}"].T, params[f"b{i}"]))
    logits = linear(h, params[f"w{last}"].T, params[f"b{last}"])
    return -cross_entropy(logits, rows["y"], reduction="sum")


LIKELIHOODS: dict[str, Callable[[Params, Params], Tensor]] = {
    "a": likelihood_a,
    "b": likelihood_b,
    "c": likelihood_c,
}


def shapes(task: str) -> dict[str, tuple[int, ...]]:
    """Of each site, in the order of a flat position."""
    if task != "c":
        return {"mu": (2,)} if task == "a" else {"beta": (123,)}
    pairs = list(zip(LAYERS[:-1], LAYERS[1:], strict=True))
    return {f"b{i}": (o,) for i, (_, o) in enumerate(pairs)} | {
        f"w{i}": pair for i, pair in enumerate(pairs)
    }


class Sampler:
    """One task's chain."""

    def __init__(self, task: str, folder: str, num_rows: int, step_size: float) -> None:
        with np.load(f"{folder}/data.npz") as file:
            given = {k: torch.from_numpy(file[k]) for k in file.files}
        self.theta, self.index = given.pop("theta"), given.pop("index")
        self.data = {k: v.long() if task == "c" and k == "y" else v for k, v in given.items()}
        self.shapes, self.num_rows, self.batch_size = shapes(task), num_rows, BATCH[task]
        likelihood, scale, precision = (
            LIKELIHOODS[task],
            num_rows / BATCH[task],
            0.01 if task == "a" else 1.0,
        )

        def log_posterior(params: Params, rows: Params) -> tuple[Tensor, Tensor]:
            squares = sum((p**2).sum() for p in params.values())
            return scale * likelihood(params, rows) - 0.5 * precision * squares, torch.tensor([])

        self.log_posterior = log_posterior
        # its step is theta + lr * gradient + N(0, 2 lr)
        self.transform = posteriors.sgmcmc.sgld.build(log_posterior, lr=step_size / 2)

    def tree(self, flat: Tensor) -> Params:
        sizes = [int(np.prod(s)) for s in self.shapes.values()]
        return {
            k: part.reshape(s)
            for (k, s), part in zip(self.shapes.items(), flat.split(sizes), strict=True)
        }

    def flat(self, params: Params) -> Tensor:
        return torch.cat([params[k].ravel() for k in self.shapes])

    def rows(self, index: Tensor) -> Params:
        return {k: v[index] for k, v in self.data.items()}

    def init(self) -> Any:
        return self.transform.init(self.tree(torch.zeros_like(self.theta)))

    def run(self, state: Any, steps: int) -> Any:
        for _ in range(steps):
            index = torch.randint(self.num_rows, (self.batch_size,))
            state, _ = self.transform.update(
                state, self.rows(index), inplace=True
            )  # faster than a new state
        return state

    def answer(self, command: str, number: int) -> Tensor:
        if command == "gradient":
            grad = torch.func.grad(self.log_posterior, has_aux=True)
            return self.flat(grad(self.tree(self.theta), self.rows(self.index))[0])
        state = self.init()
        if command == "steps":
            return self.flat(self.run(state, number).params)
        positions = []
        for _ in range(number):
            state = self.run(state, APART)
            positions.append(self.flat(state.params))
        draws = torch.stack(positions)
        return torch.cat([draws.mean(0), draws.std(0, correction=0)])


def main(arguments: list[str], commands: Iterable[str]) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    task, folder, num_rows, step_size = arguments
    sampler = Sampler(task, folder, int(num_rows), float(step_size))
    for line in commands:
        command, *number = line.split()
        print(*sampler.answer(command, int(number[0]) if number else 0).tolist(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:], sys.stdin)
