"""Inference networks in the guide: the exact optimum of a linear one, and what is refused.

Also plain SVI's steps, and gradients by hand.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flax import nnx
from numpyro.contrib.module import eqx_module
from numpyro.infer import SVI, Trace_ELBO
from vi_models import linear_encoder as linear
from vi_models import mean_field
from vi_models import unit_hierarchy as model

import numpyro_fed as fed
from numpyro_fed.vi.bound import candidate_weights, silo_bound
from numpyro_fed.vi.minibatch import pick
from numpyro_fed.vi.setup import make_setup

rng = np.random.default_rng(0)
Y = (rng.normal(size=60) + rng.normal(size=60) + 1.5).astype(np.float32)
SILOS = fed.split({"y": Y}, by=np.repeat(["a", "b", "c"], [30, 20, 10]))
WIDE = {"coupling": False, "scale_coupling": False}


def two_sites(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with fed.silo_plate("patients", y.shape[0]):
        a = numpyro.sample("a", dist.Normal(mu, tau).expand([2]).to_event(1))
        b = numpyro.sample("b", dist.LogNormal(0, 1))
        numpyro.sample("y", dist.Normal(a.sum(-1) + b * x, 1), obs=y)


def mlp(out, key=0):
    return eqx.nn.MLP(1, out, 8, 1, activation=jnp.tanh, key=jax.random.key(key))


class OnScalars(eqx.Module):
    net: eqx.nn.MLP

    def __call__(self, y):
        return self.net(y[None])


@pytest.mark.ci
def test_a_linear_encoder_reaches_the_mean_field_optimum():
    svi = fed.SFVI(
        model,
        fed.AutoSiloNormal(model, **WIDE, amortize={"z": linear}),
        optax.adam(0.02),
        num_local_particles=1,
        num_particles=8,
    )
    params = svi.run(jax.random.key(0), 2000, SILOS, progress_bar=False).params
    mean = mean_field(Y)
    np.testing.assert_allclose(params["slope"], 0.5, atol=0.01)
    np.testing.assert_allclose(params["intercept"], mean / 2, atol=0.01)
    np.testing.assert_allclose(np.exp(params["log_scale"]), np.sqrt(0.5), atol=0.01)
    np.testing.assert_allclose(params["auto_loc"], [mean], atol=0.02)
    assert not [k for k in params if k.startswith("auto_local")]


def same_as_plain_svi(amortize, the_model, silos, steps=20, **options):
    optim = optax.sgd(1e-3)
    own = fed.SFVI(
        the_model,
        fed.AutoSiloNormal(the_model, **options, amortize=amortize),
        optim,
        num_local_particles=1,
    )
    state = own.init(jax.random.key(3), silos)
    plain = SVI(
        the_model, fed.AutoSiloNormal(the_model, **options, amortize=amortize), optim, Trace_ELBO()
    )
    other = plain.init(jax.random.key(3), init_params=own.get_params(state), **silos.pooled)
    update = jax.jit(lambda s: plain.update(s, **silos.pooled))
    for _ in range(steps):
        state, loss = own.update(state, silos)
        other, expected = update(other)
        np.testing.assert_allclose(loss, expected, rtol=1e-9)
    params, expected = own.get_params(state), plain.get_params(other)
    assert params.keys() == expected.keys()
    for name in params:
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, atol=1e-8), params[name], expected[name]
        )
    return params


@pytest.mark.ci
def test_silos_take_the_steps_of_svi_on_pooled_data():
    with jax.enable_x64(True):
        silos = fed.split({"y": Y.astype(float)}, by=np.repeat(["a", "b", "c"], [30, 20, 10]))
        same_as_plain_svi({"z": OnScalars(mlp(2))}, model, silos, **WIDE)


@pytest.mark.ci
def test_one_site_amortized_and_one_not():
    def encoder(x, y):
        out = eqx_module("net", eqx.nn.MLP(2, 4, 8, 1, activation=jnp.tanh, key=jax.random.key(0)))(
            jnp.stack([x, y])
        )
        return out[:2], out[2:]

    with jax.enable_x64(True):
        rows = {"x": rng.normal(size=60), "y": Y.astype(float)}
        params = same_as_plain_svi(
            {"a": encoder}, two_sites, fed.split(rows, by=np.repeat(["a", "b", "c"], [30, 20, 10]))
        )
        assert params["auto_local_loc"].shape == (60, 1)  # b's own
        assert params["auto_local_coupling"].shape == (60, 1, 2)
        joint = same_as_plain_svi(
            {"a": encoder}, two_sites, fed.Silos({"one": rows}), steps=3, local_cov="full"
        )
        assert joint["auto_local_tril"].shape == (1, 60, 60)


@pytest.mark.ci
def test_gradient_of_the_weights_is_the_doubly_reparametrized_one():
    guide = fed.AutoSiloNormal(model, **WIDE, amortize={"z": linear})
    svi = fed.SFVI(model, guide, optax.adam(0.1), num_local_particles=3)
    setup = make_setup(model, guide, SILOS, svi._options)
    family, rows = setup.config.families[0], jax.tree.map(lambda x: x[0], setup.stacks[0])
    params = family.init(jnp.array([0.4]))
    context = family.context(params, jnp.array([0.3]))
    batch = pick(family, None, jax.random.key(0), rows)
    local, eps = family.init_local(rows), family.noise(jax.random.key(1), rows, 3)
    term = silo_bound(family, local, context, {}, eps, batch)

    def surrogate(weights):
        z = family.latents(local, context._replace(params=weights), eps, rows)
        lw, _ = candidate_weights(family, local, context, {}, z, batch)
        return jnp.sum(jax.lax.stop_gradient(jax.nn.softmax(lw, 0) ** 2) * lw)

    expected = jax.grad(surrogate)(context.params)
    for name in expected:
        np.testing.assert_allclose(term.context.params[name], expected[name], rtol=1e-4)


@pytest.mark.ci
def test_minibatches_are_unbiased():
    guide = fed.AutoSiloNormal(model, **WIDE, amortize={"z": linear})
    svi = fed.SFVI(model, guide, optax.sgd(1.0), num_local_particles=1, batch_size=5)
    setup = make_setup(model, guide, fed.Silos({"a": {"y": Y[:10]}}), svi._options)
    config, rows = setup.config, jax.tree.map(lambda x: x[0], setup.stacks[0])
    family = config.families[0]
    context = family.context(family.init(jnp.array([0.4])), jnp.array([0.3]))

    def gradient(batch):
        eps = family.noise(jax.random.key(1), batch.rows, 1)
        return silo_bound(
            family, batch.take(family.init_local(rows)), context, {}, eps, batch
        ).context

    keys = jax.random.split(jax.random.key(2), 1000)
    some = jax.vmap(lambda k: gradient(pick(family, config.batch, k, rows)))(keys)
    whole = gradient(pick(family, None, keys[0], rows))
    for x, y in zip(jax.tree.leaves(some), jax.tree.leaves(whole), strict=True):
        assert np.all(np.abs(x.mean(0) - y) <= 5 * x.std(0) / np.sqrt(len(x)) + 1e-4)


@pytest.mark.ci
def test_modules_of_both_libraries_and_functions_are_alike():
    class Net(nnx.Module):
        def __init__(self, like):
            self.hidden, self.out = (
                nnx.Linear(1, 8, rngs=nnx.Rngs(0)),
                nnx.Linear(8, 2, rngs=nnx.Rngs(0)),
            )
            for own, layer in zip((self.hidden, self.out), like.layers, strict=True):
                own.kernel, own.bias = nnx.Param(layer.weight.T), nnx.Param(layer.bias)

        def __call__(self, y):
            return self.out(jnp.tanh(self.hidden(y[None])))

    net = mlp(2)
    networks = [OnScalars(net), Net(net), lambda y: eqx_module("net", net)(y[None])]
    losses = []
    for network in networks:
        svi = fed.SFVI(
            model,
            fed.AutoSiloNormal(model, **WIDE, amortize={"z": network}),
            optax.adam(0.02),
            num_local_particles=4,
        )
        losses.append(svi.run(jax.random.key(0), 50, SILOS, progress_bar=False).losses)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    np.testing.assert_allclose(losses[2], losses[0], rtol=1e-4)


@pytest.mark.ci
def test_what_leaves_a_silo_is_the_gradient_in_the_weights():
    guide = fed.AutoSiloNormal(model, **WIDE, amortize={"z": OnScalars(mlp(2))})
    result = fed.SFVI(model, guide, optax.adam(0.02), num_local_particles=1).run(
        jax.random.key(0), 1, SILOS, progress_bar=False
    )
    weights = sum(x.size for x in jax.tree.leaves(result.params["auto_z_encoder$params"]))
    assert result.ledger.bytes_up[0] == 4 * (1 + 2 + weights) + 1
    assert "auto_z_encoder$params[[8, 1], [8], [2, 8], [2]]" in repr(result)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:Pareto's k")  # mean field between mu and z is not exact
def test_draws_prediction_and_encoding_of_new_rows():
    guide = fed.AutoSiloNormal(model, **WIDE, amortize={"z": linear})
    svi = fed.SFVI(model, guide, optax.adam(0.02), num_local_particles=1, num_particles=4)
    result = svi.run(jax.random.key(0), 500, SILOS, progress_bar=False)
    idata = fed.to_inference_data(svi, result, SILOS, num_draws=2000)
    z = idata.posterior["z"].values[0]
    loc, log_scale = guide.encode(result.params, y=Y)["z"]
    assert np.all(np.abs(z.mean(0) - loc) < 6 * z.std(0) / np.sqrt(2000) + 0.05)
    np.testing.assert_allclose(np.exp(log_scale), 0.71, atol=0.2)
    assert guide.encode(result.params, y=jnp.zeros(3))["z"][0].shape == (3,)
    with pytest.raises(
        ValueError, match=r"encode: expected the encoders' arguments, got none of \['y'\]"
    ):
        guide.encode(result.params, x=Y)
    with pytest.raises(RuntimeError, match="called or fitted"):
        fed.AutoSiloNormal(model, amortize={"z": linear}).encode({}, y=Y)


@pytest.mark.ci
def test_as_a_plain_guide_it_wants_the_data():
    guide = fed.AutoSiloNormal(model, **WIDE, amortize={"z": linear})
    svi = SVI(model, guide, optax.adam(0.05), Trace_ELBO())
    params = svi.run(jax.random.key(0), 500, Y, progress_bar=False).params
    assert guide.sample_posterior(jax.random.key(1), params, Y, sample_shape=(3,))["z"].shape == (
        3,
        60,
    )
    loc, log_scale = guide.encode(params, y=Y)["z"]
    draws = guide.sample_posterior(jax.random.key(2), params, Y, sample_shape=(4000,))["z"]
    sd = np.broadcast_to(np.exp(log_scale), 60)
    assert (np.abs(draws.mean(0) - loc) < 4.5 * sd / 4000**0.5).all()
    np.testing.assert_allclose(draws.std(0), sd, rtol=4.5 / 8000**0.5)
    with pytest.raises(ValueError, match=r"encoders need \['y'\], got \[\]"):
        guide.sample_posterior(jax.random.key(0), params)


@pytest.mark.ci
def test_sfvi_avg_averages_the_weights():
    guide = fed.AutoSiloNormal(model, **WIDE, amortize={"z": linear})
    avg = fed.SFVIAvg(model, guide, optax.adam(0.02), 50, num_local_particles=1)
    params = avg.run(jax.random.key(0), 40, SILOS, progress_bar=False).params
    np.testing.assert_allclose(params["slope"], 0.5, atol=0.1)
    np.testing.assert_allclose(params["auto_loc"], [Y.mean()], atol=0.3)
    few = fed.SFVIAvg(model, guide, optax.adam(0.02), 5, num_local_particles=1)
    after, _ = few.update(few.init(jax.random.key(0), SILOS), SILOS)
    own = np.concatenate([np.asarray(s.base["slope"]) for s in after.silos])
    assert np.ptp(own) > 0
    np.testing.assert_allclose(after.server.params["slope"], own @ [30, 20, 10] / 60, rtol=1e-5)


@pytest.mark.ci
def test_networks_in_a_model_and_in_a_users_guide():
    decoder = mlp(1, 1)

    def decoded(y):
        net = eqx_module("decoder", decoder)
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with fed.silo_plate("patients", y.shape[0] if y is not None else 4):
            z = numpyro.sample("z", dist.Normal(mu, 1))
            numpyro.sample("y", dist.Normal(jax.vmap(net)(z[:, None])[:, 0], 1), obs=y)

    def guide(y):
        net = eqx_module("encoder", mlp(2))
        numpyro.sample("mu", dist.Normal(numpyro.param("loc", 0.0), 0.3))
        with fed.silo_plate("patients", y.shape[0]):
            loc, log_scale = jax.vmap(net)(y[:, None]).T
            numpyro.sample("z", dist.Normal(loc, jnp.exp(log_scale)))

    svi = fed.SFVI(decoded, guide, optax.adam(0.01), num_local_particles=1)
    result = svi.run(jax.random.key(0), 300, SILOS, progress_bar=False)
    assert result.losses[-50:].mean() < result.losses[:50].mean() - 10
    with pytest.warns(UserWarning, match="Pareto's k"):
        idata = fed.to_inference_data(svi, result, SILOS, num_draws=10)
    with pytest.raises(
        ValueError, match=r"learned networks \['decoder\$params'\].*give result.params"
    ):
        fed.predict(decoded, idata, jax.random.key(1), {"y": None})
    drawn = fed.predict(
        decoded,
        idata,
        jax.random.key(1),
        {"y": None},
        params={"decoder$params": result.params["decoder$params"]},
    )
    assert drawn["y"].shape == (10, 4)
    again = svi.run(jax.random.key(0), 10, SILOS, progress_bar=False, init_from=result)
    assert abs(again.losses.mean() - result.losses[-50:].mean()) < 15


def stateful(y):
    numpyro.primitives.mutable("count", jnp.zeros(()))
    return numpyro.param("w", 0.0) * y, y


@pytest.mark.parametrize(
    ("amortize", "error", "message"),
    [
        (
            {"mu": linear},
            ValueError,
            r"\['mu'\] are no latent sites inside a silo plate; expected some of \['z'\]",
        ),
        (
            {"z": 3},
            TypeError,
            r"expected an equinox or flax.nnx module, or a function, for 'z', got int",
        ),
        ([linear], TypeError, "expected a dict of encoders by site, got list"),
        ({"z": lambda y: (y, y)}, ValueError, "declares no parameters"),
        (
            {"z": OnScalars(mlp(3))},
            ValueError,
            r"encoder of 'z' returns \(3,\) for one element; expected a pair",
        ),
        (
            {"z": lambda y: (numpyro.param("w", 0.0) * y,)},
            ValueError,
            r"returns \[\(\)\] for one element",
        ),
        (
            {"z": lambda x, w: (x, w)},
            ValueError,
            r"takes \['x', 'w'\]; expected .* row for each element of 'patients'.*\['y'\]",
        ),
        ({"z": stateful}, ValueError, "mutable site 'count'"),
        (
            {"z": lambda y: (numpyro.param("w", 0.0), numpyro.sample("e", dist.Normal(0, 1)))},
            ValueError,
            "sample site 'e'",
        ),
    ],
)
def test_bad_encoders_are_refused(amortize, error, message):
    with pytest.raises(error, match=message):
        fed.SFVI(model, fed.AutoSiloNormal(model, **WIDE, amortize=amortize), optax.adam(0.1)).init(
            jax.random.key(0), SILOS
        )


def test_one_name_for_a_network_of_the_model_and_one_of_the_guide():
    def decoded(y):
        net = eqx_module("net", mlp(1))
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with fed.silo_plate("patients", y.shape[0]):
            z = numpyro.sample("z", dist.Normal(mu, 1))
            numpyro.sample("y", dist.Normal(jax.vmap(net)(z[:, None])[:, 0], 1), obs=y)

    guide = fed.AutoSiloNormal(
        decoded, **WIDE, amortize={"z": lambda y: eqx_module("net", mlp(2))(y[None])}
    )
    with pytest.raises(ValueError, match=r"\['net\$params'\] are in the model and in the guide"):
        fed.SFVI(decoded, guide, optax.adam(0.1)).init(jax.random.key(0), SILOS)


def test_conducive_rounds_refuse_encoders():
    avg = fed.ConduciveSFVI(model, fed.AutoSiloNormal(model, amortize={"z": linear}))
    with pytest.raises(ValueError, match="without amortize="):
        avg.init(jax.random.key(0), SILOS)


def test_a_step_size_of_their_own_for_weights():
    """An optimizer that knows parameters by name."""

    def labels(params):
        return {k: "net" if k.endswith("$params") else "q" for k in params}

    optim = optax.multi_transform({"net": optax.sgd(0.0), "q": optax.adam(0.05)}, labels)
    guide = fed.AutoSiloNormal(model, **WIDE, amortize={"z": OnScalars(mlp(2))})
    svi = fed.SFVI(model, guide, optim, num_local_particles=1, local_optim=optax.adam(0.05))
    params = svi.run(jax.random.key(0), 20, SILOS, progress_bar=False).params
    jax.tree.map(
        np.testing.assert_array_equal,
        params["auto_z_encoder$params"],
        eqx.filter(OnScalars(mlp(2)), eqx.is_inexact_array),
    )
    assert float(params["auto_loc"][0]) != 0
