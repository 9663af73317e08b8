"""One small fit by each algorithm of the library, over inline and remote silos.

Functions of a module, as carriers want them.

Four silos of a model with a local latent for each patient. Over bytes all fits go to one silo's
process: the first byte of a message says which.
"""

import io
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import random
from numpyro.infer import MCMC

import numpyro_fed as fed
from numpyro_fed.engines.silo_side import SiloSide
from numpyro_fed.engines.wire import connect

SIZES = {"oslo": 6, "rome": 9, "bern": 4, "lima": 7}
NAMES, CHAINS = tuple(SIZES), 4
RING, STAR = fed.graphs.ring(4).with_link_failures(0.1), fed.graphs.star(4).with_link_failures(0.1)


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 3))
    tau = numpyro.sample("tau", dist.HalfNormal(3))
    with fed.silo_plate("patients", y.shape[0]):
        z = numpyro.sample("z", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(z, 1), obs=y)


def rows(name):
    """Return a silo's own rows."""
    rng = np.random.default_rng(NAMES.index(name))
    return {"y": (1 + rng.normal(size=SIZES[name]) * 2.5).astype(np.float32)}


def silos(names=NAMES):
    return fed.Silos({name: rows(name) for name in names})


def guide():
    return fed.AutoSiloNormal(model)


FITS = {
    "DSGLD": lambda: fed.DSGLD(model, step_size=fed.Step(1e-2), num_local_steps=5),
    "FSGLD": lambda: fed.FSGLD(model),
    "SFVI": lambda: fed.SFVI(model, guide(), optax.adam(0.02)),
    "SFVI-Avg": lambda: fed.SFVIAvg(model, guide(), optax.adam(0.02), 5),
    "SFVI-Avg, conducive": lambda: fed.ConduciveSFVI(model, guide()),
    "push-sum": lambda: fed.PushSumLangevin(model, RING, 1e-2),
    "gossip": lambda: fed.GossipLangevin(model, STAR, 1e-2),
}
VARIATIONAL = ("SFVI", "SFVI-Avg", "SFVI-Avg, conducive")


def fitted(name: str, where: fed.Silos, rounds: int, fit: Any = None) -> dict[str, np.ndarray]:
    """Return draws of the global sites, or global parameters and losses, and the seconds they took.

    :param where: inline or remote silos.
    :param fit: of the variational ones the one that goes over a wire.
    """
    start, fit = time.perf_counter(), FITS[name]() if fit is None else fit
    if name in VARIATIONAL:
        result = fit.run(random.key(3), rounds, where, progress_bar=False)
        out = {**result.params, "losses": result.losses}
    else:
        settings = {
            "num_warmup": 0,
            "num_samples": rounds,
            "num_chains": CHAINS,
            "progress_bar": False,
        }
        remote = isinstance(where, fed.RemoteSilos)
        mcmc = (
            fed.RemoteMCMC(fit, **settings)
            if remote
            else MCMC(fit, chain_method="vectorized", **settings)
        )
        mcmc.run(random.key(3), where)
        draws = mcmc.get_samples(group_by_chain=True)
        out = {k: draws[k] for k in ("mu", "tau")}
    out = {k: np.asarray(v) for k, v in jax.device_get(out).items()}
    return {**out, "seconds": np.array(time.perf_counter() - start)}


class ManySides:
    """A silo's side of every fit."""

    def __init__(self, name: str, directory: str | Path) -> None:
        self.name, self.directory = name, Path(directory)
        self.sides: dict[int, SiloSide] = {}

    def answer(self, data: bytes) -> bytes:
        which = data[0]
        if which not in self.sides:
            name = tuple(FITS)[which]
            fit = FITS[name]() if name in VARIATIONAL else None
            self.sides[which] = SiloSide(
                silos((self.name,)), model, self.directory / str(which), fit=fit, own_keys=False
            )
        return self.sides[which].answer(data[1:])


class Marked:
    """A transport whose messages are of one fit."""

    def __init__(self, transport: Any, name: str) -> None:
        self.transport, self.names, self.mark = (
            transport,
            transport.names,
            bytes([tuple(FITS).index(name)]),
        )

    def exchange(self, messages: dict[str, bytes]) -> dict[str, bytes]:
        return self.transport.exchange({name: self.mark + data for name, data in messages.items()})


def make_side(name, directory):
    """One silo's side."""
    return ManySides(name, directory)


def over(transport: Any, rounds: int, algorithms: list[str]) -> dict[str, dict[str, np.ndarray]]:
    """All fits over a transport."""
    out = {}
    for name in algorithms:
        fit = FITS[name]()
        where = connect(Marked(transport, name), model, fit=fit if name in VARIATIONAL else None)
        out[name] = fitted(name, where, rounds, fit)
    return out


def packed(found: dict[str, dict[str, np.ndarray]]) -> bytes:
    """Return the results of fits, as the bytes of a ``.npz``."""
    out = io.BytesIO()
    np.savez(out, **{f"{name}/{k}": v for name, one in found.items() for k, v in one.items()})
    return out.getvalue()


def unpacked(data: bytes) -> dict[str, dict[str, np.ndarray]]:
    """Invert :func:`packed`."""
    out: dict[str, dict[str, np.ndarray]] = {}
    for key, value in np.load(io.BytesIO(data)).items():
        name, _, k = key.partition("/")
        out.setdefault(name, {})[k] = value
    return out


def run(transport, rounds, algorithms):
    """Run the server's part of a job."""
    return packed(over(transport, rounds, algorithms))
