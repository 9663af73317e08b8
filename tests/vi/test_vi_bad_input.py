"""Errors, before anything is compiled, for what SFVI and its guides cannot take."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from vi_models import hierarchy, hierarchy_silos, wheeze, wheeze_silos

import numpyro_fed as fed

SILOS = hierarchy_silos(np.arange(9) % 2)
ADAM = optax.adam(0.01)


def svi(model=hierarchy, guide=None, optim=ADAM, **options):
    return fed.SFVI(model, fed.AutoSiloNormal(model) if guide is None else guide, optim, **options)


def plain_guide(y):
    numpyro.sample("mu", dist.Normal(numpyro.param("loc", 0.0), 1.0))
    with fed.silo_plate("patients", y.shape[0]):
        numpyro.sample(
            "z", dist.Normal(numpyro.param("m", jnp.zeros(y.shape[0]), event_dim=0), 1.0)
        )


def other_plate(y):
    numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with fed.silo_plate("people", y.shape[0]):
        numpyro.sample("z", dist.Normal(0.0, 1.0))


def no_plate(y):
    numpyro.sample("mu", dist.Normal(0.0, 1.0))


def missing_site(y):
    with fed.silo_plate("patients", y.shape[0]):
        numpyro.sample("z", dist.Normal(0.0, 1.0))


def other_support(y):
    numpyro.sample("mu", dist.LogNormal(0.0, 1.0))
    with fed.silo_plate("patients", y.shape[0]):
        numpyro.sample("z", dist.Normal(0.0, 1.0))


def no_rsample(y):
    numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with fed.silo_plate("patients", y.shape[0]):
        numpyro.sample(
            "z",
            dist.MixtureSameFamily(
                dist.Categorical(probs=jnp.ones(2) / 2), dist.Normal(jnp.zeros(2), 1.0)
            ),
        )


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        (
            other_plate,
            r"the guide does not match the model at \['z'\].*\('patients', "
            r"\(\)\).*got.*\('people', \(\)\)",
        ),
        (no_plate, r"silo plate"),
        (missing_site, r"the guide does not match the model at \['mu'\]"),
        (
            other_support,
            r"guide site 'mu': expected the support of the model's, Real\(\), got Positive",
        ),
        (no_rsample, r"guide site 'z': its distribution cannot be reparametrized"),
    ],
)
def test_guides_that_do_not_match(guide, message):
    with pytest.raises(ValueError, match=message):
        svi(guide=guide).init(random.key(0), SILOS)


def test_a_matching_guide_is_taken():
    state = svi(guide=plain_guide, num_local_particles=1).init(random.key(0), SILOS)
    assert set(state.server.params) == {"loc"}


def discrete(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with fed.silo_plate("patients", y.shape[0]):
        k = numpyro.sample("k", dist.Bernoulli(0.3))
        numpyro.sample("y", dist.Normal(mu + k, 1), obs=y)


def local_param(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with fed.silo_plate("patients", y.shape[0]):
        shift = numpyro.param("shift", jnp.zeros(y.shape[0]), event_dim=0)
        numpyro.sample("y", dist.Normal(mu + shift, 1), obs=y)


def branching(y, kind="plain"):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    if kind != "plain":
        mu = mu + numpyro.sample("offset", dist.Normal(0, 1))
    with fed.silo_plate("patients", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def local_only(y):
    with fed.silo_plate("patients", y.shape[0]):
        numpyro.sample("y", dist.Normal(numpyro.sample("z", dist.Normal(0, 1)), 1), obs=y)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (discrete, r"latent site 'k' is discrete; expected continuous latents"),
        (
            local_param,
            r"learned parameter 'shift' is inside a silo plate; expected parameters that all "
            r"silos share",
        ),
        (local_only, r"the model has no global latent site"),
    ],
)
def test_models_that_are_not_covered(model, message):
    with pytest.raises(ValueError, match=message):
        svi(model).init(random.key(0), SILOS)


def test_structures_must_share_the_global_sites():
    silos = fed.MixedSilos(
        {"oslo": {"y": np.zeros(3)}, "rome": {"y": np.ones(2), "kind": "offset"}}
    )
    with pytest.raises(
        ValueError,
        match=r"silo 'rome' and silo 'oslo' differ in structure and in the global sites "
        r"\['offset'\]",
    ):
        svi(branching).init(random.key(0), silos)


@pytest.mark.parametrize(
    ("participation", "message"),
    [
        (0.0, r"participation: expected the fraction of silos in a round, in \(0, 1\].*got 0.0"),
        (1.5, r"in \(0, 1\].*got 1.5"),
        ("half", r"got 'half'"),
        (
            {"0": 0.5},
            r"participation: expected a probability for every silo, got unknown silos \[\], none "
            r"for \['1'\]",
        ),
        (
            {"0": 0.5, "1": 0.0},
            r"expected probabilities in \(0, 1\], got 0.0 for silo '1'; a silo that never takes "
            r"part",
        ),
    ],
)
def test_participation(participation, message):
    with pytest.raises(ValueError, match=message):
        svi(num_local_particles=1).run(
            random.key(0), 5, SILOS, progress_bar=False, participation=participation
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_particles": 0}, r"num_particles: expected a whole number >= 1, got 0"),
        (
            {"num_local_particles": 2.5},
            r"num_local_particles: expected a whole number >= 1, got 2.5",
        ),
        ({"batch_size": -3}, r"batch_size: expected a whole number >= 1, got -3"),
    ],
)
def test_options(options, message):
    with pytest.raises(ValueError, match=message):
        svi(**options)


def test_types():
    with pytest.raises(
        TypeError,
        match=r"optim: expected an optax transformation, e.g. optax.adam\(1e-2\), got "
        r"(_NumPyroOptim|Adam)",
    ):
        svi(optim=numpyro.optim.Adam(0.01))
    with pytest.raises(TypeError, match=r"local_optim: expected an optax transformation"):
        svi(local_optim=0.01)
    with pytest.raises(TypeError, match=r"expected a model \(a callable\), got str"):
        fed.SFVI("model", plain_guide, ADAM)
    with pytest.raises(
        TypeError, match=r"expected a guide, e.g. fed.AutoSiloNormal\(model\), got str"
    ):
        fed.SFVI(hierarchy, "guide", ADAM)
    with pytest.raises(
        ValueError,
        match=r"expected silos = fed.split\(...\), fed.Silos\(...\) or fed.MixedSilos\(...\), got "
        r"dict",
    ):
        svi().init(random.key(0), {"y": np.zeros(3)})


def test_run_arguments():
    fit = svi(num_local_particles=1)
    with pytest.raises(ValueError, match=r"num_rounds: expected a whole number >= 1, got 0"):
        fit.run(random.key(0), 0, SILOS)
    with pytest.raises(ValueError, match=r"tol: expected a number of nats > 0, got -1"):
        fit.run(random.key(0), 5, SILOS, tol=-1)
    with pytest.raises(ValueError, match=r"expected an object that has been initialized"):
        svi().get_params(None)


def test_minibatches_need_units_that_can_be_subsampled():
    with pytest.raises(
        ValueError, match=r"batch_size=2 of 'rows': their latents are one unit in each silo"
    ):
        svi(guide=fed.AutoSiloNormal(hierarchy, local_cov="full"), batch_size=2).init(
            random.key(0), SILOS
        )


def test_low_rank_must_be_low():
    with pytest.raises(
        ValueError, match=r"global_cov=5: expected a rank below the 3 global latents"
    ):
        svi(wheeze, fed.AutoSiloNormal(wheeze, global_cov=5)).init(
            random.key(0), wheeze_silos(np.arange(6) % 2)
        )


def test_init_values_must_be_finite():
    guide = fed.AutoSiloNormal(
        wheeze, init_loc_fn=numpyro.infer.init_to_value(values={"sigma": 0.0})
    )  # -inf
    fit = svi(wheeze, guide, num_local_particles=1)
    silos = wheeze_silos(np.arange(6) % 2)
    with pytest.raises(
        ValueError, match=r"init_loc_fn: expected finite values of the global sites"
    ):
        fit.init(random.key(0), silos)


@pytest.mark.ci
def test_states_and_results_are_not_mixed_up():
    fit = svi(num_local_particles=1, validate=False)
    result = fit.run(random.key(0), 2, SILOS, progress_bar=False)
    with pytest.raises(
        TypeError,
        match=r"init_state: expected result.state, got VIResult; a result goes to init_from=",
    ):
        fit.run(random.key(0), 2, SILOS, progress_bar=False, init_state=result)
    with pytest.raises(
        TypeError, match=r"expected a state, e.g. result.state, got VIResult; a result has .params"
    ):
        fit.get_params(result)
    with pytest.raises(
        ValueError, match=r"init_from and init_state: expected one of them, got both"
    ):
        fit.run(
            random.key(0), 2, SILOS, progress_bar=False, init_state=result.state, init_from=result
        )
    other = fed.SFVIAvg(hierarchy, fed.AutoSiloNormal(hierarchy), ADAM, 2, 1, 1, validate=False)
    with pytest.raises(ValueError, match=r"init_state: expected a state of the same kind of fit"):
        other.run(random.key(0), 2, SILOS, progress_bar=False, init_state=result.state)
    moved = hierarchy_silos(
        np.array([0, 0, 1, 1, 0, 1, 0, 1, 0])
    )  # as many rows, others, under the same names
    assert (moved.names, moved.sizes) == (SILOS.names, SILOS.sizes)
    with pytest.raises(
        ValueError, match=r"expected the silos of the run, got others of the same names"
    ):
        fed.to_inference_data(fit, result, moved)


def test_a_guide_of_another_model_is_refused():
    with pytest.raises(
        ValueError,
        match=r"the guide was made for another model: expected .*\['mu', 'z'\], got \['mu'\]",
    ):
        svi(guide=fed.AutoSiloNormal(local_param_free)).init(random.key(0), SILOS)
    with pytest.raises(
        TypeError, match=r"expected a guide, e.g. fed.AutoSiloNormal\(model\), got type|got ABCMeta"
    ):
        svi(guide=fed.AutoSiloNormal)


def local_param_free(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with fed.silo_plate("patients", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)
