"""Hard settings of the test run, made before JAX is imported."""

import os
from importlib.metadata import version

os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "TF_CPP_MIN_LOG_LEVEL", "3"
)  # XLA has a page of words for each program that it takes from the cache
# most of the tests' time is compilation: hardly any optimization, and below no MLIR on the way to
# LLVM, and programs in one part, not 32
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# programs without lines of code, which nobody reads here, save a tenth of tracing and lowering
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
_flags = "--xla_force_host_platform_device_count=4"
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):  # later ones refuse this flag
    _flags += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
if _flags not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flags}".strip()

import gc  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import jax  # noqa: E402
import pytest  # noqa: E402

_CACHE = (
    Path(__file__).resolve().parent.parent / ".pytest_cache" / "d" / "jax"
)  # what `pytest --cache-clear` empties
# compiled programs are kept between runs, and shared by the workers and by the processes that tests
# start
for _name, _value in {
    "jax_compilation_cache_dir": str(_CACHE),
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}.items():
    os.environ[_name.upper()] = str(_value)
    jax.config.update(_name, _value)

_MAPS = Path("/proc/self/maps")
# of the 65,530 memory maps that Linux allows a process; every compiled program takes some, and XLA
# crashes without
_MANY = 45_000
_STATM = Path("/proc/self/statm")  # pages of memory in use, second
_FULL = 5 << 30  # bytes; two workers had 15 GB at the end of all tests
_left = 0  # bytes in use after programs were last given up
# Python's collector walks over all traced programs again and again, for an eighth of the tests'
# time; it runs where programs are given up
gc.disable()


def _bytes_in_use() -> int:
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _compiled_programs_fit_into_memory() -> None:
    global _left
    if not _MAPS.exists():
        return
    full = _bytes_in_use() > max(_FULL, 1.2 * _left)
    if full or _MAPS.read_text().count("\n") > _MANY:
        jax.clear_caches()
        gc.collect()
        _left = _bytes_in_use()


@pytest.fixture(autouse=True, scope="module")
def _after_a_file() -> Iterator[None]:
    yield
    _compiled_programs_fit_into_memory()


@pytest.fixture(autouse=True)
def _after_a_long_test(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if request.node.get_closest_marker("ci"):  # to count maps takes some hundredths of a second
        _compiled_programs_fit_into_memory()
