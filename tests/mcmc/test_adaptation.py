"""The step size learned in warm-up.

Curvature and noise against their exact values, and the bias it aims at.
"""

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
from jax import random
from network_law import exact_law, posterior
from numpyro.infer import MCMC
from small_models import intercepts, intercepts_silos, linear, linear_precisions, linear_silos

import numpyro_fed as fed

SILOS = linear_silos()
M = len(SILOS)


def curvature():
    return linear_precisions(SILOS)[1].sum(0) + np.eye(2)


def warm(kernel, chains, num_warmup, num_samples=10, **options):
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), SILOS, **options)
    return mcmc


def batch_noise(batch, pooled):
    """Return the covariance of the gradient's estimate at the posterior mean, summed over silos.

    Minibatches are drawn with replacement.
    """
    mean, total = posterior(SILOS)[0], 0.0
    rows = [{k: np.asarray(v, np.float64) for k, v in SILOS[name].items()} for name in SILOS]
    if pooled:
        rows = [{k: np.concatenate([r[k] for r in rows]) for k in rows[0]}]
    for r in rows:
        scores = r["x"] * (r["y"] - r["x"] @ mean)[:, None]
        total = total + len(r["y"]) ** 2 / batch * np.cov(scores.T, ddof=0)
    return total


def start(chains):
    """All chains at the posterior's mean."""
    return {"beta": jnp.broadcast_to(jnp.asarray(posterior(SILOS)[0], jnp.float32), (chains, 2))}


@pytest.mark.ci
def test_curvature_of_a_gaussian_is_found_exactly():
    values, vectors = np.linalg.eigh(curvature())
    kernel = fed.PushSumLangevin(
        linear, fed.graphs.ring(M), fed.Step("adaptive", bias_target=0.03, preconditioner=None)
    )
    state = warm(kernel, M, 200).last_state
    learned = np.asarray(state.adaptation.product)
    np.testing.assert_allclose(np.linalg.norm(learned), values[-1], rtol=1e-3)
    np.testing.assert_allclose(np.abs(learned @ vectors[:, -1]), values[-1], rtol=1e-3)
    assert float(state.adaptation.noise) < 1e-3
    price = fed.graphs.ring(M).added_variance() + 1 / (4 * M)
    assert float(state.step_size[0]) == pytest.approx(0.03 / (price * values[-1]), rel=1e-3)
    step = fed.Step("adaptive", bias_target=0.03, preconditioner=None)
    sgld = warm(fed.SGLD(linear, step, 5), 4, 200).last_state
    np.testing.assert_allclose(np.asarray(sgld.step_size), 8 * 0.03 / values[-1], rtol=1e-3)
    assert float(sgld.inflation[0] if sgld.inflation.ndim else sgld.inflation) == pytest.approx(
        1.03
    )


@pytest.mark.ci
@pytest.mark.parametrize("name", ["SGLD", "push-sum"])
def test_noise_of_minibatches_is_measured(name):
    stiff = np.linalg.eigh(curvature())[1][:, -1]
    if name == "SGLD":
        state = warm(fed.SGLD(linear, "adaptive", 1, 3), 8, 1000, init_params=start(8)).last_state
    else:
        state = warm(
            fed.PushSumLangevin(linear, fed.graphs.ring(M), batch_size=2),
            2 * M,
            4000,
            init_params=start(2 * M),
        ).last_state
    expected = stiff @ batch_noise(3 if name == "SGLD" else 2, pooled=name == "SGLD") @ stiff
    noise = np.atleast_1d(np.asarray(state.adaptation.noise))
    # squares of normal differences, averaged over 0.44 of the looks; the chain's own spread adds a
    # tenth and less to residuals
    error = expected * np.sqrt(2 / (0.44 * float(np.mean(state.adaptation.seen)) * len(noise)))
    assert np.mean(noise) - expected + 4 * error > 0
    assert np.mean(noise) - 1.15 * expected < 4 * error
    assert error < 0.06 * expected


@pytest.mark.ci
def test_after_warmup_nothing_changes_and_all_chains_keep_their_own():
    mcmc = warm(fed.SGLD(linear, "adaptive", 2, 3), 4, 100, 50)
    steps = np.asarray(mcmc.get_extra_fields(group_by_chain=True)["step_size"])
    assert (steps == steps[:, :1]).all()
    assert len(set(steps[:, 0].tolist())) == 4
    assert int(mcmc.last_state.adaptation.left) == 0
    mcmc = warm(fed.PushSumLangevin(linear, fed.graphs.ring(M), batch_size=2), M, 100, 50)
    steps = np.asarray(mcmc.get_extra_fields()["step_size"])
    assert len(set(steps.tolist())) == 1


LOPSIDED = nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0), (1, 0), (2, 0)])
GRAPHS = {
    "ring": (fed.graphs.ring(M), {}),
    "star": (fed.graphs.star(M), {}),
    "periodic": (fed.graphs.periodic([fed.graphs.ring(M), fed.graphs.star(M)]), {}),
    "lopsided": (fed.graphs.from_networkx(LOPSIDED), {}),
    "lopsided, tracked": (fed.graphs.from_networkx(LOPSIDED), {"tracking": True}),
    "star, gossip": (fed.graphs.star(M), {"gossip": True}),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", GRAPHS)
def test_the_worst_node_is_as_inflated_as_it_was_aimed_at(name):
    """Exactly, on a Gaussian model of silos alike.

    By the law of the linear recursion at the step that was chosen.
    """
    graph, options = GRAPHS[name]
    rows = linear_silos((40,))
    data = {k: np.asarray(v) for k, v in rows[rows.names[0]].items()}
    silos = fed.Silos(
        {name: data for name in ("a", "b", "c", "d")}, rows={"x": "rows", "y": "rows"}
    )
    values, vectors = np.linalg.eigh(linear_precisions(silos)[1].sum(0) + np.eye(2))
    stiff = vectors[:, -1]

    def worst(alpha, steps):
        cov = exact_law(silos, graph, alpha, steps=steps, **options)[1]
        return (
            max(stiff @ cov[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] @ stiff for i in range(M))
            * values[-1]
            - 1
        )

    # k itself, at a small step
    small = 1e-3 / values[-1]
    k = graph.added_variance(**options) + 1 / (4 * M)
    assert worst(small, 40_000) / (2 * small * values[-1]) == pytest.approx(k, rel=0.01)
    # the step that is chosen
    target = 0.02
    step = fed.Step("adaptive", bias_target=target, preconditioner=None)
    if options.get("gossip"):
        kernel = fed.GossipLangevin(linear, graph, step)
    else:
        kernel = fed.PushSumLangevin(
            linear, graph, step, gradient_tracking=options.get("tracking", False)
        )
    state = kernel.init(random.split(random.key(0), M), 0, model_args=(silos,))
    alpha = float(kernel.sample(state, (silos,), {}).step_size[0])
    assert np.sqrt(1 + worst(alpha, 8000)) - 1 == pytest.approx(target, rel=0.05)


@pytest.mark.ci
def test_a_start_far_away_does_not_freeze_the_chain():
    """A rule by the size of gradients would take steps of no length there."""
    kernel = fed.SGLD(linear, "adaptive", 10, 3)
    start = {"beta": jnp.full((4, 2), 300.0)}
    mcmc = MCMC(
        kernel,
        num_warmup=300,
        num_samples=200,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), SILOS, init_params=start)
    mean, cov = posterior(SILOS)
    beta = np.asarray(mcmc.get_samples()["beta"])
    assert (np.abs(beta.mean(0) - mean) < 2 * np.sqrt(np.diag(cov))).all()


@pytest.mark.ci
def test_local_latents_and_preconditioner():
    silos = intercepts_silos()
    for kernel, chains in (
        (fed.SGLD(intercepts, fed.Step("adaptive"), 5), 2),
        (fed.PushSumLangevin(intercepts, fed.graphs.ring(3), fed.Step("adaptive")), 3),
    ):
        mcmc = MCMC(
            kernel,
            num_warmup=50,
            num_samples=10,
            num_chains=chains,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(random.key(0), silos)
        # the one global parameter, whitened, has precision one at fixed coordinates of the latents
        learned = np.linalg.norm(np.asarray(mcmc.last_state.adaptation.product), axis=-1)
        np.testing.assert_allclose(learned, 1, rtol=0.02)


def test_a_density_with_tails_is_met_by_the_size_of_its_curvature():
    from numpyro_fed.mcmc.adaptation import adapt, begin

    def slope(x):  # Cauchy: log-concave within 1 of its mode only
        return -2 * x / (1 + x**2)

    def look(state, x):
        return adapt(state, lambda u: (slope(x + u), slope(x + u)), jnp.zeros(1)), None

    xs = jnp.asarray(np.random.default_rng(0).standard_cauchy(400), jnp.float32)
    state, _ = jax.lax.scan(
        look, begin(random.key(0), 1, (1 / 8, 1 / 8), 0.02, 400, jnp.float32), xs
    )
    # the mean of |curvature| is 0.75 under the Cauchy; signs would cancel to 0.5 and, in a bad
    # stretch, to nothing
    assert 8 * 0.02 / 1.5 < float(state.step_size) < 8 * 0.02 / 0.5


def test_stays_at_one_silo_are_refused():
    for kernel in (fed.DSGLD, fed.FSGLD):
        with pytest.raises(ValueError, match=r'expected "auto", whose pilot measures whole visits'):
            kernel(linear, "adaptive")


def test_a_curvature_that_is_not_finite_is_said_before_the_first_step():
    def model(y):
        import numpyro
        import numpyro.distributions as dist

        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with fed.silo_plate("rows", y.shape[0]):
            numpyro.factor("term", jnp.sqrt(mu - 100.0) * y)

    silos = fed.Silos({"a": {"y": np.ones(2, np.float32)}, "b": {"y": np.ones(3, np.float32)}})
    with pytest.raises(ValueError, match="curvature is not finite at the start"):
        fed.PushSumLangevin(model, fed.graphs.ring(2), validate=False).init(
            jax.random.split(random.key(0), 2), 10, model_args=(silos,)
        )
