"""Mistakes that would otherwise give wrong numbers without a word."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC

import numpyro_fed as fed
from numpyro_fed._arviz import groups_of
from numpyro_fed.mcmc.config import LatentCoordinates

Y = np.random.default_rng(0).normal(3, 1, 40)


def mean(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with fed.silo_plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def reads_size(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with fed.silo_plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu * 40 / y.shape[0], 1), obs=y)


def run(kernel, silos, **options):
    mcmc = MCMC(kernel, num_warmup=2, num_samples=4, progress_bar=False)
    mcmc.run(jax.random.key(0), silos, **options)
    return mcmc


def halves():
    return fed.split({"y": Y}, by=np.arange(40) % 2)


@pytest.mark.filterwarnings("ignore:the rows of the one silo")  # SGLD sees one
@pytest.mark.parametrize("kernel", [fed.SGLD, fed.DSGLD])
def test_a_model_that_reads_the_number_of_its_rows_is_refused_with_minibatches(kernel):
    with pytest.raises(
        ValueError, match=r"row's log density in a minibatch of 5|factorization check: log p"
    ):
        run(kernel(reads_size, step_size=1e-3, num_local_steps=2, batch_size=5), halves())
    run(kernel(mean, step_size=1e-3, num_local_steps=2, batch_size=5), halves())  # the control


def test_a_state_of_other_silos_is_refused():
    mcmc = run(fed.DSGLD(mean, step_size=1e-3, num_local_steps=2), halves())
    mcmc.post_warmup_state = mcmc.last_state
    with pytest.raises(ValueError, match="visited 2 silos, the data have 4"):
        mcmc.run(jax.random.key(1), fed.split({"y": Y}, by=np.arange(40) % 4))


def test_values_that_the_stored_type_cannot_hold_are_refused():
    with pytest.raises(ValueError, match="does not fit into int32"):
        fed.Silos({"a": {"t": np.array([10**10, 1])}, "b": {"t": np.array([2])}})
    with pytest.raises(ValueError, match="silo 'a', argument 'y', row 1: expected finite"):
        fed.Silos({"a": {"y": np.array([1.0, 1e39])}, "b": {"y": np.array([2.0])}})


def test_masked_columns_and_lists_of_silos_are_refused():
    with pytest.raises(ValueError, match="without masked values"):
        fed.split({"y": np.ma.masked_array([1.0, -999.0], mask=[0, 1])}, by=["a", "b"])
    with pytest.raises(ValueError, match=r"expected \{silo name: \{argument: value\}\}"):
        fed.Silos([{"y": Y}])


def test_a_step_that_is_too_large_is_said():
    silos = halves()
    means = np.array([[Y[::2].mean()], [Y[1::2].mean()]])
    exact = fed.surrogates.analytic(silos, means, np.full((2, 1), 20.0), prior=([0.0], [0.01]))
    mcmc = run(fed.FSGLD(mean, step_size=2.0, num_local_steps=1, surrogate=exact), silos)
    with pytest.warns(UserWarning, match="predicted to be 1.41 times too large"):
        fed.to_inference_data(mcmc, silos)
    with pytest.raises(ValueError, match="whitened steps of 4 or more diverge"):
        run(fed.FSGLD(mean, step_size=5.0, num_local_steps=1, surrogate=exact), silos)
    with pytest.raises(ValueError, match="expected the silos of the run"):
        fed.to_inference_data(mcmc, {"y": Y})


def test_starts_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="init_params: expected finite values"):
        run(
            fed.DSGLD(mean, step_size=1e-3, num_local_steps=2), halves(), init_params={"mu": np.nan}
        )


def test_the_result_keeps_its_groups_and_saves(tmp_path):
    import arviz as az

    silos = halves()
    idata = fed.to_inference_data(
        run(fed.DSGLD(mean, step_size=1e-3, num_local_steps=2), silos), silos
    )
    assert sorted(groups_of(idata)) == [
        "log_likelihood",
        "observed_data",
        "posterior",
        "sample_stats",
    ]
    idata.to_netcdf(str(tmp_path / "fit.nc"))
    read = az.from_netcdf(str(tmp_path / "fit.nc"))
    np.testing.assert_array_equal(read.observed_data["rows_silo"].values, np.tile(["0", "1"], 20))
    np.testing.assert_array_equal(read.posterior["mu"], idata.posterior["mu"])


def test_a_schedule_that_starts_beyond_what_is_stable_is_refused():
    with pytest.raises(ValueError, match="got 10; whitened steps of 4 or more diverge"):
        run(fed.FSGLD(mean, step_size=lambda i: 10.0), halves())


def test_data_outside_a_support_are_named_as_such():
    def counts(y):
        rate = numpyro.sample("rate", dist.Gamma(2, 1))
        with fed.silo_plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Poisson(rate), obs=y)

    with pytest.raises(
        ValueError,
        match=r"log density is -inf at a typical position, silo 'b'; .* inside the supports",
    ):
        run(
            fed.FSGLD(counts),
            fed.Silos({"a": {"y": np.array([1, 2])}, "b": {"y": np.array([3, -3])}}),
        )


def test_results_of_other_silos_and_predictions_of_what_is_given_are_refused():
    silos = halves()
    mcmc = run(fed.DSGLD(mean, step_size=1e-3, num_local_steps=2), silos)
    other = fed.split({"y": Y}, by=np.repeat([0, 1], [30, 10]))
    with pytest.raises(
        ValueError,
        match=r"expected the silos of the run, with .*\(20, 20\).* rows, got .*\(30, 10\)",
    ):
        fed.to_inference_data(mcmc, other)
    with pytest.raises(
        ValueError, match=r"expected the silos of the run, \['0', '1'\], got NoneType"
    ):
        fed.to_inference_data(mcmc)
    idata = fed.to_inference_data(mcmc, silos)
    with pytest.raises(ValueError, match=r"got values of all that is observed, \['y'\]"):
        fed.predict(mean, idata, jax.random.key(0), {"y": Y[:3]}, silo="0")


def test_latents_of_other_silos_are_carried_no_further_than_the_map_was_fitted():
    latents = LatentCoordinates(np.zeros(2), np.eye(2), None)
    np.testing.assert_array_equal(latents.u(np.array([-9.0, 1.0])), [-6.0, 1.0])


def test_a_chain_that_grows_without_end_has_left_before_its_numbers_overflow():
    # each step multiplies the distance by 1 - h / 2 * 40 = -3: beyond 1e18 after 4 rounds of 10,
    # and still finite then
    grown = MCMC(
        fed.DSGLD(mean, step_size=0.2, num_local_steps=10),
        num_warmup=0,
        num_samples=8,
        progress_bar=False,
    )
    grown.run(jax.random.key(0), halves())
    assert np.asarray(grown.get_extra_fields()["diverging"]).tolist()[-3:] == [True] * 3
    assert 1e9 < abs(float(grown.get_samples()["mu"][-1])) < 1e18
    with pytest.warns(UserWarning, match="chain 0 left the reals in [345] rounds"):
        fed.to_inference_data(grown, halves())
    calm = run(fed.DSGLD(mean, step_size=1e-3, num_local_steps=10), halves())
    assert not np.asarray(calm.get_extra_fields()["diverging"]).any()


@pytest.mark.ci
def test_learned_parameters_that_chains_keep_are_named():
    def scaled(y):
        sigma = numpyro.param("sigma", 2.0, constraint=dist.constraints.positive)
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with fed.silo_plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, sigma), obs=y)

    silos = fed.Silos({"a": {"y": np.ones(4)}, "b": {"y": np.zeros(3)}})
    for kernel in (fed.FSGLD(scaled), fed.DSGLD(scaled, step_size=0.01)):
        with pytest.warns(
            UserWarning, match=r"learned parameters \['sigma'\] are kept at their first values"
        ):
            MCMC(kernel, num_warmup=0, num_samples=1, progress_bar=False).run(
                jax.random.key(0), silos
            )
