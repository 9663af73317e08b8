"""Seconds to the first answer, in a new process each: pooled NUTS, `fed.fit`, and FSGLD.

    python tests/benchmarks/first_answer.py [--cache] [--methods M,M] [--record] [PROBLEM ...]

Problems are those of `fidelity_problems.py`, and three of data of your own: "patients" (111, with a
random intercept), "visits" (nested: 236 of 59 patients) and "rows" (2,000, without latents). A row
a method: seconds from the data in memory to its answer, with tracing, lowering and compilation in
them; programs; what the answer is.

    nuts      500 + 1,000 draws of 4 vectorized chains, all compilation included
    fit       `fed.fit` to its verdict
    again     `fed.fit` once more in the same process
    fsgld     `FSGLD` by defaults until 1,000 effective draws of its worst global coordinate
    nuts1000  NUTS until as many, of the same sites

"rest" is running and Python. ``--cache``: a second process finds the programs of the first.
``--record``: for docs/results (`docs/tables.py`). PROBLEM ``all``: every one.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.infer import MCMC, NUTS
from record import record

import numpyro_fed as fed

CHAINS: dict[str, Any] = {"num_chains": 4, "chain_method": "vectorized", "progress_bar": False}
METHODS = ("nuts", "fit", "fsgld", "nuts1000")
OWN = ("patients", "visits", "rows")
SITES = ("beta", "sigma")
ENOUGH = 1000  # effective draws
MOST = 40_000  # draws of a chain
EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}


def patients_model(x: Array, y: Array) -> None:
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[-1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with fed.silo_plate("patients", x.shape[0]):
        z = numpyro.sample("z", dist.Normal(0, 1))
        mean = x @ beta + sigma * z
        numpyro.sample("y", dist.Binomial(5, logits=mean), obs=y)


def visits_model(x: Array, y: Array, patient: Array, patients: Array) -> None:
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[-1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with fed.silo_plate("patients", patients.shape[0]):
        a = numpyro.sample("a", dist.Normal(0, sigma))
    with fed.silo_plate("visits", x.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ beta + a[patient])), obs=y)


def rows_model(x: Array, y: Array) -> None:
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[-1]]).to_event(1))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def _own(name: str) -> tuple[Callable, Any, tuple[str, ...]]:
    rng = np.random.default_rng(3)
    n, d = {"patients": (111, 3), "visits": (236, 3), "rows": (2000, 5)}[name]
    x = rng.normal(size=(n, d)).astype(np.float32)
    mean = x @ np.linspace(-0.5, 0.5, d)
    silo = np.array([f"s{i}" for i in range(5)])
    if name == "patients":
        y = rng.binomial(5, 1 / (1 + np.exp(-mean - 0.7 * rng.normal(size=n))))
        return patients_model, fed.split({"x": x, "y": y}, by=silo[rng.integers(5, size=n)]), SITES
    if name == "rows":
        y = rng.binomial(1, 1 / (1 + np.exp(-mean)))
        return rows_model, fed.split({"x": x, "y": y}, by=silo[rng.integers(5, size=n)]), ("beta",)
    patient = np.sort(np.concatenate([np.arange(59), rng.integers(59, size=n - 59)]))
    y = rng.poisson(np.exp(mean + 0.6 * rng.normal(size=59)[patient]))
    of = silo[np.sort(rng.integers(5, size=59))]
    rows = {"x": "visits", "y": "visits", "patient": "visits", "patients": "patients"}
    data = {"x": x, "y": y, "patient": patient, "patients": np.arange(59)}
    split = fed.split(data, by=of[patient], rows=rows, index={"patient": "patients"})
    return visits_model, split, SITES


def problem_of(name: str) -> tuple[Callable, Any, tuple[str, ...], float]:
    """Return a model, its silos, its global sites, and NUTS's target of acceptance."""
    if name in OWN:
        return *_own(name), 0.8
    from fidelity_problems import PROBLEMS

    p = PROBLEMS[name]
    sites = (*p.fixed, *p.scales, *([p.correlation] if p.correlation else []))
    return p.model, p.silos(), sites, p.target_accept_prob


def until_enough(mcmc: MCMC, args: tuple, kwargs: dict, sites: tuple[str, ...]) -> str:
    """Run chains until each coordinate of the sites has enough effective draws."""
    from numpyro.diagnostics import effective_sample_size

    kept: list[dict[str, np.ndarray]] = []
    while True:
        mcmc.run(jax.random.key(len(kept)), *args, **kwargs)
        mcmc.post_warmup_state = mcmc.last_state
        draws = mcmc.get_samples(group_by_chain=True)
        kept.append({k: np.asarray(draws[k]) for k in sites})
        every = {k: np.concatenate([x[k] for x in kept], axis=1) for k in sites}
        spread = [x[..., np.ptp(x.reshape(-1, *x.shape[2:]), axis=0) > 0] for x in every.values()]
        worst = min(float(np.min(effective_sample_size(x))) for x in spread)
        count = next(iter(every.values())).shape[1]
        if worst >= ENOUGH or count >= MOST:
            return f"{worst:,.0f} effective of 4 x {count:,}"


def answer(name: str, method: str) -> None:
    """Answer once, and print what it took."""
    model, silos, sites, accept = problem_of(name)
    totals = dict.fromkeys(EVENTS.values(), 0.0) | {"programs": 0}

    def heard(event: str, duration: float, **_: Any) -> None:
        if event in EVENTS:
            totals[EVENTS[event]] += duration
            totals["programs"] += EVENTS[event] == "compile"

    jax.monitoring.register_event_duration_secs_listener(heard)
    start = time.perf_counter()
    nuts = NUTS(model, target_accept_prob=accept)
    if method == "nuts":
        mcmc = MCMC(nuts, num_warmup=500, num_samples=1000, **CHAINS)
        mcmc.run(jax.random.key(0), **silos.pooled)
        jax.block_until_ready(mcmc.get_samples())
        what = f"{int(np.sum(mcmc.get_extra_fields()['diverging']))} divergences"
    elif method == "nuts1000":
        mcmc = MCMC(nuts, num_warmup=500, num_samples=1000, **CHAINS)
        what = until_enough(mcmc, (), silos.pooled, sites)
    elif method == "fsgld":
        mcmc = MCMC(fed.FSGLD(model), num_warmup=200, num_samples=1000, **CHAINS)
        what = until_enough(mcmc, (silos,), {}, sites)
    else:
        what = fed.fit(model, silos, progress_bar=False).posterior.attrs["verdict"]
    print(json.dumps({**totals, "seconds": time.perf_counter() - start, "what": what}))
    if method == "fit":
        totals |= dict.fromkeys(totals, 0)
        start = time.perf_counter()
        fed.fit(model, silos, rng_key=jax.random.key(1), progress_bar=False)
        took = time.perf_counter() - start
        print(json.dumps({**totals, "seconds": took, "what": "again"}))


def asked(name: str, method: str, cache: str) -> list[dict]:
    """Return the answers of a new process."""
    kept = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    run = subprocess.run(
        [sys.executable, __file__, "--one", name, method],
        env=os.environ | (kept if cache else {}),
        capture_output=True,
        text=True,
    )
    if run.returncode:
        return [{"what": "failed: " + run.stderr.strip().splitlines()[-1][:90]}]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def row(name: str, method: str, told: dict) -> str:
    if "seconds" not in told:
        return f"{name:24} {method:10} {told['what']}"
    work = told["trace"] + told["lower"] + told["compile"]
    cells = [told["seconds"], told["trace"], told["lower"], told["compile"], told["seconds"] - work]
    numbers = " ".join(f"{x:7.1f}" for x in cells)
    return f"{name:24} {method:10} {numbers} {told['programs']:9} {told['what']}"


def flat(label: str, told: dict) -> dict[str, Any]:
    """Return the numbers of an answer by names of their own; seconds have the method's name."""
    numbers = {f"{label}_{key}": x for key, x in told.items() if key != "seconds"}
    return {label: told.get("seconds", np.nan), **numbers}


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds to the first answer.")
    parser.add_argument("problems", nargs="*", default=list(OWN))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--cache", action="store_true", help="a second process finds programs")
    parser.add_argument("--record", action="store_true", help="write a file of docs/results")
    parser.add_argument("--one", nargs=2, metavar=("PROBLEM", "METHOD"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return answer(*args.one)
    problems = args.problems
    if problems == ["all"]:
        from fidelity_problems import PROBLEMS

        problems = [*OWN, *(name for name in PROBLEMS if name != "horseshoe")]
    start, found = time.time(), []
    print(f"{jax.devices()[0].device_kind}; JAX {jax.__version__}")
    print(f"{'':24} {'':10}     all   trace   lower compile    rest  programs")
    for name in problems:
        found.append({"problem": name})
        for method in args.methods.split(","):
            with tempfile.TemporaryDirectory() as folder:
                for second in range(1 + args.cache):
                    for i, told in enumerate(asked(name, method, folder if args.cache else "")):
                        label = "again" if i else method + " cached" * second
                        print(row(name, label, told), flush=True)
                        found[-1] |= flat(label.replace(" ", "_"), told)
    for one in found:
        one["ratio"] = one.get("fit", np.nan) / one.get("nuts", np.nan)
    if args.record:
        record("first_answers", found, start)


if __name__ == "__main__":
    main()
