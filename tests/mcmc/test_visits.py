"""What a round is: how long, at which silo, and how many draws are kept of it."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from numpyro.infer import MCMC
from small_models import SilentSilos, intercepts, intercepts_silos, linear, linear_silos, view_of
from test_law import errors, exact_law, exact_surrogates, posterior_of, run, uncut, whitened_sd

import numpyro_fed as fed
from numpyro_fed.mcmc import gradients

SILOS = linear_silos()


def chains(kernel, num_samples=40, num_chains=4, silos=SILOS):
    mcmc = MCMC(
        kernel,
        num_warmup=4,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), silos)
    return mcmc


# Draws inside a visit


@pytest.mark.ci
def test_kept_draws_are_of_one_stay():
    mcmc = chains(
        fed.FSGLD(linear, num_local_steps=12, num_kept=4, surrogate=exact_surrogates(SILOS))
    )
    silo = np.asarray(mcmc.get_extra_fields(group_by_chain=True)["silo"]).reshape(4, 10, 4)
    assert (silo == silo[..., :1]).all()
    assert len(np.unique(silo)) == 4
    visits = np.asarray(mcmc.last_state.visits)
    assert (visits.sum(1) == 11).all()
    ledger = mcmc.sampler.ledger(mcmc.last_state)
    before = mcmc.sampler.ledger(mcmc.sampler.init(random.key(0), 0, model_args=(SILOS,)))
    np.testing.assert_array_equal(np.subtract(ledger.rounds, before.rounds), visits.sum(0))
    np.testing.assert_array_equal(
        np.subtract(ledger.gradient_evaluations, before.gradient_evaluations), 12 * visits.sum(0)
    )
    per_draw = np.subtract(ledger.bytes_up, before.bytes_up) / (4 * visits.sum(0))
    np.testing.assert_array_equal(per_draw, 8 + 4 + 5 + 8)


@pytest.mark.ci
def test_kept_draws_have_the_law_of_the_chain():
    """The last draw of each visit has the exact law of a chain that keeps no others.

    The draws before have no more noise.
    """
    given = exact_surrogates(SILOS, 0.2)
    kernel = uncut(fed.FSGLD(linear, 0.05, 8, None, given, num_kept=4), SILOS)
    draws = run(kernel, SILOS, num_samples=1200)["beta"]
    scale = np.linalg.cholesky(given.posterior().covariance)
    law = exact_law(SILOS, 0.05, 8, alpha=1.0, surrogates=given, scale=scale)
    assert np.abs(errors(draws[:, 3::4], *law)).max() < 4
    assert np.abs(errors(draws, *law)[:2]).max() < 4
    assert errors(draws, *law)[[2, 4]].max() < 4
    assert np.abs(errors(draws[:, 3::4], law[0], 1.3 * law[1])).max() > 8  # negative control


@pytest.mark.ci
def test_dsgld_keeps_the_draws_that_fsgld_without_weight_keeps():
    settings = {"step_size": 0.01, "num_local_steps": 8, "num_kept": 4}
    mcmc = chains(fed.DSGLD(linear, **settings))
    silo = np.asarray(mcmc.get_extra_fields(group_by_chain=True)["silo"]).reshape(4, 10, 4)
    assert (silo == silo[..., :1]).all()
    plain = {**settings, "step_size": fed.Step(0.01, preconditioner=None)}
    same = chains(fed.FSGLD(linear, alpha=0.0, surrogate=None, **plain))
    draws = mcmc.get_samples()["beta"]
    np.testing.assert_array_equal(draws, same.get_samples()["beta"])
    once = chains(fed.DSGLD(linear, step_size=0.01, num_local_steps=8)).get_samples()["beta"]
    assert (draws != once).any()  # negative control
    with pytest.raises(ValueError, match="num_kept=3 does not divide the steps of a visit"):
        fed.DSGLD(linear, **{**settings, "num_kept": 3})


# Silos


@pytest.mark.ci
def test_distinct_silos():
    f = np.full(4, 1 / 4)
    kernel = fed.FSGLD(
        linear, num_local_steps=2, surrogate=exact_surrogates(SILOS), selection="distinct"
    )
    mcmc = chains(kernel, num_samples=4000, num_chains=2)
    silo = np.asarray(mcmc.get_extra_fields(group_by_chain=True)["silo"])
    assert (silo[0] != silo[1]).all()  # no f exceeds one half
    for own in silo:
        share = np.bincount(own, minlength=4) / 4000
        assert np.abs((share - f) / np.sqrt(f * (1 - f) / 4000)).max() < 4
        again = (own[1:] == own[:-1]).mean()  # independent from round to round
        assert abs(again - (f**2).sum()) < 4 * np.sqrt((f**2).sum() / 4000)
    independent = chains(
        fed.FSGLD(linear, num_local_steps=2, surrogate=exact_surrogates(SILOS), selection=f), 200, 2
    )
    silo = np.asarray(independent.get_extra_fields(group_by_chain=True)["silo"])
    assert (silo[0] == silo[1]).any()  # negative control


def test_selection_by_size_and_by_noise():
    by_size = fed.FSGLD(
        linear, surrogate=exact_surrogates(SILOS), selection="size", num_local_steps=2
    )
    by_size.init(random.key(0), 0, model_args=(SILOS,))
    np.testing.assert_allclose(by_size._tuning.selection, np.array([3, 8, 5, 14]) / 30, rtol=1e-6)
    # one silo's surrogate is off: more visits there
    exact = exact_surrogates(SILOS)
    eta = np.asarray(exact.factors.eta).copy()
    eta[2] += 3
    wrong = fed.surrogates.Surrogates(
        fed.surrogates.Gaussian(jnp.asarray(eta), exact.factors.precision), exact.prior
    )
    equal, auto = (
        fed.FSGLD(linear, surrogate=wrong, num_local_steps=10, selection=s) for s in (None, "auto")
    )
    for kernel in (equal, auto):
        kernel.init(random.key(0), 0, model_args=(SILOS,))
    assert int(np.argmax(auto._tuning.selection)) == 2
    assert float(auto._tuning.step_size) > 1.5 * float(equal._tuning.step_size)


# What is injected


@pytest.mark.ci
def test_noise_correction_gives_the_right_sds():
    """The exact discretized law at a step that inflates the sds by an eighth without it."""
    given = exact_surrogates(SILOS, 0.3)
    scale = np.linalg.cholesky(given.posterior().covariance)
    kernel = uncut(
        fed.FSGLD(linear, fed.Step(bias_target=0.05, noise_correction=True), 5, None, given), SILOS
    )
    h = float(kernel._tuning.step_size)
    inject = np.asarray(kernel._tuning.inject, float)
    settings = {"alpha": 1.0, "surrogates": given, "scale": scale}
    law, without = (exact_law(SILOS, h, 5, **settings, inject=g) for g in (inject, None))
    exact = posterior_of(SILOS)[1]
    assert whitened_sd(without[1], exact) > 1.1
    assert whitened_sd(law[1], exact) < 1 + 0.3 * (whitened_sd(without[1], exact) - 1)
    draws = run(kernel, SILOS, num_samples=5000, num_warmup=500)[
        "beta"
    ]  # chains start at the wrong surrogates
    assert np.abs(errors(draws, *law)).max() < 4
    assert np.abs(errors(draws, *without)).max() > 8  # negative control


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_local_steps": "long"},
            "num_local_steps: expected an integer >= 1, got 'long'",
        ),
        (
            {"selection": "best"},
            "selection: expected .auto., .distinct., .size., probabilities or None, got 'best'",
        ),
        (
            {"selection": "auto", "step_size": fed.Step(0.1, preconditioner=None)},
            'selection="auto" needs whitened coordinates',
        ),
        ({"num_kept": 0}, "num_kept: expected an integer >= 1, got 0"),
        (
            {"num_kept": 7},
            "num_kept=7 does not divide the steps of a visit; expected a divisor of "
            "num_local_steps=40",
        ),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        fed.FSGLD(linear, **options)


@pytest.mark.parametrize(
    "options", [{"size": 0.1, "preconditioner": None}, {"size": lambda t: 0.1}]
)
def test_noise_correction_wants_whitened_coordinates_and_one_size(options):
    with pytest.raises(ValueError, match=r"noise_correction=True needs whitened .* one step size"):
        fed.Step(**options, noise_correction=True)


# Silos that do not answer


@pytest.mark.ci
def test_rounds_without_an_answer_are_lost_and_change_no_law():
    given = exact_surrogates(SILOS, 0.2)
    scale = np.linalg.cholesky(given.posterior().covariance)
    kernel = uncut(SilentSilos(linear, 0.05, 8, None, given, silence=0.3), SILOS)
    mcmc = chains(kernel, num_samples=600, num_chains=64)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["beta"], float)
    law = exact_law(SILOS, 0.05, 8, alpha=1.0, surrogates=given, scale=scale)
    assert np.abs(errors(draws[:, 100:], *law)).max() < 4
    assert np.abs(errors(draws[:, 100:], law[0], 1.3 * law[1])).max() > 8  # negative control
    fields = mcmc.get_extra_fields(group_by_chain=True)
    waited = (draws[:, 1:] == draws[:, :-1]).all(-1)
    silo = np.asarray(fields["silo"])
    assert (silo[:, 1:] == silo[:, :-1])[
        waited
    ].all()  # a draw that counts again is of the silo it was made at
    again = waited.mean()
    assert again == pytest.approx(0.3, abs=0.01)
    state = mcmc.last_state
    visits, silent = (np.asarray(x).sum(0) for x in (state.visits, state.unanswered))
    np.testing.assert_allclose(silent / visits, 0.3, atol=0.02)  # whichever the silo
    ledger, before = (
        kernel.ledger(state),
        kernel.ledger(kernel.init(random.key(0), 0, model_args=(SILOS,))),
    )
    np.testing.assert_array_equal(np.subtract(ledger.rounds, before.rounds), visits)
    np.testing.assert_array_equal(
        np.subtract(ledger.gradient_evaluations, before.gradient_evaluations), 8 * (visits - silent)
    )


# Minibatches with control variates


@pytest.mark.ci
def test_control_variates_are_unbiased_and_quieter():
    """The mean is the same as without, and there is no noise at the center.

    By enumeration of minibatches of one row.
    """
    found = {}
    for wanted in (True, False):
        kernel = fed.FSGLD(
            linear, fed.Step(0.05, control_variates=wanted), 2, 1, exact_surrogates(SILOS)
        )
        kernel.init(random.key(0), 0, model_args=(SILOS,))
        config, tuning = kernel._config, kernel._tuning._replace(cut=jnp.asarray(jnp.inf))
        for place, theta in (
            ("center", tuning.loc),
            ("one sd off", tuning.loc + gradients.push(tuning, jnp.ones(2) / 2**0.5)),
        ):
            for s in range(4):
                view = view_of(SILOS, s)
                silo = gradients.open_silo(config, tuning, None, view)
                each = []
                for i in range(len(SILOS[SILOS.names[s]]["x"])):
                    rows = view.batch(config.batch[0], jnp.array([i]))
                    here = silo._replace(kwargs={**silo.kwargs, **rows})
                    each.append(
                        np.asarray(
                            gradients.residual(config, tuning, theta, None, here, view)[0], float
                        )
                    )
                found[wanted, place, s] = np.stack(each)
    for place in ("center", "one sd off"):
        for s in range(4):
            with_, without = found[True, place, s], found[False, place, s]
            np.testing.assert_allclose(
                with_.mean(0), without.mean(0), atol=2e-3 * np.abs(without).max()
            )
            assert with_.var(0).sum() < (1e-6 if place == "center" else 1.0) * without.var(0).sum()


@pytest.mark.ci
def test_control_variates_have_the_posterior_and_allow_larger_steps():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3000, 2)).astype(np.float32)
    y = (x @ [0.5, -1.0] + rng.normal(size=3000)).astype(np.float32)
    silos = fed.split({"x": x, "y": y}, by=np.arange(3000) % 3)
    steps = [fed.Step(control_variates=c) for c in (True, False)]
    kernels = [fed.FSGLD(linear, step, batch_size=20) for step in steps]
    for kernel in kernels:
        kernel.init(random.key(0), 0, model_args=(silos,))
    steps = [float(k._tuning.step_size) for k in kernels]
    assert steps[0] > 10 * steps[1]
    draws = run(kernels[0], silos)["beta"]
    mean, covariance = posterior_of(silos)
    sd = np.sqrt(np.diag(covariance))
    error = ((draws - mean) / sd).mean(1)
    assert np.abs(error.mean(0) / (error.std(0, ddof=1) / 8)).max() < 4
    ratio = draws.std((0, 1)) / sd
    assert 0.98 < ratio.min() < ratio.max() < 1.05


def test_control_variates_want_minibatches():
    with pytest.raises(
        ValueError,
        match=r"control_variates=True is for minibatches; expected batch_size=\.\.\., got None",
    ):
        fed.FSGLD(linear, fed.Step(control_variates=True))
    kernel = fed.FSGLD(intercepts, fed.Step(control_variates=True), batch_size=2)
    with pytest.raises(
        ValueError, match=r"control_variates=True is for models without local latents, got \['a'\]"
    ):
        kernel.init(random.key(0), 0, model_args=(intercepts_silos(),))
