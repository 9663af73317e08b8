"""Steps of a fit in one call: weighed draws, and chains. Each has a text and a verdict."""

import json
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jax import Array
from numpyro.infer import MCMC

from numpyro_fed.data.mixed import MixedSilos
from numpyro_fed.data.silos import Silos
from numpyro_fed.mcmc.fsgld import FSGLD
from numpyro_fed.mcmc.hmc import HMC
from numpyro_fed.mcmc.options import Step
from numpyro_fed.mcmc.remote import RemoteMCMC
from numpyro_fed.results.diagnose import Diagnosis, diagnose
from numpyro_fed.results.inference_data import to_inference_data
from numpyro_fed.results.silo_coords import ledger_attrs, ledger_of
from numpyro_fed.results.weighing import WIDEST
from numpyro_fed.rounds.federated import Ledger
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.vi.conducive.checks import has_converged
from numpyro_fed.vi.importance import POOR
from numpyro_fed.vi.result import VIResult
from numpyro_fed.vi.svi import ConduciveSFVI

if TYPE_CHECKING:
    from arviz import InferenceData


# as in the comparison with NUTS (docs/results.md): five visits at a step of .01
# leave 1 / e of the start
_CHAINS, _WARMUP = 4, 200
_HMC_WARMUP = 400  # the verdicts in docs/results.md are of so many
# draws for each one that is kept, of the first run and of longer ones. Where no fit gave FSGLD a
# start, 165 of 2,000 draws were effective for families in communities; `diagnose` asks for 400
_FSGLD_WARM, _FSGLD_COLD = (1, 4, 16), (2, 8, 32)
_REMOTE_LENGTHS = 2  # of these, over remote silos: a round takes a message to each
_HMC_LENGTHS, _MARGINAL_LENGTHS = (1, 4, 16), (1, 4)
# many chains that share what they learn: of few draws each, so that there are few rounds
_MARGINAL_CHAINS, _MARGINAL_WARMUP = 64, 40
# share of the draws that are effective, of the worst site, at which chains end: with 533 of 4,000,
# more than a sound run needs, a scale with a long tail (frailties of `kidney`) was off by .2 sds
_ENOUGH = 0.25
# acceptance that chains aim at, one after the other where trajectories diverge: that of NUTS, and
# what its users raise it to
_TARGETS = (0.8, 0.95, 0.99)
# bias of FSGLD's sds that its step size aims at: the default, and where the surrogates do not fit
# well enough for such steps, a fourth (bacteria: 6 % of steps cut, then .1 %)
_BIASES = (0.02, 0.005)
# checks that shorter steps mend
_COARSE = (
    "trajectories diverged",
    "rounds undone",
    "steps cut",
    "steps cut in a tail",
    "inflation predicted",
    "inflation met",
)
# checks of FSGLD that a longer run mends
_SHORT = (
    "R-hat",
    "effective draws",
    "R-hat of latents",
    "effective draws of latents",
    "surrogate mass left out",
)
_MOST_TERMS = 50_000_000  # log likelihoods of rows in a result: 200 MB


class Asked(NamedTuple):
    """Request to a fit: number of draws, whether with rows' log likelihoods, and progress bars."""

    num_draws: int
    log_likelihood: bool = True
    progress_bar: bool = False


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


def are_few_terms(silos: Silos | MixedSilos, num_draws: int) -> bool:
    """Return whether log likelihoods of rows at the draws are at most 50 million numbers."""
    parts = silos.parts if isinstance(silos, MixedSilos) else (silos,)
    most = max(sum(sizes) for part in parts for sizes in part.sizes.values())
    return num_draws * most <= _MOST_TERMS


def weighed(
    svi: ConduciveSFVI,
    result: VIResult,
    silos: Silos | MixedSilos,
    asked: Asked,
    key: Array,
) -> Found:
    """Return weighted draws from the end of conducive rounds."""
    idata = to_inference_data(
        svi,
        result,
        silos,
        num_draws=asked.num_draws,
        rng_key=key,
        log_likelihood=asked.log_likelihood,
        resample=True,
        progress_bar=asked.progress_bar,
    )
    attrs = idata.posterior.attrs
    k, unit = float(attrs["pareto_k"]), float(attrs.get("pareto_k_unit", -np.inf))
    around = ", with candidates around the latents' modes at each draw"
    fitted = "drew also from mixtures fitted to earlier draws, and "
    up = (sum(ledger_of(attrs).bytes_up) - sum(result.ledger.bytes_up)) / 1e3
    words = (
        f"the last round, {up:,.1f} kB up, "
        f"{fitted if attrs['mixture'] else ''}weighted {attrs['candidates']:,} "
        f"public draws by the silos' likelihoods"
        f"{around if attrs['placed'] else ''}: Pareto's k {k:.2f} "
        f"({attrs['pareto_k_of']}: {'good' if k <= POOR else f'above {POOR}'}; "
        f"{attrs['effective_draws']:,.0f} effective draws)"
    )
    if "pareto_k_unit" in attrs:
        words += f", of the latents' candidates at worst {unit:.2f} ({attrs['pareto_k_unit_at']})"
    visited = json.loads(attrs.get("remote", "[]"))
    if visited:
        words += f"; none for the candidates of {', '.join(visited)}, which stay in the silos"
    if has_converged(result.state) and max(k, unit) <= POOR:
        return Found(idata, words, "sound", "")
    dim = len(result.params[f"{svi.guide.prefix}_loc"])
    wide = f" (mixtures are for at most {WIDEST} global coordinates, not {dim})"
    mend = (
        f". Expected k <= {POOR} and rounds that converge{wide if dim > WIDEST else ''}: "
        'take method="auto", which goes on by HMC, or reparameterize the model'
    )
    return Found(idata, words, "unsound", mend)


def of_rounds(result: VIResult) -> str:
    """Return a text on conducive rounds: how many, what silos sent, and whether they converged."""
    moved = float(result.state.server.moved)
    names, up = result.ledger.silos, sum(result.ledger.bytes_up) / 1e3
    how = "converged" if has_converged(result.state) else "has not converged"
    return (
        f"q(theta) {how} in {len(result.losses)} conducive rounds of {len(names)} "
        f"silo{'' if len(names) == 1 else 's'}, {up:.1f} kB up "
        f"(it moved by {moved:.2g} sds in the last; bound {-result.losses[-1]:.2f})"
    )


def fsgld(
    model: Callable,
    result: VIResult | None,
    silos: Silos | MixedSilos,
    asked: Asked,
    key: Array,
) -> Found:
    """Return draws of FSGLD, by shorter and by more steps until its checks hold.

    :param result: where chains start; ``None``: at the prior.
    """
    lengths: tuple[int, ...] = _FSGLD_COLD if result is None else _FSGLD_WARM
    if isinstance(silos, RemoteSilos):
        lengths = lengths[:_REMOTE_LENGTHS]
    plan = _Plan(asked, _CHAINS, _WARMUP, lengths)
    kernels = [FSGLD(model, init_from=result, step_size=Step(bias_target=x)) for x in _BIASES]
    run = _run_chains(kernels, plan, silos, key, lambda found: not _is_short(found))
    bias = _BIASES[kernels.index(run.mcmc.sampler)]
    words = (
        f"{'FSGLD' if result is None else 'from there FSGLD'}, {_CHAINS} chains of {_WARMUP} + "
        f"{run.mcmc.num_samples:,} rounds{run.kept}"
        f"{f', of shorter steps (bias {bias:.1%})' if bias < _BIASES[0] else ''}"
    )
    return run.found(silos, words, [] if result is None else [result.ledger])


def hmc(model: Callable, silos: Silos | MixedSilos, asked: Asked, key: Array) -> Found:
    """Return draws of HMC, by shorter steps and longer runs until the checks hold."""
    plan = _Plan(asked, _CHAINS, _HMC_WARMUP, _HMC_LENGTHS)
    kernels = [HMC(model, target_accept_prob=target) for target in _TARGETS]
    run = _run_chains(kernels, plan, silos, key, plan.are_enough)
    target = _TARGETS[kernels.index(run.mcmc.sampler)]
    words = (
        f"HMC, {_CHAINS} chains of {plan.num:,} draws{run.kept}, {run.rounds:,} rounds"
        f"{f', of acceptance {target}, as others diverged' if target > _TARGETS[0] else ''}"
    )
    return run.found(silos, words)


def marginal(
    model: Callable, result: VIResult, silos: RemoteSilos, asked: Asked, key: Array
) -> Found:
    """Return draws of HMC whose silos integrate their latents out, from the end of the rounds."""
    plan = _Plan(asked, _MARGINAL_CHAINS, _MARGINAL_WARMUP, _MARGINAL_LENGTHS)
    kernels = [
        HMC(model, marginal=True, init_from=result, target_accept_prob=target)
        for target in _TARGETS[1:]
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "More chains")
        run = _run_chains(kernels, plan, silos, key, plan.are_enough)
        words = (
            f"HMC with latents integrated out, {plan.num_chains} chains of {plan.num} draws, "
            f"{run.rounds:,} rounds"
        )
        return run.found(silos, words)


def weighed_or_chains(
    svi: ConduciveSFVI,
    result: VIResult,
    silos: Silos,
    asked: Asked,
    keys: tuple[Array, Array],
) -> tuple[Found, str]:
    """Return weighed draws, or those of HMC where the weights fail, and a text on what was before.

    :param keys: seeds of the draws, and of the chains.
    """
    way = f"{of_rounds(result)}; "
    with warnings.catch_warnings():  # the report says so
        warnings.filterwarnings("ignore", "Pareto's k of the approximation")
        found = weighed(svi, result, silos, asked, keys[0])
    if found.verdict == "sound":
        return found, way
    way_on = f"{way}{found.words} (unsound, so chains went on); "
    if asked.progress_bar:
        print(way_on.removeprefix(way))
    try:
        chains = (
            marginal(svi.model, result, silos, asked, keys[1])
            if isinstance(silos, RemoteSilos)
            else hmc(svi.model, silos, asked, keys[1])
        )
    except (ValueError, RuntimeError) as error:  # the weighed draws are not lost
        return found._replace(mend=f"{found.mend}. HMC: {error}"), way
    add_ledgers(chains.idata, result.ledger)
    return chains, way_on


class _Plan(NamedTuple):
    """Plan of a step: the request, and numbers of chains and of warm-up draws.

    :param lengths: draws for each one that is kept: of a first run, and of longer ones after it.
    """

    asked: Asked
    num_chains: int
    num_warmup: int
    lengths: tuple[int, ...]

    @property
    def num(self) -> int:
        """Draws of a chain that are kept."""
        return -(-self.asked.num_draws // self.num_chains)

    def are_enough(self, found: Diagnosis) -> bool:
        """Return whether chains are sound, and enough of their draws effective."""
        # chains of two draws have no such row
        effective = found.table["value"].get("effective draws", 0.0)
        return found.verdict == "sound" and effective >= _ENOUGH * self.num * self.num_chains


class _Chains(NamedTuple):
    """Chains that have ended.

    :param each: draws for each one that is kept.
    :param spent: ledgers of chains before them, whose draws are not kept.
    """

    asked: Asked
    mcmc: MCMC
    diagnosis: Diagnosis
    each: int
    spent: list[Ledger]

    @property
    def kept(self) -> str:
        """Text on draws that are not kept."""
        return f", one of {self.each} kept" if self.each > 1 else ""

    @property
    def rounds(self) -> int:
        """Rounds of these chains and of those before, of the first silo."""
        ledger = self.mcmc.sampler.ledger(self.mcmc.last_state)
        return int(ledger.plus(*self.spent).rounds[0])

    def found(self, silos: Silos | MixedSilos, words: str, before: Sequence[Ledger] = ()) -> Found:
        """Return the draws, with the ledgers of all rounds."""
        every = self.each // self.mcmc.thinning
        log_lik = self.asked.log_likelihood
        if every > 1:  # they are evaluated also at draws that are not kept
            log_lik &= are_few_terms(silos, self.mcmc.num_samples * self.mcmc.num_chains)
        idata = to_inference_data(self.mcmc, silos, log_likelihood=log_lik)
        idata = idata.sel(draw=slice(None, None, every))
        add_ledgers(idata, *before, *self.spent)
        return Found(idata, words, self.diagnosis.verdict, f". {self.diagnosis.summary()}")


def _run_chains(
    kernels: Sequence[FSGLD | HMC],
    plan: _Plan,
    silos: Silos | MixedSilos,
    key: Array,
    settled: Callable[[Diagnosis], bool],
) -> _Chains:
    """Run chains until the checks hold.

    Where steps are too long, the next kernel follows. Else a longer run does, from the end of the
    former; where silos are remote, it starts anew.

    :param settled: whether chains may end here.
    """
    spent: list[Ledger] = []
    remote, start, kernel, length = isinstance(silos, RemoteSilos), None, 0, 0
    while True:
        each = plan.lengths[length]
        # `diagnose` looks at FSGLD's rounds one after the other
        thinning = each if isinstance(kernels[kernel], HMC) else 1
        here = partial(MCMC, chain_method="vectorized", thinning=thinning)
        mcmc = (RemoteMCMC if remote else here)(
            kernels[kernel],
            num_warmup=plan.num_warmup,
            num_samples=plan.num * each,
            num_chains=plan.num_chains,
            progress_bar=plan.asked.progress_bar,
        )
        mcmc.post_warmup_state = start
        mcmc.run(key if start is None else start.rng_key, silos)  # type: ignore[arg-type]
        diagnosis = diagnose(mcmc)
        coarse = _are_coarse(diagnosis)
        if coarse and kernel + 1 < len(kernels):
            kernel, length, start = kernel + 1, 0, None
            why = "steps are too long: again with shorter ones"
        elif coarse or length + 1 == len(plan.lengths) or settled(diagnosis):
            return _Chains(plan.asked, mcmc, diagnosis, each, spent)
        else:
            length, start = length + 1, None if remote else mcmc.last_state
            why = f"{diagnosis.verdict}: a longer run"
        if plan.asked.progress_bar:
            print(why)
        if start is None:
            spent.append(mcmc.sampler.ledger(mcmc.last_state))


def _are_coarse(found: Diagnosis) -> bool:
    """Return whether a check fails that shorter steps mend."""
    return not set(_failing(found)).isdisjoint(_COARSE)


def _is_short(found: Diagnosis) -> bool:
    """Return whether checks fail, and a longer run mends all that do."""
    failing = set(_failing(found))
    return bool(failing) and failing <= set(_SHORT)


def _failing(found: Diagnosis) -> list[str]:
    return [*found.table.index[found.table["verdict"] != "sound"]]


def add_ledgers(idata: "InferenceData", *ledgers: Ledger) -> None:
    """Add rounds that were made before to the ledger of the chains."""
    attrs = idata.posterior.attrs
    attrs |= ledger_attrs(ledger_of(attrs).plus(*ledgers))
