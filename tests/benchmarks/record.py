"""File of a benchmark's numbers, from which `docs/tables.py` writes tables."""

import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"


def _git(*arguments: str) -> str:
    here = Path(__file__).parent
    return subprocess.run(
        ["git", *arguments], cwd=here, capture_output=True, text=True, check=False
    ).stdout.strip()


def record(name: str, rows: list[dict[str, Any]], start: float) -> None:
    """Write rows of numbers into a file of docs/results, and how they came about.

    :param start: when the benchmark started, of ``time.time()``.
    """
    commit = _git("rev-parse", "--short", "HEAD")
    # but for the files of docs, which a long benchmark writes again and again
    if _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)docs"):
        commit += "-dirty"
    facts = {
        "command": " ".join(
            ["python", f"tests/benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]
        ),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "machine": f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}",
        "versions": {p: version(p) for p in ("numpyro-fed", "numpyro", "jax", "arviz")},
        "seconds": round(time.time() - start),
    }
    place = RESULTS / f"{name}.json"
    place.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    print(f"written to docs/results/{place.name}")
