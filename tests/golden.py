"""Draws and parameters of every kind of fit, and public signatures, before and after a change.

A change that must not change results is made between two calls, on one machine:

    python tests/golden.py before.npz
    python tests/golden.py before.npz --check

Numbers are compared bit for bit. Compiled programs differ between processors, so no file is kept.
"""

import argparse
import inspect
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")

import every_fit
import jax
import numpy as np
import optax
import registry
import small_models as small
import vi_models as vi
from jax import random
from numpyro.infer import MCMC

import numpyro_fed as fed

_CACHE = Path(__file__).resolve().parent.parent / ".pytest_cache" / "d" / "jax"
BY = np.arange(70) % 3
ADAM = optax.adam(0.02)


def chains(make: Callable[[], Any], silos: Any, num: int = 8) -> Callable[[], dict[str, Any]]:
    def run() -> dict[str, Any]:
        where = silos()
        many = 2 * len(where) if isinstance(make(), NODES) else 2
        mcmc = MCMC(
            make(),
            num_warmup=2,
            num_samples=num,
            num_chains=many,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(random.key(3), where)
        return mcmc.get_samples(group_by_chain=True)

    return run


def rounds(
    make: Callable[[], Any], silos: Any, num: int = 8, draws: bool = True
) -> Callable[[], dict[str, Any]]:
    def run() -> dict[str, Any]:
        where, fit = silos(), make()
        result = fit.run(random.key(1), num, where, progress_bar=False)
        out = {"losses": result.losses, "params": result.params}
        if draws:
            idata = fed.to_inference_data(fit, result, where, num_draws=200, resample=True)
            out["draws"] = {k: v.values for k, v in idata.posterior.data_vars.items()}
        return out

    return run


def one_call(method: str) -> dict[str, Any]:
    idata = fed.fit(
        every_fit.model,
        every_fit.silos(),
        method=method,
        num_draws=200,
        rng_key=random.key(0),
        progress_bar=False,
    )
    return {k: v.values for k, v in idata.posterior.data_vars.items()}


def carried(name: str, how: str) -> dict[str, Any]:
    """Run one fit over remote silos, in this process (``loopback``) or over bytes."""
    with tempfile.TemporaryDirectory() as folder:
        if how == "loopback":
            silos = every_fit.silos()
            found = every_fit.fitted(name, fed.RemoteSilos(silos, fed.Loopback(silos)), 6)
        else:
            found = every_fit.over(InProcess(Path(folder)), 6, [name])[name]
    return {k: v for k, v in found.items() if k != "seconds"}


class InProcess:
    """A transport to silos of this process."""

    def __init__(self, folder: Path) -> None:
        self.names = every_fit.NAMES
        self.sides = {name: every_fit.make_side(name, folder / name) for name in self.names}

    def exchange(self, messages: dict[str, bytes]) -> dict[str, bytes]:
        return {name: self.sides[name].answer(data) for name, data in messages.items()}


NODES = (fed.PushSumLangevin, fed.GossipLangevin)
ENTRIES = registry.ENTRIES
RING = fed.graphs.ring(3).with_link_failures(0.2)


def wheeze() -> fed.Silos:
    return vi.wheeze_silos(BY)


def fits() -> dict[str, Callable[[], Any]]:
    """Return what makes the numbers of each kind of fit."""
    linear, intercepts = small.linear_silos, small.intercepts_silos
    out: dict[str, Callable[[], Any]] = {
        "sgld": chains(lambda: fed.SGLD(small.linear, 1e-2, 5, 4), linear),
        "dsgld": chains(lambda: fed.DSGLD(small.linear, 1e-2, 5, num_kept=5), linear),
        "dsgld, scales": chains(
            lambda: fed.DSGLD(small.scale_model, "auto", 5),
            small.scale_silos,
        ),
        "fsgld": chains(lambda: fed.FSGLD(small.intercepts), intercepts),
        "fsgld, minibatches": chains(
            lambda: fed.FSGLD(small.linear, fed.Step(control_variates=True), batch_size=3), linear
        ),
        "fsgld, wheeze": chains(lambda: fed.FSGLD(vi.wheeze), wheeze),
        "push-sum": chains(lambda: fed.PushSumLangevin(small.linear, fed.graphs.ring(4)), linear),
        "push-sum, tracked": chains(
            lambda: fed.PushSumLangevin(small.intercepts, RING, 1e-2, gradient_tracking=True),
            intercepts,
        ),
        "gossip": chains(
            lambda: fed.GossipLangevin(small.linear, fed.graphs.star(4), 1e-2), linear
        ),
        "sfvi": rounds(lambda: fed.SFVI(vi.wheeze, fed.AutoSiloNormal(vi.wheeze), ADAM), wheeze),
        "sfvi, batches": rounds(
            lambda: fed.SFVI(
                vi.hierarchy, fed.AutoSiloNormal(vi.hierarchy, "diag"), ADAM, batch_size=2
            ),
            lambda: vi.hierarchy_silos(np.arange(9) % 3),
        ),
        "sfvi, low rank": rounds(
            lambda: fed.SFVI(small.linear, fed.AutoSiloNormal(small.linear, 1), ADAM), linear
        ),
        "sfvi, a user's guide": rounds(
            lambda: fed.SFVI(vi.hierarchy, vi.hierarchy_guide, ADAM),
            lambda: vi.hierarchy_silos(np.arange(9) % 3),
        ),
        "sfvi, amortized": rounds(
            lambda: fed.SFVI(
                vi.unit_hierarchy,
                fed.AutoSiloNormal(vi.unit_hierarchy, amortize={"z": vi.linear_encoder}),
                ADAM,
            ),
            lambda: vi.hierarchy_silos(np.arange(9) % 3),
        ),
        "sfvi, learned scale": rounds(
            lambda: fed.SFVI(vi.learned_scale, fed.AutoSiloNormal(vi.learned_scale), ADAM), linear
        ),
        "sfvi, private": rounds(
            lambda: fed.SFVI(
                small.linear,
                fed.AutoSiloNormal(small.linear),
                ADAM,
                privacy=fed.Privacy(4.0, 1e-5, 1.0, 8),
            ),
            linear,
            draws=False,
        ),
        "sfvi, three kinds": rounds(
            lambda: fed.SFVI(vi.three_kinds, fed.AutoSiloNormal(vi.three_kinds), ADAM),
            vi.three_kinds_silos,
        ),
        "sfvi-avg": rounds(
            lambda: fed.SFVIAvg(vi.wheeze, fed.AutoSiloNormal(vi.wheeze), ADAM, 5), wheeze
        ),
        "conducive": rounds(
            lambda: fed.ConduciveSFVI(vi.wheeze, fed.AutoSiloNormal(vi.wheeze)), wheeze
        ),
        "conducive, diagonal": rounds(
            lambda: fed.ConduciveSFVI(small.linear, fed.AutoSiloNormal(small.linear, "diag")),
            linear,
        ),
    }
    for kind in ("laplace", "moments"):
        make = partial(fed.FSGLD, small.linear, 1e-2, surrogate=kind)
        out[f"fsgld, {kind}"] = chains(make, linear)
    for name in ENTRIES:
        entry = ENTRIES[name]
        make = partial(fed.FSGLD, entry.model, 1e-3, 3, surrogate="laplace")
        out[f"entry, {name}"] = chains(make, entry.silos, 3)
    for method in ("vi", "fsgld"):
        out[f"fit, {method}"] = partial(one_call, method)
    for name in every_fit.FITS:
        for how in ("loopback", "bytes"):
            out[f"{name}, {how}"] = partial(carried, name, how)
    return out


def signatures() -> dict[str, str]:
    """Return the signature of every public function and class, and of its public methods."""
    out = {}

    def add(name: str, what: Any) -> None:
        if inspect.ismodule(what):
            for k in getattr(what, "__all__", ()):
                add(f"{name}.{k}", getattr(what, k))
        elif callable(what):
            try:
                out[name] = str(inspect.signature(what)).replace("numpyro_fed.", "")
            except ValueError:
                out[name] = "?"
            if inspect.isclass(what):
                for k, method in vars(what).items():
                    if not k.startswith("_") and callable(method):
                        out[f"{name}.{k}"] = str(inspect.signature(method))

    for name in fed.__all__:
        add(name, getattr(fed, name))
    return out


def plain(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(tree))
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--check", action="store_true", help="compare with the file")
    parser.add_argument("--only", default="", help="kinds whose name has this")
    args = parser.parse_args()
    for name, value in {
        "jax_compilation_cache_dir": str(_CACHE),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }.items():
        jax.config.update(name, value)
    warnings.simplefilter("ignore")
    before = dict(np.load(args.file, allow_pickle=False)) if args.check else {}
    found: dict[str, np.ndarray] = {}
    wrong = []
    for name, make in fits().items():
        if args.only not in name:
            continue
        started = time.monotonic()
        try:
            made = make()
        except ValueError as error:  # a refusal is a result, too; its words may change
            made = {"refused": type(error).__name__}
        now = {f"{name}|{k}": v for k, v in plain(made).items()}
        old = {k: v for k, v in before.items() if k.startswith(f"{name}|")}
        odd = [k for k in {*now, *old} if args.check and not same(now.get(k), old.get(k))]
        wrong += sorted(odd)
        found |= now
        print(
            f"{name:34} {time.monotonic() - started:6.1f} s  {'DIFFERENT' if odd else ''}",
            flush=True,
        )
        jax.clear_caches()
    for name, text in signatures().items():
        found[f"signature|{name}"] = np.array(text)
        if args.check and str(before.get(f"signature|{name}")) != text:
            print(f"signature of {name}: {before.get(f'signature|{name}')} is now {text}")
    gone = {k for k in before if k.startswith("signature|")} - set(found)
    print("\n".join(f"{k} is gone" for k in sorted(gone)))
    if args.check:
        print(f"{len(found)} compared, {len(wrong)} different: {wrong[:20]}")
        sys.exit(bool(wrong))
    np.savez_compressed(args.file, **found)


def same(x: np.ndarray | None, y: np.ndarray | None) -> bool:
    if x is None or y is None:
        return False
    return x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes()


if __name__ == "__main__":
    main()
