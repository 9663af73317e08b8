"""Networks of nodes with remote silos: the draws of the same inline network.

Also what crosses, and what is refused.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from marks import heavy
from messages import INTERCEPTS, Messages
from network_law import PERIODIC
from numpyro.infer import MCMC
from small_models import (
    intercepts,
    intercepts_silos,
    linear,
    linear_silos,
    scale_model,
    scale_silos,
)
from spmd_processes import saved_by

import numpyro_fed as fed
from numpyro_fed.data import views as storage
from numpyro_fed.decentralized.remote import NodeLocal
from numpyro_fed.density.factorize import factorize
from numpyro_fed.engines.wire import connect

WARMUP, SAMPLES, NETWORKS = 3, 17, 2
FAILING = PERIODIC.with_link_failures(0.2)


def settings(silos):
    return {
        "num_warmup": WARMUP,
        "num_samples": SAMPLES,
        "num_chains": NETWORKS * len(silos),
        "progress_bar": False,
    }


def inline_rounds(kernel, silos):
    mcmc = MCMC(kernel, chain_method="vectorized", **settings(silos))
    mcmc.run(random.key(3), silos)
    return mcmc


def remote(kernel, silos, carrier=None, **options):
    mcmc = fed.RemoteMCMC(kernel, **settings(silos), **options)
    mcmc.run(random.key(3), fed.RemoteSilos(silos, carrier or fed.Loopback(silos)))
    return mcmc


def same_draws(ours, theirs, rtol=1e-5):
    mine, expected = ours.get_samples(group_by_chain=True), theirs.get_samples(group_by_chain=True)
    assert set(mine) == {name for name, _ in ours.sampler.factors.global_sites}
    for name, draws in mine.items():
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(draws, expected[name], atol=rtol * scale, rtol=0, err_msg=name)


class Listening(fed.Loopback):
    """Carrier that notes what crosses, and in which some replies of nodes get lost.

    :param lost: a silo, and how many of its answers to a step in a row, from the 8th step on.
    """

    def __init__(self, silos, lost=(None, 0)):
        super().__init__(silos)
        self.down, self.up, self.lost, self.steps = [], [], lost, 0

    def ask(self, calls):
        replies = super().ask(calls)
        if not isinstance(calls[0].local, NodeLocal):
            return replies
        self.down += [np.asarray(x) for x in jax.tree.leaves([call.message for call in calls])]
        self.up += [np.asarray(x) for x in jax.tree.leaves(replies)]
        self.steps += 1
        who, times = self.lost
        deaf = 8 <= self.steps < 8 + times
        return [
            None if deaf and call.number == who else x
            for call, x in zip(calls, replies, strict=True)
        ]


# The same draws

CASES = {
    "push-sum": (lambda: fed.PushSumLangevin(linear, FAILING, 0.004), linear_silos()),
    "tracking": (
        lambda: fed.PushSumLangevin(
            linear, FAILING, fed.polynomial_decay(0.1, 50, 0.6), gradient_tracking=True
        ),
        linear_silos(),
    ),
    "preconditioned": (
        lambda: fed.PushSumLangevin(linear, FAILING, fed.Step(0.02), gradient_tracking=True),
        linear_silos(),
    ),
    "gossip": (
        lambda: fed.GossipLangevin(linear, fed.graphs.star(4).with_link_failures(0.2), 0.004),
        linear_silos(),
    ),
    "element latents": (
        lambda: fed.PushSumLangevin(intercepts, fed.graphs.ring(3).with_link_failures(0.2), 0.01),
        intercepts_silos(),
    ),
}


@pytest.mark.parametrize("case", heavy(CASES, "preconditioned", "element latents"))
def test_draws_are_those_of_mcmc(case):
    kernel, silos = CASES[case]
    ours, theirs = remote(kernel(), silos), inline_rounds(kernel(), silos)
    same_draws(ours, theirs)
    fields, expected = (m.get_extra_fields(group_by_chain=True) for m in (ours, theirs))
    assert set(fields) == set(expected)
    if ours.sampler.config.units is not None:  # how many latents moved stays in the silos
        assert np.isnan(fields.pop("local_accept_prob")).all()
    for name, x in fields.items():
        np.testing.assert_allclose(x, expected[name], atol=1e-5, err_msg=name)
    np.testing.assert_array_equal(ours.last_state.sent, theirs.last_state.sent)
    if case == "push-sum":  # the control
        other = fed.RemoteMCMC(kernel(), **settings(silos))
        other.run(random.key(4), fed.RemoteSilos(silos, fed.Loopback(silos)))
        with pytest.raises(AssertionError):
            same_draws(other, theirs)


@pytest.mark.ci
def test_first_latents_of_silos_in_several_stacks(monkeypatch):
    """Inline silos whose sizes are far apart lie in stacks of their own, each with its own draw."""
    monkeypatch.setattr(storage, "SMALL", 1)
    rng = np.random.default_rng(0)
    data = {}
    for name, groups in (("a", 5), ("b", 2), ("c", 9)):
        y = rng.normal(size=groups).astype(np.float32)
        data[name] = {"y": y, "group": np.arange(groups), "groups": np.arange(groups)}
    silos = fed.Silos(
        data, rows={"y": "rows", "group": "rows", "groups": "groups"}, index={"group": "groups"}
    )
    kernels = [
        fed.PushSumLangevin(intercepts, fed.graphs.ring(3), 1e-5, validate=False) for _ in range(2)
    ]
    options = {"num_warmup": 0, "num_samples": 3, "num_chains": 3, "progress_bar": False}
    theirs, ours = (
        MCMC(kernels[0], chain_method="vectorized", **options),
        fed.RemoteMCMC(kernels[1], **options),
    )
    theirs.run(random.key(0), silos)
    ours.run(random.key(0), fed.RemoteSilos(silos, fed.Loopback(silos)))
    assert len(kernels[0]._rows(silos)) > 1
    same_draws(ours, theirs)
    accepted = ours.get_extra_fields()["local_accept_prob"]  # with latents it stays in the silos
    assert (np.isnan(accepted) if kernels[1].config.units else accepted == 1).all()


@pytest.mark.ci
def test_draws_over_bytes_are_those_without(tmp_path):
    kernel, silos = CASES["element latents"][0], INTERCEPTS
    wired = connect(Messages(silos, intercepts, tmp_path), intercepts)
    ours = fed.RemoteMCMC(kernel(), **settings(silos))
    ours.run(random.key(3), wired)
    theirs = remote(kernel(), silos)
    for name, draws in ours.get_samples().items():
        np.testing.assert_array_equal(draws, theirs.get_samples()[name])
    assert min(traffic.messages for traffic in wired.carrier.traffic.values()) > WARMUP + SAMPLES


# What crosses


@pytest.mark.ci
def test_a_step_sends_a_position_and_brings_a_gradient():
    silos = intercepts_silos()
    carrier, kernel = Listening(silos), CASES["element latents"][0]()
    kernel.set_up(fed.RemoteSilos(silos, carrier), {})
    kept = {number: set(site.kept) for number, site in carrier.workers.items()}
    mcmc = remote(kernel, silos, carrier)
    assert {
        number: set(site.kept) for number, site in carrier.workers.items()
    } == kept  # of its chains nothing is left
    assert {x.shape for x in carrier.down} == {(1,)}
    assert {x.shape for x in carrier.up} == {(1,)}
    assert set(mcmc.get_samples()) == {"mu"}
    assert len(carrier.down) == (WARMUP + SAMPLES) * NETWORKS * 3
    ledger, steps = mcmc.sampler.ledger(mcmc.last_state), (WARMUP + SAMPLES) * NETWORKS
    once = mcmc.sampler._setup_cost
    assert set(ledger.bytes_down) == {once.bytes_down + 4 * steps}
    assert set(ledger.bytes_up) == {once.bytes_up + 4 * steps}


# Silos that do not answer, and servers that die


@pytest.mark.ci
def test_a_silo_that_is_silent_for_a_while_is_asked_again():
    silos = intercepts_silos()
    kernel = CASES["element latents"][0]
    carrier = Listening(silos, (1, 4))
    same_draws(remote(kernel(), silos, carrier), remote(kernel(), silos), 0.0)
    assert carrier.steps > WARMUP + SAMPLES  # the control: steps were made again


def test_a_silo_that_stays_silent_ends_the_run_with_the_draws_so_far():
    silos = linear_silos()
    with pytest.warns(
        UserWarning,
        match=r"interrupted \(SiloError: silos \['silo 1'\] did not answer, asked 5 times\): the "
        r"first 4",
    ):
        mcmc = remote(CASES["push-sum"][0](), silos, Listening(silos, (1, 99)))
    assert mcmc.get_samples(group_by_chain=True)["beta"].shape == (8, 4, 2)


@pytest.mark.ci
def test_a_step_that_leaves_the_reals_is_undone_as_at_hand():
    def far(count):
        return jnp.where(count < 10, 1e-3, 1e30)

    silos = intercepts_silos()
    kernels = [fed.PushSumLangevin(intercepts, fed.graphs.ring(3), far) for _ in range(2)]
    with pytest.warns(UserWarning, match="gradients that are NaN or beyond 1e18 18 times"):
        ours = remote(kernels[0], silos)
    theirs = inline_rounds(kernels[1], silos)
    same_draws(ours, theirs)
    undone = [
        np.asarray(m.get_extra_fields(group_by_chain=True)["diverging"]) for m in (ours, theirs)
    ]
    np.testing.assert_array_equal(*undone)
    assert undone[0].any()


def test_a_server_that_dies_goes_on_from_its_checkpoint(tmp_path):
    class Killed(BaseException):
        pass

    class Dying(fed.Loopback):
        left = 12

        def ask(self, calls):
            steps = isinstance(calls[0].local, NodeLocal)
            self.left -= steps
            if steps and not self.left:
                raise Killed("the server is gone")
            return super().ask(calls)

    silos, place = intercepts_silos(), tmp_path / "run.ckpt"
    kernel, carrier = CASES["element latents"][0], Dying(silos)
    with pytest.raises(Killed, match="gone"):
        remote(kernel(), silos, carrier, checkpoint=place, checkpoint_every=5)
    again = remote(kernel(), silos, carrier, checkpoint=place, checkpoint_every=5)
    same_draws(again, remote(kernel(), silos), 0.0)
    other = fed.PushSumLangevin(intercepts, fed.graphs.complete(3), 0.01)
    with pytest.raises(ValueError, match="is the checkpoint of another run: graph"):
        remote(other, silos, carrier, checkpoint=place)


# Results and bad input


def test_inference_data_names_nodes_and_averages(tmp_path):
    kernel, silos = CASES["push-sum"]
    ours, theirs = remote(kernel(), silos), inline_rounds(kernel(), silos)
    where = ours.sampler.silos
    idata = fed.to_inference_data(ours, where)
    assert idata.posterior.node.values.tolist() == list(silos.names) * NETWORKS
    idata.to_netcdf(tmp_path / "fit.nc")
    for node in (silos.names[1], "average"):
        mine = fed.to_inference_data(ours, where, node=node)
        expected = fed.to_inference_data(theirs, silos, node=node, log_likelihood=False)
        assert mine.posterior.sizes["chain"] == NETWORKS
        np.testing.assert_allclose(
            mine.posterior.beta, expected.posterior.beta, rtol=1e-4, atol=1e-5
        )
        assert set(mine.sample_stats) == set(expected.sample_stats)


def test_global_sites_are_unconstrained_without_rows():
    # with a deterministic site, so that draws are constrained by the model
    silos = scale_silos()
    factors = factorize(scale_model, fed.RemoteSilos(silos, fed.Loopback(silos)))
    assert factors.transforms is None
    z = {"mu": jnp.asarray(0.3), "sigma": jnp.asarray(-1.2)}
    back = factors.unconstrain_globals(factors.constrain_globals(z, silos.shared), silos.shared)
    assert set(back) == set(z)
    for name, x in z.items():
        np.testing.assert_allclose(back[name], x, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {},
            "step_size='adaptive' is not built for remote silos; expected a number, or a schedule",
        ),
        (
            {"step_size": 0.01, "batch_size": 2},
            "batch_size=2 is not built for remote silos; expected None",
        ),
    ],
)
def test_what_is_not_built_is_refused(options, message):
    silos = linear_silos()
    carrier = Listening(silos)
    carrier.ask = None  # before any silo is asked
    with pytest.raises(ValueError, match=message):
        remote(fed.PushSumLangevin(linear, fed.graphs.ring(4), **options), silos, carrier)


def test_a_number_of_chains_that_is_not_of_all_nodes_is_refused():
    silos = linear_silos()
    mcmc = fed.RemoteMCMC(CASES["push-sum"][0](), num_warmup=1, num_samples=1, num_chains=3)
    with pytest.raises(ValueError, match="expected a multiple of the 4 nodes, got 3"):
        mcmc.run(random.key(0), fed.RemoteSilos(silos, fed.Loopback(silos)))


def test_at_hand_says_what_is_for_silos_elsewhere():
    silos = linear_silos()
    with pytest.raises(
        ValueError, match=r"remote silos; expected fed\.RemoteMCMC\(kernel, \.\.\.\) in place of"
    ):
        inline_rounds(CASES["push-sum"][0](), fed.RemoteSilos(silos, fed.Loopback(silos)))


# Over processes

_PROCESS = """
import sys
sys.path[:0] = [{tests!r}, {tests!r} + "/decentralized"]
from numpyro_fed.engines import spmd
process = int(sys.argv[1])
spmd.initialize("127.0.0.1:" + sys.argv[2], 2, process)
import numpy as np, numpyro_fed as fed
from jax import random
from test_remote_network import CASES, settings
kernel, silos = CASES["element latents"]
mcmc = fed.RemoteMCMC(kernel(), **settings(silos))
mcmc.run(random.key(3), spmd.connect(spmd.dealt(silos, process, 2)))
mu = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"])
np.savez(sys.argv[3] + str(process), mu=mu, names=np.array(mcmc.sampler.silos.names))
"""


@pytest.mark.ci
def test_two_processes_draw_what_one_draws(tmp_path):
    one, other = saved_by(_PROCESS.format(tests=str(Path(__file__).parents[1])), 2, tmp_path)
    np.testing.assert_array_equal(one["mu"], other["mu"])
    kernel, _ = CASES["element latents"]
    names = one["names"].tolist()
    data = {name: {k: np.asarray(v) for k, v in INTERCEPTS[name].items()} for name in names}
    silos = fed.Silos(data, rows=dict(INTERCEPTS.group), index=dict(INTERCEPTS.index))
    expected = np.asarray(inline_rounds(kernel(), silos).get_samples(group_by_chain=True)["mu"])
    np.testing.assert_allclose(one["mu"], expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
