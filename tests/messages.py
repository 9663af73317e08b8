"""A transport within one process, which keeps all bytes, for tests of what crosses it."""

import shutil
from pathlib import Path

import numpy as np
import optax
from jax import random
from small_models import intercepts_silos, linear, linear_silos

import numpyro_fed as fed
from numpyro_fed.engines.silo_side import SiloSide
from numpyro_fed.engines.wire import connect


def in_order(silos):
    """Return the same silos with their rows one silo after the other.

    Parties that do not know each other's rows have them so.
    """
    data = {name: {k: np.asarray(v) for k, v in silos[name].items()} for name in silos.names}
    return fed.Silos(data, rows=dict(silos.group), index=dict(silos.index))


LINEAR, INTERCEPTS = in_order(linear_silos()), in_order(intercepts_silos())


def alone(silos, name):
    data = {k: np.asarray(v) for k, v in silos[name].items()}
    return fed.Silos({name: data}, rows=dict(silos.group), index=dict(silos.index))


class Messages:
    """A transport within one process, which keeps all bytes.

    :param fresh: whether every message finds a new process, which has nothing but the silo's
        folder.
    :param own_keys: the option of the silos.
    """

    def __init__(self, silos, model, folder: Path, *, fresh=False, own_keys=False) -> None:
        self.names, self.fresh, self.own_keys, self.sent = silos.names, fresh, own_keys, []
        self.make = {
            name: (
                lambda name=name: SiloSide(
                    alone(silos, name), model, folder / name, own_keys=own_keys
                )
            )
            for name in silos.names
        }
        self.sides = {name: make() for name, make in self.make.items()}

    def exchange(self, messages):
        out = {}
        for name, data in messages.items():
            side = self.make[name]() if self.fresh else self.sides[name]
            out[name] = self.answer(side, data)
            self.sent += [(name, data, out[name])]
        return out

    def answer(self, side, data):
        return side.answer(data)


def run(silos, model, transport, rounds=12, **options):
    mcmc = fed.RemoteMCMC(
        fed.FSGLD(model),
        num_warmup=2,
        num_samples=rounds,
        num_chains=2,
        progress_bar=False,
        **options,
    )
    mcmc.run(
        random.key(3),
        transport if isinstance(transport, fed.RemoteSilos) else connect(transport, model),
    )
    return mcmc


class Killed(BaseException):
    pass


class Dies(Messages):
    """Transport whose server dies after so many messages.

    It dies before or after the silos have answered.
    """

    left, after = -1, False

    def exchange(self, messages):
        self.left -= 1
        if self.left == 0 and not self.after:
            raise Killed
        out = super().exchange(messages)
        if self.left == 0:
            raise Killed
        return out


class Fits(Messages):
    def __init__(self, silos, fit, folder, make=None, **options) -> None:
        super().__init__(silos, fit.model, folder, **options)
        make = make or (lambda: fit)
        self.make = {
            n: (
                lambda n=n: SiloSide(
                    alone(silos, n), fit.model, folder / n, fit=make(), own_keys=self.own_keys
                )
            )
            for n in silos.names
        }
        self.sides = {n: one() for n, one in self.make.items()}


class DyingFits(Fits, Dies):
    pass


def introduce(folder, names):
    """Bring each silo's public key to the others, as their persons would."""
    for name in names:
        (folder / name / "peers").mkdir(exist_ok=True)
        for other in names:
            if other != name:
                shutil.copy(folder / other / f"{other}.pub", folder / name / "peers")


def private_sums():
    return fed.SFVI(
        linear,
        fed.AutoSiloNormal(linear),
        optax.adam(0.05),
        privacy=fed.Privacy(4.0, 1e-5, 1.0, 5),
        secure_sum=True,
    )
