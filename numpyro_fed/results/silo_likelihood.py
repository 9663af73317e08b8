r"""Log likelihood :math:`\log p(y_s \mid \theta)` of each silo, at draws of the posterior.

Local latents are integrated out, by nodes around their modes at each draw
(:mod:`numpyro_fed.vi.placed`).

**What leaves a silo:** one number for each draw, as in the last round of a fit.
"""

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from tqdm.auto import tqdm

from numpyro_fed._typing import PyTree
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.views import split_shared
from numpyro_fed.density.factors import Factors
from numpyro_fed.results.vi_inference_data import SILO_TERMS
from numpyro_fed.rounds.remote import Loopback, RemoteSilos
from numpyro_fed.vi.conducive.checks import JointUnits
from numpyro_fed.vi.config import FitConfig, FitTask
from numpyro_fed.vi.draws import (
    Draws,
    EstimateLocal,
    Position,
    ask_estimates,
    draw,
)
from numpyro_fed.vi.placed import can_place
from numpyro_fed.vi.setup import Setup
from numpyro_fed.vi.svi import conducive_for

if TYPE_CHECKING:
    from arviz import InferenceData
    from xarray import Dataset

_FEWEST = 25  # draws: Pareto's law is fitted to a fifth of them, and needs five
_PARTS = 20  # of the draws, where a progress bar follows them


class JointLatentsError(ValueError):
    """Error of a model whose latents cannot be integrated out one by one."""


_CANNOT = (
    "the latents of a silo depend on each other (crossed plates, a series, missing values beside "
    "groups), so that its likelihood given the global latents is no product over elements; "
    "expected a model without local latents, or with those of one plate's elements or of two "
    "nested plates; "
    "for a check of silos alone, fit remote silos with AutoSiloNormal(model, local_cov='full')"
)


class Question(NamedTuple):
    """Draws of theta as a message to silos, and the fit that asks.

    :param silos: the silos.
    :param slots: the number under which each remote silo keeps its state.
    :param setup: the fit's setup for the silos.
    :param params: its parameters, in their supports.
    :param told: the draws.
    """

    silos: Silos
    slots: list[int]
    setup: Setup
    params: dict[str, Array]
    told: Position

    def ask(self, local: FitTask) -> list[PyTree]:
        """Return remote silos' replies, in the order of the silos' names."""
        assert isinstance(self.silos, RemoteSilos)
        how = self.params, self.slots, self.silos, self.setup.stacks, random.key(0), self.told
        replies = ask_estimates(local, *how)
        return [replies[i] for i in self._order]

    @property
    def draws_latents(self) -> bool:
        """Flag of silos that can draw their latents, and not only integrate them out."""
        return self.setup.draws_latents

    def at(self, places: np.ndarray) -> "Question":
        """Return the question at some of the draws."""
        return self._replace(told=jax.tree.map(lambda x: x[places], self.told))

    def log_likelihood(self, progress_bar: bool = False) -> np.ndarray:
        """Return each silo's log likelihood, summed over its rows, at the draws, ``(n, S)``.

        :param progress_bar: show how many of the draws are done, for silos in this process.
        """
        num, silos = len(self.told.log_weight), self.silos
        here = not isinstance(silos, RemoteSilos) or isinstance(silos.carrier, Loopback)
        # parts of one size share a program
        parts = next(n for n in (_PARTS, 10, 5, 1) if num % n == 0) if here and num > _PARTS else 1
        places = np.arange(num).reshape(parts, -1)
        each = tqdm(places, "silos' likelihoods", disable=not progress_bar, delay=2.0)
        return np.concatenate([self.at(some)._terms() for some in each])

    def _terms(self) -> np.ndarray:
        if isinstance(self.silos, RemoteSilos):
            local = EstimateLocal(self.setup.config, stretched=True, placed=True)
            found = np.stack(self.ask(local), 1)
        else:
            found = np.asarray(self._here().terms)[:, self._order]
        return found.astype(np.float64)

    def together(self) -> "Question":
        """Return the question to silos here as one silo: a smaller program, for their sum alone."""
        remote = isinstance(self.silos, RemoteSilos)
        return self if remote else self._replace(setup=self.setup.as_one())

    def latents(self) -> list[dict[str, Array]]:
        """Draw the latents of silos here, at the draws.

        :return: for each structure its local sites, unconstrained, in pooled order, draws first.
        :raises JointLatentsError: for nested plates whose elements have more than two.
        """
        if not self.draws_latents:
            raise JointLatentsError(
                "an element of a nested plate has more latents than nodes are known for; expected "
                "one or two"
            )
        return self._here().latents

    def _here(self) -> Draws:
        setup = self.setup
        where = setup.local, setup.stacks, setup.totals
        return draw(setup.config, self.params, *where, self.told, stretched=True, placed=True)

    @property
    def _order(self) -> np.ndarray:
        return np.argsort(np.concatenate([np.asarray(rows.number) for rows in self.setup.stacks]))


def question(
    model: Callable, silos: Silos, draws: dict[str, np.ndarray], rng_key: Array | None = None
) -> Question:
    """Return the question to silos at draws of theta; remote silos make their first states.

    :param draws: global latent sites in their supports, leading axis n.
    :param rng_key: seed of the silos' latents. ``None``: a fixed one.
    :raises ValueError: for learned parameters, and for latents that cannot be integrated out: those
        of crossed plates, or of elements that depend on each other.
    """
    try:
        svi = conducive_for(model, silos)
    except JointUnits as error:
        raise JointLatentsError(_CANNOT) from error
    setup = svi.setup(silos)
    config = setup.config
    if config.learned:
        raise ValueError(f"learned parameters {list(config.learned)}: expected priors on them")
    for rows in setup.stacks:
        if config.families[rows.part].has_local and not can_place(config.families[rows.part], rows):
            raise JointLatentsError(_CANNOT)
    dim = config.factors.dim
    params = config.normal().from_moments(jnp.zeros(dim), jnp.eye(dim))
    key = random.key(0) if rng_key is None else rng_key
    told = _told(config, params, draws, setup.parts[0], key)
    remote = isinstance(silos, RemoteSilos)
    slots = svi.init(random.key(0), silos).silos.slots.tolist() if remote else []
    return Question(silos, slots, setup, params, told)


def _told(
    config: FitConfig,
    params: dict[str, Array],
    draws: dict[str, np.ndarray],
    silos: Silos,
    rng_key: Array,
) -> Position:
    """Return the message to the silos, which has the unconstrained draws."""
    shared = split_shared(silos.shared)

    @jax.jit
    def one(draws: dict, keys: Array, arrays: dict) -> Position:
        def at(sites: dict, key: Array) -> Position:
            free = config.factors.unconstrain_globals(sites, {**arrays, **dict(shared[1])})
            theta = config.factors.ravel(free)
            # q is standard normal, so that its noise is theta
            context = config.families[0].context(params, theta)._replace(params={})
            return Position(context, jnp.zeros(()), *random.split(key))

        return jax.vmap(at)(draws, keys)

    some = {k: jnp.asarray(x) for k, x in draws.items()}
    keys = random.split(rng_key, len(next(iter(some.values()))))
    return one(some, keys, shared[0])


def kept_terms(idata: "InferenceData", silos: Silos, most: int) -> np.ndarray | None:
    """Return each silo's log likelihood as a fit has kept it, at the draws of :func:`global_draws`.

    A silo's estimate has an error. Draws were resampled by these very estimates, so that weights
    from their inverse are exact up to Monte-Carlo error.

    :return: ``(n, S)``, or ``None`` where the result has none of these silos.
    """
    if not hasattr(idata, SILO_TERMS):
        return None
    kept = getattr(idata, SILO_TERMS)["log_likelihood"]
    if tuple(kept["silo"].values) != tuple(silos.names):
        return None
    terms = kept.values.reshape(-1, len(silos))
    return terms[evenly(len(terms), most)]


def check_same_silos(posterior: "Dataset", factors: Factors, silos: Silos) -> None:
    """Raise a ``ValueError`` unless these are the silos of the posterior, as far as it tells.

    It has the names where this library made it, and the number of elements of a silo plate where
    it has their latents.
    """
    names = json.loads(posterior.attrs.get("silos", "null"))
    # kernels that pool know one silo, of all rows
    if names is not None and set(names) not in ({"all"}, set(silos.names)):
        raise ValueError(f"expected the silos of the fit, {names}, got {list(silos.names)}")
    for plate, group in factors.plates:
        num, mine = posterior.sizes.get(plate), sum(silos.sizes[group])
        if num not in (None, mine):
            raise ValueError(
                f"expected the rows of the fit, which has {num} elements of {plate!r}, got {mine}"
            )


def check_enough(sites: dict[str, np.ndarray]) -> None:
    """Raise a ``ValueError`` for draws that are too few for weights."""
    num = len(next(iter(sites.values())))
    if num < _FEWEST:
        raise ValueError(f"expected {_FEWEST} draws or more, got {num}: take more, or num_draws=")


def evenly(total: int, most: int) -> np.ndarray:
    """Return at most ``most`` evenly spaced places among ``total``."""
    return np.arange(min(most, total)) * total // min(most, total)


def global_draws(posterior: "Dataset", factors: Factors, most: int) -> dict[str, np.ndarray]:
    """Return at most ``most`` draws of all chains, evenly spaced, by global site.

    :raises ValueError: for a posterior without one of the model's global latents.
    """
    missing = [name for name, _ in factors.global_sites if name not in posterior]
    if missing:
        raise ValueError(
            f"expected the posterior of this model, with its global latents; {missing} are not in "
            f"it, which has {sorted(map(str, posterior.data_vars))}"
        )
    flat = {
        name: posterior[name].values.reshape(-1, *posterior[name].shape[2:])
        for name, _ in factors.global_sites
    }
    total = len(next(iter(flat.values())))
    return {name: x[evenly(total, most)] for name, x in flat.items()}


def coefficients(
    sites: dict[str, np.ndarray], names: Sequence[str] | None = None
) -> tuple[list[str], np.ndarray]:
    """Return names and draws of the scalars of the global sites.

    :param names: the scalars; by default those that move, so not the diagonal of a correlation.
    """
    known, columns = [], []
    for name, x in sites.items():
        flat = x.reshape(len(x), -1).astype(np.float64)
        places = [f"[{', '.join(map(str, i))}]" for i in np.ndindex(x.shape[1:])]
        known += [name + place if x.ndim > 1 else name for place in places]
        columns.append(flat)
    values = np.concatenate(columns, axis=1)
    if names is None:
        names = [name for name, x in zip(known, values.T, strict=True) if np.ptp(x) > 0]
    return list(names), values[:, [known.index(name) for name in names]]
