"""What the library changes in JAX, and the private names of NumPyro and JAX that it uses."""

import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC

import numpyro_fed  # noqa: F401

# calls that do not depend on each other, and split their work: on two threads they may hang
CALLS = """
import jax, jax.numpy as jnp
{}
x = 0.01 * jnp.arange(512 * 16 * 16, dtype=jnp.float32).reshape(512, 16, 16) % 1 + 20 * jnp.eye(16)

@jax.jit
def total(xs):
    def body(sum, _):
        return sum + sum_of([jnp.linalg.cholesky(x + 1e-6 * sum).sum() for x in xs]), None
    return jax.lax.scan(body, 0.0, None, length=50)[0]

sum_of, xs = sum, [x + k for k in range(8)]
text = total.lower(xs).as_text()
print(sum("lapack" in line and "512x16x16" in line for line in text.splitlines()))
if {}:
    print(float(total(xs)))
"""


def matrices(num: int) -> np.ndarray:
    x = np.random.default_rng(0).normal(size=(num, 3, 4, 4)).astype(np.float32)
    return x @ x.swapaxes(-1, -2) + np.eye(4, dtype=np.float32)


@pytest.mark.parametrize(
    "of",
    [
        jnp.linalg.cholesky,
        lambda x: jnp.linalg.solve(x, x + 1),
        jnp.linalg.eigh,
        lambda x: jax.scipy.linalg.solve_triangular(x, x + 1, lower=True),
        jnp.linalg.qr,
        lambda x: jnp.linalg.svd(x, compute_uv=False),
    ],
    ids=["cholesky", "solve", "eigh", "triangular", "qr", "svd"],
)
def test_a_batch_has_the_results_of_its_matrices(of) -> None:
    x = matrices(5)
    found = jax.jit(of)(x)
    each = [[jax.jit(of)(m) for m in ms] for ms in x]
    for together, *alone in zip(
        jax.tree.leaves(found), *(jax.tree.leaves(m) for ms in each for m in ms), strict=True
    ):
        np.testing.assert_allclose(together.reshape(15, -1), np.reshape(alone, (15, -1)), atol=1e-5)


@pytest.mark.ci
def test_batched_calls_do_not_wait_for_each_other() -> None:
    """Eight batched factorizations on two threads end: none is one call."""
    environment = {**os.environ, "NPROC": "2", "PJRT_NPROC": "2"}

    def run(head: str, calls: bool) -> str:
        command = [sys.executable, "-c", CALLS.format(head, calls)]
        return subprocess.run(
            command, env=environment, timeout=120, capture_output=True, text=True, check=True
        ).stdout

    together, total = run("import numpyro_fed", True).split()
    assert together == "0"
    assert np.isfinite(float(total))
    assert int(run("", False)) > 0  # the control, which may hang where it runs


def of_mcmc(name: str) -> Callable[[], object]:
    """Return a search for an attribute that NumPyro's ``MCMC`` sets at some time."""

    def look() -> None:
        if f"self.{name}" not in inspect.getsource(MCMC):
            raise AttributeError(f"MCMC sets no {name}")

    return look


PRIVATE = {
    "infer.util._unconstrain_reparam": (numpyro, lambda: numpyro.infer.util._unconstrain_reparam),
    "infer.util._transforms_from_trace": (
        numpyro,
        lambda: numpyro.infer.util._transforms_from_trace,
    ),
    "MaskedDistribution._mask": (numpyro, lambda: dist.Normal(0, 1).mask(jnp.ones(1, bool))._mask),
    "MCMC._states": (numpyro, of_mcmc("_states")),
    "MCMC._states_flat": (numpyro, of_mcmc("_states_flat")),
    "MCMC._last_state": (numpyro, of_mcmc("_last_state")),
    "MCMC._args": (numpyro, of_mcmc("_args")),
    "MCMC._kwargs": (numpyro, of_mcmc("_kwargs")),
    "_src.compilation_cache": (jax, lambda: importlib.import_module("jax._src.compilation_cache")),
}


@pytest.mark.parametrize("name", PRIVATE)
def test_a_private_name_is_where_the_library_looks_for_it(name) -> None:
    package, look = PRIVATE[name]
    try:
        look()
    except (AttributeError, ImportError) as error:
        pytest.fail(f"{package.__name__} {package.__version__} has moved {name}: {error}")
