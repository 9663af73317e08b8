"""Personal Bayesian neural networks on MNIST.

The partition, both densities, prediction by a known q, and short fits.
"""

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hierarchical_bnn as bnn
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from marks import heavy
from multinomial_regression import images
from numpyro.infer.util import log_density
from scipy import special, stats

import numpyro_fed as fed
from numpyro_fed.density.check import check_factorization
from numpyro_fed.density.factorize import factorize

TRAIN = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)  # images of each digit
TEST = (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009)


def made_up(count: int, seed: int = 0, pixels: int = 20) -> dict[str, np.ndarray]:
    """Ten patterns under noise."""
    rng, patterns = np.random.default_rng(seed), np.random.default_rng(99).normal(size=(10, pixels))
    y = rng.integers(0, 10, count)
    return {"x": (patterns[y] + 0.7 * rng.normal(size=(count, pixels))).astype(np.float32), "y": y}


@pytest.mark.parametrize(
    ("have", "num_silos", "size"),
    [(TRAIN, 10, 5421), (TRAIN, 50, 1084), (TEST, 10, 892), (TEST, 50, 178)],
)
def test_silos_are_equal_nine_tenths_one_digit_and_as_large_as_rows_allow(
    have: tuple[int, ...], num_silos: int, size: int
) -> None:
    digits = np.random.default_rng(1).permutation(np.repeat(np.arange(10), have))
    by = bnn.partition(0, digits, num_silos)
    assert by.shape == digits.shape  # so that each row is in one silo at most
    found = np.array([np.bincount(digits[by == s], minlength=10) for s in range(num_silos)])
    assert (found.sum(1) == size).all()
    main = found[np.arange(num_silos), np.arange(num_silos) % 10]
    assert (abs(main - 0.9 * size) <= 0.5).all()
    others = np.array([np.delete(row, s % 10) for s, row in enumerate(found)])
    assert (np.ptp(others, axis=1) <= 1).all()
    assert np.ptp(found.sum(0)) == 0  # ten silos use all digits alike
    assert (bnn.shares(size + 1, num_silos).sum(0) > have).any()
    other = bnn.partition(1, digits, num_silos)  # another seed: other rows, as many
    assert (by != other).any()
    np.testing.assert_array_equal(np.bincount(digits[other == 0], minlength=10), found[0])


def test_a_digit_that_no_row_shows_is_said() -> None:
    with pytest.raises(
        ValueError, match=r"a row of every main digit for each of 10 silos, got digits \[0, 5, 5"
    ):
        bnn.partition(0, np.repeat(np.arange(1, 10), 5), 10)


def small() -> tuple[fed.Silos, dict[str, np.ndarray]]:
    """Return four silos of few rows of three pixels, and a position.

    Tests make latents of the right shapes of it.
    """
    rng, by = np.random.default_rng(2), np.array([2, 0, 1, 3, 3, 0, 2, 1, 0])
    x, y = rng.normal(size=(9, 3)).astype(np.float32), rng.integers(0, 10, 9)
    rows = {"x": "images", "y": "images", "silo": "images", "silos": "silos"}
    data = {"x": x, "y": y, "silo": by, "silos": np.arange(4)}
    return fed.split(data, by=by, rows=rows, index={"silo": "silos"}), data


def network(name: str, sites: dict[str, Any], x: np.ndarray, s: int) -> np.ndarray:
    """Logits of one image in silo s, in NumPy."""
    own = sites["mu"] + sites["sigma"] * sites["z"][s]
    first, last = (own, sites["w"]) if name == "hierarchical" else (sites["w"], own)
    hidden = np.maximum(bnn.FIRST * x @ first[1:] + first[0], 0)
    return hidden @ last[1:] + last[0]


@pytest.mark.parametrize("name", heavy(bnn.MODELS, "FedPop"))
def test_the_pooled_density_is_that_of_each_rows_own_network(name: str) -> None:
    _, data = small()
    rng, (first, last) = np.random.default_rng(3), ((4, bnn.HIDDEN), (1 + bnn.HIDDEN, 10))
    own, shared = (first, last) if name == "hierarchical" else (last, first)
    sites = {
        "mu": rng.normal(size=own),
        "sigma": 0.7,
        "w": rng.normal(size=shared),
        "z": rng.normal(size=(4, *own)),
    }
    prior = sum(
        stats.norm.logpdf(sites[k]).sum() for k in ("mu", "w", "z")
    ) + stats.halfnorm.logpdf(0.7)

    def density(silo: np.ndarray) -> float:
        logits = [network(name, sites, x, s) for x, s in zip(data["x"], silo, strict=True)]
        return prior + sum(
            special.log_softmax(v)[y] for v, y in zip(logits, data["y"], strict=True)
        )

    found = float(
        log_density(bnn.MODELS[name], (), data, {k: jnp.asarray(v) for k, v in sites.items()})[0]
    )
    assert abs(found - density(data["silo"])) < 0.01
    assert (
        abs(found - density(data["silo"][::-1])) > 0.1
    )  # negative control: networks of other silos


@pytest.mark.parametrize("model", bnn.MODELS.values(), ids=bnn.MODELS)
def test_silos_terms_sum_to_the_pooled_density(model: Callable) -> None:
    silos, _ = small()
    check_factorization(factorize(model, silos), silos)


def relabeled(silos: fed.Silos, y: np.ndarray) -> fed.Silos:
    """Return the same silos, each image with another digit."""
    pooled = silos.pooled
    told = {"x": "images", "y": "images", "silo": "images", "silos": "silos"}
    return fed.split(
        {**pooled, "y": y}, by=np.asarray(pooled["silo"]), rows=told, index={"silo": "silos"}
    )


def test_a_silo_is_judged_by_its_own_network() -> None:
    """Hidden unit k answers to pattern k; the last layer of silo s calls it digit k + s."""
    drawn = bnn.silos(made_up(2000, seed=1), 4)
    x, y, silo = (np.asarray(drawn.pooled[k]) for k in ("x", "y", "silo"))
    templates = np.linalg.lstsq(x, np.eye(10)[y], rcond=None)[0]
    right = 100 * ((x @ templates).argmax(-1) == y).mean()
    w, z = np.zeros((21, bnn.HIDDEN)), np.zeros((4, 1 + bnn.HIDDEN, 10))
    w[0, :10], w[1:, :10] = 1, templates / bnn.FIRST
    for s in range(4):
        z[s, 1:11] = 100 * np.roll(np.eye(10), s, axis=1)
    loc = ravel_pytree(
        {"mu": jnp.zeros(z.shape[1:]), "sigma": jnp.zeros(()), "w": jnp.asarray(w, jnp.float32)}
    )[0]
    z = jnp.asarray(z.reshape(4, -1), jnp.float32)
    q = {"auto_loc": loc, "auto_scale": jnp.full(loc.shape, 1e-6)}
    local = {"auto_local_loc": z, "auto_local_log_scale": jnp.full(z.shape, -14.0)}
    silos = relabeled(drawn, (y + silo) % 10)
    found = bnn.accuracy(bnn.fedpop, q | local, silos)
    assert right > 90
    assert abs(found.mean() - right) < 0.2, found
    # negative control: the networks of other silos
    assert (bnn.accuracy(bnn.fedpop, q | local | {"auto_local_loc": z[::-1]}, silos) < 20).all()


@pytest.mark.ci
def test_a_short_fit_learns_from_images_not_from_frequencies_alone() -> None:
    learned, tested = bnn.silos(made_up(6000), 4), bnn.silos(made_up(2000, seed=1), 4)
    rng, y, silo = (
        np.random.default_rng(0),
        np.array(learned.pooled["y"]),
        np.asarray(learned.pooled["silo"]),
    )
    for s in range(4):
        y[silo == s] = rng.permutation(y[silo == s])
    found, control = (
        bnn.accuracy(bnn.fedpop, bnn.sfvi(bnn.fedpop, rows, 50, 400).params, tested).mean()
        for rows in (learned, relabeled(learned, y))
    )
    floor = bnn.floor(tested).mean()
    assert 89 < floor < 91
    assert abs(control - floor) < 1.5, control  # all that labels dealt at random can teach
    assert found > max(control, floor) + 4, (found, control)


@pytest.mark.ci
@pytest.mark.usefixtures("optimized")
def test_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "NUMPYRO_FED_DATA" not in os.environ:
        write(tmp_path, monkeypatch)
    frame = bnn.main(["--quick"])
    assert list(frame.index) == [(model, method) for model in bnn.MODELS for method in bnn.METHODS]
    # always the main digit: 89.9
    assert (frame["accuracy"].loc[:, "SFVI"] > 91.5).all(), frame
    assert (frame["accuracy"].loc[:, "SFVI-Avg"] > 89.5).all(), frame
    assert (frame["MB up"] > 0).all()


def write(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files in the form of MNIST."""
    monkeypatch.setenv("NUMPYRO_FED_DATA", str(folder))
    (folder / "mnist").mkdir()
    for seed, (part, count) in enumerate((("train", 6000), ("t10k", 2000))):
        rows = made_up(count, seed, 784)
        pixels = np.clip(60 + 30 * rows["x"], 0, 255).astype(np.uint8)
        for kind, header, values in (
            ("images-idx3", 16, pixels),
            ("labels-idx1", 8, rows["y"].astype(np.uint8)),
        ):
            with gzip.open(folder / "mnist" / f"{part}-{kind}-ubyte.gz", "wb") as out:
                out.write(bytes(header) + values.tobytes())


def test_files_that_are_missing_or_cut_short_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMPYRO_FED_DATA", str(tmp_path))
    with pytest.raises(
        FileNotFoundError,
        match=r"train-images-idx3-ubyte.gz, but there is no such file.*60,000 images",
    ):
        bnn.main(["--quick"])
    write(tmp_path, monkeypatch)
    assert images("t10k", 10_000)["x"].shape == (2000, 784)
    place = tmp_path / "mnist" / "t10k-images-idx3-ubyte.gz"
    whole = place.read_bytes()
    place.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        ValueError,
        match=r"t10k-images-idx3-ubyte.gz: expected a whole file compressed by gzip.*end-of-stream",
    ):
        images("t10k", 10_000)
    place.write_bytes(gzip.compress(gzip.decompress(whole)[:-784]))
    with pytest.raises(
        ValueError, match=r"784 pixels of each of 2,000 digits of 't10k', got 1,567,216"
    ):
        images("t10k", 10_000)
