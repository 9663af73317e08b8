"""Fit of a posterior in one call, with a report and a verdict of its own checks."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import jax
from jax import Array
from jax.stages import Lowered

from numpyro_fed.data.checks import check_key
from numpyro_fed.data.mixed import MixedSilos
from numpyro_fed.data.silos import Silos
from numpyro_fed.front.steps import (
    Asked,
    Found,
    are_few_terms,
    fsgld,
    hmc,
    of_rounds,
    weighed,
    weighed_or_chains,
)
from numpyro_fed.results.vi_inference_data import check_num_draws
from numpyro_fed.results.weighing import prepare_draws
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.vi.conducive.checks import JointUnits
from numpyro_fed.vi.guides.auto_silo_normal import AutoSiloNormal
from numpyro_fed.vi.svi import MOST_ROUNDS, TOL, ConduciveSFVI, conducive_for

if TYPE_CHECKING:
    from arviz import InferenceData


# the same, for rounds that only give chains a start: the fit of surrogates goes on from there, and
# chains were as right as from a cold start on 19 models (docs/results.md)
_START_TOL = 0.1
# most latents of a silo that depend on each other, where conducive rounds are made: with 250 a
# round takes a minute
_LARGEST_UNIT = 64
_METHODS = ("auto", "vi", "hmc", "fsgld")


def fit(
    model: Callable,
    silos: Silos | MixedSilos,
    *,
    method: str = "auto",
    num_draws: int = 4000,
    rng_key: Array | None = None,
    log_likelihood: bool | None = None,
    progress_bar: bool = True,
) -> "InferenceData":
    """Fit a model over silos, and return its posterior.

    It goes on until its own checks hold, by these steps:

    1. ``"vi"``: conducive rounds (:class:`ConduciveSFVI`) run until they converge, after about ten.
       In one more round the silos' likelihoods weight public draws of theta (Pareto-smoothed
       importance sampling). Where the weights fail, silos look for the latents' modes at each draw,
       and weigh again. Where they still fail, up to four more rounds add draws of mixtures of
       Student laws, fitted to the draws before (for at most eight global coordinates).
    2. ``"hmc"``: four chains of :class:`HMC`, which need no Gaussian shape. They go on until R-hat
       is sound and a quarter of the draws effective, for at most 16 times ``num_draws``. Where
       trajectories diverge they start again with shorter steps, of acceptance .95 and then .99.

    ``method="auto"`` takes the second step where the first is unsound. Where latents of a silo
    depend on each other (nested or crossed plates), it takes the second step alone. ``"vi"`` and
    ``"hmc"`` take one step. With ``method="fsgld"`` :class:`FSGLD` starts from the result of the
    conducive rounds, and its draws are the posterior. Where its steps are too long, it starts again
    with shorter ones, for a fourth of their bias. Where draws are too few, it makes 4 and then 16
    times as many rounds (4 with remote silos). No conducive rounds are made for it where more than
    64 latents of a silo depend on each other.

    HMC makes thousands of rounds, and is for silos in this process. Remote silos integrate their
    latents out in the second step (``HMC(model, marginal=True)``). 64 chains then make hundreds of
    rounds, on some models thousands. Where two plates are nested, remote silos integrate latents
    out in the first step already (:class:`AutoSiloNormal` with ``marginal=True``). Where more than
    64 latents of a remote silo depend on each other in another way, :class:`FSGLD` draws, in place
    of both steps. :class:`MixedSilos` end with the first step.

    What leaves the silos: see :mod:`numpyro_fed.vi.conducive.rounds`, :mod:`numpyro_fed.vi.draws`
    for the last round, :class:`HMC` and :class:`FSGLD`.

    Bias: ``"vi"`` has that of importance sampling. Pareto's k judges it, for theta's weights and
    for those of each element's latents. ``"hmc"`` has none; ``"fsgld"`` widens sds by about 2 %.
    :func:`diagnose` judges both.

    :param model: a NumPyro model with at least one silo plate.
    :param silos: the data. Local latents of :class:`RemoteSilos` stay in their silos.
    :param method: ``"auto"``, ``"vi"``, ``"hmc"`` or ``"fsgld"``.
    :param num_draws: draws of the result. Chains round them up to a multiple of their number.
    :param rng_key: seed; ``jax.random.key(0)`` by default.
    :param log_likelihood: whether the result has the log likelihood of each row at each draw, of
        silos in this process. ``None``: where these are at most 50 million numbers. Where
        chains keep one of several draws, there are none beyond this number.
    :param progress_bar: show rounds, and print the report.
    :return: the ``InferenceData`` of :func:`to_inference_data`. The attributes of ``posterior``
        hold the ledger of all rounds, ``report`` (a text on the rounds and the checks) and
        ``verdict``: ``"sound"``, ``"undecided"`` or ``"unsound"``.
    :raises ValueError: for models and data that the methods do not cover.

    Example::

        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_fed as fed
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with fed.silo_plate("patients", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> silos = fed.Silos({"oslo": {"y": jnp.ones(3)}, "rome": {"y": jnp.zeros(3)}})
        >>> idata = fed.fit(model, silos, progress_bar=False)
        >>> idata.posterior.attrs["verdict"]
        'sound'
    """
    if method not in _METHODS:
        raise ValueError(f"method: expected one of {', '.join(_METHODS)}, got {method!r}")
    check_num_draws(num_draws)
    rng_key = jax.random.key(0) if rng_key is None else rng_key
    check_key(rng_key)
    _check_silos(method, silos)
    if log_likelihood is None:
        log_likelihood = are_few_terms(silos, num_draws)
    asked = Asked(num_draws, log_likelihood, progress_bar)
    key_chains = jax.random.split(rng_key, 3)[2]
    can_chain = not isinstance(silos, MixedSilos | RemoteSilos)
    svi, joint = (None, 0) if method == "hmc" else _settable(model, silos)
    if svi is None or (method == "auto" and joint and can_chain):
        why = "latents of a silo depend on each other: " if svi is not None else ""
        found = hmc(model, silos, asked, key_chains)
        return _reported(found, why, progress_bar)
    if joint > _LARGEST_UNIT and method != "vi" and not isinstance(silos, MixedSilos):
        try:
            found = fsgld(model, None, silos, asked, key_chains)
            return _reported(found, f"{joint} latents of a silo are one unit: ", progress_bar)
        except ValueError:  # a model that FSGLD does not cover
            if method == "fsgld":
                raise
    return _by_rounds(model, svi, silos, method, asked, rng_key)


def _by_rounds(
    model: Callable,
    svi: ConduciveSFVI,
    silos: Silos | MixedSilos,
    method: str,
    asked: Asked,
    rng_key: Array,
) -> "InferenceData":
    """Return draws from the end of conducive rounds: weighed, or of chains."""
    key_rounds, key_draws, key_chains = jax.random.split(rng_key, 3)
    rounds, together = svi.together(silos)
    if method != "fsgld" and not isinstance(silos, RemoteSilos):
        _compile(svi, silos, rounds.lower(key_rounds, together), asked.num_draws, key_rounds)
    tol = _START_TOL if method == "fsgld" else TOL
    result = rounds.run(key_rounds, MOST_ROUNDS, together, tol=tol, progress_bar=asked.progress_bar)
    if together is not silos:
        ledger = result.ledger.of_each(silos.names)
        partition = svi.setup(silos).partition()
        result = replace(result, ledger=ledger, partition=partition)
    way = told = f"{of_rounds(result)}; "
    if asked.progress_bar:  # what follows may take minutes
        print(told)
    if method == "fsgld":
        found = fsgld(model, result, silos, asked, key_chains)
    elif method == "vi" or isinstance(silos, MixedSilos):
        found = weighed(svi, result, silos, asked, key_draws)
    else:
        found, way = weighed_or_chains(svi, result, silos, asked, (key_draws, key_chains))
        told = way
    return _reported(found, way, asked.progress_bar, told)


def _check_silos(method: str, silos: Silos | MixedSilos) -> None:
    """Raise for silos that a method does not cover."""
    if method in ("hmc", "fsgld") and isinstance(silos, MixedSilos):
        raise ValueError(
            f'method="{method}" is for silos of one structure; expected fed.Silos(...), got '
            'MixedSilos; take method="vi"'
        )
    if method == "hmc" and isinstance(silos, RemoteSilos):
        raise ValueError(
            'method="hmc" makes thousands of rounds, and is for silos in this process; expected '
            'fed.Silos(...), got RemoteSilos; take method="vi" or "fsgld"'
        )


def _reported(found: Found, way: str, progress_bar: bool, told: str = "") -> "InferenceData":
    """Return the draws with a report on the way to them, and print it beside progress bars.

    :param told: its beginning, if that has been printed.
    """
    report = found.reported(way[0].upper() + way[1:] if way.startswith("latents") else way)
    if progress_bar:
        print(report.removeprefix(told))
    return found.idata


def _compile(
    svi: ConduciveSFVI,
    silos: Silos | MixedSilos,
    lowered: Lowered | None,
    num_draws: int,
    key: Array,
) -> None:
    """Compile the two large programs side by side, before they are called.

    XLA compiles a program on one core.

    :param lowered: the program of the rounds.
    """
    assert lowered is not None
    with ThreadPoolExecutor(2) as pool:
        pool.submit(lowered.compile)
        prepare_draws(pool, svi, silos, num_draws, key)


def _settable(model: Callable, silos: Silos | MixedSilos) -> tuple[ConduciveSFVI, int]:
    """Return the method with a guide that covers the model, and the number of joint latents.

    The guide's unit is an element of the silo plate (then the number is 0), or a silo where its
    elements depend on each other.
    """
    try:
        if isinstance(silos, RemoteSilos):
            return conducive_for(model, silos), 0
        svi = ConduciveSFVI(model, AutoSiloNormal(model))
        svi.setup(silos)
    except JointUnits as error:
        return ConduciveSFVI(model, AutoSiloNormal(model, local_cov="full")), error.size
    return svi, 0
