"""The same draws over Flower and over NVFLARE as over no carrier at all."""

import io
from pathlib import Path

import carried_fit
import numpy as np
import pytest

import numpyro_fed as fed


@pytest.fixture(scope="module")
def expected():
    silos = carried_fit.silos()
    return carried_fit.drawn(fed.RemoteSilos(silos, fed.Loopback(silos)))


def test_draws_over_flower_in_one_process(expected, tmp_path):
    pytest.importorskip("flwr")
    from numpyro_fed.engines.flower import Flower, InProcessGrid, client_app

    names = carried_fit.silos().names
    apps = [client_app(lambda _, n=n: carried_fit.make_side(n, tmp_path / n)) for n in names]
    got = np.load(io.BytesIO(carried_fit.run(Flower(InProcessGrid(apps), names))))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.slow
def test_draws_over_nvflares_simulator(expected, tmp_path, monkeypatch):
    pytest.importorskip("nvflare")
    from numpyro_fed.engines.nvflare import simulate

    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    data = simulate(
        "carried_fit:run", "carried_fit:make_side", carried_fit.silos().names, tmp_path, patience=120.0, timeout=500.0
    )
    np.testing.assert_array_equal(np.load(io.BytesIO(data)), expected)
