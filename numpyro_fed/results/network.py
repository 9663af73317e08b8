"""ArviZ data of a run over a network: names of the nodes, draws of one node, their average."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC, log_likelihood
from numpyro.infer.util import transform_fn, unconstrain_fn

from numpyro_fed._arviz import assign_coords, from_groups, group_of, groups_of, set_group
from numpyro_fed.data.silos import Silos
from numpyro_fed.mcmc._base import FederatedKernel
from numpyro_fed.rounds.remote import RemoteSilos

if TYPE_CHECKING:
    from arviz import InferenceData


# largest accepted distance from the nodes' average, in sds: the tolerance of `compare`
_OFF = 0.1
# smallest accepted push-sum weight y, with gradients tracked and without: a step's noise then
# counts y^-1/2 = 100 and 1 / y = 50 times in a draw
_SMALL_WEIGHT = {True: 1e-4, False: 0.02}
_FEWEST = 20  # fewest draws by which a mean is judged: they know the sd to 1 / sqrt(40) = 16 %


def label_nodes(idata: "InferenceData", silos: Silos) -> None:
    """Set each chain's coordinates ``node``, its silo's name, and ``network``, a number."""
    networks = idata.posterior.sizes["chain"] // len(silos)
    nodes = np.tile(np.array(silos.names), networks)
    number = np.repeat(np.arange(networks), len(silos))
    labels = {"node": ("chain", nodes), "network": ("chain", number)}
    assign_coords(idata, "chain", labels)


def take_node(idata: "InferenceData", node: str, silos: Silos) -> "InferenceData":
    """Return the chains of one node, one for each network."""
    chains = np.arange(silos.names.index(node), idata.posterior.sizes["chain"], len(silos))
    part = idata.sel(chain=chains)
    assign_coords(part, "chain", {"chain": np.arange(len(chains))})
    return part


def average_of_nodes(
    mcmc: MCMC, silos: Silos, idata: "InferenceData", log_lik: bool
) -> "InferenceData":
    """Return the draws of every network's average of its nodes.

    The average is that of ``push_sum_weight * position`` in unconstrained space. It follows
    Langevin dynamics on the pooled potential.
    """
    kernel, before = mcmc.sampler, group_of(idata, "posterior")
    m, latent = len(silos), [name for name, _ in kernel.factors.global_sites]
    draws = mcmc.get_samples(group_by_chain=True)
    remote = isinstance(silos, RemoteSilos)  # remote silos keep their latents
    sites = latent + [s.name for s in kernel.factors.local_sites if not remote]
    weight = jnp.asarray(mcmc.get_extra_fields(group_by_chain=True)["push_sum_weight"])
    z = jax.vmap(jax.vmap(_unconstrain(kernel, silos)))({k: draws[k] for k in sites})

    def average(name: str, x: jax.Array) -> jax.Array:
        grouped = x.reshape(-1, m, *x.shape[1:])
        if name not in latent:  # local latents are the same in all nodes
            return grouped[:, 0]
        share = weight.reshape(-1, m, weight.shape[1], *[1] * (x.ndim - 2))
        return jnp.mean(share * grouped, 1)

    here = None if remote else kernel.postprocess_fn((silos,), {})
    constrain = here or (lambda z: kernel.factors.constrain_globals(z, silos.shared))
    posterior = jax.vmap(jax.vmap(constrain))({k: average(k, v) for k, v in z.items()})
    dims = {k: list(v.dims[2:]) for k, v in before.items()}
    coords = {
        k: v.values
        for k, v in before.coords.items()
        if k in before.dims and k not in {"chain", "draw"}
    }
    groups: dict[str, dict] = {"posterior": {k: np.asarray(posterior[k]) for k in before}}
    if log_lik:
        values = log_likelihood(
            kernel.model, {k: posterior[k] for k in sites}, silos, batch_ndims=2
        )
        groups["log_likelihood"] = {k: np.asarray(v) for k, v in values.items()}
    stats = group_of(idata, "sample_stats")
    by_network = {k: stats[k].values.reshape(-1, m, stats.sizes["draw"]) for k in stats}
    groups["sample_stats"] = {
        k: v.any(1) if v.dtype == bool else v.mean(1) for k, v in by_network.items()
    }
    result = from_groups(groups, coords=coords, dims=dims)
    if "observed_data" in groups_of(idata):
        set_group(result, "observed_data", group_of(idata, "observed_data"))
    return result


def _unconstrain(kernel: FederatedKernel, silos: Silos) -> Callable:
    factors = kernel.factors
    assert factors is not None
    if isinstance(silos, RemoteSilos):
        return lambda sites: factors.unconstrain_globals(sites, silos.shared)
    if factors.transforms is not None:
        return partial(transform_fn, factors.transforms, invert=True)
    return partial(unconstrain_fn, kernel.model, (silos,), {})


def warn_of_nodes(mcmc: MCMC, silos: Silos) -> None:
    """Warn of nodes that broke down, and of nodes that are off the average."""
    m = len(silos)
    fields = {k: np.asarray(v) for k, v in mcmc.get_extra_fields(group_by_chain=True).items()}
    weight, undone, error = (
        fields[k].reshape(-1, m, fields[k].shape[1])
        for k in ("push_sum_weight", "diverging", "consensus_error")
    )
    share = undone[:, 0].mean(1)
    network = int(share.argmax())
    lost = (
        f"{100 * share.max():.1f} % of the steps of network {network} were undone"
        if share.max()
        else ""
    )
    least = weight.min((0, 2))
    if least.min() < _SMALL_WEIGHT[mcmc.sampler.tracking]:
        warnings.warn(
            f"the push-sum weight of node {silos.names[int(least.argmin())]!r} fell to "
            f"{least.min():.1g} (of a mean of 1): the node sent more than it received, and its "
            f"draws, quotients by this weight, have heavy tails{f'; {lost}' if lost else ''}. "
            "Let more nodes send to it, let fewer links fail, or "
            "track gradients (gradient_tracking=True)",
            stacklevel=4,
        )
    elif lost:
        worst = silos.names[int(error[network].max(1).argmax())]
        warnings.warn(
            f"{lost}, because they left the reals; farthest from the average was node {worst!r}. "
            "Do not trust its draws: lower step_size",
            stacklevel=4,
        )
    if not lost and weight.shape[2] >= _FEWEST:
        _warn_of_offsets(mcmc, silos)


def _warn_of_offsets(mcmc: MCMC, silos: Silos) -> None:
    draws, m = mcmc.get_samples(group_by_chain=True), len(silos)
    off, where = 0.0, ""
    for name, _ in mcmc.sampler.factors.global_sites:
        x = np.asarray(draws[name], np.float64)
        x = x.reshape(-1, m, *x.shape[1:])
        sd = x.std((0, 1, 2))
        x = x - x.mean(1, keepdims=True)
        parts = np.stack([part.mean(2) for part in np.array_split(x, min(10, x.shape[2]), 2)])
        error = parts.std((0, 1)) / np.sqrt(parts.shape[0] * parts.shape[1])
        # beyond what Monte Carlo explains
        distance = (np.abs(parts.mean((0, 1))) - 2 * error) / np.where(sd > 0, sd, np.inf)
        if distance.max() > off:
            off = float(distance.max())
            node = silos.names[np.unravel_index(distance.argmax(), distance.shape)[0]]
            where = (
                f"node {node!r} is at least {off:.2f} posterior sds off the average of all nodes "
                f"in {name!r}"
            )
    if off > _OFF:
        warnings.warn(
            f"{where}: at this step size nodes disagree in the mean. Lower step_size, take a "
            "schedule that diminishes, or track gradients (gradient_tracking=True)",
            stacklevel=5,
        )
