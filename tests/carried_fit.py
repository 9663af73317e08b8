"""A small fit whose two sides are functions of a module, as carriers want them."""

import io

import numpy as np
from jax import random
from small_models import linear, linear_silos

import numpyro_fed as fed
from numpyro_fed.engines.silo_side import SiloSide
from numpyro_fed.engines.wire import connect

ROUNDS = 20


def silos():
    """Four silos, named as carriers allow."""
    pooled = linear_silos()
    return fed.Silos(
        {
            name.replace(" ", "-"): {k: np.asarray(v) for k, v in pooled[name].items()}
            for name in pooled.names
        }
    )


def make_side(name, directory):
    """One silo's side."""
    rows = {k: np.asarray(v) for k, v in silos()[name].items()}
    return SiloSide(fed.Silos({name: rows}), linear, directory, own_keys=False)


def drawn(remote):
    """Draws of a short run."""
    mcmc = fed.RemoteMCMC(
        fed.FSGLD(linear), num_warmup=2, num_samples=ROUNDS, num_chains=2, progress_bar=False
    )
    mcmc.run(random.key(3), remote)
    return np.asarray(mcmc.get_samples(group_by_chain=True)["beta"])


def run(transport):
    """Run the server's part; return draws, as the bytes of a ``.npy``."""
    out = io.BytesIO()
    np.save(out, drawn(connect(transport, linear)))
    return out.getvalue()
