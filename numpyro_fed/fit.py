"""Fit of a posterior in one call, with a report and a verdict of its own checks."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax import Array
from numpyro.infer import MCMC

from numpyro_fed.data.checks import check_key
from numpyro_fed.data.mixed import MixedSilos
from numpyro_fed.data.silos import Silos
from numpyro_fed.mcmc.fsgld import FSGLD
from numpyro_fed.mcmc.remote import RemoteMCMC
from numpyro_fed.results.diagnose import diagnose
from numpyro_fed.results.inference_data import to_inference_data
from numpyro_fed.results.vi_inference_data import check_num_draws
from numpyro_fed.results.weighing import prepare_draws
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.surrogates.natural_step import CONVERGED
from numpyro_fed.vi.conducive.checks import JointUnits
from numpyro_fed.vi.guides.auto_silo_normal import AutoSiloNormal
from numpyro_fed.vi.importance import POOR
from numpyro_fed.vi.result import VIResult
from numpyro_fed.vi.svi import ConduciveSFVI

if TYPE_CHECKING:
    from arviz import InferenceData


_MOST_ROUNDS = 40  # 15 models took 6 to 28 (docs/results.md)
# change of the bound in a round, in nats, below which rounds may end; a mean that is .045 sds off
# costs so much
TOL = 1e-3
# the same, for rounds that only give chains a start: the fit of surrogates goes on from there, and
# chains were as right as from a cold start on 19 models (docs/results.md)
_START_TOL = 0.1
# as in the comparison with NUTS (docs/results.md): five visits at a step of .01
# leave 1 / e of the start
_CHAINS, _WARMUP = 4, 200


def fit(
    model: Callable,
    silos: Silos | MixedSilos,
    *,
    method: str = "vi",
    num_draws: int = 4000,
    rng_key: Array | None = None,
    progress_bar: bool = True,
) -> "InferenceData":
    """Fit a model over silos, and return its posterior.

    With ``method="vi"`` conducive rounds (:class:`ConduciveSFVI`) run until they converge, after
    about ten. In one more round the silos' likelihoods weight public draws of theta
    (Pareto-smoothed importance sampling). Where the weights fail, silos look for the latents'
    modes at each draw, and weigh again. With ``method="fsgld"`` :class:`FSGLD` starts from the
    result of the conducive rounds, and its draws are the posterior.

    What leaves the silos: see :mod:`numpyro_fed.vi.conducive.rounds`, :mod:`numpyro_fed.vi.draws`
    for the last round, and :class:`FSGLD`.

    Bias: ``"vi"`` has that of importance sampling. Pareto's k judges it, for theta's weights and
    for those of each element's latents. ``"fsgld"`` widens sds by about 2 %; :func:`diagnose`
    judges it.

    :param model: a NumPyro model with at least one silo plate.
    :param silos: the data. Local latents of :class:`RemoteSilos` stay in their silos.
    :param method: ``"vi"`` or ``"fsgld"``.
    :param num_draws: draws of the result. ``"fsgld"`` rounds them up to a multiple of its four
        chains.
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
    if method not in ("vi", "fsgld"):
        raise ValueError(f'method: expected "vi" or "fsgld", got {method!r}')
    check_num_draws(num_draws)
    rng_key = jax.random.key(0) if rng_key is None else rng_key
    check_key(rng_key)
    if method == "fsgld" and isinstance(silos, MixedSilos):
        raise ValueError(
            'method="fsgld" is for silos of one structure; expected fed.Silos(...), got '
            'MixedSilos; take method="vi"'
        )
    key_rounds, key_draws, key_chains = jax.random.split(rng_key, 3)
    svi = _settable(model, silos)
    if method == "vi" and not isinstance(silos, RemoteSilos):
        _compile(svi, silos, num_draws, key_rounds)
    result = svi.run(
        key_rounds,
        _MOST_ROUNDS,
        silos,
        tol=TOL if method == "vi" else _START_TOL,
        progress_bar=progress_bar,
    )
    words, converged = _of_rounds(result)
    if method == "vi":
        idata, more, verdict, mend = _last_round(
            svi, result, silos, num_draws, key_draws, converged
        )
    else:
        idata, more, verdict, mend = _chains(
            model, result, silos, num_draws, key_chains, progress_bar
        )
    report = f"{words}; {more}. Checks: {verdict}{mend}"
    idata.posterior.attrs |= {"report": report, "verdict": verdict}
    if progress_bar:
        print(report)
    return idata


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
) -> tuple["InferenceData", str, str, str]:
    """Return weighted draws, a text on their round, the verdict, and a mend of a bad verdict."""
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
        return idata, words, "sound", ""
    mend = (
        ". Expected k <= 0.7 and rounds that converge: "
        'take method="fsgld", or reparameterize the model'
    )
    return idata, words, "unsound", mend


def _chains(
    model: Callable,
    result: VIResult,
    silos: Silos | MixedSilos,
    num_draws: int,
    key: Array,
    progress_bar: bool,
) -> tuple["InferenceData", str, str, str]:
    """Run FSGLD from the result, and return what :func:`_last_round` returns."""
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
    _add_ledger(idata, result)
    words = f"from there FSGLD, {_CHAINS} chains of {_WARMUP} + {mcmc.num_samples} rounds"
    return idata, words, diagnosis.verdict, f". {diagnosis.summary()}"


def _settable(model: Callable, silos: Silos | MixedSilos) -> ConduciveSFVI:
    """Return the method with a guide that covers the model.

    The guide's unit is an element of the silo plate, or a silo where its elements depend on each
    other.
    """
    try:
        svi = ConduciveSFVI(model, AutoSiloNormal(model))
        svi.setup(silos)
    except JointUnits:
        svi = ConduciveSFVI(model, AutoSiloNormal(model, local_cov="full"))
        svi.setup(silos)
    return svi


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


def _add_ledger(idata: "InferenceData", result: VIResult) -> None:
    """Add the variational rounds to the ledger of the chains."""
    attrs, added = idata.posterior.attrs, asdict(result.ledger)
    for name in ("rounds", "gradient_evaluations", "bytes_down", "bytes_up"):
        attrs[name] = json.dumps(np.add(json.loads(attrs[name]), added[name]).tolist())
