"""List of the calls that a silo answers over a wire, with their replies and limits."""

from typing import NamedTuple

__all__ = [
    "ANSWERED",
    "FIT_CALLS",
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
    "Answer",
]

FIT_CALLS = ("InitLocal", "RoundLocal", "EstimateLocal")  # of variational fits
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


class Answer(NamedTuple):
    """Kind of call, with its reply and limits.

    :param leaves: contents of its reply, as a sentence for a person at the silo.
    :param numbers: count of the numbers in its reply, for d global parameters.
    :param most: default for the largest number of such calls that a silo answers in one study.
    :param told: wire names of the classes that its message may hold, beside numbers.
    :param reads: for each state that it starts from, the kinds of call that may have written it.
    """

    leaves: str
    numbers: str
    most: int
    told: tuple[str, ...] = ()
    reads: tuple[tuple[str, ...], ...] = ((),)


_MAP = ("ScoreLocal",)  # writes the local map
_TUNING = ("Tuning", "Conducive", "Corrections", "LatentCoordinates", "LowRankMatrix")
_FIT = ("NormalContext", "GuideContext", "Triangular", "Diagonal", "LowRankScale")
_FIT_STATES = ("InitLocal", "RoundLocal")


ANSWERED = {
    "ScoreLocal": Answer(
        "The silo sends its surrogate, which is a gradient and a precision fitted to its log "
        "marginal likelihood at the server's points, the error of this fit, and the values at the "
        "points",
        "d + d^2 + 1 numbers (beyond 500 dimensions 2 d + 1) and one for each point; in the last "
        "rounds with d <= 16, d (1 + 2 d + d (d + 1) / 2) more",
        1_000,
        told=("ScoreMessage",),
    ),
    "LaplaceLocal": Answer(
        "The silo sends the value, gradient and precision of its log marginal likelihood at one "
        "point",
        "d + d^2 + 2 numbers (beyond 500 dimensions 2 d + 2)",
        1_000,
        told=("ScoreMessage",),
    ),
    "PilotLocal": Answer(
        "The silo sends means and norms of the difference between its gradient and its "
        "surrogate's at the server's positions",
        "2 d numbers for each position, and one for each of up to 128 steps",
        100,
        told=_TUNING,
        reads=(_MAP,),
    ),
    "InitLocal": Answer(
        "The silo makes its own first parameters, keeps them, and sends only a zero",
        "",
        1_000,
        reads=(_FIT_STATES,),
    ),
    "RoundLocal": Answer(
        "The silo sends, in SFVI, its part of the bound and of the bound's gradient; in SFVI-Avg, "
        "its bound, its number of rows and the global parameters after its steps; in conducive "
        "rounds, its expected log likelihood, the change of its approximate factor, and with "
        "optimizers its copies of the learned parameters and its share of the rows; and in each, "
        "whether all is finite",
        "for SFVI, up to 2 d numbers and the gradient in the message's network weights or guide "
        "parameters for each draw, and one for each learned parameter; for SFVI-Avg, one for each "
        "global parameter; for conducive rounds, d + d (d + 1) / 2 (diagonal: 2 d) and one for "
        "each learned parameter; and up to 3 more",
        100_000,
        told=("SFVIMessage", "SFVIAvgMessage", "ConduciveMessage", *_FIT),
        reads=(_FIT_STATES,),
    ),
    "EstimateLocal": Answer(
        "The silo sends estimates of its log likelihood at the server's draws",
        "1 number for each draw",
        1_000,
        told=("Position", *_FIT),
        reads=(_FIT_STATES,),
    ),
    "TellLocal": Answer(
        "The silo keeps the server's surrogates and step size, and sends only a zero",
        "",
        1_000,
        told=_TUNING,
    ),
    "StartLocal": Answer(
        "The silo draws its first local latents, keeps them, and sends only a zero",
        "",
        100_000,
        reads=(_MAP,),
    ),
    "VisitLocal": Answer(
        "The silo sends a chain's position and count of steps after the visit, four statistics of "
        "the visit, and the mean difference between its gradient and its surrogate's",
        "2 d + 5 numbers in each visit",
        1_000_000,
        told=("Chain",),
        reads=(("TellLocal",), ("StartLocal", "VisitLocal")),
    ),
    "NodeStartLocal": Answer(
        "The silo draws its first local latents, keeps them, and sends only a zero",
        "",
        100_000,
        reads=(_MAP,),
    ),
    "NodeLocal": Answer(
        "The silo sends the gradient of its part of the potential at its node's position, and the "
        "mean acceptance of its local moves",
        "d + 1 numbers in each step of each network",
        1_000_000,
        reads=(("TellLocal",), ("NodeStartLocal", "NodeLocal")),
    ),
}
