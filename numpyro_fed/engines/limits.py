"""Limits of what a silo answers over a wire, in numbers, bytes and latents."""

# Limits are above what the runs in docs/results.md ask for, and what a silo can bear of a liar.
MAX_MESSAGE = 1 << 28  # bytes, of 67 million float32 numbers: 100 MB were tried
MAX_REFUSED = 20  # refused connections in a study: each can test a guess at the silo's data
# rows in all silos, since each silo draws the first latents of all: 400 MB of one latent a row
MAX_ROWS = 100_000_000
MAX_SLOTS = 100_000  # states that a silo keeps at one time: those of 25,000 rounds of four chains
MAX_POINTS = 1 << 17  # positions in one call: the last round of `fed.fit` has 16,000
# settings that make a call slow: local steps (6,000 are the most that were run), and those of a
# pilot's walk (64, see mcmc/pilot.py)
MAX_SETTINGS = {"num_local_steps": 10_000, "length": 128}
MAX_LATENTS = 1 << 21  # networks times rows in all silos, since each silo draws for all: 8 MB
# points times rows for a local map, which are in memory at one time: 128 MiB for each number
MAX_MAP = 1 << 25
MAX_WALKS = 256  # positions of one pilot: eight times the 32 of surrogates/score.py
MAX_CALLS = 4_096  # in one message, which has a call for each chain or node
# latents of one unit, padded as the largest silo claims: a Newton step then takes 3 x 10^8 products
MAX_JOINT = 1_000
MAX_LEAVES = 1_000  # arrays in the message of one call, two for each layer of a learned network
MAX_KEPT = 1 << 32  # bytes of the states that a silo keeps at one time: 100,000 of 43 kB
# compiled programs of a silo's process, which are never freed: 4 MiB each, and a study has tens
MAX_PROGRAMS = 200
