"""Remote silos: the same draws as inline, and nothing of the rows across.

Also what happens when one is silent.
"""

import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC
from registry import ENTRIES
from small_models import intercepts, intercepts_silos, linear, linear_silos
from spmd_processes import saved_by

import numpyro_fed as fed
from numpyro_fed.engines import spmd
from numpyro_fed.mcmc.remote_chains import StartLocal, VisitLocal
from numpyro_fed.rounds.federated import message_bytes
from numpyro_fed.rounds.remote import Kept

CHAINS, WARMUP, SAMPLES = 2, 2, 12


class Listening(fed.Loopback):
    """A carrier that notes what crosses, and in which some replies get lost."""

    def __init__(self, silos: fed.Silos, lost: set[int] = frozenset()) -> None:
        super().__init__(silos)
        self.crossed: list[np.ndarray] = []
        self.lost, self.asked, self.lost_visits = lost, 0, frozenset()

    def ask(self, calls):
        replies = super().ask(calls)
        leaves = jax.tree.leaves([[call.message for call in calls], replies])
        self.crossed += [np.asarray(x) for x in leaves]
        self.asked += 1
        lost = self.lost | (self.lost_visits if isinstance(calls[0].local, VisitLocal) else set())
        return [
            None if call.number in lost else reply
            for call, reply in zip(calls, replies, strict=True)
        ]


def inline_rounds(kernel, silos, samples=SAMPLES):
    mcmc = MCMC(
        kernel, num_warmup=WARMUP, num_samples=samples, num_chains=CHAINS, chain_method="vectorized"
    )
    mcmc.run(random.key(3), silos)
    return mcmc


def remote(kernel, silos, carrier=None):
    mcmc = fed.RemoteMCMC(kernel, num_warmup=WARMUP, num_samples=SAMPLES, num_chains=CHAINS)
    mcmc.run(random.key(3), fed.RemoteSilos(silos, carrier or fed.Loopback(silos)))
    return mcmc


def same_draws(one, other, rtol):
    mine, theirs = one.get_samples(group_by_chain=True), other.get_samples(group_by_chain=True)
    assert set(mine) == {name for name, _ in one.sampler.factors.global_sites}
    for name, draws in mine.items():
        scale = np.abs(theirs[name]).max()
        np.testing.assert_allclose(draws, theirs[name], atol=rtol * scale, rtol=0, err_msg=name)


# The same draws


@pytest.mark.parametrize(
    ("kernel", "silos"),
    [
        pytest.param(lambda: fed.FSGLD(linear), linear_silos(), marks=pytest.mark.ci),
        pytest.param(
            lambda: fed.FSGLD(linear, selection="distinct", num_local_steps=7),
            linear_silos(),
            marks=pytest.mark.ci,
        ),
        (lambda: fed.DSGLD(linear, step_size=1e-2, num_local_steps=5), linear_silos()),
        pytest.param(lambda: fed.FSGLD(intercepts), intercepts_silos(), marks=pytest.mark.ci),
    ],
    ids=["fsgld", "distinct", "dsgld", "element latents"],
)
def test_draws_are_those_of_mcmc(kernel, silos):
    ours, theirs = remote(kernel(), silos), inline_rounds(kernel(), silos)
    same_draws(ours, theirs, 1e-5)
    fields, expected = (m.get_extra_fields(group_by_chain=True) for m in (ours, theirs))
    np.testing.assert_array_equal(fields["silo"], expected["silo"])
    known = expected["local_accept_prob"]
    if ours.sampler.config.units is not None:  # how many rows' latents moved stays in the silo
        known = np.full_like(known, np.nan)
    np.testing.assert_allclose(fields["local_accept_prob"], known, atol=1e-4)
    assert repr(ours.sampler.ledger(ours.last_state)) == repr(
        theirs.sampler.ledger(theirs.last_state)
    )


@pytest.mark.ci
def test_another_seed_gives_other_draws():
    # the control of the comparisons above
    silos = linear_silos()
    ours = fed.RemoteMCMC(
        fed.FSGLD(linear), num_warmup=WARMUP, num_samples=SAMPLES, num_chains=CHAINS
    )
    ours.run(random.key(4), fed.RemoteSilos(silos, fed.Loopback(silos)))
    with pytest.raises(AssertionError):
        same_draws(ours, inline_rounds(fed.FSGLD(linear), silos), 1e-5)


@pytest.mark.ci
@pytest.mark.parametrize(
    "name", ["dirichlet", "deterministic", "women_in_districts", "pupils_in_classes_in_schools"]
)
def test_draws_of_other_model_shapes(name):
    entry = ENTRIES[name]
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # of dense units, and of surrogates that have not converged
        ours, theirs = (
            remote(fed.FSGLD(entry.model), entry.silos()),
            inline_rounds(fed.FSGLD(entry.model), entry.silos()),
        )
    same_draws(ours, theirs, 1e-3)


# What crosses


@pytest.mark.ci
def test_nothing_as_long_as_rows_and_no_local_latent_crosses():
    silos = intercepts_silos()
    carrier = Listening(silos)
    mcmc = remote(fed.FSGLD(intercepts), silos, carrier)
    assert set(mcmc.get_samples()) == {"mu"}
    rows, groups = set(silos.sizes["rows"]) | {72}, set(silos.sizes["groups"]) | {18}
    seen = {n for x in carrier.crossed for n in x.shape}
    assert len(carrier.crossed) > 100
    assert not seen & (rows | groups)
    private = [leaf for site in carrier.workers.values() for leaf in jax.tree.leaves(site.kept)]
    assert any(len(x) in groups for x in private)  # the control: sites do hold such


@pytest.mark.ci
def test_planted_values_are_not_among_what_crosses():
    silos = linear_silos()
    data = {name: {k: np.array(v) for k, v in silos[name].items()} for name in silos}
    data["silo 0"]["y"][1] = planted = np.float32(1.2345679)
    carrier = Listening(fed.Silos(data))
    remote(fed.FSGLD(linear), fed.Silos(data), carrier)
    raw = b"".join(x.tobytes() for x in carrier.crossed if x.dtype != object)
    assert planted.tobytes() not in raw
    assert (
        np.float32(np.asarray(carrier.crossed[0]).ravel()[0]).tobytes() in raw
    )  # the control: what crosses is found


def test_the_server_holds_no_rows():
    remote = fed.RemoteSilos(linear_silos(), fed.Loopback(linear_silos()))
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in remote.rows.values())
    assert jax.tree.leaves(remote) == []
    with pytest.raises(
        ValueError, match=r"silos \['silo 0', .*\] are remote, and their rows are not pooled"
    ):
        _ = remote.pooled
    with pytest.raises(ValueError, match="silo 'silo 1' is remote"):
        _ = remote["silo 1"]


# Silos that do not answer


def test_chains_wait_where_a_silo_is_silent():
    silos = linear_silos()
    carrier = Listening(silos)
    mcmc = fed.RemoteMCMC(fed.FSGLD(linear), num_warmup=0, num_samples=30, num_chains=3)
    kernel, remote = mcmc.sampler, fed.RemoteSilos(silos, carrier)
    kernel.set_up(remote, {})
    carrier.lost_visits = {2}
    with pytest.warns(UserWarning, match="answered unequally often"):
        mcmc.run(random.key(0), remote)
    last, fields = mcmc.last_state, mcmc.get_extra_fields(group_by_chain=True)
    asked = np.asarray(last.visits).sum(0)
    np.testing.assert_array_equal(np.asarray(last.unanswered).sum(0), [0, 0, asked[2], 0])
    assert asked.sum() == 90
    assert asked[2] > 5
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["beta"])
    moved = (np.diff(draws, axis=1) != 0).any(-1)
    silent = np.asarray(fields["silo"])[:, 1:] == np.asarray(fields["silo"])[:, :-1]
    assert silent[~moved].all()  # a draw that counts again keeps its silo
    assert asked[2] - 3 <= (~moved).sum() <= asked[2]


def test_all_silent_is_a_round_too():
    silos = linear_silos()
    carrier = Listening(silos)
    mcmc = fed.RemoteMCMC(fed.FSGLD(linear), num_warmup=0, num_samples=3, num_chains=2)
    remote = fed.RemoteSilos(silos, carrier)
    mcmc.sampler.set_up(remote, {})
    carrier.lost_visits = {0, 1, 2, 3}
    mcmc.run(random.key(0), remote)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["beta"])
    np.testing.assert_array_equal(draws, np.broadcast_to(draws[:, :1], draws.shape))
    assert np.asarray(mcmc.last_state.unanswered).sum() == 6


class Deaf(fed.Loopback):
    """Carrier in which silo 1 does not answer from its 10th to its 30th round.

    It has computed its reply, or it was never asked.
    """

    def __init__(self, silos, computes):
        super().__init__(silos)
        self.computes, self.rounds = computes, 0

    def ask(self, calls):
        stays = isinstance(calls[0].local, VisitLocal)
        self.rounds += stays
        silent = stays and 10 <= self.rounds < 30
        asked = [c for c in calls if not (silent and c.number == 1 and not self.computes)]
        replies = dict(zip(map(id, asked), super().ask(asked), strict=True))
        return [None if silent and c.number == 1 else replies[id(c)] for c in calls]


@pytest.mark.ci
def test_a_reply_that_is_lost_on_the_way_leaves_no_trace_in_the_silo():
    silos, found = intercepts_silos(), []
    for computes in (True, False):
        mcmc = fed.RemoteMCMC(fed.FSGLD(intercepts), num_warmup=0, num_samples=40, num_chains=2)
        with pytest.warns(UserWarning, match="answered unequally often"):
            mcmc.run(random.key(0), fed.RemoteSilos(silos, Deaf(silos, computes)))
        found.append(np.asarray(mcmc.get_samples()["mu"]))
        assert np.asarray(mcmc.last_state.unanswered).sum() > 5
    np.testing.assert_array_equal(*found)


def test_draws_so_far_are_kept_after_an_interruption():
    class Interrupted(fed.Loopback):
        stays = 0

        def ask(self, calls):
            self.stays += isinstance(calls[0].local, VisitLocal)
            if self.stays == 8:
                raise KeyboardInterrupt
            return super().ask(calls)

    silos = linear_silos()
    mcmc = fed.RemoteMCMC(fed.FSGLD(linear), num_warmup=3, num_samples=50)
    with pytest.warns(UserWarning, match="interrupted: the first 4 draws are kept"):
        mcmc.run(random.key(0), fed.RemoteSilos(silos, Interrupted(silos)))
    assert mcmc.get_samples()["beta"].shape == (4, 2)
    with pytest.raises(NotImplementedError, match=r"warmup\(\) is not built"):
        mcmc.warmup(random.key(0), silos)


def test_preparation_needs_all_silos():
    silos = linear_silos()
    with pytest.raises(
        RuntimeError, match=r"silos \['silo 1'\] did not answer while the fit was prepared"
    ):
        remote(fed.FSGLD(linear), silos, Listening(silos, {1}))


# Results and bad input


@pytest.mark.ci
def test_inference_data_and_diagnosis(tmp_path):
    silos = linear_silos()
    mcmc = remote(fed.FSGLD(linear), silos)
    where = mcmc.sampler.silos
    idata = fed.to_inference_data(mcmc, where)
    assert idata.posterior["beta"].shape == (CHAINS, SAMPLES, 2)
    assert "cut_rate" in idata.sample_stats
    idata.to_netcdf(tmp_path / "fit.nc")
    expected = fed.diagnose(inline_rounds(fed.FSGLD(linear), silos)).table
    ours = fed.diagnose(mcmc).table
    assert list(ours.index) == list(expected.index)
    # ranks of draws that differ in their last digits
    np.testing.assert_allclose(ours["value"], expected["value"], rtol=2e-2, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"batch_size": 2},
            "batch_size=2 is not built for remote silos; expected None",
        ),
        (
            {"surrogate": "moments"},
            'surrogate=\'moments\' is not built for remote silos; expected "score", "laplace" or',
        ),
        ({"num_kept": 2}, "num_kept=2 is not built for remote silos; expected 1"),
    ],
)
def test_what_is_not_built_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        remote(fed.FSGLD(linear, **options), linear_silos())


def test_wrong_kernels_and_silos():
    with pytest.raises(TypeError, match=r"expected a fed.DSGLD, fed.FSGLD or fed.HMC, got SGLD"):
        fed.RemoteMCMC(fed.SGLD(linear, 0.01), num_warmup=1, num_samples=1)
    mcmc = fed.RemoteMCMC(fed.FSGLD(linear), num_warmup=1, num_samples=1)
    with pytest.raises(
        ValueError,
        match=r"expected fed\.RemoteSilos, got Silos; for silos in this process use "
        r"numpyro\.infer\.MCMC",
    ):
        mcmc.run(random.key(0), linear_silos())


@pytest.mark.ci
def test_data_outside_a_support_name_their_silo():
    def model(y):
        a = numpyro.sample("a", dist.Gamma(1.0, 1.0))
        with fed.silo_plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Beta(a, 2.0), obs=y)

    silos = fed.Silos(
        {"oslo": {"y": jnp.array([0.1, 0.2])}, "rome": {"y": jnp.array([0.5, 1.5, 0.3])}}
    )
    with pytest.raises(
        ValueError,
        match=r"log density is -inf at a typical position, silo 'rome'; expected a finite one",
    ):
        remote(fed.FSGLD(model), silos)


def test_a_prior_that_reads_rows_is_refused():
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 0.3 * jnp.abs(y).max()))
        with fed.silo_plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    silos = fed.Silos(
        {"oslo": {"y": jnp.array([5.0, 6.0])}, "rome": {"y": jnp.array([7.0, 9.0, 8.0])}}
    )
    with pytest.raises(
        ValueError,
        match=r"log p\(theta\) \+ sum of the 2 silos' terms is .*gradients differ at \['mu'\]",
    ):
        remote(fed.FSGLD(model), silos)


@pytest.mark.ci
def test_two_fits_over_one_carrier_do_not_meet():
    silos = intercepts_silos()
    carrier = fed.Loopback(silos)
    kernel = fed.FSGLD(intercepts)
    first = remote(kernel, silos, carrier)
    slots = {n: set(site.kept) for n, site in carrier.workers.items()}
    remote(fed.FSGLD(intercepts, num_local_steps=3), silos, carrier)
    again = fed.RemoteMCMC(kernel, num_warmup=WARMUP, num_samples=SAMPLES, num_chains=CHAINS)
    again.run(random.key(3), first.sampler.silos)
    np.testing.assert_array_equal(again.get_samples()["mu"], first.get_samples()["mu"])
    # a fit leaves its local map, and nothing of its chains
    assert {len(site.kept) - len(slots[n]) for n, site in carrier.workers.items()} == {
        len(slots[0])
    }


def test_a_batch_of_keys():
    silos, keys = linear_silos(), random.split(random.key(3), CHAINS)
    ours = fed.RemoteMCMC(
        fed.FSGLD(linear), num_warmup=WARMUP, num_samples=SAMPLES, num_chains=CHAINS
    )
    ours.run(keys, fed.RemoteSilos(silos, fed.Loopback(silos)))
    same_draws(ours, inline_rounds(fed.FSGLD(linear), silos), 1e-5)


def test_a_silo_that_is_silent_at_the_start_is_named():
    class Late(fed.Loopback):
        def ask(self, calls):
            replies = super().ask(calls)
            start = isinstance(calls[0].local, StartLocal)
            return [
                None if start and call.number == 2 else x
                for call, x in zip(calls, replies, strict=True)
            ]

    silos = intercepts_silos()
    with pytest.raises(RuntimeError, match=rf"silos \['{silos.names[2]}'\] did not answer"):
        remote(fed.FSGLD(intercepts), silos, Late(silos))


def test_what_runs_at_hand_alone_says_so():
    silos = linear_silos()
    remote = fed.RemoteSilos(silos, fed.Loopback(silos))
    with pytest.raises(
        ValueError, match=r"remote silos; expected fed\.RemoteMCMC\(kernel, \.\.\.\) in place of"
    ):
        MCMC(fed.FSGLD(linear), num_warmup=1, num_samples=1).run(random.key(0), remote)


def test_kept_is_a_number_to_the_server():
    assert jax.tree.leaves(Kept(3)) == []
    assert message_bytes(Kept(3)) == 0


# Over processes

_PROCESS = """
import sys
sys.path.insert(0, {tests!r})
from numpyro_fed.engines import spmd
process = int(sys.argv[1])
spmd.initialize("127.0.0.1:" + sys.argv[2], {processes}, process)
import numpy as np, numpyro_fed as fed
from jax import random
from small_models import linear, linear_silos
silos = spmd.connect(spmd.dealt(linear_silos(), process, {processes}))
lengths = {{"num_warmup": {warmup}, "num_samples": {samples}, "num_chains": {chains}}}
mcmc = fed.RemoteMCMC(fed.FSGLD(linear), **lengths, progress_bar=False)
mcmc.run(random.key(3), silos)
beta = np.asarray(mcmc.get_samples(group_by_chain=True)["beta"])
np.savez(sys.argv[3] + str(process), beta=beta, names=np.array(silos.names))
"""


@pytest.mark.ci
@pytest.mark.parametrize(
    ("processes", "rounds"),
    [(2, WARMUP + SAMPLES), pytest.param(4, 50, marks=pytest.mark.ci)],
    ids=["two", "four"],
)
def test_processes_draw_what_one_draws(tmp_path, processes, rounds):
    runs = {"warmup": WARMUP, "samples": rounds - WARMUP, "chains": CHAINS}
    code = _PROCESS.format(tests=str(Path(__file__).parents[1]), processes=processes, **runs)
    one, *others = saved_by(code, processes, tmp_path)
    for other in others:
        np.testing.assert_array_equal(one["beta"], other["beta"])
    silos = linear_silos()
    data = {
        name: {k: np.asarray(v) for k, v in silos[name].items()} for name in one["names"].tolist()
    }
    expected = np.asarray(
        inline_rounds(fed.FSGLD(linear), fed.Silos(data), rounds - WARMUP).get_samples(True)["beta"]
    )
    np.testing.assert_allclose(one["beta"], expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


def told(monkeypatch, *others):
    """As if other processes had these silos."""
    monkeypatch.setattr(
        spmd,
        "_gather_text",
        lambda text: [text, *[spmd.json.dumps(spmd.description(s)) for s in others]],
    )


def test_processes_with_one_silo_twice(monkeypatch):
    told(monkeypatch, linear_silos())
    with pytest.raises(ValueError, match=r"silos \['silo 0', .*\] are with more than one party"):
        spmd.connect(linear_silos())


def test_processes_with_silos_of_another_kind(monkeypatch):
    told(monkeypatch, fed.Silos({"x": {"x": np.ones((3, 5)), "y": np.ones(3)}}))
    with pytest.raises(
        ValueError, match="process 1 has silos of another kind than process 0: rows"
    ):
        spmd.connect(linear_silos())


def test_more_processes_than_silos():
    with pytest.raises(
        ValueError, match="5 processes for 4 silos; expected at most one process a silo"
    ):
        spmd.dealt(linear_silos(), 4, 5)


def test_dealt_silos_keep_groups_and_index():
    silos = intercepts_silos()
    own = spmd.dealt(silos, 1, 2)
    assert own.names == silos.names[1::2]
    assert own.index == silos.index
    assert own.group == silos.group


def test_dealt_silos_are_not_guessed_anew():
    # a shared argument as long as one silo is not taken for its rows
    silos = fed.Silos(
        {"a": {"y": np.arange(5.0), "w": np.ones(5)}, "b": {"y": np.arange(7.0), "w": np.ones(5)}}
    )
    own = spmd.dealt(silos, 0, 2)
    assert own.group == silos.group
    assert set(own.shared) == {"w"}
    np.testing.assert_array_equal(own["a"]["y"], np.arange(5.0))


def test_processes_that_make_other_calls_are_told(monkeypatch):
    silos = linear_silos()
    carrier = spmd.Spmd(fed.Loopback(silos).workers, [0, 0, 0, 0], silos)
    remote = fed.RemoteSilos(silos, carrier)

    def differing(sent):
        other = sent.copy()
        other[0, 0] += 1  # the silo's number
        return np.stack([sent, other])

    monkeypatch.setattr(spmd, "_gathered", lambda sent: np.stack([sent, sent]))
    kernel = fed.FSGLD(linear, validate=False)
    fed.RemoteMCMC(kernel, num_warmup=0, num_samples=1).run(random.key(0), remote)
    monkeypatch.setattr(spmd, "_gathered", differing)
    with pytest.raises(RuntimeError, match="the processes do not make the same calls"):
        fed.RemoteMCMC(fed.FSGLD(linear, validate=False), num_warmup=0, num_samples=1).run(
            random.key(0), remote
        )


def test_the_launcher_names_a_missing_file(capsys):
    with pytest.raises(SystemExit):
        spmd.main(["nowhere.py"])
    assert "nowhere.py: no such file" in capsys.readouterr().err
