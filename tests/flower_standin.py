"""A side that stands in for a silo's, and a run that sends messages to it.

Apps for Flower's processes to import.

Its private state is a running hash of all messages, on disk. A message that it has answered before
gets the same reply again.
"""

import hashlib
import json
import os
import statistics
import sys
import time
from pathlib import Path

from numpyro_fed.engines.flower import Flower, Message, RecordDict, client_app, server_app


class Hashing:
    """``answer`` folds a message into the running hash.

    With "sleep", "raise" and "die" in a message it does so, once.
    """

    def __init__(self, name, directory):
        self.name, self.file = name, Path(directory) / f"{name}.json"
        self.file.parent.mkdir(parents=True, exist_ok=True)

    def answer(self, data):
        head, body = data.split(b"\n", 1)
        asked = json.loads(head)
        if "echo" in asked:
            return body
        state = (
            json.loads(self.file.read_text())
            if self.file.exists()
            else {"number": -1, "hash": "", "starts": 0}
        )
        if asked["number"] > state["number"]:
            self._play(asked)
            state["hash"] = hashlib.sha256(
                state["hash"].encode() + self.name.encode() + body
            ).hexdigest()
            state["number"] = asked["number"]
            part = self.file.with_suffix(".part")
            part.write_text(json.dumps(state))
            part.replace(self.file)
        return state["hash"].encode()

    def _play(self, asked):
        mark = self.file.with_suffix(f".{asked['number']}")
        if asked.get("for", self.name) != self.name or mark.exists():
            return
        if asked.get("do"):
            mark.touch()
        if asked.get("do") == "sleep":
            time.sleep(asked["seconds"])
        elif asked.get("do") == "raise":
            raise ValueError("row 17 holds 37.25")
        elif asked.get("do") == "die":
            os._exit(9)


def message(number, body=b"", **what):
    return json.dumps({"number": number, **what}).encode() + b"\n" + body


def side(context):
    return Hashing(context.node_config["name"], context.node_config["directory"])


def run(grid, context):
    """Make rounds as the run's configuration says; replies and seconds go to a file."""
    config = context.run_config
    flower = Flower(
        grid,
        config["names"].split(),
        timeout=config["timeout"],
        patience=config["patience"],
        grace=10,
        wait=config["wait"],
    )
    plan, replies, seconds = json.loads(config["plan"]), [], []
    for number in range(config["rounds"]):
        start = time.perf_counter()
        what = plan.get(str(number), {}) | ({"echo": True} if config["echo"] else {})
        data = message(number, os.urandom(config["size"]) if config["echo"] else b"round", **what)
        got = flower.exchange(dict.fromkeys(flower.names, data))
        seconds.append(time.perf_counter() - start)
        replies.append({name: len(x) if config["echo"] else x.decode() for name, x in got.items()})
        done = {"replies": replies, "seconds": seconds, "reasons": flower.reasons}
        part = Path(config["out"] + ".part")
        part.write_text(json.dumps(done))
        part.replace(config["out"])


def median_of(rounds, one):
    one()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        one()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def empty_round(grid, nodes):
    """Flower's own: a message without content to each node, and replies without content."""
    sent = set(
        grid.push_messages([Message(RecordDict(), node, "query.empty", ttl=300) for node in nodes])
    )
    while sent:
        came = [m.metadata.reply_to_message_id for m in grid.pull_messages(list(sent))]
        sent -= set(came)
        time.sleep(0.0 if came or not sent else 0.01)


def measured(grid, names, floats, rounds, wait=120.0):
    """Median seconds of a round: Flower's empty one, and messages of so many floats."""
    flower = Flower(grid, names, wait=wait, poll=0.02)
    nodes = list(flower.registry.nodes.values())
    found = {"empty": median_of(rounds, lambda: empty_round(grid, nodes))}
    for n in floats:
        data = message(0, os.urandom(4 * n), echo=True)
        found[str(n)] = median_of(
            rounds, lambda data=data: flower.exchange(dict.fromkeys(names, data))
        )
    return found


def measure(grid, context):
    config = context.run_config
    floats = [int(n) for n in config["floats"].split()]
    found = measured(grid, config["names"].split(), floats, config["rounds"], config["wait"])
    part = Path(config["out"] + ".part")
    part.write_text(json.dumps({"replies": [0] * config["rounds"], "medians": found}))
    part.replace(config["out"])


client = client_app(side)
client.query("empty")(lambda message, context: Message(RecordDict(), reply_to=message))
server = server_app(run)
measuring = server_app(measure)

if __name__ == "__main__":  # a lasting node: server, name, folder, certificate, key
    from numpyro_fed.engines.flower_node import serve

    address, own, folder, authority, private = sys.argv[1:6]
    serve(
        client,
        address,
        own,
        ca=Path(authority),
        key=Path(private) if private else None,
        give_up=20,
        directory=folder,
    )
