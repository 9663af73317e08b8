"""The same draws over Flower and over NVFLARE as over no carrier at all."""

import io
import json
import re
from pathlib import Path

import carried_fit
import numpy as np
import pytest

import numpyro_fed as fed
from numpyro_fed.engines.silo_side import SiloSide


@pytest.fixture(scope="module")
def expected():
    silos = carried_fit.silos()
    return carried_fit.drawn(fed.RemoteSilos(silos, fed.Loopback(silos)))


@pytest.mark.ci
def test_draws_over_flower_in_one_process(expected, tmp_path):
    pytest.importorskip("flwr")
    from numpyro_fed.engines.flower import Flower, InProcessGrid, client_app

    names = carried_fit.silos().names
    apps = [client_app(lambda _, n=n: carried_fit.make_side(n, tmp_path / n)) for n in names]
    got = np.load(io.BytesIO(carried_fit.run(Flower(InProcessGrid(apps), names))))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.ci
def test_draws_over_nvflares_simulator(expected, tmp_path, monkeypatch):
    pytest.importorskip("nvflare")
    from numpyro_fed.engines.nvflare import simulate

    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    data = simulate(
        "carried_fit:run",
        "carried_fit:make_side",
        carried_fit.silos().names,
        tmp_path,
        patience=120.0,
        timeout=500.0,
    )
    np.testing.assert_array_equal(np.load(io.BytesIO(data)), expected)


def refused_in_words(transport):
    """Return the error for each model that reads across rows.

    It comes once silos of another model are met.
    """
    from across_rows import WRONG, right

    from numpyro_fed.engines.wire import connect

    silos, said = connect(transport, right), []
    for model in WRONG:
        try:
            fed.FSGLD(model).set_up(silos, {})
        except ValueError as error:
            said.append(str(error))
    return json.dumps(said).encode()


def check_refused(said):
    from across_rows import REFUSED

    assert len(said) == 5
    assert all(re.search(REFUSED, words) for words in said), said


def right_side(name, folder):
    from across_rows import SERIES, right

    return SiloSide(fed.Silos({name: {"y": np.asarray(SERIES[name]["y"])}}), right, folder)


def test_models_that_read_across_rows_are_refused_over_flower(tmp_path):
    pytest.importorskip("flwr")
    from numpyro_fed.engines.flower import Flower, InProcessGrid, client_app

    apps = [client_app(lambda _, n=n: right_side(n, tmp_path / n)) for n in "abc"]
    said = json.loads(refused_in_words(Flower(InProcessGrid(apps), tuple("abc"))))
    check_refused(said)


@pytest.mark.ci
def test_models_that_read_across_rows_are_refused_over_nvflares_simulator_draws(
    tmp_path, monkeypatch
):
    pytest.importorskip("nvflare")
    from numpyro_fed.engines.nvflare import simulate

    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    where = "test_carried:refused_in_words", "test_carried:right_side"
    said = json.loads(simulate(*where, list("abc"), tmp_path, patience=120.0, timeout=300.0))
    check_refused(said)
