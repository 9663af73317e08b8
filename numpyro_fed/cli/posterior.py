"""Posterior of a study by the method of its model file."""

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax

from numpyro_fed._typing import Facts
from numpyro_fed.cli.model_file import goes_on, public_of
from numpyro_fed.decentralized._kernel import NetworkKernel
from numpyro_fed.engines.wire import Transport, connect
from numpyro_fed.front.steps import Asked, of_rounds, weighed, weighed_or_chains
from numpyro_fed.mcmc.fsgld import FSGLD
from numpyro_fed.mcmc.remote import RemoteMCMC
from numpyro_fed.results.check import check
from numpyro_fed.results.diagnose import diagnose
from numpyro_fed.results.inference_data import to_inference_data
from numpyro_fed.results.silo_coords import ledger_of
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.vi.svi import MOST_ROUNDS, TOL

if TYPE_CHECKING:
    from arviz import InferenceData

# SFVI came within a nat of its bound in about so many on five models (docs/results.md)
_MOST_ROUNDS = 1000


def connected(transport: Transport, module: ModuleType, **options: Any) -> RemoteSilos:
    """Connect to the silos with the model and the fit of a model file.

    :param options: further arguments of :func:`numpyro_fed.engines.wire.connect`.
    """
    return connect(
        transport,
        module.model,
        shared=module.SHARED,
        public=public_of(module),
        fit=module.svi,
        **options,
    )


def posterior(
    module: ModuleType,
    silos: RemoteSilos,
    told: Facts,
    checkpoint: Path | None = None,
    progress_bar: bool = False,
) -> tuple["InferenceData", str]:
    """Return the posterior by the study's method, and a text on its cost.

    The method is ``svi`` or ``kernel`` of the module, or FSGLD where it has neither.

    :param told: ``chains``, ``warmup``, ``samples``, ``rounds`` (0: a default), ``seed``, and
        perhaps ``check``: whether to leave each silo out in turn.
    :param checkpoint: file from which a run goes on; ``None``: none.
    :param progress_bar: show rounds on standard error.
    :raises RuntimeError: when the variational fit stopped early.
    """
    key, svi = jax.random.key(told["seed"]), module.svi
    if svi is None:
        kernel, chains = module.kernel or FSGLD(module.model), told["chains"]
        mcmc = RemoteMCMC(
            kernel,
            num_warmup=told["warmup"],
            num_samples=told["samples"],
            num_chains=chains,
            progress_bar=progress_bar,
            checkpoint=checkpoint,
        )
        mcmc.run(key, silos)
        idata, cost = to_inference_data(mcmc, silos), str(mcmc.sampler.ledger(mcmc.last_state))
        if isinstance(kernel, NetworkKernel):
            return idata, cost
        judged = diagnose(mcmc)
        idata.posterior.attrs |= {"report": judged.summary(), "verdict": judged.verdict}
        return idata, f"{judged.summary()}\n{cost}"
    conducive, (key_rounds, key_draws) = svi.algorithm == "conducive", jax.random.split(key)
    most = MOST_ROUNDS if conducive else _MOST_ROUNDS
    result = svi.run(
        key_rounds,
        told["rounds"] or (svi.privacy.num_rounds if svi.privacy is not None else most),
        silos,
        tol=TOL if conducive else None,
        progress_bar=progress_bar,
        checkpoint=checkpoint,
        # about ten conducive rounds, and thousands of others
        checkpoint_every=1 if conducive else 10,
    )
    if result.stopped is not None:
        raise RuntimeError(f"{result.stopped}; started again with the same folder, the run goes on")
    num_draws = told["chains"] * told["samples"]
    if conducive:
        asked = Asked(num_draws, progress_bar=progress_bar)
        if goes_on(svi):
            keys = key_draws, jax.random.fold_in(key, 2)
            found, way = weighed_or_chains(svi, result, silos, asked, keys)
        else:
            found, way = weighed(svi, result, silos, asked, key_draws), f"{of_rounds(result)}; "
        idata, lines = found.idata, [found.reported(way)]
        ledger = ledger_of(idata.posterior.attrs)
    else:
        idata = to_inference_data(svi, result, silos, num_draws=num_draws, rng_key=key_draws)
        lines, ledger = [f"{len(result.losses)} rounds"], result.ledger
    lines += [str(result.privacy)] if result.privacy is not None else []
    lines.append(str(ledger))
    if told.get("check", False):
        lines.append(str(check(idata, module.model, silos)))
    return idata, "\n".join(lines)
