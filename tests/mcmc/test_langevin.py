"""One step and one visit of the Langevin kernels, exactly.

By sums, quadratures and detailed balance.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from small_models import linear, linear_precisions, linear_silos, run_kernel, view_of

import numpyro_fed as fed
from numpyro_fed.density.factors import pooled_log_density
from numpyro_fed.mcmc import gradients
from numpyro_fed.mcmc.options import Options
from numpyro_fed.mcmc.setup import make_setup
from numpyro_fed.surrogates import Gaussian, Surrogates

PLAIN = fed.Step(0.01, preconditioner=None)


def options(**given):
    settings = {
        "num_local_steps": 1, "batch_size": None, "surrogate": None, "alpha": 0.0,
        "selection": None, "public": (), "validate": False,
    }  # fmt: skip
    step = fed.Step(0.01, preconditioner=given.pop("preconditioner", None))
    return Options(step, **{**settings, **given})


def random_surrogates(rng, num, dim, diagonal=False):
    """Return symmetric, not necessarily positive definite precisions.

    Only their product with the prior must be positive definite.
    """
    root = rng.normal(size=(num, dim, dim))
    precision = root + np.swapaxes(root, 1, 2)
    prior = np.eye(dim) * (1 - np.linalg.eigvalsh(precision.sum(0)).min())
    if diagonal:
        precision = rng.normal(size=(num, dim))
        prior = np.full(dim, 1 - precision.sum(0).min())
    eta = rng.normal(size=(num, dim))
    return Surrogates(
        Gaussian(jnp.asarray(eta), jnp.asarray(precision)),
        Gaussian(jnp.zeros(dim), jnp.asarray(prior)),
    )


def exact_surrogates(silos):
    eta, precision = linear_precisions(silos)
    return Surrogates(
        Gaussian(jnp.asarray(eta), jnp.asarray(precision)), Gaussian(jnp.zeros(2), jnp.eye(2))
    )


# Lemma 1


def logistic(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with fed.silo_plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=tau * (x @ beta)), obs=y)


def logistic_silos():
    rng = np.random.default_rng(3)
    sizes = {"a": 4, "b": 9, "c": 6}
    return fed.Silos(
        {
            k: {"x": rng.normal(size=(n, 2)).astype(np.float32), "y": rng.integers(0, 2, n)}
            for k, n in sizes.items()
        }
    )


@partial(jax.jit, static_argnames=("config",))
def mean_over_single_rows(config, tuning, theta, silos, number):
    """Mean of the residual e over a silo's minibatches of one row, in whitened units."""
    view = view_of(silos, number)
    silo = gradients.open_silo(config, tuning, None, view)
    group, _ = config.batch

    def one(row):
        here = silo._replace(kwargs={**silo.kwargs, **view.batch(group, row[None])})
        return gradients.residual(config, tuning, theta, None, here, view)[0]

    weights = view.mask(group) / view.size(group)
    return weights @ jax.vmap(one)(jnp.arange(dict(view.pad)[group]) % view.size(group))


@partial(jax.jit, static_argnames=("config",))
def residual_and_cut(config, tuning, theta, silos, number):
    view = view_of(silos, number)
    return gradients.residual(
        config, tuning, theta, None, gradients.open_silo(config, tuning, None, view), view
    )


def full_batch_residual(*args):
    return residual_and_cut(*args)[0]


@partial(jax.jit, static_argnames=("config",))
def server_drift(config, tuning, theta, silos):
    gradient = gradients._server_gradient(config, tuning, theta, view_of(silos, 0))
    return gradients.pull_back(tuning, gradient)


def expected_drift(config, tuning, theta, silos, residual):
    """Return the drift averaged over the silos, each with its probability of being visited."""
    parts = [
        np.asarray(residual(config, tuning, theta, silos, s), np.float64) for s in range(len(silos))
    ]
    return np.asarray(tuning.selection) @ np.stack(parts) + np.asarray(
        server_drift(config, tuning, theta, silos)
    )


@jax.jit
def logistic_gradient(silos, theta):
    def density(theta):
        return pooled_log_density(logistic, silos, {"beta": theta[:2], "tau": theta[2]})

    return jax.grad(density)(theta)


@pytest.mark.parametrize("diagonal", [False, True], ids=["full", "diagonal"])
@pytest.mark.parametrize("preconditioner", [None, "surrogate"])
@pytest.mark.parametrize("seed", [0, 1])
def test_lemma_1_the_estimator_averages_to_the_full_gradient(seed, preconditioner, diagonal):
    rng = np.random.default_rng(seed)
    silos = logistic_silos()
    alpha = float(rng.uniform(0.1, 3))
    config, tuning, *_ = make_setup(
        logistic,
        silos,
        {},
        options(
            batch_size=1,
            alpha=alpha,
            selection=rng.dirichlet([2, 2, 2]),
            preconditioner=preconditioner,
            surrogate=random_surrogates(rng, 3, 3, diagonal),
        ),
    )
    config = dataclasses.replace(config, cut=False)
    theta = jnp.asarray(rng.normal(size=3), jnp.float32)
    gradient = logistic_gradient(silos, theta)
    expected = np.asarray(gradients.pull_back(tuning, gradient))
    for residual in (mean_over_single_rows, full_batch_residual):
        one = (
            config if residual is mean_over_single_rows else dataclasses.replace(config, batch=None)
        )
        got = expected_drift(one, tuning, theta, silos, residual)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=2e-4 * np.abs(expected).max())
    # negative control: a product of surrogates that lacks one factor is biased
    conducive = tuning.conducive
    lacking = conducive._replace(total_shift=conducive.total_shift - conducive.shift[0])
    wrong = expected_drift(
        config, tuning._replace(conducive=lacking), theta, silos, mean_over_single_rows
    )
    assert np.abs(wrong - expected).max() > 0.01 * np.abs(expected).max()


@pytest.mark.parametrize("diagonal", [False, True], ids=["full", "diagonal"])
@pytest.mark.parametrize("preconditioner", [None, "surrogate"])
def test_a_step_without_a_cut_has_the_same_drift_in_one_call_of_the_model(preconditioner, diagonal):
    rng = np.random.default_rng(5)
    silos = logistic_silos()
    config, tuning, *_ = make_setup(
        logistic,
        silos,
        {},
        options(
            alpha=0.7,
            selection=rng.dirichlet([2, 2, 2]),
            preconditioner=preconditioner,
            surrogate=random_surrogates(rng, 3, 3, diagonal),
        ),
    )
    config = dataclasses.replace(config, cut=False)
    theta = jnp.asarray(rng.normal(size=3), jnp.float32)
    server = np.asarray(server_drift(config, tuning, theta, silos))
    drift = jax.jit(gradients.drift, static_argnums=0)
    for s in range(3):
        view = view_of(silos, s)
        got, separate, cut = drift(
            config, tuning, theta, None, gradients.open_silo(config, tuning, None, view), view
        )
        e = np.asarray(full_batch_residual(config, tuning, theta, silos, s))
        assert separate is None
        assert cut is None
        np.testing.assert_allclose(got, server + e, rtol=1e-4, atol=1e-4 * np.abs(e).max())
        assert np.abs(e).max() > 0.1  # negative control: the silo's part is not nothing


def test_exact_surrogates_leave_no_residual():
    silos = linear_silos()
    config, tuning, *_ = make_setup(
        linear,
        silos,
        {},
        options(
            alpha=1.0,
            surrogate=exact_surrogates(silos),
            preconditioner="surrogate",
            selection=[0.1, 0.2, 0.3, 0.4],
        ),
    )
    theta = jnp.asarray([0.7, -2.0])
    for s in range(4):
        assert np.abs(full_batch_residual(config, tuning, theta, silos, s)).max() < 2e-4
        # negative control: DSGLD's residual at the same point is not small
        alone = tuning._replace(alpha=jnp.asarray(0.0))
        assert np.abs(full_batch_residual(config, alone, theta, silos, s)).max() > 0.3


def test_residual_of_a_silo_does_not_depend_on_the_order_or_size_of_the_others():
    rng = np.random.default_rng(5)
    silos = linear_silos()
    given = random_surrogates(rng, 4, 2)
    f = np.array([0.1, 0.2, 0.3, 0.4])
    theta = jnp.asarray(rng.normal(size=2), jnp.float32)

    def residuals(order):
        part = fed.Silos({silos.names[s]: silos[silos.names[s]] for s in order})
        factors = Gaussian(
            given.factors.eta[jnp.asarray(order)], given.factors.precision[jnp.asarray(order)]
        )
        settings = options(
            alpha=0.7,
            surrogate=Surrogates(factors, given.prior),
            selection=f[order] / f[order].sum(),
        )
        config, tuning, *_ = make_setup(linear, part, {}, settings)
        tuning = tuning._replace(
            loc=jnp.zeros(2), conducive=tuning.conducive._replace(shift=jnp.asarray(factors.eta))
        )
        tuning = tuning._replace(selection=jnp.asarray(f[order]))
        return {
            part.names[i]: np.asarray(full_batch_residual(config, tuning, theta, part, i))
            for i in range(len(order))
        }

    reference = residuals([0, 1, 2, 3])
    for order in ([3, 1, 0, 2], [2, 0]):
        for name, e in residuals(order).items():
            np.testing.assert_allclose(e, reference[name], rtol=1e-5, atol=1e-5)


def test_the_cut_shortens_the_residual_and_is_counted():
    silos = linear_silos()
    config, tuning, *_ = make_setup(
        linear,
        silos,
        {},
        options(alpha=1.0, surrogate=exact_surrogates(silos), preconditioner="surrogate"),
    )
    assert config.cut
    assert float(tuning.cut) == 8
    tuning = tuning._replace(alpha=jnp.asarray(0.0))
    for distance, cut in ((0.1, 0), (300.0, 1)):
        theta = tuning.loc + distance
        e, was_cut = residual_and_cut(config, tuning, theta, silos, 3)
        whole, _ = residual_and_cut(dataclasses.replace(config, cut=False), tuning, theta, silos, 3)
        assert int(was_cut) == cut
        length = np.linalg.norm(whole)
        np.testing.assert_allclose(e, np.asarray(whole) * (8 / length if cut else 1.0), rtol=1e-5)


# Visits


def test_sgld_is_dsgld_with_one_silo():
    silos = linear_silos()
    rows = [silos[name] for name in silos]
    one = fed.Silos({"all": {k: np.concatenate([r[k] for r in rows]) for k in "xy"}})
    for batch in (None, 3):
        sgld = run_kernel(fed.SGLD(linear, 0.01, 7, batch, validate=False), silos)
        dsgld = run_kernel(fed.DSGLD(linear, 0.01, 7, batch, validate=False), one)
        np.testing.assert_allclose(sgld.z["beta"], dsgld.z["beta"], rtol=1e-6)
        assert int(sgld.visits.sum()) == int(sgld.visits[0]) == 3


def test_fsgld_with_one_silo_is_sgld():
    silos = linear_silos().as_one()
    given = random_surrogates(np.random.default_rng(15), 1, 2)
    start = {"beta": jnp.array([0.3, 0.1])}
    fsgld = run_kernel(fed.FSGLD(linear, PLAIN, 7, surrogate=given), silos, init_params=start)
    sgld = run_kernel(fed.SGLD(linear, 0.01, 7), silos, init_params=start)
    np.testing.assert_allclose(fsgld.z["beta"], sgld.z["beta"], rtol=1e-4)


@pytest.mark.ci
def test_dsgld_is_fsgld_with_alpha_zero():
    silos = linear_silos()
    dsgld = run_kernel(fed.DSGLD(linear, 0.01, 7, 3), silos)
    fsgld = run_kernel(fed.FSGLD(linear, PLAIN, 7, 3, alpha=0.0, surrogate=None), silos)
    np.testing.assert_array_equal(dsgld.z["beta"], fsgld.z["beta"])
    other = run_kernel(
        fed.FSGLD(linear, PLAIN, 7, 3, alpha=0.5, surrogate=exact_surrogates(silos)),
        silos,
    )
    assert np.abs(np.asarray(dsgld.z["beta"] - other.z["beta"])).max() > 1e-3  # negative control


def straight(y):
    """Rows so far away that the gradient is constant, and so large that noise does not matter."""
    mu = numpyro.sample("mu", dist.Normal(0, 1e6))
    with fed.silo_plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def rising(count):
    return 1e-10 * (1.0 + count)


@pytest.mark.parametrize(
    ("steps", "batch"), [(1, None), (7, None), (100, None), (250, None), (211, 2)]
)
def test_every_local_step_is_made_once_with_its_own_step_size(steps, batch):
    """The chain moves by gradient / 2 x the sum of its steps' sizes, whatever the blocks."""
    silos = fed.Silos(
        {"a": {"y": np.full(4, 1e7, np.float32)}, "b": {"y": np.full(4, 1.1e7, np.float32)}}
    )
    kernel = fed.DSGLD(straight, rising, steps, batch, validate=False)
    state = kernel.init(random.key(0), 0, {"mu": jnp.zeros(())}, model_args=(silos,))
    for r in range(2):
        before = float(state.z["mu"])
        state = kernel.sample(state, (silos,), {})
        counts = np.arange(r * steps, (r + 1) * steps)
        gradient = [8e7, 8.8e7][int(state.silo)]
        moved = gradient / 2 * float(rising(counts).sum())
        # one step more or less would be 2 / 250 of a visit
        noise = 4 * np.sqrt(float(rising(counts).sum()))
        assert float(state.z["mu"]) - before == pytest.approx(moved, rel=1e-4, abs=noise)
        assert noise < 0.002 * moved or steps < 100
        assert float(state.step_size) == pytest.approx(float(rising(counts[-1])), rel=1e-5)
    assert int(state.i) == 2
    assert kernel.ledger(state).gradient_evaluations == tuple(int(v) * steps for v in state.visits)


def test_blocks_are_bounded_by_memory():
    rows = np.zeros((50, 1000), np.float32)
    wide = fed.Silos({"a": {"x": rows, "y": rows[:, 0]}, "b": {"x": rows[:40], "y": rows[:40, 0]}})
    config, *_ = make_setup(linear, wide, {}, options(num_local_steps=500, batch_size=40))
    assert (8 << 20) // (40 * 4 * 1001) == 52  # steps whose rows fit
    assert config.block == 50
    assert dataclasses.replace(config, num_local_steps=40).block == 40
    assert (
        dataclasses.replace(config, num_local_steps=53).block == 27
    )  # 53 is prime: two blocks that differ by one step
    config, *_ = make_setup(linear, wide, {}, options(num_local_steps=500))
    assert config.block == 125


def quartic(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with fed.silo_plate("rows", y.shape[0]):
        numpyro.factor("term", -((mu - y) ** 4))


def first_stay_is_huge(count):
    return jnp.where(count < 20, 1e3, 1e-4)


def test_a_stay_that_leaves_the_reals_is_undone_and_counted():
    silos = fed.Silos({"a": {"y": np.zeros(2, np.float32)}, "b": {"y": np.ones(2, np.float32)}})
    kernel = fed.DSGLD(quartic, first_stay_is_huge, 20)
    state = kernel.init(random.key(0), 0, {"mu": jnp.asarray(0.5)}, model_args=(silos,))
    state = kernel.sample(state, (silos,), {})
    assert bool(state.diverging)
    assert float(state.z["mu"]) == 0.5
    state = kernel.sample(state, (silos,), {})
    assert not bool(state.diverging)
    assert np.isfinite(float(state.z["mu"]))
    assert float(state.z["mu"]) != 0.5


def test_ledger_counts_rounds_gradients_and_bytes():
    silos = linear_silos()
    kernel = fed.FSGLD(linear, num_local_steps=5, surrogate=exact_surrogates(silos), validate=False)
    state = run_kernel(kernel, silos, rounds=4)
    ledger, before = (
        kernel.ledger(state),
        kernel.ledger(kernel.init(random.key(0), 0, model_args=(silos,))),
    )
    visits = np.asarray(state.visits)
    assert ledger.silos == silos.names
    assert visits.sum() == 4
    for field, each in {
        "rounds": 1,
        "gradient_evaluations": 5,
        "bytes_down": 8 + 4,
        "bytes_up": 8 + 4 + 5 + 8,
    }.items():
        gained = np.subtract(getattr(ledger, field), getattr(before, field))
        np.testing.assert_array_equal(gained, visits * each)
        assert min(getattr(before, field)) > 0  # what the pilot cost
