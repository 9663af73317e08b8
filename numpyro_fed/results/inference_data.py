"""ArviZ data of a federated run: draws with silo names, pooled rows, and the cost per silo."""

import json
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
from numpyro.infer import MCMC

from numpyro_fed._arviz import from_groups, import_arviz, infer_dims
from numpyro_fed.data.silos import Silos
from numpyro_fed.decentralized._kernel import NetworkKernel
from numpyro_fed.mcmc._base import FederatedKernel
from numpyro_fed.mcmc.hmc import HMC
from numpyro_fed.results.diagnose import MOST_CUT, MOST_DIVERGED
from numpyro_fed.results.local_latents import local_latents
from numpyro_fed.results.network import average_of_nodes, label_nodes, take_node, warn_of_nodes
from numpyro_fed.results.silo_coords import ledger_attrs, silo_coords
from numpyro_fed.results.vi_inference_data import vi_inference_data
from numpyro_fed.rounds.federated import Ledger
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.vi._base import FederatedVI

if TYPE_CHECKING:
    from arviz import InferenceData


# predicted inflation of the sds above which a warning is due: bias_target = .1 is the largest whose
# prediction was measured (docs/results.md)
_TOO_WIDE = 1.1


def to_inference_data(fit: FederatedVI | MCMC, *args: Any, **options: Any) -> "InferenceData":
    """Convert a federated fit to ArviZ ``InferenceData``.

    ``to_inference_data(mcmc, silos, log_likelihood=True, node=None, **options)`` takes an
    :class:`numpyro.infer.MCMC` that has run over one of the library's kernels, and passes the
    options to ``arviz.from_numpyro``. Over :class:`PushSumLangevin` and :class:`GossipLangevin`
    each chain is a node; the coordinates ``node`` and ``network`` name it. ``node=`` selects the
    chains of one silo's node, or of the ``"average"`` of all nodes, one for each network. R-hat and
    effective sample sizes are right for such a selection.

    ``to_inference_data(svi, result, silos, num_draws=1000, rng_key=None, log_likelihood=True,
    resample=False, progress_bar=True)`` takes the result of a variational fit. The importance
    weights of the bound resample local latents. With ``resample=True`` the draws of theta are
    resampled too, from two to four times as many, by their Pareto-smoothed weights. Where these
    fail, draws of fitted mixtures are added (:mod:`numpyro_fed.vi.mixture`). A remote silo returns
    its estimated log likelihood at each draw of theta, one number each (under privacy it returns
    nothing).

    The result has all that ``arviz.from_numpyro(mcmc)`` gives. In addition, each element of a silo
    plate has its pooled row as coordinate, and its silo's name as ``<plate>_silo``. The attributes
    of the posterior hold the silos' names and the ledger (rounds, gradient evaluations, bytes down
    and up per silo, as JSON).

    The draws of a variational fit are independent and form one chain, for which R-hat is
    undefined. The result then also has:

    * the trace of the bound (group ``optimization``);
    * the log importance weight of each draw (group ``sample_stats``);
    * learned parameters (attribute ``learned``);
    * Pareto's k of theta's draws (attribute ``pareto_k``), which is the largest of the weights' own
      and of those of the coordinates' variances; the attribute ``pareto_k_of`` says which it is,
      and ``mixture`` is the number of mixtures that drew beside q;
    * Pareto's k of the worst unit's candidates (attribute ``pareto_k_unit``).

    Where silos differ in structure, names and dimensions of the i-th structure end in ``_i``. The
    result saves to netCDF.

    :return: groups posterior, sample_stats, observed_data and log_likelihood (pointwise, of every
        draw, on the pooled rows); for remote silos the last two are absent.
    :raises TypeError: when ``result`` is not the result of a variational run.
    :raises ValueError: when the run is over another kernel, has not run, or ran on other silos.
    :warns UserWarning: when more than 1 % of local steps were cut, or a chain left the reals; when
        more than .2 % of trajectories of HMC diverged; when
        the sds are predicted to be more than 1.1 times too large; when Pareto's k is above 0.7;
        when a node of a network broke down, or is off the average of all nodes.

    Example::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_fed as fed
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with fed.silo_plate("patients", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> silos = fed.Silos({"oslo": {"y": jnp.ones(3)}, "rome": {"y": jnp.zeros(2)}})
        >>> mcmc = numpyro.infer.MCMC(
        ...     fed.FSGLD(model), num_warmup=5, num_samples=10, progress_bar=False
        ... )
        >>> mcmc.run(jax.random.key(0), silos)
        >>> fed.to_inference_data(mcmc, silos).observed_data["patients_silo"].values.tolist()
        ['oslo', 'oslo', 'oslo', 'rome', 'rome']
    """
    if isinstance(fit, FederatedVI):
        return vi_inference_data(fit, *args, **options)
    return _mcmc_inference_data(fit, *args, **options)


def _mcmc_inference_data(
    mcmc: MCMC,
    silos: Silos | None = None,
    *,
    log_likelihood: bool = True,
    node: str | None = None,
    **options: Any,
) -> "InferenceData":
    kernel = mcmc.sampler
    factors = kernel.factors if isinstance(kernel, FederatedKernel) else None
    if factors is None:
        raise ValueError(
            "expected an MCMC that has run over a kernel of numpyro_fed, got one over "
            f"{type(kernel).__name__}; for other kernels use arviz.from_numpyro(mcmc)"
        )
    ledger = kernel.ledger(mcmc.last_state)
    if not isinstance(silos, Silos) or ledger.silos not in (silos.names, ("all",)):
        got = list(silos.names) if isinstance(silos, Silos) else type(silos).__name__
        raise ValueError(f"expected the silos of the run, {list(ledger.silos)}, got {got}")
    is_network = isinstance(kernel, NetworkKernel)
    average = node == "average" and node not in silos.names
    if ledger.silos == silos.names and silos.sizes != kernel.silos.sizes:
        raise ValueError(
            f"expected the silos of the run, with {kernel.silos.sizes} rows, got {silos.sizes}"
        )
    if node is not None and not is_network:
        raise ValueError(
            f"node={node!r} is for kernels over a network, whose chains are nodes; got "
            f"{type(kernel).__name__}"
        )
    if node not in (None, "average", *silos.names):
        raise ValueError(
            f'node: expected "average", or one of the silos {list(silos.names)}, got {node!r}'
        )
    if is_network:
        warn_of_nodes(mcmc, silos)
    elif isinstance(kernel, HMC):
        _warn_of_divergences(mcmc)
    else:
        _warn_of_cuts(mcmc)
    if isinstance(silos, RemoteSilos):
        return _remote_inference_data(mcmc, silos, node if is_network else None, ledger, options)
    if isinstance(kernel, HMC) and kernel.config.units is not None:
        return _with_latents(mcmc, kernel, silos, ledger)
    if "dims" in options:  # sites that the caller does not name keep the dims that ArviZ infers
        options["dims"] = {**infer_dims(kernel.model, (silos,)), **options["dims"]}
    idata = import_arviz().from_numpyro(
        mcmc, log_likelihood=log_likelihood and not average, **options
    )
    if average:
        idata = average_of_nodes(mcmc, silos, idata, log_likelihood)
    elif is_network:
        label_nodes(idata, silos)
        idata = idata if node is None else take_node(idata, node, silos)
    silo_coords(idata, factors, silos)
    idata.posterior.attrs.update(ledger_attrs(ledger))
    return idata


def _remote_inference_data(
    mcmc: MCMC, silos: RemoteSilos, node: str | None, ledger: Ledger, options: dict[str, object]
) -> "InferenceData":
    """Return the draws of the global sites of a run over remote silos, without data."""
    fields = {k: np.asarray(v) for k, v in mcmc.get_extra_fields(group_by_chain=True).items()}
    posterior = {k: np.asarray(v) for k, v in mcmc.get_samples(group_by_chain=True).items()}
    idata = from_groups({"posterior": posterior, "sample_stats": fields}, **options)
    if node == "average" and node not in silos.names:
        idata = average_of_nodes(mcmc, silos, idata, log_lik=False)
    elif isinstance(mcmc.sampler, NetworkKernel):
        label_nodes(idata, silos)
        idata = idata if node is None else take_node(idata, node, silos)
    idata.posterior.attrs.update(ledger_attrs(ledger))
    idata.posterior.attrs["remote"] = json.dumps([s.name for s in mcmc.sampler.factors.local_sites])
    return idata


def _with_latents(mcmc: MCMC, kernel: HMC, silos: Silos, ledger: Ledger) -> "InferenceData":
    """Return draws of chains whose silos integrated their latents out, with latents drawn anew."""
    posterior = {k: np.asarray(v) for k, v in mcmc.get_samples(group_by_chain=True).items()}
    total = mcmc.num_chains * mcmc.num_samples
    idata = local_latents(posterior, kernel.model, silos, num_draws=total)
    idata.posterior.attrs.update(ledger_attrs(ledger))
    return idata


def _warn_of_divergences(mcmc: MCMC) -> None:
    share = np.asarray(mcmc.get_extra_fields()["diverging"]).mean()
    if share > MOST_DIVERGED:
        warnings.warn(
            f"{100 * share:.1f} % of trajectories diverged, so that the chains do not reach a part "
            "of the posterior. Raise target_accept_prob, or reparameterize the model",
            stacklevel=4,
        )


def _warn_of_cuts(mcmc: MCMC) -> None:
    fields = mcmc.get_extra_fields(group_by_chain=True)
    cut = np.asarray(fields["cut_rate"]).mean(1)
    undone = (np.asarray(fields["diverging"]) & (np.asarray(fields["cut_rate"]) == 0)).sum(1)
    inflation = float(np.nan_to_num(np.asarray(fields["inflation"]), nan=1.0).max())
    if inflation > _TOO_WIDE:
        warnings.warn(
            f"at this step size the sds are predicted to be {inflation:.2f} times too large: lower "
            'step_size, or leave it "auto"',
            stacklevel=4,
        )
    for chain in range(len(cut)):
        if undone[chain]:
            warnings.warn(
                f"chain {chain} left the reals in {undone[chain]} rounds, which were undone: do "
                "not trust its draws. Lower step_size or fed.Step(bias_target=), or take fewer "
                "num_local_steps",
                stacklevel=4,
            )
        elif cut[chain] > MOST_CUT:
            warnings.warn(
                f"{100 * cut[chain]:.1f} % of chain {chain}'s local steps were cut, which pulls "
                "its tails towards the surrogates. Take fewer num_local_steps, or lower step_size "
                "or fed.Step(bias_target=)",
                stacklevel=4,
            )
