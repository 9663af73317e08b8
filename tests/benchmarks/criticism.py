"""Model criticism in silos, beside what pooled data or another fit say.

    python tests/benchmarks/criticism.py loo [--record] [PROBLEM ...]
    python tests/benchmarks/criticism.py silos [--record] [PROBLEM ...]
    python tests/benchmarks/criticism.py outlier [--record] [--simulations N] [--shift X ...]
    python tests/benchmarks/criticism.py evidence [--record]

``loo``: the leave-one-row-out density from the silos' sums, and from ``arviz.loo`` of pooled rows;
their difference with its Monte-Carlo error (of a posterior with p_loo parameters, by as many draws
as each has). ``silos``: the log density of each silo under the others, from weights, and as the
difference of two fits' log evidence, where Pareto's k is at most .7; the largest difference in
standard errors of both. ``outlier``: how often the mean of a silo is told that was moved by X sds
of the distribution of silos, and how often another silo's. ``evidence``: the log marginal
likelihood of six cities with its interaction and without it, beside importance sampling in double
precision with 80 nodes for each child's intercept.

Problems are those of `fidelity_problems.py`, and for ``silos`` also ``ist``: deaths in IST by
country (`NUMPYRO_FED_DATA`).
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import arviz as az
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from fidelity_problems import PROBLEMS, six_cities
from scipy import optimize, special, stats

import numpyro_fed as fed

LOO = ("kidiq", "six_cities", "eight_schools", "heart_disease_hospitals", "exam")
SILOS = ("six_cities_ten", "heart_disease_hospitals")


def loo(name: str) -> None:
    """Print a row of leave-one-row-out densities."""
    problem = PROBLEMS[name]
    silos = problem.silos()
    idata = fed.fit(problem.model, silos, progress_bar=False)
    start = time.time()
    table = fed.check(idata, problem.model, silos, refit=False).rows.loo
    seconds = time.time() - start
    for site in table.index.get_level_values("site").unique():
        own, pooled = table.loc[site], az.loo(idata, var_name=site)
        p = float(pooled.p_loo)
        error = np.sqrt(p / 1000 + p / 4000)
        print(
            f"{name:25} {site:12} {own['elpd'].sum():10.2f} {pooled.elpd_loo:10.2f} "
            f"{own['elpd'].sum() - pooled.elpd_loo:7.2f} {error:5.2f}  p_loo "
            f"{own['p_loo'].sum():6.1f} {p:6.1f}  k > .7 {own['bad_k'].sum():3d} "
            f"{int((pooled.pareto_k > 0.7).sum()) if hasattr(pooled, 'pareto_k') else -1:3d} "
            f"{seconds:5.1f} s"
        )


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


def left_out(name: str) -> None:
    """Print a row on leaving silos out."""
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
    found = np.array(off or [(np.nan, np.nan)])  # no weights that may be trusted
    print(
        f"{name:25} {len(silos):3d} silos, {len(good):3d} with k <= .7; largest difference "
        f"{np.abs(found[:, 0]).max():.3f} nats, {np.abs(found[:, 1]).max():.1f} errors; weights in "
        f"{seconds:.0f} s, fits in {time.time() - start - seconds:.0f} s"
    )


def centers(y, group, names):
    """Model of silos with normal means."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    sd = numpyro.sample("sd", dist.HalfNormal(2))
    with fed.silo_plate("centers", names.shape[0]):
        z = numpyro.sample("z", dist.Normal(mu, sd))
    with fed.silo_plate("patients", y.shape[0]):
        numpyro.sample("y", dist.Normal(z[group], 1), obs=y)


def outlier(simulations: int, shift: float, num: int = 10, rows: int = 30) -> None:
    """Print how often the moved silo is told, and how often another."""
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
    print(
        f"moved by {shift} sds: the most extreme in {(odd.argmax(1) == 3).sum()} of {simulations}"
    )
    for level in (0.005, 0.025):
        told = odd > 0.5 - level
        print(
            f"  beyond {level}: silo 3 in {told[:, 3].sum()} of {simulations}, others in "
            f"{np.delete(told, 3, 1).sum()} of {simulations * (num - 1)}"
        )


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


def evidence() -> None:
    """Print log evidence of both models of six cities, and the Bayes factor's log."""
    rows = []
    for name, model in (("with", six_cities.model), ("without", additive)):
        attrs = fed.fit(model, six_cities.silos(six_cities.TEN), progress_bar=False).posterior.attrs
        reference = _reference(name == "with")
        rows.append((attrs["log_evidence"], attrs["log_evidence_error"], *reference))
        print(name, "interaction: {:.3f} ± {:.3f}, pooled {:.3f} ± {:.3f}".format(*rows[-1]))
    found = np.array(rows)
    own, error = found[0] - found[1], np.hypot(found[0], found[1])
    print(f"log Bayes factor {own[0]:.3f} ± {error[1]:.3f}, pooled {own[2]:.3f} ± {error[3]:.3f}")


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


def main() -> None:
    """Print the rows that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["loo", "silos", "outlier", "evidence"])
    parser.add_argument("problems", nargs="*")
    parser.add_argument("--simulations", type=int, default=50)
    parser.add_argument("--shift", type=float, nargs="+", default=[0.0, 3.0, 5.0])
    args = parser.parse_args()
    if args.what == "outlier":
        for shift in args.shift:
            outlier(args.simulations, shift)
        return
    if args.what == "evidence":
        evidence()
        return
    run, default = (loo, LOO) if args.what == "loo" else (left_out, (*SILOS, "ist"))
    for name in args.problems or default:
        run(name)


if __name__ == "__main__":
    main()
