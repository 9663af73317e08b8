"""Fit of a posterior in one call, with a report and a verdict of its own checks."""

import json
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jax import Array
from numpyro.infer import MCMC

from numpyro_fed.data.checks import check_key
from numpyro_fed.data.mixed import MixedSilos
from numpyro_fed.data.silos import Silos
from numpyro_fed.density.factorize import factorize
from numpyro_fed.density.nested import NestedUnits
from numpyro_fed.mcmc.checks import units_of
from numpyro_fed.mcmc.fsgld import FSGLD
from numpyro_fed.mcmc.hmc import HMC
from numpyro_fed.mcmc.remote import RemoteMCMC
from numpyro_fed.results.diagnose import Diagnosis, diagnose
from numpyro_fed.results.inference_data import to_inference_data
from numpyro_fed.results.vi_inference_data import check_num_draws
from numpyro_fed.results.weighing import prepare_draws
from numpyro_fed.rounds.federated import Ledger
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.surrogates.natural_step import CONVERGED
from numpyro_fed.vi.conducive.checks import JointUnits
from numpyro_fed.vi.guides.auto_silo_normal import AutoSiloNormal
from numpyro_fed.vi.importance import POOR
from numpyro_fed.vi.result import VIResult
from numpyro_fed.vi.svi import MOST_ROUNDS, TOL, ConduciveSFVI

if TYPE_CHECKING:
    from arviz import InferenceData


# the same, for rounds that only give chains a start: the fit of surrogates goes on from there, and
# chains were as right as from a cold start on 19 models (docs/results.md)
_START_TOL = 0.1
# as in the comparison with NUTS (docs/results.md): five visits at a step of .01
# leave 1 / e of the start
_CHAINS, _WARMUP = 4, 200
_HMC_WARMUP = 400  # the verdicts in docs/results.md are of so many
# many chains that share what they learn: of few draws each, so that there are few rounds
_MARGINAL_CHAINS, _MARGINAL_WARMUP = 64, 40
# share of the draws that are effective, of the worst site, at which chains end: with 533 of 4,000,
# more than a sound run needs, a scale with a long tail (frailties of `kidney`) was off by .2 sds
_ENOUGH = 0.25
_LONGEST = 16  # most draws of a chain for one that is kept
# acceptance that chains aim at, one after the other where trajectories diverge: that of NUTS, and
# what its users raise it to
_TARGETS = (0.8, 0.95, 0.99)
_METHODS = ("auto", "vi", "hmc", "fsgld")


def fit(
    model: Callable,
    silos: Silos | MixedSilos,
    *,
    method: str = "auto",
    num_draws: int = 4000,
    rng_key: Array | None = None,
    progress_bar: bool = True,
) -> "InferenceData":
    """Fit a model over silos, and return its posterior.

    It goes on until its own checks hold, by these steps:

    1. ``"vi"``: conducive rounds (:class:`ConduciveSFVI`) run until they converge, after about ten.
       In one more round the silos' likelihoods weight public draws of theta (Pareto-smoothed
       importance sampling). Where the weights fail, silos look for the latents' modes at each draw,
       and weigh again.
    2. ``"hmc"``: four chains of :class:`HMC`, which need no Gaussian shape. They go on until R-hat
       is sound and a quarter of the draws effective, for at most 16 times ``num_draws``. Where
       trajectories diverge they start again with shorter steps, of acceptance .95 and then .99.

    ``method="auto"`` takes the second step where the first is unsound. Where latents of a silo
    depend on each other (nested or crossed plates), it takes the second step alone. ``"vi"`` and
    ``"hmc"`` take one step. With ``method="fsgld"`` :class:`FSGLD` starts from the result of the
    conducive rounds, and its draws are the posterior.

    HMC makes thousands of rounds, and is for silos in this process. Remote silos integrate their
    latents out in the second step (``HMC(model, marginal=True)``). 64 chains then make some hundred
    rounds, for at most 4 times ``num_draws``. :class:`MixedSilos` end with the first step.

    What leaves the silos: see :mod:`numpyro_fed.vi.conducive.rounds`, :mod:`numpyro_fed.vi.draws`
    for the last round, :class:`HMC` and :class:`FSGLD`.

    Bias: ``"vi"`` has that of importance sampling. Pareto's k judges it, for theta's weights and
    for those of each element's latents. ``"hmc"`` has none; ``"fsgld"`` widens sds by about 2 %.
    :func:`diagnose` judges both.

    :param model: a NumPyro model with at least one silo plate.
    :param silos: the data. Local latents of :class:`RemoteSilos` stay in their silos.
    :param method: ``"auto"``, ``"vi"``, ``"hmc"`` or ``"fsgld"``.
    :param num_draws: draws of the result. Four chains round them up to a multiple of four.
    :param rng_key: seed; ``jax.random.key(0)`` by default.
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
    key_rounds, key_draws, key_chains = jax.random.split(rng_key, 3)
    can_chain = not isinstance(silos, MixedSilos | RemoteSilos)
    svi, joint = (None, True) if method == "hmc" else _settable(model, silos)
    if svi is None or (method == "auto" and joint and can_chain):
        why = "latents of a silo depend on each other: " if svi is not None else ""
        found = _hmc(model, silos, num_draws, key_chains, progress_bar)
        return _reported(found, why, progress_bar)
    if method == "auto" and joint and isinstance(silos, RemoteSilos) and _nested(model, silos):
        found = _marginal(model, silos, num_draws, key_chains, progress_bar, None)
        return _reported(found, "latents of a silo depend on each other: ", progress_bar)
    if method != "fsgld" and not isinstance(silos, RemoteSilos):
        _compile(svi, silos, num_draws, key_rounds)
    result = svi.run(
        key_rounds,
        MOST_ROUNDS,
        silos,
        tol=_START_TOL if method == "fsgld" else TOL,
        progress_bar=progress_bar,
    )
    words, converged = _of_rounds(result)
    if method == "fsgld":
        found = _chains(model, result, silos, num_draws, key_chains, progress_bar)
        return _reported(found, f"{words}; ", progress_bar)
    last = partial(_last_round, svi, result, silos, num_draws, key_draws, converged)
    if method == "vi" or isinstance(silos, MixedSilos):
        return _reported(last(), f"{words}; ", progress_bar)
    with warnings.catch_warnings():  # the report says so
        warnings.filterwarnings("ignore", "Pareto's k of the approximation")
        found = last()
    if found.verdict != "sound":
        try:
            how = num_draws, key_chains, progress_bar
            chains = (
                _marginal(model, silos, *how, result)
                if isinstance(silos, RemoteSilos)
                else _hmc(model, silos, *how)
            )
        except ValueError as error:  # no start; the weighed draws are not lost
            found = found._replace(mend=f"{found.mend}. HMC: {error}")
            return _reported(found, f"{words}; ", progress_bar)
        words, found = f"{words}; {found.words} (unsound, so chains went on)", chains
        _add_ledger(found.idata, result.ledger)
    return _reported(found, f"{words}; ", progress_bar)


class _Found(NamedTuple):
    """Draws of a step, a text on it, its verdict, and a mend where this is bad."""

    idata: "InferenceData"
    words: str
    verdict: str
    mend: str


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


def _reported(found: _Found, way: str, progress_bar: bool) -> "InferenceData":
    """Return the draws with a report on the way to them, and print it beside progress bars."""
    report = f"{way}{found.words}. Checks: {found.verdict}{found.mend}"
    report = report[0].upper() + report[1:] if way.startswith("latents") else report
    found.idata.posterior.attrs |= {"report": report, "verdict": found.verdict}
    if progress_bar:
        print(report)
    return found.idata


def _compile(svi: ConduciveSFVI, silos: Silos | MixedSilos, num_draws: int, key: Array) -> None:
    """Compile the two large programs side by side, before they are called.

    XLA compiles a program on one core.
    """
    rounds = svi.lower(key, silos)
    assert rounds is not None
    with ThreadPoolExecutor(2) as pool:
        pool.submit(rounds.compile)
        prepare_draws(pool, svi, silos, num_draws, key)


def _last_round(
    svi: ConduciveSFVI,
    result: VIResult,
    silos: Silos | MixedSilos,
    num_draws: int,
    key: Array,
    converged: bool,
) -> _Found:
    """Return weighted draws."""
    idata = to_inference_data(svi, result, silos, num_draws=num_draws, rng_key=key, resample=True)
    attrs = idata.posterior.attrs
    k, unit = float(attrs["pareto_k"]), float(attrs.get("pareto_k_unit", -np.inf))
    around = ", with candidates around the latents' modes at each draw"
    words = (
        f"the last round weighted {attrs['candidates']:,} public draws by the silos' "
        f"likelihoods{around if attrs['placed'] else ''}: Pareto's k {k:.2f} "
        f"({attrs['pareto_k_of']}: {'good' if k <= POOR else 'too large'})"
    )
    if "pareto_k_unit" in attrs:
        words += f", of the latents' candidates at worst {unit:.2f} ({attrs['pareto_k_unit_at']})"
    visited = json.loads(attrs.get("remote", "[]"))
    if visited:
        words += f"; none for the candidates of {', '.join(visited)}, which stay in the silos"
    if converged and max(k, unit) <= POOR:
        return _Found(idata, words, "sound", "")
    mend = (
        ". Expected k <= 0.7 and rounds that converge: "
        'take method="fsgld", or reparameterize the model'
    )
    return _Found(idata, words, "unsound", mend)


def _chains(
    model: Callable,
    result: VIResult,
    silos: Silos | MixedSilos,
    num_draws: int,
    key: Array,
    progress_bar: bool,
) -> _Found:
    """Return draws of FSGLD from the result."""
    kind = (
        RemoteMCMC if isinstance(silos, RemoteSilos) else partial(MCMC, chain_method="vectorized")
    )
    mcmc = kind(
        FSGLD(model, init_from=result),
        num_warmup=_WARMUP,
        num_samples=-(-num_draws // _CHAINS),
        num_chains=_CHAINS,
        progress_bar=progress_bar,
    )
    mcmc.run(key, silos)  # type: ignore[arg-type]  # each class has its own type of silos
    idata = to_inference_data(mcmc, silos)
    diagnosis = diagnose(mcmc)
    _add_ledger(idata, result.ledger)
    words = f"from there FSGLD, {_CHAINS} chains of {_WARMUP} + {mcmc.num_samples} rounds"
    return _Found(idata, words, diagnosis.verdict, f". {diagnosis.summary()}")


def _hmc(
    model: Callable, silos: Silos | MixedSilos, num_draws: int, key: Array, progress_bar: bool
) -> _Found:
    """Return draws of HMC, by shorter steps and longer runs until the checks hold."""
    num, each, start, targets, spent = -(-num_draws // _CHAINS), 1, None, list(_TARGETS), []
    kernel = HMC(model, target_accept_prob=targets[0])
    while True:
        mcmc = MCMC(
            kernel,
            num_warmup=_HMC_WARMUP,
            num_samples=num * each,
            num_chains=_CHAINS,
            thinning=each,
            chain_method="vectorized",
            progress_bar=progress_bar,
        )
        mcmc.post_warmup_state = start
        mcmc.run(key if start is None else start.rng_key, silos)
        diagnosis = diagnose(mcmc)
        diverged, enough = _judged(diagnosis, num * _CHAINS)
        if diverged and len(targets) > 1:
            spent.append(kernel.ledger(mcmc.last_state))
            start, each, targets = None, 1, targets[1:]
            kernel = HMC(model, target_accept_prob=targets[0])
        elif diverged or each == _LONGEST or (diagnosis.verdict == "sound" and enough):
            break
        else:
            start, each = mcmc.last_state, each * 4
    idata = to_inference_data(mcmc, silos)
    for ledger in spent:
        _add_ledger(idata, ledger)
    words = (
        f"HMC, {_CHAINS} chains of {num:,} draws"
        f"{f', one of {each} each' if each > 1 else ''}, "
        f"{json.loads(idata.posterior.attrs['rounds'])[0]:,} rounds"
        f"{f', of acceptance {targets[0]}, as others diverged' if spent else ''}"
    )
    return _Found(idata, words, diagnosis.verdict, f". {diagnosis.summary()}")


def _marginal(
    model: Callable,
    silos: RemoteSilos,
    num_draws: int,
    key: Array,
    progress_bar: bool,
    result: VIResult | None,
) -> _Found:
    """Return draws of HMC whose silos integrate their latents out.

    :param result: rounds from whose end chains start; ``None``: they start near zero.
    """
    num, each, targets, spent = -(-num_draws // _MARGINAL_CHAINS), 1, list(_TARGETS[1:]), []
    while True:
        kernel = HMC(model, marginal=True, init_from=result, target_accept_prob=targets[0])
        mcmc = RemoteMCMC(
            kernel,
            num_warmup=_MARGINAL_WARMUP if result is not None else _HMC_WARMUP,
            num_samples=num * each,
            num_chains=_MARGINAL_CHAINS,
            progress_bar=progress_bar,
        )
        mcmc.run(key, silos)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "More chains")
            diagnosis = diagnose(mcmc)
        diverged, enough = _judged(diagnosis, num * _MARGINAL_CHAINS)
        if diverged and len(targets) > 1:
            targets = targets[1:]
        elif diverged or each > 1 or (diagnosis.verdict == "sound" and enough):
            break
        else:
            each = 4
        spent.append(kernel.ledger(mcmc.last_state))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "More chains")
        idata = to_inference_data(mcmc, silos).sel(draw=slice(None, None, each))
    for ledger in spent:
        _add_ledger(idata, ledger)
    words = (
        f"HMC with latents integrated out, {_MARGINAL_CHAINS} chains of {num} draws, "
        f"{json.loads(idata.posterior.attrs['rounds'])[0]:,} rounds"
    )
    return _Found(idata, words, diagnosis.verdict, f". {diagnosis.summary()}")


def _nested(model: Callable, silos: RemoteSilos) -> bool:
    """Return whether latents are those of two nested plates, which can be integrated out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that all latents of a silo are one unit
        return isinstance(units_of(factorize(model, silos), silos), NestedUnits)


def _judged(diagnosis: Diagnosis, num_draws: int) -> tuple[bool, bool]:
    """Return whether trajectories diverged, and whether enough of the draws are effective."""
    table = diagnosis.table
    diverged = table.loc["trajectories diverged", "verdict"] != "sound"
    return diverged, table.loc["effective draws", "value"] >= _ENOUGH * num_draws


def _settable(model: Callable, silos: Silos | MixedSilos) -> tuple[ConduciveSFVI, bool]:
    """Return the method with a guide that covers the model, and whether its unit is a silo.

    The guide's unit is an element of the silo plate, or a silo where its elements depend on each
    other.
    """
    try:
        svi = ConduciveSFVI(model, AutoSiloNormal(model))
        svi.setup(silos)
    except JointUnits:
        return ConduciveSFVI(model, AutoSiloNormal(model, local_cov="full")), True
    return svi, False


def _of_rounds(result: VIResult) -> tuple[str, bool]:
    moved = float(result.state.server.moved)
    names, up = result.ledger.silos, sum(result.ledger.bytes_up) / 1e3
    how = "converged" if moved <= CONVERGED else "has not converged"
    return (
        f"q(theta) {how} in {len(result.losses)} conducive rounds of {len(names)} "
        f"silo{'' if len(names) == 1 else 's'}, {up:.1f} kB up in all "
        f"(it moved by {moved:.2g} sds in the last; bound {-result.losses[-1]:.2f})",
        moved <= CONVERGED,
    )


def _add_ledger(idata: "InferenceData", ledger: Ledger) -> None:
    """Add rounds that were made before to the ledger of the chains."""
    attrs, added = idata.posterior.attrs, asdict(ledger)
    for name in ("rounds", "gradient_evaluations", "bytes_down", "bytes_up"):
        attrs[name] = json.dumps(np.add(json.loads(attrs[name]), added[name]).tolist())
