"""Loader of a model file, and of a silo's table as arguments of its model."""

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd

from numpyro_fed.data.silos import Silos
from numpyro_fed.decentralized._kernel import NetworkKernel
from numpyro_fed.front.tables import read_file
from numpyro_fed.mcmc._kernel import LangevinKernel
from numpyro_fed.mcmc.hmc import HMC
from numpyro_fed.vi._base import FederatedVI


def load_model_file(place: str | Path) -> ModuleType:
    """Load the module of a file that has a marked ``model``.

    The file may also have:

    * ``silo(table)``, a function that makes the model's arguments from a silo's table;
    * ``SHARED``, the values of arguments that are the same in all silos;
    * ``ROWS`` and ``INDEX``, the arguments ``rows`` and ``index`` of :class:`~numpyro_fed.Silos`;
    * either ``svi``, a variational fit of the model, or ``kernel``, a kernel of it.

    :raises ValueError: for a file that is not such a module.
    """
    place = Path(place)
    if not place.is_file():
        raise ValueError(f"{place}: no such file; expected a Python file with a function model")
    spec = importlib.util.spec_from_file_location(place.stem, place)
    if spec is None or spec.loader is None:
        raise ValueError(f"{place}: expected a Python file with a function model")
    module = importlib.util.module_from_spec(spec)
    if str(place.resolve().parent) not in sys.path:  # the file may import its neighbors
        sys.path.insert(0, str(place.resolve().parent))
    sys.modules.setdefault(place.stem, module)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{place}: {type(error).__name__}: {error}") from error
    names = vars(module)
    if not callable(names.get("model")):
        raise ValueError(
            f"{place}: it has no function model; expected one whose silo plates are marked"
        )
    svi, kernel = names.get("svi"), names.get("kernel")
    if svi is not None and kernel is not None:
        raise ValueError(
            f"{place}: it has svi and kernel; expected one of them, for one study has one method"
        )
    if svi is not None and not (isinstance(svi, FederatedVI) and svi.model is module.model):
        raise ValueError(
            f"{place}: svi: expected fed.SFVI, fed.SFVIAvg or fed.ConduciveSFVI of this file's "
            f"model, got {svi!r}"
        )
    known = isinstance(kernel, NetworkKernel | HMC) or (
        isinstance(kernel, LangevinKernel) and not kernel.pooled
    )
    if kernel is not None and not (known and kernel.model.model is module.model):
        raise ValueError(
            f"{place}: kernel: expected fed.FSGLD, fed.DSGLD, fed.HMC, fed.PushSumLangevin or "
            "fed.GossipLangevin of this file's model, "
            f"got {kernel!r}"
        )
    shared = names.get("SHARED", {})
    if not isinstance(shared, dict):
        raise ValueError(
            f"{place}: SHARED: expected a dict, {{argument: value}}, got {type(shared).__name__}"
        )
    names.update(svi=svi, kernel=kernel, SHARED=shared)  # None where the file has none
    return module


def methods_of(module: ModuleType) -> set[str]:
    """Return the study's methods, by the names that kinds of call have for them."""
    if module.svi is not None:
        return {"fit", "hmc"} if goes_on(module.svi) else {"fit"}
    if isinstance(module.kernel, HMC):
        return {"hmc"}
    return {"network" if isinstance(module.kernel, NetworkKernel) else "chains"}


def goes_on(svi: FederatedVI) -> bool:
    """Return whether HMC goes on where the weights of a fit fail.

    It cannot where the silos' replies are noised or masked.
    """
    return svi.algorithm == "conducive" and not svi.rounds_only


def public_of(module: ModuleType) -> tuple[str, ...]:
    """Return the observed sites that all silos know, as the file's kernel says."""
    kernel = module.kernel
    return () if kernel is None or isinstance(kernel, HMC) else tuple(kernel.options.public)


def silo_of_file(
    module: ModuleType, name: str, place: str | Path, columns: tuple[str, ...] | None = None
) -> Silos:
    """Return one silo, from its table in a CSV or Parquet file.

    Without a ``silo(table)`` in the model file, each argument of the model is the column of its
    name.

    :param columns: the columns that the study may use; the model file does not see the others.
    :raises ValueError: for a file that is no table, or lacks columns.
    """
    place = Path(place)
    if not place.is_file():
        raise ValueError(f"{place}: no such file; expected the silo's table")
    try:
        table = read_file(place)
    except Exception as error:
        raise ValueError(
            f"{place}: expected a table in CSV or Parquet ({type(error).__name__}: {error})"
        ) from error
    if columns is not None:
        lacking = sorted(set(columns) - set(table.columns))
        if lacking:
            raise ValueError(
                f"guard columns: {place} has no columns {lacking}; it has {list(table.columns)}"
            )
        # anew: a Parquet file's index and its attrs would go to the model file, too
        table = pd.DataFrame({name: table[name].array for name in columns})
    try:
        arguments = module.silo(table) if "silo" in vars(module) else _columns(module, table)
    except KeyError as error:
        if columns is not None:
            raise ValueError(
                f"guard columns: the study wants {error} of {place}; allowed are {list(columns)}"
            ) from error
        raise ValueError(
            f"{place}: it has no column {error}; it has {list(table.columns)}"
        ) from error
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{place}: silo(table) of {module.__file__} failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(arguments, dict):
        raise ValueError(
            f"{place}: silo(table) of {module.__file__} gave {type(arguments).__name__}; expected "
            "a dict of the model's arguments, {argument: array}"
        )
    try:
        return Silos(
            {name: {**module.SHARED, **arguments}},
            rows=vars(module).get("ROWS"),
            index=vars(module).get("INDEX"),
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{place}, as silo(table) of {module.__file__} has it: {error}") from error


def _columns(module: ModuleType, table: pd.DataFrame) -> dict[str, np.ndarray]:
    """Return the model's arguments, each from the column of its name."""
    out = {}
    for name in inspect.signature(module.model).parameters:
        if name in module.SHARED:
            continue
        column = table[name].to_numpy()
        if column.dtype.kind not in "biuf":
            raise ValueError(
                f"column {name!r} holds {column.dtype}; expected numbers, or a function "
                "silo(table) in the model file"
            )
        out[name] = column
    return out
