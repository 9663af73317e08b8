"""List of what a silo answers over a wire.

For each kind of call what leaves, and how often at most.
"""

from typing import NamedTuple

__all__ = [
    "ANSWERED",
    "FIT_CALLS",
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
MAX_REFUSED = 20  # refused connections of a study: each tells whether a guess was right
# of all silos together: first latents are drawn for all, and each silo's are picked
MAX_ROWS = 100_000_000
MAX_SLOTS = 100_000  # states that a silo keeps at one time
MAX_POINTS = 1 << 17  # positions that one call may ask about
# settings of a call that decide how long it takes
MAX_SETTINGS = {"num_local_steps": 10_000, "length": 128}
MAX_LATENTS = 1 << 21  # networks x rows of all silos: first latents of all are drawn
MAX_MAP = 1 << 25  # points x rows of which a local map is fitted: all are in memory
MAX_WALKS = 256  # positions at which one pilot walks
MAX_LEAVES = 1_000  # arrays that one call tells
MAX_KEPT = 1 << 32  # bytes of the states that a silo keeps at one time


class Answer(NamedTuple):
    """A kind of call.

    :param leaves: what its reply holds.
    :param numbers: how many numbers that is, for d global parameters.
    :param most: calls of this kind that a silo answers in one study, by default.
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
        "its surrogate: gradient and precision of its log marginal likelihood, fitted at the "
        "server's points, and "
        "its values there",
        "d + d^2 (beyond 500 dimensions 2 d), one for each point; where d <= 16 in the last rounds "
        "d (1 + 2 d + d (d "
        "+ 1) / 2) more",
        1_000,
        told=("ScoreMessage",),
    ),
    "LaplaceLocal": Answer(
        "gradient and precision of its log marginal likelihood at one point, and its value",
        "d + d^2",
        1_000,
        told=("ScoreMessage",),
    ),
    "PilotLocal": Answer(
        "means and norms of what its surrogate lacks, on walks from the server's positions",
        "2 d for each position, and up to 64",
        100,
        told=_TUNING,
        reads=(_MAP,),
    ),
    "InitLocal": Answer(
        "nothing: it makes its own first parameters, and keeps them",
        "",
        1_000,
        reads=(_FIT_STATES,),
    ),
    "RoundLocal": Answer(
        "SFVI: its part of the bound and of its gradient; SFVI-Avg: global parameters after its "
        "steps; conducive "
        "rounds: its site's natural parameters, its part of the bound, and with optimizers its "
        "copies of learned "
        "parameters",
        "2 d for each draw, and as many as learned parameters; as many as global parameters; d + d "
        "(d + 1) / 2 "
        "(diagonal: 2 d)",
        100_000,
        told=("SFVIMessage", "SFVIAvgMessage", "ConduciveMessage", *_FIT),
        reads=(_FIT_STATES,),
    ),
    "EstimateLocal": Answer(
        "estimates of its log likelihood at the server's draws",
        "1 for each draw",
        1_000,
        told=("Position", *_FIT),
        reads=(_FIT_STATES,),
    ),
    "TellLocal": Answer("nothing: it keeps surrogates and step size", "", 1_000, told=_TUNING),
    "StartLocal": Answer(
        "nothing: it draws its first local latents, and keeps them", "", 100_000, reads=(_MAP,)
    ),
    "VisitLocal": Answer(
        "a chain's position after its stay, four statistics, and the mean of what its surrogate "
        "lacks",
        "2 d + 5 in each visit",
        1_000_000,
        told=("Chain",),
        reads=(("TellLocal",), ("StartLocal", "VisitLocal")),
    ),
    "NodeStartLocal": Answer(
        "nothing: it draws its first local latents, and keeps them", "", 100_000, reads=(_MAP,)
    ),
    "NodeLocal": Answer(
        "gradient of its part of the potential at its node's position, and the acceptance of its "
        "local moves",
        "d + 1 in each step of each network",
        1_000_000,
        reads=(("TellLocal",), ("NodeStartLocal", "NodeLocal")),
    ),
}
