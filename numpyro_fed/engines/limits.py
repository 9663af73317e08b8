"""Limits of what a silo answers over a wire, in numbers, bytes and latents."""

__all__ = [
    "MAX_CALLS",
    "MAX_JOINT",
    "MAX_KEPT",
    "MAX_LATENTS",
    "MAX_LEAVES",
    "MAX_MAP",
    "MAX_MESSAGE",
    "MAX_POINTS",
    "MAX_REFUSED",
    "MAX_ROWS",
    "MAX_SETTINGS",
    "MAX_SLOTS",
    "MAX_WALKS",
]

MAX_MESSAGE = 1 << 28  # bytes
MAX_REFUSED = 20  # refused connections in a study: each can test a guess at the silo's data
MAX_ROWS = 100_000_000  # rows in all silos, since each silo draws the first latents of all
MAX_SLOTS = 100_000  # states that a silo keeps at one time
MAX_POINTS = 1 << 17  # positions in one call
MAX_SETTINGS = {"num_local_steps": 10_000, "length": 128}  # settings that make a call slow
MAX_LATENTS = 1 << 21  # networks times rows in all silos, since each silo draws for all
MAX_MAP = 1 << 25  # points times rows for a local map, which are in memory at one time
MAX_WALKS = 256  # positions of one pilot
MAX_CALLS = 4_096  # in one message
MAX_JOINT = 1_000  # latents of one unit, padded as the largest silo claims: time is cubic
MAX_LEAVES = 1_000  # arrays in the message of one call
MAX_KEPT = 1 << 32  # bytes of the states that a silo keeps at one time
