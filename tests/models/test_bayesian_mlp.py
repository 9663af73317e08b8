"""A Bayesian network on silos whose labels differ.

Its data, its density, its judgment, its surrogates, and modules that do not fit.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import _binary_silos as labels
import bayesian_mlp as mlp
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from flax import nnx
from numpyro.contrib.module import random_eqx_module, random_nnx_module
from numpyro.infer import MCMC
from numpyro.infer.util import log_density
from scipy import special, stats

import numpyro_fed as fed
from numpyro_fed.density.check import check_factorization
from numpyro_fed.density.factorize import factorize

DIM = 18 * 18 + 18 + 18 * 18 + 18 + 18 * 8 + 8 + 8 * 2 + 2


def weights(seed: int = 0, features: int = 18) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        k: rng.normal(0, 0.5, v.shape).astype(np.float32) for k, v in mlp.start(features, 0).items()
    }


def logits(sites: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """Evaluate the network in NumPy."""
    for i in range(4):
        x = x @ sites[f"net/layers.{i}.kernel"] + sites[f"net/layers.{i}.bias"]
        x = np.maximum(x, 0) if i < 3 else x
    return x


def few(seed: int = 0, sizes: tuple[int, ...] = (30, 40)) -> fed.Silos:
    rng = np.random.default_rng(seed)
    return fed.Silos(
        {f"s{s}": labels.given(rng, rng.integers(0, 2, n)) for s, n in enumerate(sizes)}
    )


def test_rows_given_their_labels_have_the_odds_they_are_said_to_have() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 18))
    np.testing.assert_allclose(
        labels.log_odds(x * np.r_[-1, -1, np.ones(16)]), -labels.log_odds(x), rtol=1e-12
    )
    rows = labels.given(rng, np.arange(20_000) % 2)
    assert rows["x"].dtype == np.float32
    for feature in (np.ones(20_000), rows["x"][:, 0], rows["x"][:, 1] * rows["x"][:, 2]):
        score = feature * (rows["y"] - special.expit(labels.log_odds(rows["x"])))
        assert abs(score.mean()) < 4 * score.std() / 20_000**0.5
    wrong = rows["x"][:, 0] * (1 - rows["y"] - special.expit(labels.log_odds(rows["x"])))
    assert abs(wrong.mean()) > 20 * wrong.std() / 20_000**0.5  # negative control: the other labels


def test_silos_have_the_labels_of_their_beta_draws() -> None:
    silos, test = labels.simulated(0.5, seed=3, size=200)
    shares = np.random.default_rng(3).beta(0.5, 0.5, labels.NUM_SILOS)
    found = np.array([np.asarray(silos[name]["y"]).sum() for name in silos.names])
    np.testing.assert_array_equal(found, [round(200 * share) for share in shares])
    assert test["y"].sum() == 100
    alike = [
        np.asarray(v["y"]).mean()
        for v in (labels.simulated(100, size=200)[0][f"silo{s}"] for s in range(30))
    ]
    assert np.std(alike) < 0.06 < 0.25 < np.std(found / 200)


def test_rows_are_dealt_into_equal_silos_as_large_as_labels_allow() -> None:
    rng = np.random.default_rng(0)
    y, shares = rng.permutation(np.repeat([0, 1], [530, 470])), np.array([0.1, 0.5, 0.95])
    by = labels.deal(rng, y, shares)
    size = int((by == 0).sum())
    assert [(by == s).sum() for s in range(3)] == [size] * 3
    np.testing.assert_array_equal([y[by == s].sum() for s in range(3)], np.round(shares * size))
    assert np.round(shares * (size + 2)).sum() > 470  # no larger ones: there are no more ones
    with pytest.raises(ValueError, match=r"enough labels of both kinds for 3 silos, got \[5, 0\]"):
        labels.deal(rng, np.zeros(5, int), shares)


@pytest.mark.ci
def test_the_density_is_that_of_the_network_written_in_numpy() -> None:
    sites, rows = weights(), labels.given(np.random.default_rng(1), np.arange(30) % 2)
    assert sum(v.size for v in sites.values()) == DIM

    def density(y: np.ndarray) -> float:
        prior = sum(stats.norm.logpdf(v).sum() for v in sites.values())
        return prior + special.log_softmax(logits(sites, rows["x"]), axis=1)[np.arange(30), y].sum()

    found = float(log_density(mlp.model, (), rows, sites)[0])
    assert abs(found - density(rows["y"])) < 1e-2
    assert abs(found - density(1 - rows["y"])) > 1  # negative control
    with_equinox = {
        k.replace("layers.", "layers[")
        .replace(".kernel", "].weight")
        .replace(".bias", "].bias"): v.T
        for k, v in sites.items()
    }
    assert abs(float(log_density(equinox_model, (), rows, with_equinox)[0]) - found) < 1e-2


class Layers(eqx.Module):
    layers: list[eqx.nn.Linear]

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers[:-1]:
            x = jax.nn.relu(layer(x))
        return self.layers[-1](x)


sizes = (18, *mlp.HIDDEN, 2)
layers = Layers(
    [eqx.nn.Linear(i, o, key=jax.random.key(0)) for i, o in zip(sizes[:-1], sizes[1:], strict=True)]
)


def equinox_model(x: Any, y: Any = None) -> None:
    net = random_eqx_module("net", layers, dist.Normal(0, 1))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=jax.vmap(net)(x)), obs=y)


@pytest.mark.ci
@pytest.mark.parametrize("model", [mlp.model, equinox_model])
def test_kernels_run_modules_of_flax_and_equinox(model: Callable) -> None:
    silos = few()
    check_factorization(factorize(model, silos), silos)
    flat = fed.surrogates.analytic(silos, np.zeros((2, DIM)), np.ones((2, DIM)))
    for kernel in (
        fed.DSGLD(model, 1e-4, 5, 10, validate=False),
        fed.FSGLD(
            model, fed.Step(1e-4, preconditioner=None), 5, 10, surrogate=flat, validate=False
        ),
    ):
        mcmc = MCMC(kernel, num_warmup=0, num_samples=3, progress_bar=False)
        mcmc.run(jax.random.key(0), silos)
        draws = mlp.flat(mcmc.get_samples(), 1)
        assert draws.shape == (3, DIM)
        assert np.isfinite(draws).all()
        assert (draws[1] != draws[0]).all()


def test_draws_are_judged_by_both_log_likelihoods_and_at_their_own_silo() -> None:
    """Networks that say the same of every row.

    The rows have p(y = 1) = 1 / (1 + exp(-b)), b by turns -1 and 2.
    """
    silos = fed.Silos(
        {f"s{s}": {"x": np.ones((20, 18), np.float32), "y": np.arange(20) < 5 * s} for s in (1, 3)}
    )
    test = {"x": np.zeros((8, 18), np.float32), "y": np.arange(8) % 2}
    b = np.tile([-1.0, 2.0], 200)
    draws = {k: np.zeros((400, *v.shape), np.float32) for k, v in weights().items()}
    draws["net/layers.3.bias"][:, 1] = b
    found = mlp.Fit(draws, (b > 0).astype(int))  # the second silo, of more ones, has drawn 2
    which = np.linspace(40, 399, mlp.JUDGED).astype(int)
    p = special.expit(b[which])
    value = mlp.judge(found, silos, test)
    assert abs(value["test"] - (np.log(p) + np.log(1 - p)).mean() / 2) < 1e-5
    assert abs(value["test, mean p"] - (np.log(p.mean()) + np.log((1 - p).mean())) / 2) < 1e-5
    share = np.where(b[which] > 0, 0.75, 0.25)
    own = (share * np.log(p) + (1 - share) * np.log(1 - p)).mean()
    assert abs(value["own silo"] - own) < 1e-5
    assert value["own silo"] > value["train"] + 0.1
    chance = mlp.judge(mlp.Fit({k: 0 * v for k, v in draws.items()}, found.silo), silos, test)
    np.testing.assert_allclose(list(chance.values()), -np.log(2), rtol=1e-5)


def test_the_best_log_likelihood_depends_on_whose_rows_they_are() -> None:
    silos, test = labels.simulated(0.5, seed=0, size=1_000)
    best = labels.best(silos, test)
    eta = labels.log_odds(test["x"])
    assert abs(best["test"] - stats.bernoulli.logpmf(test["y"], special.expit(eta)).mean()) < 1e-6
    assert best["own silo"] > best["train"] + 0.1
    pooled = {k: np.asarray(v) for k, v in silos.pooled.items()}
    odds, shift = labels.log_odds(pooled["x"]), special.logit(pooled["y"].mean())
    # of all shifts of the log odds the labels' own is best: the derivative vanishes there
    score = pooled["y"] - special.expit(odds + shift)
    assert abs(score.mean()) < 4 * score.std() / len(score) ** 0.5
    assert (
        abs(best["train"] - stats.bernoulli.logpmf(pooled["y"], special.expit(odds + shift)).mean())
        < 1e-5
    )


@pytest.mark.ci
def test_surrogates_are_the_silos_own() -> None:
    """A silo of ones alone, and one of zeros.

    Each chain's last bias leaves for its silo's label.
    """
    rng = np.random.default_rng(0)
    silos = fed.Silos(
        {
            name: labels.given(rng, np.full(60, k))
            for k, name in ((1, "ones"), (0, "zeros"), (1, "more"))
        }
    )
    q = mlp.surrogates(silos, 1e-3, num_draws=120).factors
    assert (q.precision > 0).all()
    means = q.eta / q.precision
    names = [name for name, v in sorted(weights().items()) for _ in range(v.size)]
    towards_one = np.diff(
        means[:, [i for i, name in enumerate(names) if name == "net/layers.3.bias"]], axis=1
    )[:, 0]
    assert towards_one[0] > 0.1
    assert towards_one[1] < -0.1
    assert towards_one[2] > 0.1


def by_rows(x: Any, y: Any = None) -> None:
    net = random_nnx_module(
        "net", nnx.Linear(x.shape[-1], max(2, len(x) // 2), rngs=nnx.Rngs(0)), dist.Normal(0, 1)
    )
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=net(x)), obs=y)


def large_by_rows(x: Any, y: Any = None) -> None:
    net = random_nnx_module(
        "net", nnx.Linear(x.shape[-1], 3 if len(x) > 45 else 2, rngs=nnx.Rngs(0)), dist.Normal(0, 1)
    )
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=net(x)), obs=y)


def by_labels(x: Any, y: Any = None) -> None:
    net = random_nnx_module(
        "net", nnx.Linear(x.shape[-1], int(y.max()) + 1, rngs=nnx.Rngs(0)), dist.Normal(0, 1)
    )
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=net(x)), obs=y)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            by_rows,
            r"latent sites \['net/bias', 'net/kernel'\] change shape with a silo's number of rows",
        ),
        (
            large_by_rows,
            r"fails on the rows of a silo .* least and most rows are \{'x': \(30, 40\)\}; .* same "
            r"shapes in all",
        ),
        (
            by_labels,
            r"Abstract tracer value .* expected one that takes all sizes from its arguments",
        ),
    ],
)
def test_a_network_whose_shape_depends_on_the_silo_is_said(model: Callable, message: str) -> None:
    mcmc = MCMC(fed.DSGLD(model, 1e-4, 5, 10), num_warmup=0, num_samples=2, progress_bar=False)
    with pytest.raises(ValueError, match="(?s)" + message):
        mcmc.run(jax.random.key(0), few())


def test_files_that_are_missing_or_cut_short_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMPYRO_FED_DATA", str(tmp_path))
    with pytest.raises(
        FileNotFoundError,
        match=r"susy_11k_lowlevel.npz, but there is no such.*STRUMPACK.*\(10000, 8\)",
    ):
        labels.susy(0.5)
    place = tmp_path / "susy" / "susy_11k_lowlevel.npz"
    place.parent.mkdir()
    rng = np.random.default_rng(0)
    arrays = {
        "X_train": rng.normal(size=(10_000, 8)).astype(np.float32),
        "y_train": rng.integers(0, 2, 10_000),
    }
    arrays |= {
        "X_test": rng.normal(size=(1_000, 8)).astype(np.float32),
        "y_test": rng.integers(0, 2, 1_000),
    }
    np.savez_compressed(place, **arrays)
    silos, test = labels.susy(100)
    assert len(silos) == 30
    assert len({len(silos[name]["y"]) for name in silos.names}) == 1
    assert test["y"].mean() == 0.5
    np.savez_compressed(place, **{**arrays, "X_train": arrays["X_train"][:9_000]})
    with pytest.raises(
        ValueError, match=r"susy_11k_lowlevel.npz: expected arrays of shapes .* got .*\(9000, 8\)"
    ):
        labels.susy(0.5)
    np.savez_compressed(place, **{k: v for k, v in arrays.items() if k != "y_test"})
    with pytest.raises(ValueError, match=r"expected a whole npz file.*y_test"):
        labels.susy(0.5)
    place.write_bytes(place.read_bytes()[:10_000])
    with pytest.raises(ValueError, match=r"expected a whole npz file of arrays .*get it anew from"):
        labels.susy(0.5)


@pytest.mark.ci
def test_quick(tmp_path: Path) -> None:
    frame = mlp.main(["--quick", "--figure", str(tmp_path / "mlp.png")]).set_index("method")
    assert (tmp_path / "mlp.png").is_file()
    # a draw of DSGLD follows the labels of its silo: far better there than on balanced rows
    assert frame.loc["DSGLD", "own silo"] > frame.loc["DSGLD", "test"] + 0.5
    assert frame.loc["DSGLD", "test, mean p"] > frame.loc["DSGLD", "test"] + 0.3
    assert jnp.isfinite(frame.loc["FSGLD", "test"])
