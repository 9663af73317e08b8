"""Packages of the extra ``privacy``, which are imported where something needs them."""

import importlib
from types import ModuleType


def of_extra(what: str, module: str) -> ModuleType:
    """Return a module of a package of the extra ``privacy``.

    :param what: what needs it, for the error.
    :raises ImportError: with the mend, if the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0].replace("_", "-")
        raise ImportError(f'{what} needs {package}: pip install "numpyro-fed[privacy]"') from error
