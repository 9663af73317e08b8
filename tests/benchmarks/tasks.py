r"""Three tasks of different step costs, each as a NumPyro model and as hand-written JAX.

a: mean of a Gaussian, d = 2, 10 silos of 200 rows, m = 10: a step is almost only random numbers and
dispatch. b: logistic regression, d = 123, 26,000 rows of about 14 binary features (the shape of
a9a), m = 100. c: an MLP 18-18-18-8-2, 854 parameters, 30 silos of 90,000 rows, m = 50.

:func:`plain` is the scan that one writes first, :func:`block_form` the fastest known: random
numbers drawn and rows gathered for a block of steps in one go. Both make SGLD steps on the pooled
rows,

.. math::

    \theta \leftarrow \theta + \tfrac h2 \left( \nabla \log p(\theta)
    + \tfrac Nm \nabla \log p(y^{(m)} \mid \theta) \right) + N(0, h) .
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, lax, random

import numpyro_fed as fed

__all__ = ["TASKS", "Task", "block_form", "plain", "pooled_rows"]

BLOCK = 200  # most steps of the hand-written block form whose random numbers are drawn together

LAYERS = (18, 18, 18, 8, 2)


class Task(NamedTuple):
    """A posterior as a model, and written by hand.

    :param name: a letter.
    :param model: the NumPyro model.
    :param silos: its data.
    :param batch_size: m.
    :param step_size: h.
    :param dim: number of parameters.
    :param log_prior: of a flat position, up to a constant.
    :param log_likelihood: of a flat position and rows, summed, up to a constant.
    """

    name: str
    model: Callable
    silos: fed.Silos
    batch_size: int
    step_size: float
    dim: int
    log_prior: Callable[[Array], Array]
    log_likelihood: Callable[[Array, dict[str, Array]], Array]


def gaussian_model(y: Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 10).expand([2]).to_event(1))
    with fed.silo_plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1).to_event(1), obs=y)


def task_a(shrink: int = 1) -> Task:
    """Mean of a Gaussian (small as it is)."""
    rng = np.random.default_rng(0)
    data = {
        f"silo{s}": {"y": rng.normal(rng.normal(size=2), 1, (200, 2)).astype(np.float32)}
        for s in range(10)
    }
    return Task(
        "a",
        gaussian_model,
        fed.Silos(data),
        10,
        1e-4,
        2,
        lambda theta: -0.5 * jnp.sum(theta**2) / 100,
        lambda theta, rows: -0.5 * jnp.sum((rows["y"] - theta) ** 2),
    )


def logistic_model(x: Array, y: Array) -> None:
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[-1]]).to_event(1))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def task_b(shrink: int = 1) -> Task:
    """Logistic regression on one-hot codes of 14 categorical features."""
    rng = np.random.default_rng(1)
    rows, dim, categories = 26_000 // shrink, 123, 14
    edges = np.linspace(0, dim, categories + 1).astype(int)
    x = np.zeros((rows, dim), np.float32)
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        x[np.arange(rows), rng.integers(low, high, rows)] = 1
    y = (rng.random(rows) < 1 / (1 + np.exp(-x @ rng.normal(0, 0.5, dim)))).astype(np.float32)

    def log_likelihood(beta: Array, rows: dict[str, Array]) -> Array:
        logits = rows["x"] @ beta
        return jnp.sum(rows["y"] * logits - jax.nn.softplus(logits))

    return Task(
        "b",
        logistic_model,
        fed.split({"x": x, "y": y}, by=np.arange(rows) % 10),
        100,
        1e-5,
        dim,
        lambda beta: -0.5 * jnp.sum(beta**2),
        log_likelihood,
    )


def mlp_model(x: Array, y: Array) -> None:
    sites = []
    for i, (fan_in, fan_out) in enumerate(zip(LAYERS[:-1], LAYERS[1:], strict=True)):
        bias = numpyro.sample(f"b{i}", dist.Normal(0, 1).expand([fan_out]).to_event(1))
        weight = numpyro.sample(f"w{i}", dist.Normal(0, 1).expand([fan_in, fan_out]).to_event(2))
        sites.append((weight, bias))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=mlp(sites, x)), obs=y)


def mlp(layers: list[tuple[Array, Array]], x: Array) -> Array:
    for weight, bias in layers[:-1]:
        x = jax.nn.relu(x @ weight + bias)
    weight, bias = layers[-1]
    return x @ weight + bias


def mlp_layers(theta: Array) -> list[tuple[Array, Array]]:
    """Return the layers of a flat position (sites sorted by name: all biases, then all weights)."""
    pairs = list(zip(LAYERS[:-1], LAYERS[1:], strict=True))
    shapes = [(o,) for _, o in pairs] + pairs
    parts = jnp.split(theta, np.cumsum([int(np.prod(s)) for s in shapes])[:-1])
    parts = [p.reshape(s) for p, s in zip(parts, shapes, strict=True)]
    return list(zip(parts[len(pairs) :], parts[: len(pairs)], strict=True))


def task_c(shrink: int = 1) -> Task:
    """Return a small network for two classes on many rows."""
    rng = np.random.default_rng(2)
    rows = 90_000 // shrink
    data = {}
    for s in range(30):
        x = rng.standard_normal((rows, LAYERS[0]), np.float32)
        y = (np.sin(x[:, 0] * x[:, 1]) + 0.3 * rng.standard_normal(rows, np.float32) > 0).astype(
            np.int32
        )
        data[f"silo{s}"] = {"x": x, "y": y}

    def log_likelihood(theta: Array, rows: dict[str, Array]) -> Array:
        log_p = jax.nn.log_softmax(mlp(mlp_layers(theta), rows["x"]))
        return jnp.sum(jnp.take_along_axis(log_p, rows["y"][:, None], axis=1))

    return Task(
        "c",
        mlp_model,
        fed.Silos(data),
        50,
        1e-8,
        sum(i * o + o for i, o in zip(LAYERS[:-1], LAYERS[1:], strict=True)),
        lambda theta: -0.5 * jnp.sum(theta**2),
        log_likelihood,
    )


TASKS: dict[str, Callable[[int], Task]] = {"a": task_a, "b": task_b, "c": task_c}


def _langevin(task: Task, theta: Array, rows: dict[str, Array], xi: Array, num_rows: int) -> Array:
    def log_density(theta: Array) -> Array:
        return task.log_prior(theta) + num_rows / task.batch_size * task.log_likelihood(theta, rows)

    h = task.step_size
    return theta + 0.5 * h * jax.grad(log_density)(theta) + jnp.sqrt(h) * xi


def _chain(round: Callable, key: Array, theta: Array, num_samples: int) -> Array:
    """Return the positions after each of ``num_samples`` calls of ``round(theta, key)``."""

    def one(theta: Array, key: Array) -> tuple[Array, Array]:
        theta = round(theta, key)
        return theta, theta

    return lax.scan(one, theta, random.split(key, num_samples))[1]


def plain(
    task: Task, num_local_steps: int, num_samples: int
) -> Callable[[Array, dict[str, Array]], Array]:
    """Noise, row numbers, gather and gradient in each step of one scan."""

    @jax.jit
    def run(key: Array, data: dict[str, Array]) -> Array:
        num_rows = len(next(iter(data.values())))

        def step(theta: Array, key: Array) -> tuple[Array, None]:
            key_batch, key_noise = random.split(key)
            index = random.randint(key_batch, (task.batch_size,), 0, num_rows)
            rows = {k: v[index] for k, v in data.items()}
            xi = random.normal(key_noise, theta.shape)
            return _langevin(task, theta, rows, xi, num_rows), None

        def round(theta: Array, key: Array) -> Array:
            return lax.scan(step, theta, random.split(key, num_local_steps))[0]

        return _chain(round, key, jnp.zeros(task.dim), num_samples)

    return run


def block_form(
    task: Task, num_local_steps: int, num_samples: int, unroll: int = 1
) -> Callable[[Array, dict[str, Array]], Array]:
    """Noise, row numbers and rows of a block of steps in one go; the scan only makes steps.

    Unrolled by 2, 4, 8 or 16 it was slower on tasks a and b, and no faster on c.
    """
    block = min(BLOCK, num_local_steps)
    blocks = num_local_steps // block
    if blocks * block != num_local_steps:
        raise ValueError(f"expected num_local_steps a multiple of {block}, got {num_local_steps}")

    @jax.jit
    def run(key: Array, data: dict[str, Array]) -> Array:
        num_rows = len(next(iter(data.values())))

        def step(theta: Array, drawn: tuple) -> tuple[Array, None]:
            xi, rows = drawn
            return _langevin(task, theta, rows, xi, num_rows), None

        def one_block(theta: Array, key: Array) -> tuple[Array, None]:
            key_batch, key_noise = random.split(key)
            index = random.bits(key_batch, (block, task.batch_size), jnp.uint32) % num_rows
            rows = {k: v[index] for k, v in data.items()}
            xi = random.normal(key_noise, (block, *theta.shape))
            return lax.scan(step, theta, (xi, rows), unroll=unroll)

        def round(theta: Array, key: Array) -> Array:
            if blocks == 1:
                return one_block(theta, key)[0]
            return lax.scan(one_block, theta, random.split(key, blocks))[0]

        return _chain(round, key, jnp.zeros(task.dim), num_samples)

    return run


def pooled_rows(task: Task) -> dict[str, Array]:
    """Return the rows of all silos, as the hand-written forms take them."""
    return dict(task.silos.rows)
