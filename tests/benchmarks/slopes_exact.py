"""Sds of log scales beside quadrature: whether weighed draws miss a tail.

    python tests/benchmarks/slopes_exact.py [--seeds N] [--record NAME] [PROBLEM ...]

Models of random intercepts and slopes with Gaussian rows (hsb82, orthodont and oxboys of
`rdata_problems.py`) have their lines and coefficients integrated out in closed form. Log scales and
the correlation are then weighed by 200,000 draws in four dimensions, from laws that reach tau =
e^-12. A row a fit by `fed.fit(method="vi")`: k, mixtures, and the ratios of the sds of the log
scales of intercepts and slopes to the exact ones, with the Monte-Carlo standard error of these.
"""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rdata_problems import PROBLEMS
from record import record
from scipy import stats

import numpyro_fed as fed

_NUM, _LEFT = 200_000, -12.0


def sums(pooled: dict[str, Any]) -> tuple[np.ndarray, ...]:
    """Return sums over each unit's rows: X'X, X'y, y'y, and their number."""
    unit, y = np.asarray(pooled["unit"]), np.asarray(pooled["y"], float)
    x = np.stack([np.ones(len(y)), pooled["x"]], 1).astype(float)
    units = len(pooled["units"])
    xx, xy, yy = np.zeros((units, 2, 2)), np.zeros((units, 2)), np.zeros(units)
    np.add.at(xx, unit, x[:, :, None] * x[:, None])
    np.add.at(xy, unit, x * y[:, None])
    np.add.at(yy, unit, y**2)
    return xx, xy, yy, np.bincount(unit, minlength=units)


def log_density(at: jax.Array, parts: tuple[np.ndarray, ...]) -> jax.Array:
    """Return the log density of log scales, correlation and log noise, up to a constant.

    Woodbury's formula in two dimensions for each unit, and again for the coefficients.
    """
    xx, xy, yy, num = parts
    a, b, rho, log_noise = at
    noise = jnp.exp(2 * log_noise)
    root = jnp.exp(jnp.stack([a, b]))[:, None] * jnp.stack(
        [jnp.array([1.0, 0.0]), jnp.stack([rho, jnp.sqrt(1 - rho**2)])]
    )
    inner = jnp.eye(2) + root.T @ xx @ root / noise
    inverse, to_units = jnp.linalg.inv(inner), xx @ root / noise
    own = xy @ root / noise
    precision = (xx / noise - to_units @ inverse @ to_units.swapaxes(1, 2)).sum(0)
    precision = precision + jnp.eye(2) / 25
    slope = (xy / noise - jnp.einsum("jab,jbc,jc->ja", to_units, inverse, own)).sum(0)
    square = yy.sum() / noise - jnp.einsum("ja,jab,jb->", own, inverse, own)
    log_lik = -0.5 * (square - slope @ jnp.linalg.solve(precision, slope))
    log_lik -= 0.5 * (jnp.linalg.slogdet(inner)[1].sum() + jnp.linalg.slogdet(precision)[1])
    logs = jnp.stack([a, b, log_noise])
    log_prior = jnp.sum(logs - jnp.exp(2 * logs) / 2) + jnp.log1p(-(rho**2))
    return log_lik - num.sum() * log_noise + log_prior


def exact(pooled: dict[str, Any], draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return sds of the two log scales and their relative Monte-Carlo standard errors.

    :param draws: draws of the log scales and the log noise ``(n, 3)``, for centers of proposals.
    """
    rng, parts = np.random.default_rng(0), sums(pooled)
    low, center, high = np.quantile(draws, [0.16, 0.5, 0.84], axis=0)
    spread = (high - low) / 2
    columns, log_q = [], np.full(_NUM, -np.log(2))
    for i in range(3):
        law, left = stats.t(4, center[i], 1.3 * spread[i]), stats.uniform(_LEFT, center[i] - _LEFT)
        share = 0.3 if i < 2 else 0.0
        wide = rng.random(_NUM) < share
        x = np.where(wide, left.rvs(_NUM, rng), law.rvs(_NUM, rng))
        columns.append(x)
        log_q = log_q + np.log(share * left.pdf(x) + (1 - share) * law.pdf(x))
    at = np.stack([*columns[:2], rng.uniform(-1, 1, _NUM), columns[2]], 1)
    with jax.enable_x64(True):
        given = jnp.asarray(at)
        log_p = np.asarray(jax.lax.map(lambda x: log_density(x, parts), given, batch_size=500))
    weight = np.exp(log_p - log_q - (log_p - log_q).max())
    weight /= weight.sum()
    away = at[:, :2] - weight @ at[:, :2]
    var = weight @ away**2
    error = np.sqrt((weight**2) @ (away**2 / var - 1) ** 2) / 2
    return np.sqrt(var), error


def main() -> None:
    """Fit the problems asked for, each with several seeds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("problems", nargs="*", metavar="PROBLEM")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--record", metavar="NAME", help="write a file of docs/results")
    args = parser.parse_args()
    start, rows = time.time(), []
    for name in args.problems or ("hsb82", "orthodont", "oxboys"):
        problem, sd = PROBLEMS[name], None
        for seed in range(args.seeds):
            silos, key = problem.silos(), jax.random.key(seed)
            idata = fed.fit(problem.model, silos, method="vi", rng_key=key, progress_bar=False)
            one = idata.posterior.isel(chain=0)
            logs = np.log(np.column_stack([one["tau"].values, one["noise"].values]))
            if sd is None:
                sd, error = exact(silos.pooled, logs)
            attrs, found = idata.posterior.attrs, logs[:, :2].std(0) / sd
            rows.append(
                {"problem": name, "seed": seed, "k": attrs["pareto_k"]}
                | {"mixtures": attrs["mixture"], "verdict": attrs["verdict"]}
                | dict(zip(("intercepts", "slopes"), found.tolist(), strict=True))
                | {"error": float(error.max())}
            )
            print(*rows[-1].values(), flush=True)
            if args.record:
                record(args.record, rows, start)


if __name__ == "__main__":
    main()
