"""Words for a carrier that is not there, or not as the library knows it."""

import importlib
import sys

import pytest

from numpyro_fed.engines.side import not_importable


def test_a_carrier_that_is_not_installed():
    error = ModuleNotFoundError("No module named 'nowhere'", name="nowhere")
    said = str(not_importable("Flower", "nowhere", "flower", error))
    assert said == 'Flower is not installed; pip install "numpyro-fed[flower]"'


@pytest.mark.parametrize(
    ("package", "module", "engine"),
    [
        ("flwr", "flwr.supercore.retry", "flower_node"),
        ("flwr", "flwr.serverapp", "flower"),
        ("nvflare", "nvflare.private.fed.client.shell_cmd", "nvflare"),
    ],
)
def test_a_release_that_has_moved_a_name_is_named(monkeypatch, package, module, engine):
    found = pytest.importorskip(package)
    name = f"numpyro_fed.engines.{engine}"
    importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not there
    with pytest.raises(ImportError, match=rf"{found.__version__} has moved .*{module}"):
        importlib.import_module(name)
