"""JAX processes on this machine that run one program, and what each of them saved."""

import os
import subprocess
import sys

import numpy as np

from numpyro_fed.engines import spmd


def saved_by(code, count, folder, timeout=480):
    """Return the arrays that each process saved in ``sys.argv[3] + sys.argv[1] + ".npz"``.

    Its number and the port are ``sys.argv[1:3]``.
    """
    port, place = str(spmd._free_port()), str(folder / "process")
    command, environment = [sys.executable, "-c", code], {**os.environ, "JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen([*command, str(i), port, place], stderr=subprocess.PIPE, env=environment)
        for i in range(count)
    ]
    try:
        errors = [p.communicate(timeout=timeout)[1] for p in started]
    finally:
        for p in started:
            p.kill()
    assert [p.returncode for p in started] == [0] * count, errors
    return [np.load(f"{place}{i}.npz") for i in range(count)]
