"""Calibration of a study by simulation; :mod:`numpyro_fed.results.calibration` tells the law."""

import warnings
from collections.abc import Callable

import numpy as np
from jax import Array, random
from tqdm.auto import trange

from numpyro_fed.data.checks import check_key
from numpyro_fed.data.silos import Silos
from numpyro_fed.front.fit import fit
from numpyro_fed.results.calibration import Calibration, Simulator, calibration
from numpyro_fed.rounds.remote import RemoteSilos


def calibrate(
    model: Callable,
    silos: Silos,
    *,
    num_simulations: int = 100,
    method: str = "auto",
    num_draws: int = 1000,
    rng_key: Array | None = None,
    progress_bar: bool = True,
) -> Calibration:
    """Calibrate a study by simulation: draw parameters and data from the model, and fit them.

    Law: exact for the model as it is. A wrong prior or likelihood is not seen.

    Nothing leaves a silo, as all happens where the simulated data are. Covariates and sizes are
    those of ``silos``, which may be made up.

    :param model: a model with proper priors, whose observed sites take an argument as it is
        (``obs=y``). Values of these arguments do not matter.
    :param silos: silos like those of the study, in this process.
    :param num_simulations: number of data sets.
    :param method: as in :func:`fit`.
    :param num_draws: draws of each posterior.
    :param rng_key: seed; ``jax.random.key(0)`` by default.
    :param progress_bar: show the simulations.
    :raises TypeError: for silos that are not in this process.
    :raises ValueError: for fewer than ten simulations, for an improper prior, and for an observed
        site whose value is no argument.

    Example::

        >>> import numpy as np, numpyro, numpyro.distributions as dist, numpyro_fed as fed
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 1))
        ...     with fed.silo_plate("patients", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> like = fed.Silos({"oslo": {"y": np.zeros(5)}, "rome": {"y": np.zeros(3)}})
        >>> found = fed.calibrate(model, like, num_simulations=20, progress_bar=False)
        >>> found.verdicts.count("sound"), bool(found.table.loc["mu", "p"] > 0.01)
        (20, True)
    """
    if isinstance(silos, RemoteSilos) or not isinstance(silos, Silos):
        raise TypeError(f"expected fed.Silos or fed.split(...), got {type(silos).__name__}")
    if isinstance(num_simulations, bool) or not isinstance(num_simulations, int | np.integer):
        raise ValueError(f"num_simulations: expected a whole number, got {num_simulations!r}")
    if num_simulations < 10:
        raise ValueError(f"num_simulations: expected 10 or more, got {num_simulations}")
    rng_key = random.key(0) if rng_key is None else rng_key
    check_key(rng_key)
    study = Simulator(model, silos)
    names: list[str] = []
    ranks, verdicts = [], []
    for i in trange(num_simulations, desc="calibrate", disable=not progress_bar):
        key_data, key_fit = random.split(random.fold_in(rng_key, i))
        theta, simulated = study.draw(key_data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of checks, which the verdict sums up
            idata = fit(
                model,
                simulated,
                method=method,
                num_draws=num_draws,
                rng_key=key_fit,
                progress_bar=False,
            )
        names, found = study.ranks(theta, idata)
        ranks.append(found)
        verdicts.append(idata.posterior.attrs["verdict"])
    return calibration(np.array(ranks), names, tuple(verdicts))
