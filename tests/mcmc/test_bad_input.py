"""Kernels refuse bad input before anything is compiled.

The error names the silo, site or argument, and the mend.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.contrib.control_flow import cond, scan
from numpyro.infer import MCMC, NUTS, Gibbs
from small_models import intercepts, intercepts_silos, linear, linear_silos

import numpyro_fed as fed
from numpyro_fed.density.factorize import factorize
from numpyro_fed.mcmc import _kernel
from numpyro_fed.mcmc import setup as make_setup
from numpyro_fed.surrogates import Gaussian, Surrogates

SILOS = linear_silos()


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    """Fail if a fit, the pilot or a round begins before the error."""

    def begun(*args, **kwargs):
        raise AssertionError("compilation began before the input was refused")

    for owner, name in [
        (make_setup, "check_factorization"),
        (make_setup.score, "fit"),
        (make_setup.laplace, "fit"),
        (make_setup.pilot, "choose_step_size"),
        (_kernel, "one_round"),
        (_kernel, "first_state"),
        (_kernel, "first_states"),
    ]:
        monkeypatch.setattr(owner, name, begun)


def run(kernel, *args, **kwargs):
    MCMC(kernel, num_warmup=0, num_samples=1, progress_bar=False).run(
        random.key(0), *args, **kwargs
    )


# Arguments of the kernels, refused at construction


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_size": 0.0}, "step_size: expected a finite number > 0, got 0.0"),
        ({"step_size": -1e-3}, "step_size: expected a finite number > 0, got -0.001"),
        ({"step_size": float("nan")}, "step_size: expected a finite number > 0, got nan"),
        (
            {"step_size": "Auto"},
            'step_size: expected a positive number, a schedule, "auto" or "adaptive", got \'Auto\'',
        ),
        (
            {"size": "auto", "preconditioner": None},
            'step_size="auto" needs whitened coordinates; expected preconditioner="surrogate"',
        ),
        ({"num_local_steps": 0}, "num_local_steps: expected an integer >= 1, got 0"),
        ({"num_local_steps": 2.5}, "num_local_steps: expected an integer >= 1, got 2.5"),
        ({"batch_size": 0}, "batch_size: expected an integer >= 1 or None"),
        ({"batch_size": 2.5}, r"batch_size: expected an integer >= 1 or None .* got 2.5"),
        ({"step_size": float("inf")}, "step_size: expected a finite number > 0, got inf"),
        (
            {"surrogate": "median"},
            'surrogate: expected "score", "laplace", "moments", a fed.surrogates.Surrogates or '
            "None, got 'median'",
        ),
        (
            {"surrogate": 3},
            'surrogate: expected "score", "laplace", "moments", a fed.surrogates.Surrogates or '
            "None, got 3",
        ),
        ({"preconditioner": np.eye(2)}, 'preconditioner: expected "surrogate" or None, got array'),
        (
            {"surrogate": None},
            'alpha > 0: expected surrogate="score".* got None; or take DSGLD',
        ),
        (
            {"preconditioner": "diagonal"},
            "preconditioner: expected \"surrogate\" or None, got 'diagonal'",
        ),
        ({"alpha": -1.0}, "alpha: expected a finite number >= 0, got -1.0"),
        ({"alpha": float("inf")}, "alpha: expected a finite number >= 0, got inf"),
        ({"bias_target": 0.0}, r"bias_target: expected a number in \(0, 1\), got 0.0"),
        ({"bias_target": 1.5}, r"bias_target: expected a number in \(0, 1\), got 1.5"),
    ],
)
def test_arguments(options, message):
    step = {k: v for k, v in options.items() if k in fed.Step.__dataclass_fields__}
    rest = {k: v for k, v in options.items() if k not in step}
    with pytest.raises(ValueError, match=message):
        fed.FSGLD(linear, **rest, **({"step_size": fed.Step(**step)} if step else {}))


def test_auto_step_size_of_the_kernels_without_preconditioner():
    for kernel in (fed.SGLD, fed.DSGLD):
        assert kernel(linear, "auto").surrogates is None
        with pytest.raises(TypeError, match="preconditioner"):
            kernel(linear, "auto", preconditioner="surrogate")


def test_no_model():
    with pytest.raises(TypeError, match=r"expected a model \(a callable\), got dict"):
        fed.FSGLD({})


# Arguments of run


@pytest.mark.parametrize(
    ("args", "got"),
    [
        ((), "no positional argument"),
        ((np.ones(3),), "ndarray"),
        ((SILOS, 1), "Silos, int"),
        (({"x": 1},), "dict"),
    ],
)
def test_run_without_silos(args, got):
    with pytest.raises(
        ValueError,
        match=rf"expected mcmc.run\(rng_key, silos\).* got {got}; one silo with all rows",
    ):
        run(fed.FSGLD(linear), *args)


def test_run_with_other_arguments():
    with pytest.raises(
        ValueError,
        match=r"arguments \['sd', 'x'\] of mcmc.run: put all arguments .* into the silos",
    ):
        run(fed.FSGLD(linear), SILOS, x=1, sd=2)


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (
            [0.5, 0.5],
            r"selection: expected one probability for each of the 4 silos, got shape \(2,\)",
        ),
        (0.25, r"one probability for each of the 4 silos, got shape \(\)"),
        (
            [0.4, 0.3, 0.0, 0.3],
            r"expected probabilities > 0, got 0.0 for silo 'silo 2'; a silo that is never visited",
        ),
        ([0.4, 0.3, -0.1, 0.4], "got -0.1 for silo 'silo 2'"),
        ([0.4, 0.3, 0.2, 0.3], "expected probabilities that sum to one, got a sum of 1.2"),
        ([0.4, 0.3, 0.3, float("nan")], "expected probabilities > 0, got nan for silo 'silo 3'"),
        (
            {"silo 0": 1.0},
            r"expected numbers, one for each of the silos \['silo 0', .* got \{'silo 0': 1.0\}",
        ),
        (
            ["a", "b", "c", "d"],
            r"expected numbers, one for each of the silos .* got \['a', 'b', 'c', 'd'\]",
        ),
    ],
)
def test_selection(selection, message):
    with pytest.raises(ValueError, match=message):
        run(fed.FSGLD(linear, selection=selection), SILOS)


def test_batch_size_above_a_silos_rows_names_the_silo():
    with pytest.raises(
        ValueError,
        match=r"batch_size=4 is more than silo 'silo 0' has: 3 rows of .*; expected at most 3, or "
        r"None",
    ):
        run(fed.FSGLD(linear, batch_size=4), SILOS)


def test_batch_size_with_local_latents_under_an_adaptive_step():
    with pytest.raises(
        ValueError, match=r"batch_size=2 with local latents \['a'\] .* expected batch_size=None"
    ):
        run(fed.SGLD(intercepts, "adaptive", batch_size=2), intercepts_silos())


def test_batch_size_of_elements_and_rows_that_do_not_point_to_them():
    def model(y, z):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with fed.silo_plate("groups", y.shape[0]):
            a = numpyro.sample("a", dist.Normal(mu, 1))
            numpyro.sample("y", dist.Normal(a, 1), obs=y)
        with fed.silo_plate("others", z.shape[0]):
            numpyro.sample("z", dist.Normal(mu, 1), obs=z)

    silos = fed.Silos(
        {s: {"y": n + np.ones(n - 1), "z": n + np.ones(n)} for s, n in (("a", 4), ("b", 5))}
    )
    with pytest.raises(
        ValueError, match=r"batch_size takes elements of 'y', .* rows of 'z' do not point there"
    ):
        run(fed.FSGLD(model, batch_size=2), silos)


def test_batch_size_with_latents_that_depend_on_each_other():
    def walk(y):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        with fed.silo_plate("times", y.shape[0]):
            z = numpyro.sample("z", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(scale * jnp.cumsum(z), 0.5), obs=y)

    silos = fed.Silos({"a": {"y": np.array([0.3, 0.1, -0.4])}, "b": {"y": np.array([0.5, 0.2])}})
    with (
        pytest.warns(UserWarning, match="not independent"),
        pytest.raises(
            ValueError,
            match=r"latents \['z'\] that are one unit in a silo, or nested: they need all rows of "
            r"a silo; expected batch_size=None",
        ),
    ):
        run(fed.FSGLD(walk, batch_size=2), silos)


def test_batch_size_with_two_row_groups():
    def model(x, y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        for name, data in (("first", x), ("second", y)):
            with fed.silo_plate(name, data.shape[0]):
                numpyro.sample(f"{name}_obs", dist.Normal(mu, 1), obs=data)

    silos = fed.Silos(
        {"a": {"x": np.ones(3), "y": np.ones(4)}, "b": {"x": np.zeros(3), "y": np.ones(5)}}
    )
    with pytest.raises(
        ValueError, match=r"batch_size subsamples one row group, but .* expected batch_size=None"
    ):
        run(fed.FSGLD(model, batch_size=2), silos)


def surrogates(num=4, dim=2, prior=1.0, precision=1.0):
    eye = jnp.eye(dim)
    factors = Gaussian(jnp.zeros((num, dim)), jnp.broadcast_to(precision * eye, (num, dim, dim)))
    return Surrogates(factors, Gaussian(jnp.zeros(dim), prior * eye))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            surrogates(dim=3),
            r"surrogate: expected factors of 4 silos in dimension 2 \(\['beta'\] unconstrained\), "
            r"got Surrogates\(4 silos, dimension 3",
        ),
        (surrogates(num=3), r"expected factors of 4 silos .* got Surrogates\(3 silos, dimension 2"),
        (surrogates(precision=-1.0), "not positive definite: smallest eigenvalue -3; expected > 0"),
    ],
)
def test_given_surrogates(given, message):
    with pytest.raises(ValueError, match=message):
        run(fed.FSGLD(linear, surrogate=given), SILOS)


# Models


def test_no_silo_plate():
    def model(x, y):
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ beta, 1), obs=y)

    for kernel in (fed.FSGLD(model), fed.DSGLD(model, 0.1), fed.SGLD(model, 0.1)):
        with pytest.raises(
            ValueError,
            match=r"the model has no silo plate.* write fed.silo_plate.*or mark one from out",
        ):
            run(kernel, SILOS)


def test_no_global_site():
    def model(y):
        with fed.silo_plate("rows", y.shape[0]):
            z = numpyro.sample("z", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(z, 1), obs=y)

    silos = fed.Silos({"a": {"y": np.ones(3)}, "b": {"y": np.zeros(4)}})
    with pytest.raises(ValueError, match="no global latent site: its silos have nothing in common"):
        run(fed.FSGLD(model), silos)


# Steps in time

PATHS = fed.Silos({"oslo": {"y": np.ones((3, 2))}, "rome": {"y": np.zeros((4, 2))}})


def steps_inside(y, plate=fed.silo_plate):
    mu = numpyro.sample("mu", dist.Normal(0, 1))

    def step(at, now):
        at = numpyro.sample("at", dist.Normal(at, 1))
        numpyro.sample("y", dist.Normal(at, 1), obs=now)
        return at, None

    with plate("patients", y.shape[0]):
        scan(step, mu * jnp.ones(y.shape[0]), y.T)


def branch_inside(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with fed.silo_plate("patients", y.shape[0]):
        cond(True, lambda _: numpyro.sample("a", dist.Normal(mu, 1)), lambda _: 0.0, None)


def steps_outside(y, plate=fed.silo_plate):
    mu = numpyro.sample("mu", dist.Normal(0, 1))

    def step(at, now):
        with plate("patients", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, 1), obs=now)
        return at, None

    scan(step, None, y.T)


def marked(model):
    return fed.mark_silos(lambda y: model(y, numpyro.plate), "patients")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (steps_inside, "plate 'patients' has a scan or a cond inside it"),
        (marked(steps_inside), "plate 'patients' has a scan or a cond inside it"),
        (branch_inside, "plate 'patients' has a scan or a cond inside it"),
        (steps_outside, r"plates \['patients'\] are inside a scan or a cond"),
        (marked(steps_outside), r"did not find \['patients'\]; use the names"),
    ],
)
def test_scan_with_silo_plates(model, words):
    with pytest.raises(
        ValueError, match=rf"{words}.*; expected, inside it, a Python loop over the steps"
    ):
        run(fed.FSGLD(model), PATHS)


def test_scan_of_global_sites_and_a_loop_in_a_silo_plate():
    def model(y):
        _, level = scan(
            lambda at, _: (numpyro.sample("level", dist.Normal(at, 1)),) * 2, 0.0, None, length=2
        )
        with fed.silo_plate("patients", y.shape[0]):
            at = 0.0
            for t in range(y.shape[1]):
                at = numpyro.sample(f"at {t}", dist.Normal(at + level[t], 1))
                numpyro.sample(f"y {t}", dist.Normal(at, 1), obs=y[:, t])

    factors = factorize(model, PATHS)
    assert factors.global_sites == (("level", (2,)),)
    assert [site.name for site in factors.local_sites] == ["at 0", "at 1"]


# Shapes


@pytest.mark.ci
def test_a_response_of_one_column_in_one_silo(monkeypatch):
    """Nothing tells rows from columns in NumPyro, which pairs each with each."""
    monkeypatch.undo()

    def model(x, y):
        beta = numpyro.sample("beta", dist.Normal(0, 1))
        with fed.silo_plate("patients", x.shape[0]):
            numpyro.sample("y", dist.Normal(beta * x, 1), obs=y)

    x = np.linspace(-1, 1, 6)
    with pytest.warns(
        UserWarning,
        match=r"the one silo 'oslo' depend on each other .*a response of shape \(n, 1\)",
    ):
        run(fed.FSGLD(model), fed.Silos({"oslo": {"x": x, "y": x[:, None]}}))
    run(fed.FSGLD(model), fed.Silos({"oslo": {"x": x, "y": x}}))  # the control


# Wiring


def test_kernels_that_have_not_run_have_no_ledger():
    with pytest.raises(
        ValueError, match=r"expected a kernel that has run; call mcmc.run\(rng_key, silos\) first"
    ):
        fed.FSGLD(linear).ledger(None)


def test_traced_data():
    def start(silos):
        return fed.FSGLD(linear).init(random.key(0), 0, model_args=(silos,)).i

    with pytest.raises(
        ValueError, match="the kernel must see concrete data when it starts; expected chain_method"
    ):
        jax.jit(start)(SILOS)


def test_vectorized_gibbs():
    def model(x, y):
        shift = numpyro.sample("shift", dist.Normal(0, 1))
        beta = numpyro.sample("beta", dist.Normal(0, 1))
        with fed.silo_plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(shift + beta * x[:, 0], 1), obs=y)

    kernel = fed.FSGLD(model)
    blocks = Gibbs([(kernel, ["beta"]), (NUTS(kernel.model), ["shift"])])
    mcmc = MCMC(
        blocks, num_warmup=0, num_samples=1, num_chains=2, chain_method=jax.vmap, progress_bar=False
    )
    with pytest.raises(ValueError, match="must see concrete data"):
        mcmc.run(random.key(0), SILOS)


@pytest.mark.parametrize(
    ("start", "chains", "message"),
    [
        ({}, 1, r"init_params: expected .* shapes \{'beta': \(2,\)\}, got \{'beta': 'nothing'\}"),
        ({"beta": jnp.zeros(3)}, 1, r"shapes \{'beta': \(2,\)\}, got \{'beta': \(3,\)\}"),
        (
            {"beta": jnp.zeros(2), "b": jnp.zeros(2)},
            1,
            r"\{'b': 'no such site'\}, got \{'b': \(2,\)\}",
        ),
        ({"beta": jnp.zeros(2)}, 2, r"shapes \{'beta': \(2, 2\)\}, got \{'beta': \(2,\)\}"),
    ],
)
def test_init_params(start, chains, message, monkeypatch):
    monkeypatch.undo()
    kernel = fed.DSGLD(linear, 0.1, validate=False)
    key = random.key(0) if chains == 1 else random.split(random.key(0), chains)
    with pytest.raises(ValueError, match=message):
        kernel.init(key, 0, start, model_args=(SILOS,))
