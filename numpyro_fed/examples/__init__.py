"""Examples that run as ``python -m numpyro_fed.examples.six_cities``.

They are the files of ``models/`` in the repository, which a wheel has in this folder. They import
each other by name, so that the folder is put on the path.
"""

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_MODELS = _HERE.parents[1] / "models"  # in a checkout
FOLDER = _MODELS if (_MODELS / "six_cities.py").is_file() else _HERE
__path__.append(str(FOLDER))
if str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))
