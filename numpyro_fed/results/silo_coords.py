"""Names of silos as ArviZ coordinates, and the ledger as ArviZ attributes."""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

import numpy as np

from numpyro_fed._arviz import assign_coords
from numpyro_fed.data.silos import Silos
from numpyro_fed.density.factors import Factors
from numpyro_fed.rounds.federated import Ledger

if TYPE_CHECKING:
    from arviz import InferenceData


def silo_coords(idata: "InferenceData", factors: Factors, silos: Silos, suffix: str = "") -> None:
    """Set the coordinate ``<plate>_silo`` of each silo plate to the silos' names.

    Also set the attribute ``index``, which maps each argument that holds positions to the arguments
    with the rows at these positions.
    """
    names = np.array(silos.names)
    for plate, group in factors.plates:
        dim = plate + suffix
        silo = np.empty(sum(silos.sizes[group]), names.dtype)
        silo[np.asarray(silos.order[group])] = names[silos.silo_of_row(group)]
        assign_coords(idata, dim, {f"{dim}_silo": (dim, silo)})
    points_to = {leaf: factors.leaves(target) for leaf, target in silos.index.items()}
    known = json.loads(idata.posterior.attrs.get("index", "{}"))
    idata.posterior.attrs["index"] = json.dumps({**known, **points_to})


def ledger_attrs(ledger: Ledger) -> dict[str, str]:
    """Return the ledger as attributes that netCDF can hold."""
    return {entry: json.dumps(value) for entry, value in asdict(ledger).items()}


def ledger_of(attrs: Mapping[str, str]) -> Ledger:
    """Return the ledger in the attributes of a posterior."""
    return Ledger(**{one.name: tuple(json.loads(attrs[one.name])) for one in fields(Ledger)})
