"""Families of outcomes: a distribution given the linear predictor, and priors of its parameters."""

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Family:
    """A distribution of the outcome, as text of a model.

    :param likelihood: the distribution, given ``eta`` and its parameters; empty for times.
    :param parameters: prior of each parameter, in which ``SD`` stands for the outcome's sd.
    :param values: what the outcome may be: ``"real"``, ``"positive"``, ``"time"`` (zero, too),
        ``"count"``, ``"share"`` (between 0 and 1), ``"binary"`` or ``"order"``.
    :param identity: whether ``eta`` has the outcome's unit, so that priors are scaled by its sd.
    :param intercept: whether the model has one.
    :param event: whether the outcome is a time, with a column that says if it was seen.
    """

    likelihood: str
    parameters: dict[str, str] = field(default_factory=dict)
    values: str = "real"
    identity: bool = False
    intercept: bool = True
    event: bool = False


FAMILIES = {
    "gaussian": Family(
        "dist.Normal(eta, sigma)", {"sigma": "dist.Exponential(1 / SD)"}, identity=True
    ),
    "t": Family(
        "dist.StudentT(nu, eta, sigma)",
        {"sigma": "dist.Exponential(1 / SD)", "nu": "dist.Gamma(2.0, 0.1)"},
        identity=True,
    ),
    "bernoulli": Family("dist.Bernoulli(logits=eta)", values="binary"),
    "binomial": Family("dist.Binomial(trials, logits=eta)", values="count"),
    "poisson": Family("dist.Poisson(jnp.exp(eta))", values="count"),
    "negativebinomial": Family(
        "dist.NegativeBinomial2(jnp.exp(eta), 1 / dispersion)",
        {"dispersion": "dist.Exponential(1.0)"},
        values="count",
    ),
    "gamma": Family(
        "dist.Gamma(shape, shape * jnp.exp(-eta))",
        {"shape": "dist.Exponential(0.1)"},
        values="positive",
    ),
    "beta": Family(
        "dist.BetaProportion(jax.nn.sigmoid(eta), precision)",
        {"precision": "dist.Exponential(0.1)"},
        values="share",
    ),
    "ordinal": Family(
        "dist.OrderedLogistic(eta, cuts)",
        {
            "cuts": "dist.TransformedDistribution("
            "dist.Normal(0.0, 2.5).expand([CUTS]).to_event(1), "
            "dist.transforms.OrderedTransform())"
        },
        values="order",
        intercept=False,
    ),
    "weibull": Family("", {"shape": "dist.Exponential(1.0)"}, values="positive", event=True),
    "cox": Family("", values="time", intercept=False, event=True),
}


def check_outcome(family: str, y: np.ndarray, name: str, silo: str) -> None:
    """Raise a ``ValueError`` unless the family has the outcome's values."""
    right = {
        "real": np.isfinite(y),
        "positive": y > 0,
        "time": y >= 0,
        "count": (y >= 0) & (y == np.round(y)),
        "share": (y > 0) & (y < 1),
        "binary": (y == 0) | (y == 1),
        "order": (y >= 0) & (y == np.round(y)),
    }[FAMILIES[family].values]
    if not right.all():
        words = {
            "real": "finite numbers",
            "positive": "numbers > 0",
            "time": "numbers >= 0",
            "count": "counts 0, 1, 2, ...",
            "share": "numbers between 0 and 1, both excluded",
            "binary": "0 and 1, or text with two levels",
            "order": "levels 0, 1, 2, ... in order",
        }[FAMILIES[family].values]
        row = int(np.argmin(right))
        raise ValueError(
            f"silo {silo!r}, column {name!r}, row {row}: family {family!r} expects {words}, got "
            f"{y[row]:g}"
        )
