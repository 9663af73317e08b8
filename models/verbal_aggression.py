"""Verbal aggression: 316 persons answer 24 items, yes or no. Item response models.

Persons live in eight silos, and their abilities stay there. Items are common, so that their
easiness, and in the second model their slope, are global: 25 and 48 dimensions.

References: De Boeck & Wilson (2004), Explanatory Item Response Models, chapter 1 (the data, lme4's
``VerbAgg``); Rasch (1960); Birnbaum (1968), in Lord & Novick, Statistical Theories of Mental Test
Scores.
"""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from _beside_nuts import main
from _r_data import r_table

import numpyro_fed as fed


def silos() -> fed.Silos:
    """Return eight silos of persons, a column for each item."""
    table = r_table("lme4", "VerbAgg")
    yes = table.assign(y=(table["r2"] == "Y").astype(int))
    y = yes.pivot(index="id", columns="item", values="y").to_numpy()
    return fed.split({"y": y}, by=fed.partitioners.iid(0, len(y), 8))


def _answers(y: jax.Array, easy: jax.Array, spread: jax.Array, slope: jax.Array) -> None:
    with fed.silo_plate("persons", y.shape[0]):
        ability = numpyro.sample("ability", dist.Normal(0, 1))
        logits = easy + slope * (spread * ability)[:, None]
        numpyro.sample("y", dist.Bernoulli(logits=logits).to_event(1), obs=y)


def model(y):  # type: ignore[no-untyped-def]
    """Rasch's model: items differ in easiness."""
    num = y.shape[-1]
    easy = numpyro.sample("easy", dist.Normal(0, 2).expand([num]).to_event(1))
    spread = numpyro.sample("spread", dist.HalfNormal(2))
    _answers(y, easy, spread, jnp.ones(num))


def model_two_parameters(y):  # type: ignore[no-untyped-def]
    """Birnbaum's model: items differ in slope, too; the first item's slope is 1."""
    num = y.shape[-1]
    easy = numpyro.sample("easy", dist.Normal(0, 2).expand([num]).to_event(1))
    spread = numpyro.sample("spread", dist.HalfNormal(2))
    slope = numpyro.sample("slope", dist.LogNormal(0, 0.5).expand([num - 1]).to_event(1))
    _answers(y, easy, spread, jnp.concatenate([jnp.ones(1), slope]))


if __name__ == "__main__":
    main("Verbal aggression", model, silos, "verbal_aggression", by_fit=True)
