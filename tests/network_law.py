"""The exact law of nodes that sample the model ``linear``.

The recursions are linear, their noise is normal.
"""

import networkx as nx
import numpy as np
from jax import random
from numpyro.infer import MCMC
from small_models import linear_precisions, linear_silos

import numpyro_fed as fed

__all__ = ["LOPSIDED", "PERIODIC", "SILOS", "D", "M", "exact_law", "posterior", "run"]

SILOS = linear_silos()
M, D = len(SILOS), 2
LOPSIDED = nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (0, 3)])
PERIODIC = fed.graphs.periodic([LOPSIDED, LOPSIDED.reverse(), nx.DiGraph(nx.star_graph(3))])


def run(kernel, silos, networks, num_samples, num_warmup=300, seed=0):
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=networks * len(silos),
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(seed), silos)
    return mcmc


def posterior(silos):
    eta, precision = linear_precisions(silos)
    covariance = np.linalg.inv(precision.sum(0) + np.eye(2))
    return covariance @ eta.sum(0), covariance


def exact_law(silos, graph, alpha, *, tracking=False, gossip=False, steps=8000):
    """Return stationary mean ``(m d,)`` and covariance of all nodes' positions.

    Both are averaged over the graph's period. The state is (X, tracker, gradient held); a step is
    state <- F state + c + G noise. So with the covariance S of the last period's states S <- F S F'
    + G G', the discrete Lyapunov recursion.
    """
    eta, precision = linear_precisions(silos)
    m, d = eta.shape
    n, eye = m * d, np.eye(d)
    slope = np.zeros((n, n))
    for i in range(m):
        slope[i * d : (i + 1) * d, i * d : (i + 1) * d] = -(precision[i] + eye / m)
    constant = eta.ravel()
    weight, mean, cov, seen = np.ones(m), np.zeros(3 * n), np.zeros((3 * n, 3 * n)), []
    noise = np.zeros((3 * n, 3 * n))
    for t in range(steps):
        matrix = graph.matrix(t, gossip=gossip)
        weight = matrix @ weight
        mix = np.kron(matrix, eye)
        place = np.eye(n) if gossip else np.kron(np.diag(1 / weight) @ matrix, eye)
        if t >= steps - graph.period:
            seen.append((place @ mean[:n], place @ cov[:n, :n] @ place.T))
        step, add = np.zeros((3 * n, 3 * n)), np.zeros(3 * n)
        gradient, drift = slope @ place, np.zeros((n, 3 * n))
        drift[:, :n] = gradient
        if tracking:
            drift[:, n : 2 * n], drift[:, 2 * n :] = mix, -np.eye(n)
        step[n : 2 * n], add[n : 2 * n] = drift, constant
        step[2 * n :, :n], add[2 * n :] = gradient, constant
        step[:n] = alpha * drift
        step[:n, :n] += mix
        add[:n] = alpha * constant
        noise[:n, :n] = 2 * alpha * np.kron(np.diag(weight if tracking else np.ones(m)), eye)
        mean = step @ mean + add
        cov = step @ cov @ step.T + noise
    average = np.mean([s[0] for s in seen], axis=0)
    spread = [s[1] + np.outer(s[0] - average, s[0] - average) for s in seen]
    return average, np.mean(spread, axis=0)
