"""Shapes and types of the messages that a silo of a fit expects."""

import math
from collections.abc import Callable

import jax

from numpyro_fed._typing import PyTree
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.views import outlines
from numpyro_fed.vi.algorithms import ALGORITHMS
from numpyro_fed.vi.config import FitConfig
from numpyro_fed.vi.first_params import params_at
from numpyro_fed.vi.guides.learned import factored
from numpyro_fed.vi.setup import without_params


def expected_messages(
    algorithm: str, config: FitConfig, model: Callable, known: Silos
) -> dict[str, PyTree]:
    """Return shapes and types of the messages of a fit, by wire name of the task.

    ``None`` stands for a part of any shape: draws of theta, of which a server may send any number.

    :param algorithm: name of the fit's algorithm.
    :param config: the static facts of the silo's fit.
    :param model: the fit's model.
    :param known: facts about all silos.
    """
    _, (part,), _ = factored(model, (known,))
    rounds = ALGORITHMS[algorithm].federated(config, [without_params(x) for x in outlines(part)])

    def types() -> tuple[PyTree, PyTree, PyTree]:
        params, key = params_at(config, part), jax.random.key(0)
        return params, config.constrain(params), rounds.broadcast(key, rounds.init(key, params))

    params, named, message = jax.eval_shape(types)
    weights = {k: named[k] for k in config.families[0].shared_params}
    estimate = (None, weights, {k: named[k] for k in config.learned}, params)
    at_draws = {"EstimateLocal": estimate, "RowsLocal": estimate}
    return {"InitLocal": params, "RoundLocal": message, **at_draws}


def num_parameters(config: FitConfig, messages: dict[str, PyTree]) -> int:
    """Return the number of global parameters that silos see: of theta, learned and shared."""
    _, weights, learned, _ = messages["EstimateLocal"]
    sizes = [math.prod(x.shape) for x in jax.tree.leaves((weights, learned))]
    return config.families[0].factors.dim + sum(sizes)
