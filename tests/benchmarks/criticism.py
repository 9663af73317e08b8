"""Model criticism in silos, beside what pooled data or another fit say.

    python tests/benchmarks/criticism.py loo [--record] [PROBLEM ...]
    python tests/benchmarks/criticism.py silos [--record] [PROBLEM ...]
    python tests/benchmarks/criticism.py outlier [--record] [--simulations N] [--shift X ...]
    python tests/benchmarks/criticism.py evidence [--record]
    python tests/benchmarks/criticism.py bytes [--record] [PROBLEM ...]

``loo``: the leave-one-row-out density from the silos' sums, and from ``arviz.loo`` of pooled rows;
their difference with its Monte-Carlo error (of a posterior with p_loo parameters, by as many draws
as each has). ``silos``: the log density of each silo under the others, from weights, and as the
difference of two fits' log evidence, where Pareto's k is at most .7; the largest difference in
standard errors of both. ``outlier``: how often the mean of a silo is told that was moved by X sds
of the distribution of silos, and how often another silo's. ``evidence``: the log marginal
likelihood of six cities with its interaction and without it, beside importance sampling in double
precision with 80 nodes for each child's intercept. ``bytes``: what a check of remote silos sends to
a silo, and brings back, on a result that has no log likelihoods of silos and on one that has them.

Problems are those of `fidelity_problems.py`, and for ``silos`` also ``ist``: deaths in IST by
country (`NUMPYRO_FED_DATA`).
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import arviz as az
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from fidelity_problems import PROBLEMS, six_cities
from record import record
from scipy import optimize, special, stats

import numpyro_fed as fed
from numpyro_fed.rounds.worker import Call

LOO = ("kidiq", "six_cities", "eight_schools", "heart_disease_hospitals", "exam")
BYTES = ("kidiq", "six_cities", "eight_schools", "exam")
SILOS = ("six_cities_ten", "heart_disease_hospitals")


def loo(name: str) -> list[dict]:
    """Return leave-one-row-out densities of a problem's observed sites."""
    problem = PROBLEMS[name]
    silos = problem.silos()
    idata = fed.fit(problem.model, silos, progress_bar=False)
    start, rows = time.time(), []
    table = fed.check(idata, problem.model, silos, refit=False).rows.loo
    seconds = time.time() - start
    for site in table.index.get_level_values("site").unique():
        own, pooled = table.loc[site], az.loo(idata, var_name=site, pointwise=True)
        p, elpd = float(pooled.p_loo), own["elpd"].sum()
        rows.append(
            {
                "problem": name,
                "elpd": elpd,
                "arviz": float(pooled.elpd_loo),
                "difference": elpd - float(pooled.elpd_loo),
                "error": np.sqrt(p / 1000 + p / 4000),
                "p_loo": own["p_loo"].sum(),
                "arviz_p_loo": p,
                "bad_k": int(own["bad_k"].sum()),
                "arviz_bad_k": int((np.asarray(pooled.pareto_k) > 0.7).sum()),
                "seconds": seconds,
            }
        )
    return rows


def countries() -> tuple[Callable, fed.Silos]:
    """Return a logistic regression of death within 14 days in IST, and its countries."""
    import pandas as pd

    def model(x, y):
        a = numpyro.sample("a", dist.Normal(0, 3))
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
        with fed.silo_plate("patients", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=a + x @ b), obs=y)

    table = pd.read_csv(Path(os.environ["NUMPYRO_FED_DATA"]) / "federated" / "ist.csv")
    data = {}
    for country, own in table.groupby("country"):
        x = [(own["age"] - 72) / 10, own["aspirin"] == "Y", own["conscious"] != "F"]
        data[str(country)] = {
            "x": np.stack(x, 1).astype(np.float32),
            "y": own["dead_14_days"].to_numpy(np.float32),
        }
    return model, fed.Silos(data)


def left_out(name: str) -> list[dict]:
    """Return how the densities of silos left out compare with other fits."""
    model, silos = countries() if name == "ist" else (PROBLEMS[name].model, PROBLEMS[name].silos())
    idata = fed.fit(model, silos, method="vi", progress_bar=False)
    total, error = (idata.posterior.attrs[k] for k in ("log_evidence", "log_evidence_error"))
    start = time.time()
    table = fed.check(idata, model, silos, refit=False, rows=False).table
    seconds = time.time() - start
    off, good = [], table.index[table["pareto_k"] <= 0.7]
    for silo in good:
        rest = {s: silos[s] for s in silos.names if s != silo}
        others = fed.Silos(rest, rows=silos.group, index=silos.index)
        attrs = fed.fit(model, others, method="vi", progress_bar=False).posterior.attrs
        exact, own = total - attrs["log_evidence"], attrs["log_evidence_error"]
        difference = table.loc[silo, "elpd"] - exact
        off.append(
            (difference, difference / np.sqrt(error**2 + own**2 + table.loc[silo, "se"] ** 2))
        )
    found = np.abs(off or [(np.nan, np.nan)]).max(0)  # no weights that may be trusted
    return [
        {
            "problem": name,
            "silos": len(silos),
            "good": len(good),
            "nats": found[0],
            "errors": found[1],
            "seconds": seconds,
            "fits": time.time() - start - seconds,
        }
    ]


def centers(y, group, names):
    """Model of silos with normal means."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    sd = numpyro.sample("sd", dist.HalfNormal(2))
    with fed.silo_plate("centers", names.shape[0]):
        z = numpyro.sample("z", dist.Normal(mu, sd))
    with fed.silo_plate("patients", y.shape[0]):
        numpyro.sample("y", dist.Normal(z[group], 1), obs=y)


def outlier(simulations: int, shift: float, num: int = 10, rows: int = 30) -> list[dict]:
    """Return how often the moved silo is told, and how often another."""
    tails = []
    for seed in range(simulations):
        rng = np.random.default_rng(seed)
        data = {}
        for s in range(num):
            mean = rng.normal(0, 0.5) + 0.5 * shift * (s == 3)
            y = rng.normal(mean, 1, rows).astype(np.float32)
            data[f"s{s}"] = {"y": y, "group": np.zeros(rows, int), "names": np.array([1.0 * s])}
        groups = {"y": "patients", "group": "patients", "names": "centers"}
        silos = fed.Silos(data, rows=groups, index={"group": "centers"})
        idata = fed.fit(centers, silos, progress_bar=False, rng_key=jax.random.key(seed))
        found = fed.check(idata, centers, silos, refit=False)
        tails.append(found.rows.predictive["mean_tail"].droplevel("site")[list(silos.names)])
    odd = np.abs(np.array(tails) - 0.5)
    facts = {"shift": shift, "studies": simulations, "extreme": int((odd.argmax(1) == 3).sum())}
    facts["others"] = simulations * (num - 1)
    for name, level in (("narrow", 0.005), ("wide", 0.025)):
        told = odd > 0.5 - level
        facts |= {name: int(told[:, 3].sum()), f"{name}_others": int(np.delete(told, 3, 1).sum())}
    return [facts]


def additive(y, smoke):
    """Model of six cities without the interaction."""
    intercept = numpyro.sample("intercept", dist.Normal(0, 5))
    age = numpyro.sample("age", dist.Normal(0, 2.5))
    smoking = numpyro.sample("smoke", dist.Normal(0, 2.5))
    sigma = numpyro.sample("sigma", dist.Exponential(1.0))
    with fed.silo_plate("children", y.shape[0], dim=-2):
        z = numpyro.sample("z", dist.Normal(0, 1))
        logits = intercept + age * six_cities.AGE + smoking * smoke[:, None] + sigma * z
        with numpyro.plate("visits", 4, dim=-1):
            numpyro.sample("wheeze", dist.Bernoulli(logits=logits), obs=y)


def evidence() -> list[dict]:
    """Return log evidence of both models of six cities, and of the first over the second."""
    rows = []
    for name, model in (("with", six_cities.model), ("without", additive)):
        attrs = fed.fit(model, six_cities.silos(six_cities.TEN), progress_bar=False).posterior.attrs
        pooled, pooled_error = _reference(name == "with")
        own = {"evidence": attrs["log_evidence"], "error": attrs["log_evidence_error"]}
        rows.append({"model": name, **own, "pooled": pooled, "pooled_error": pooled_error})
    first, second = rows
    rows.append({"model": "log Bayes factor"})
    rows[2] |= {key: first[key] - second[key] for key in ("evidence", "pooled")}
    rows[2] |= {key: np.hypot(first[key], second[key]) for key in ("error", "pooled_error")}
    return rows


def _reference(product: bool, num: int = 40_000) -> tuple[float, float]:
    """Return log evidence of six cities by importance sampling, and its error."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    log_weights = np.log(weights / weights.sum())
    y = np.array(list(np.ndindex(2, 2, 2, 2)), float)
    counts, age = np.array(six_cities.COUNTS, float), six_cities.AGE.astype(float)

    def log_density(theta: np.ndarray) -> np.ndarray:
        """Return log prior and likelihood at ``(n, d)``, whose last is log sigma."""
        sigma, beta = np.exp(theta[:, -1]), np.zeros((len(theta), 4))
        beta[:, : theta.shape[1] - 1] = theta[:, :-1]
        total = stats.norm(0, 5).logpdf(beta[:, 0]) - sigma + theta[:, -1]
        total += stats.norm(0, 2.5).logpdf(theta[:, 1:-1]).sum(1)
        for smoke in (0, 1):
            mean = beta[:, :1] + beta[:, 1:2] * age + smoke * (beta[:, 2:3] + beta[:, 3:] * age)
            logits = mean[:, None] + sigma[:, None, None] * nodes[:, None]
            none, one = -np.logaddexp(0, logits), -np.logaddexp(0, -logits)
            each = np.einsum("nqt,pt->nqp", one, y) + np.einsum("nqt,pt->nqp", none, 1 - y)
            total += special.logsumexp(each + log_weights[:, None], 1) @ counts[smoke]
        return total

    dim = 5 if product else 4
    found = optimize.minimize(lambda x: -log_density(x[None])[0], np.eye(dim)[-1] - np.eye(dim)[0])
    mean, cov = found.x, found.hess_inv
    for _ in range(3):  # the law follows the weighed draws of the last
        law = stats.multivariate_t(mean, cov, df=5, seed=0)
        theta = law.rvs(num)
        log_ratio = np.concatenate([log_density(x) for x in np.split(theta, num // 500)])
        log_ratio -= law.logpdf(theta)
        ratio = np.exp(log_ratio - log_ratio.max())
        mean, cov = np.average(theta, 0, ratio), np.cov(theta.T, aweights=ratio)
    error = ratio.std() / ratio.mean() / np.sqrt(num)
    return np.log(ratio.mean()) + log_ratio.max(), error


class Counted(fed.Loopback):
    """Carrier that counts the bytes of arrays."""

    sent = back = 0

    def ask(self, calls: list[Call]) -> list[Any]:
        """Answer the calls, and count them and their replies."""
        replies = super().ask(calls)
        self.sent += _bytes([call.message for call in calls])
        self.back += _bytes(replies)
        return replies


def _bytes(tree: Any) -> int:
    return sum(getattr(x, "nbytes", 8) for x in jax.tree.leaves(tree))


def told(name: str) -> list[dict]:
    """Return the kilobytes of a check to and from a silo."""
    model, silos = PROBLEMS[name].model, PROBLEMS[name].silos()
    remote = fed.RemoteSilos(silos, fed.Loopback(silos))
    idata = fed.fit(model, remote, progress_bar=False)
    facts: dict[str, Any] = {"problem": name, "silos": len(silos)}
    for what in ("kept", "all"):
        carrier = Counted(silos)
        fed.check(idata, model, fed.RemoteSilos(silos, carrier), progress_bar=False)
        for way, count in (("sent", carrier.sent), ("back", carrier.back)):
            facts[f"{what}_{way}"] = count / len(silos) / 1000
        if what == "kept":  # the second check asks for them
            del idata.log_likelihood_silo
    return [facts]


def main() -> None:
    """Print the rows that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["loo", "silos", "outlier", "evidence", "bytes"])
    parser.add_argument("problems", nargs="*")
    parser.add_argument("--simulations", type=int, default=50)
    parser.add_argument("--shift", type=float, nargs="+", default=[0.0, 3.0, 5.0])
    parser.add_argument("--record", action="store_true", help="write a file of docs/results")
    args = parser.parse_args()
    tasks: dict[str, list[Callable[[], list[dict]]]] = {
        "loo": [partial(loo, name) for name in args.problems or LOO],
        "silos": [partial(left_out, name) for name in args.problems or (*SILOS, "ist")],
        "outlier": [partial(outlier, args.simulations, shift) for shift in args.shift],
        "evidence": [evidence],
        "bytes": [partial(told, name) for name in args.problems or BYTES],
    }
    start, rows = time.time(), []
    for task in tasks[args.what]:
        for row in task():
            rows.append(
                {key: x.item() if isinstance(x, np.generic) else x for key, x in row.items()}
            )
            print(rows[-1], flush=True)
    if args.record:
        record(f"criticism_{args.what}", rows, start)


if __name__ == "__main__":
    main()
