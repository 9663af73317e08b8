"""Stand-ins for both sides of a fit.

A running hash of each silo, kept on disk, idempotent by the message's number.
"""

import hashlib
import json
import os
import time
from pathlib import Path


class Hashing:
    """Answers message number n with a hash of all messages up to it."""

    def __init__(self, name, directory):
        self.name, self.file = name, Path(directory) / "state.json"
        with (Path(directory) / "made.txt").open("a") as file:
            file.write(f"{os.getpid()}\n")

    def answer(self, data):
        number, text = data.split(b" ", 1)
        done, state = json.loads(self.file.read_text()) if self.file.exists() else (0, "")
        if int(number) > done:
            state = hashlib.sha256(f"{state} {self.name} ".encode() + text).hexdigest()
            part = self.file.with_suffix(".part")
            part.write_text(json.dumps([int(number), state]))
            part.replace(self.file)
        return state.encode()


def make_side(name, directory):
    return Hashing(name, directory)


def make_broken(name, directory):
    raise ValueError("row 17 is 42.5")


def run(transport, rounds=3):
    """Return a hash of all answers of all rounds."""
    total = hashlib.sha256()
    for n in range(1, rounds + 1):
        replies = transport.exchange(
            {name: f"{n} {total.hexdigest()}".encode() for name in transport.names}
        )
        for name in transport.names:
            total.update(replies.get(name, b"absent"))
    return total.hexdigest().encode()


def who_answers(transport, rounds):
    """Return the silos that answered, by round."""
    messages = [dict.fromkeys(transport.names, f"{n} x".encode()) for n in range(1, rounds + 1)]
    return json.dumps([sorted(transport.exchange(asked)) for asked in messages]).encode()


def fail(transport):
    raise ValueError("the fit has no rounds")


def ask_a_stranger(transport):
    transport.exchange({"paris": b""})


def private_fit():
    """Return a fit whose budget of privacy is two rounds."""
    import optax
    from small_models import linear

    import numpyro_fed as fed

    guide, privacy = fed.AutoSiloNormal(linear), fed.Privacy(1.0, 1e-5, 1.0, num_rounds=2)
    return fed.SFVI(linear, guide, optax.adam(0.05), privacy=privacy)


def make_private(name, directory):
    import carried_fit

    import numpyro_fed as fed
    from numpyro_fed.engines.silo_side import SiloSide

    silos, fit = carried_fit.silos(), private_fit()
    return SiloSide(fed.Silos({name: silos[silos.names[0]]}), fit.model, directory, fit=fit)


class Echo:
    """Side that answers with the message it received."""

    def __init__(self, name, directory):
        self.name = name

    def answer(self, data):
        return data


def make_echo(name, directory):
    return Echo(name, directory)


def time_rounds(transport, sizes, rounds):
    """Seconds of each round, by the number of float32 that go each way."""
    times = {}
    for size in sizes:
        data = os.urandom(4 * size)
        times[size] = []
        for _ in range(rounds + 2):
            start = time.perf_counter()
            replies = transport.exchange(dict.fromkeys(transport.names, data))
            times[size].append(time.perf_counter() - start)
            assert all(replies[name] == data for name in transport.names)
    return json.dumps({size: x[2:] for size, x in times.items()}).encode()
