"""Steps of a fit in one call: weighed draws, and chains. Each has a text and a verdict."""

import json
import warnings
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jax import Array
from numpyro.infer import MCMC

from numpyro_fed.data.mixed import MixedSilos
from numpyro_fed.data.silos import Silos
from numpyro_fed.mcmc.fsgld import FSGLD
from numpyro_fed.mcmc.hmc import HMC
from numpyro_fed.mcmc.remote import RemoteMCMC
from numpyro_fed.results.diagnose import Diagnosis, diagnose
from numpyro_fed.results.inference_data import to_inference_data
from numpyro_fed.rounds.federated import Ledger
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.surrogates.natural_step import CONVERGED
from numpyro_fed.vi.importance import POOR
from numpyro_fed.vi.result import VIResult
from numpyro_fed.vi.svi import ConduciveSFVI

if TYPE_CHECKING:
    from arviz import InferenceData


# as in the comparison with NUTS (docs/results.md): five visits at a step of .01
# leave 1 / e of the start
_CHAINS, _WARMUP = 4, 200
_HMC_WARMUP = 400  # the verdicts in docs/results.md are of so many
# rounds for each draw that is kept, where no fit gave chains a start: 165 of 2,000 draws were
# effective for families in communities, and `diagnose` asks for 400
_FSGLD_EACH = (2, 8)
# many chains that share what they learn: of few draws each, so that there are few rounds
_MARGINAL_CHAINS, _MARGINAL_WARMUP = 64, 40
# share of the draws that are effective, of the worst site, at which chains end: with 533 of 4,000,
# more than a sound run needs, a scale with a long tail (frailties of `kidney`) was off by .2 sds
_ENOUGH = 0.25
_LONGEST = 16  # most draws of a chain for one that is kept
# acceptance that chains aim at, one after the other where trajectories diverge: that of NUTS, and
# what its users raise it to
_TARGETS = (0.8, 0.95, 0.99)


class Found(NamedTuple):
    """Draws of a step, a text on it, its verdict, and a mend where this is bad."""

    idata: "InferenceData"
    words: str
    verdict: str
    mend: str

    def reported(self, way: str) -> str:
        """Write a report and the verdict into the draws' attributes; return the report.

        :param way: text on the steps before this one.
        """
        report = f"{way}{self.words}. Checks: {self.verdict}{self.mend}"
        self.idata.posterior.attrs |= {"report": report, "verdict": self.verdict}
        return report


def weighed(
    svi: ConduciveSFVI,
    result: VIResult,
    silos: Silos | MixedSilos,
    num_draws: int,
    key: Array,
) -> Found:
    """Return weighted draws from the end of conducive rounds."""
    idata = to_inference_data(svi, result, silos, num_draws=num_draws, rng_key=key, resample=True)
    attrs = idata.posterior.attrs
    k, unit = float(attrs["pareto_k"]), float(attrs.get("pareto_k_unit", -np.inf))
    around = ", with candidates around the latents' modes at each draw"
    fitted = "drew from a mixture fitted to earlier draws, and "
    words = (
        f"the last round {fitted if attrs['mixture'] else ''}weighted {attrs['candidates']:,} "
        f"public draws by the silos' likelihoods"
        f"{around if attrs['placed'] else ''}: Pareto's k {k:.2f} "
        f"({attrs['pareto_k_of']}: {'good' if k <= POOR else 'too large'})"
    )
    if "pareto_k_unit" in attrs:
        words += f", of the latents' candidates at worst {unit:.2f} ({attrs['pareto_k_unit_at']})"
    visited = json.loads(attrs.get("remote", "[]"))
    if visited:
        words += f"; none for the candidates of {', '.join(visited)}, which stay in the silos"
    if _has_converged(result) and max(k, unit) <= POOR:
        return Found(idata, words, "sound", "")
    mend = (
        ". Expected k <= 0.7 and rounds that converge: "
        'take method="fsgld", or reparameterize the model'
    )
    return Found(idata, words, "unsound", mend)


def _has_converged(result: VIResult) -> bool:
    """Return whether q(theta) has come to rest in conducive rounds."""
    return float(result.state.server.moved) <= CONVERGED


def of_rounds(result: VIResult) -> str:
    """Return a text on conducive rounds: how many, what silos sent, and whether they converged."""
    moved = float(result.state.server.moved)
    names, up = result.ledger.silos, sum(result.ledger.bytes_up) / 1e3
    how = "converged" if _has_converged(result) else "has not converged"
    return (
        f"q(theta) {how} in {len(result.losses)} conducive rounds of {len(names)} "
        f"silo{'' if len(names) == 1 else 's'}, {up:.1f} kB up in all "
        f"(it moved by {moved:.2g} sds in the last; bound {-result.losses[-1]:.2f})"
    )


def fsgld(
    model: Callable,
    result: VIResult | None,
    silos: Silos | MixedSilos,
    num_draws: int,
    key: Array,
    progress_bar: bool,
) -> Found:
    """Return draws of FSGLD from the result, or, without one, of as many rounds as they need."""
    kind = (
        RemoteMCMC if isinstance(silos, RemoteSilos) else partial(MCMC, chain_method="vectorized")
    )
    num, spent = -(-num_draws // _CHAINS), [] if result is None else [result.ledger]
    lengths = _FSGLD_EACH if result is None else (1,)
    for each in lengths:
        kernel = FSGLD(model, init_from=result)
        mcmc = kind(
            kernel,
            num_warmup=_WARMUP,
            num_samples=num * each,
            num_chains=_CHAINS,
            progress_bar=progress_bar,
        )
        mcmc.run(key, silos)  # type: ignore[arg-type]  # each class has its own type of silos
        diagnosis = diagnose(mcmc)
        if diagnosis.verdict != "undecided" or each == lengths[-1]:
            break
        spent.append(kernel.ledger(mcmc.last_state))
    idata = to_inference_data(mcmc, silos).sel(draw=slice(None, None, each))
    add_ledgers(idata, *spent)
    words = (
        f"{'FSGLD' if result is None else 'from there FSGLD'}, {_CHAINS} chains of {_WARMUP} + "
        f"{mcmc.num_samples:,} rounds{f', one of {each} kept' if each > 1 else ''}"
    )
    return Found(idata, words, diagnosis.verdict, f". {diagnosis.summary()}")


def hmc(
    model: Callable, silos: Silos | MixedSilos, num_draws: int, key: Array, progress_bar: bool
) -> Found:
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
    add_ledgers(idata, *spent)
    words = (
        f"HMC, {_CHAINS} chains of {num:,} draws"
        f"{f', one of {each} each' if each > 1 else ''}, "
        f"{json.loads(idata.posterior.attrs['rounds'])[0]:,} rounds"
        f"{f', of acceptance {targets[0]}, as others diverged' if spent else ''}"
    )
    return Found(idata, words, diagnosis.verdict, f". {diagnosis.summary()}")


def marginal(
    model: Callable,
    silos: RemoteSilos,
    num_draws: int,
    key: Array,
    progress_bar: bool,
    result: VIResult,
) -> Found:
    """Return draws of HMC whose silos integrate their latents out, from the end of the rounds."""
    num, each, targets, spent = -(-num_draws // _MARGINAL_CHAINS), 1, list(_TARGETS[1:]), []
    while True:
        kernel = HMC(model, marginal=True, init_from=result, target_accept_prob=targets[0])
        mcmc = RemoteMCMC(
            kernel,
            num_warmup=_MARGINAL_WARMUP,
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
    add_ledgers(idata, *spent)
    words = (
        f"HMC with latents integrated out, {_MARGINAL_CHAINS} chains of {num} draws, "
        f"{json.loads(idata.posterior.attrs['rounds'])[0]:,} rounds"
    )
    return Found(idata, words, diagnosis.verdict, f". {diagnosis.summary()}")


def _judged(diagnosis: Diagnosis, num_draws: int) -> tuple[bool, bool]:
    """Return whether trajectories diverged, and whether enough of the draws are effective."""
    table = diagnosis.table
    diverged = table.loc["trajectories diverged", "verdict"] != "sound"
    return diverged, table.loc["effective draws", "value"] >= _ENOUGH * num_draws


def add_ledgers(idata: "InferenceData", *ledgers: Ledger) -> None:
    """Add rounds that were made before to the ledger of the chains."""
    attrs = idata.posterior.attrs
    for name in ("rounds", "gradient_evaluations", "bytes_down", "bytes_up"):
        before = [asdict(ledger)[name] for ledger in ledgers]
        attrs[name] = json.dumps(np.sum([json.loads(attrs[name]), *before], axis=0).tolist())
