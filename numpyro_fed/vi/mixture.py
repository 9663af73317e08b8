r"""Mixture of Student laws, fitted to weighted draws of theta: the next proposal.

Where the weights of draws from q(theta) fail, they still show where the posterior is. A mixture

.. math:: r(u) = \sum_k \pi_k \, t_6(u; m_k, 1.1^2 C_k)

is fitted to them by expectation maximization, in the coordinates u in which q is standard normal.
Its draws are weighed together with all before (:func:`numpyro_fed.vi.importance.balanced`). Its
tails are wider than those of a Gaussian, and it may bend and lean as the posterior does. Everything
here is the server's: silos hear of draws alone.

References: Cornuet, Marin, Mira, Robert (2012), Adaptive multiple importance sampling. Peel,
McLachlan (2000), Statistics and Computing 10 (expectation maximization for the t distribution).
"""

import math
from typing import NamedTuple

import numpy as np
from scipy import stats
from scipy.special import gammaln, logsumexp

_DEGREES = 6
_WIDER = 1.1  # factor of the fitted scales in the proposal
_MOST, _EACH = 6, 3  # parts, and distinct draws for each coordinate of a part
_STEPS = 60
# draws as many as this, for each coordinate, that each part's covariance has of that of all
_PRIOR = 0.2


class Mixture(NamedTuple):
    """Mixture of multivariate Student laws.

    :param share: probability of each part, ``(K,)``.
    :param loc: centers ``(K, d)``.
    :param root: Cholesky factors of the scale matrices, ``(K, d, d)``.
    """

    share: np.ndarray
    loc: np.ndarray
    root: np.ndarray

    def wider(self) -> "Mixture":
        """Return the mixture as a proposal."""
        return self._replace(root=_WIDER * self.root)

    def draw(self, rng: np.random.Generator, num: int) -> np.ndarray:
        """Return draws ``(num, d)``."""
        dim = self.loc.shape[1]
        part = rng.choice(len(self.share), num, p=self.share)
        normal = rng.normal(size=(num, dim, 1))
        chi = rng.chisquare(_DEGREES, (num, 1)) / _DEGREES
        return self.loc[part] + (self.root[part] @ normal)[..., 0] / np.sqrt(chi)

    def log_density(self, u: np.ndarray) -> np.ndarray:
        """Return the log density at positions ``(n, d)``."""
        return logsumexp(self.parts(u, self.squares(u)), axis=0)

    def log_ratio(self, u: np.ndarray) -> np.ndarray:
        """Return the log density at positions ``(n, d)``, over the standard normal's."""
        return self.log_density(u) - stats.norm.logpdf(u).sum(1)

    def squares(self, u: np.ndarray) -> np.ndarray:
        """Return squared distances to each center, in the parts' own scales, ``(K, n)``."""
        away = np.swapaxes(u - self.loc[:, None], 1, 2)
        return np.sum(np.linalg.solve(self.root, away) ** 2, axis=1)

    def parts(self, u: np.ndarray, squares: np.ndarray) -> np.ndarray:
        """Return the logs of each part's share of the density, ``(K, n)``."""
        dim, half = u.shape[1], (_DEGREES + u.shape[1]) / 2
        log_root = np.log(np.diagonal(self.root, axis1=1, axis2=2)).sum(1)
        constant = gammaln(half) - gammaln(_DEGREES / 2) - dim / 2 * math.log(_DEGREES * math.pi)
        with np.errstate(divide="ignore"):  # a part without a draw
            scale = np.log(self.share) - log_root + constant
        return scale[:, None] - half * np.log1p(squares / _DEGREES)


def fit_mixture(u: np.ndarray, rng: np.random.Generator) -> Mixture:
    """Fit a mixture to draws, some of which may be repeated.

    :param u: draws ``(n, d)``, as many copies of each as its weight asks for.
    """
    (num, dim), distinct = u.shape, np.unique(u, axis=0)
    many = max(1, min(_MOST, len(distinct) // (_EACH * dim)))
    spread = np.atleast_2d(np.cov(u.T)) + 1e-6 * np.eye(dim)
    mixture = Mixture(
        np.full(many, 1 / many),
        distinct[rng.choice(len(distinct), many, replace=False)],
        np.repeat(np.linalg.cholesky(spread)[None], many, axis=0),
    )
    prior = _PRIOR * dim * num / len(distinct)
    for _ in range(_STEPS):
        squares = mixture.squares(u)
        parts = mixture.parts(u, squares)
        own = np.exp(parts - logsumexp(parts, axis=0))
        pull = own * (_DEGREES + dim) / (_DEGREES + squares)
        loc = (pull @ u) / (pull.sum(1, keepdims=True) + np.finfo(float).tiny)
        away = u - loc[:, None]
        total = np.swapaxes(away * pull[..., None], 1, 2) @ away + prior * spread
        size = own.sum(1)
        root = np.linalg.cholesky(total / (size + prior)[:, None, None])
        mixture = Mixture(size / num, loc, root)
    return mixture
