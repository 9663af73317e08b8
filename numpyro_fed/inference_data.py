"""From a federated run to ArviZ: draws with silo names, pooled rows, and what each silo paid."""

import json
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
from numpyro.infer import MCMC

from numpyro_fed._compat import import_arviz, infer_dims
from numpyro_fed.silos import Silos

if TYPE_CHECKING:
    from arviz import InferenceData

__all__ = ["to_inference_data"]

_TOO_WIDE = 1.1  # predicted inflation of the sds above which they do too
_TOO_OFTEN = 0.01  # share of local steps cut above which the draws deserve a word


def to_inference_data(mcmc: MCMC, silos: Silos, *, log_likelihood: bool = True, **options: Any) -> "InferenceData":
    """The draws of a federated kernel as ArviZ ``InferenceData``.

    What ``arviz.from_numpyro(mcmc)`` gives, and in addition: elements of silo plates carry their pooled row as
    coordinate and their silo's name as ``<plate>_silo``; the attributes of the posterior hold the names of the
    silos and the ledger (rounds, gradient evaluations, bytes down and up per silo, as JSON). It saves to netCDF.

    :param mcmc: a run :class:`numpyro.infer.MCMC` over one of the library's kernels.
    :param silos: the data it ran on.
    :param log_likelihood: evaluate the pointwise log likelihood of every draw on the pooled rows.
    :param options: passed to ``arviz.from_numpyro``.
    :return: groups posterior, sample_stats, observed_data, log_likelihood.
    :raises ValueError: when the run is over another kernel or has not run.
    :warns UserWarning: when more than 1 % of local steps were cut, or a chain left the reals.

    Example::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_fed as fed
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with fed.silo_plate("patients", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> silos = fed.Silos({"oslo": {"y": jnp.ones(3)}, "rome": {"y": jnp.zeros(2)}})
        >>> mcmc = numpyro.infer.MCMC(fed.FSGLD(model), num_warmup=5, num_samples=10, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), silos)
        >>> fed.to_inference_data(mcmc, silos).observed_data["patients_silo"].values.tolist()
        ['oslo', 'oslo', 'oslo', 'rome', 'rome']
    """
    kernel = mcmc.sampler
    factors = getattr(kernel, "factors", None)
    if factors is None:
        raise ValueError(
            "expected an MCMC that has run over a kernel of numpyro_fed, got one over "
            f"{type(kernel).__name__}; for other kernels use arviz.from_numpyro(mcmc)"
        )
    ledger = kernel.ledger(mcmc.last_state)
    if not isinstance(silos, Silos) or ledger.silos not in (silos.names, ("all",)):
        got = list(silos.names) if isinstance(silos, Silos) else type(silos).__name__
        raise ValueError(f"expected the silos of the run, {list(ledger.silos)}, got {got}")
    _warn_of_cuts(mcmc)
    if "dims" in options:  # what ArviZ infers from plates holds for the sites that are not named
        options["dims"] = {**infer_dims(kernel.model, (silos,)), **options["dims"]}
    idata = import_arviz().from_numpyro(mcmc, log_likelihood=log_likelihood, **options)
    names = np.array(silos.names)
    for plate, group in factors.plates:
        silo = np.empty(sum(silos.sizes[group]), names.dtype)
        silo[np.asarray(silos.order[group])] = names[silos.silo_of_row(group)]
        for name in idata.groups():
            if plate in idata[name].dims:
                setattr(idata, name, idata[name].assign_coords({f"{plate}_silo": (plate, silo)}))
    idata.posterior.attrs["silos"] = json.dumps(ledger.silos)
    for entry in ("rounds", "gradient_evaluations", "bytes_down", "bytes_up"):
        idata.posterior.attrs[entry] = json.dumps(getattr(ledger, entry))
    return idata


def _warn_of_cuts(mcmc: MCMC) -> None:
    fields = mcmc.get_extra_fields(group_by_chain=True)
    cut = np.asarray(fields["cut_rate"]).mean(1)
    undone = (np.asarray(fields["diverging"]) & (np.asarray(fields["cut_rate"]) == 0)).sum(1)
    inflation = float(np.nan_to_num(np.asarray(fields["inflation"]), nan=1.0).max())
    if inflation > _TOO_WIDE:
        warnings.warn(
            f"at this step size the sds are predicted to be {inflation:.2f} times too large: lower step_size, or leave it "
            '"auto"',
            stacklevel=3,
        )
    for chain in range(len(cut)):
        if undone[chain]:
            warnings.warn(
                f"chain {chain} left the reals in {undone[chain]} rounds, which were undone: its draws are not to be "
                "trusted. Lower step_size (or bias_target), or take fewer num_local_steps",
                stacklevel=3,
            )
        elif cut[chain] > _TOO_OFTEN:
            warnings.warn(
                f"{100 * cut[chain]:.1f} % of chain {chain}'s local steps were cut, which pulls its tails towards the "
                'surrogates. Take fewer num_local_steps, or lower step_size (under "auto": bias_target)',
                stacklevel=3,
            )
