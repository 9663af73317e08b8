"""Marks and factors: what is found in a model, and what is refused.

Also how often the model is called.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import Array, random
from numpyro.handlers import condition, seed, trace
from registry import ENTRIES

import numpyro_fed as fed
from numpyro_fed.density.factorize import factorize
from numpyro_fed.density.factors import Factors, LocalSite, pooled_log_density

BY = np.array([0, 1, 1, 0, 1])
ONE = fed.split({"y": np.arange(5.0)}, by=BY)


# Marks


def plain(y: Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("patients", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def test_mark_silos_marks_the_named_plate_only() -> None:
    def model(y: Array) -> None:
        with numpyro.plate("visits", 2, dim=-2):
            plain(y)

    sites = trace(seed(fed.mark_silos(model, "patients"), 0)).get_trace(jnp.ones(3))
    assert fed.handlers.is_silo_plate(sites["patients"])
    assert not fed.handlers.is_silo_plate(sites["visits"])
    assert not fed.handlers.is_silo_plate(sites["y"])
    decorated = fed.mark_silos(None, "patients")(plain)
    assert fed.handlers.is_silo_plate(trace(seed(decorated, 0)).get_trace(jnp.ones(3))["patients"])
    assert not fed.handlers.is_silo_plate(trace(seed(plain, 0)).get_trace(jnp.ones(3))["patients"])


def test_marks_of_plates_that_are_not_there() -> None:
    with pytest.raises(
        ValueError, match=r"expected plates .*, did not find \['patient'\]; use the names"
    ):
        seed(fed.mark_silos(plain, "patients", "patient"), 0)(jnp.ones(3))
    with pytest.raises(ValueError, match="the name of at least one plate"):
        fed.mark_silos(plain)


# What is found


def test_sites_of_a_model() -> None:
    factors = factorize(ENTRIES["women_in_districts"].model, ENTRIES["women_in_districts"].silos())
    assert factors.global_sites == (("beta", (2,)), ("tau", ()))
    assert factors.local_sites == (LocalSite("rate", "districts", 0, ()),)
    assert dict(factors.plates) == {"districts": "districts", "women": "women"}
    assert factors.index == (("district", "districts"),)
    assert factors.latent_groups == ("districts",)
    assert factors.dim == 3


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("nested_plates", {"a": (0, (1,)), "z": (0, (3,))}),
        ("silo_plate_innermost", {"z": (1, (3,))}),
        ("local_simplex", {"share": (0, (2,))}),
        ("local_correlation", {"corr": (0, (1,))}),
        ("loc_scale_reparam", {"z_decentered": (0, ())}),
        ("transform_reparam", {"z_base": (0, ())}),
    ],
)
def test_local_sites_have_their_element_axis_and_unconstrained_shape(
    name: str, shapes: dict
) -> None:
    factors = factorize(ENTRIES[name].model, ENTRIES[name].silos())
    assert {s.name: (s.axis, s.shape) for s in factors.local_sites} == shapes


def test_flat_positions() -> None:
    factors = factorize(ENTRIES["dirichlet"].model, ENTRIES["dirichlet"].silos())
    assert factors.global_sites == (("weights", (2,)),)
    factors = factorize(
        ENTRIES["constrained_globals"].model, ENTRIES["constrained_globals"].silos()
    )
    theta = random.normal(random.key(0), (factors.dim,))
    sites = factors.unravel(theta)
    assert {k: v.shape for k, v in sites.items()} == {"beta": (2,), "rate": (), "sigma": ()}
    np.testing.assert_array_equal(factors.ravel({**sites, "other": jnp.ones(3)}), theta)


def test_public_observations_count_once() -> None:
    def model(y: Array) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        numpyro.sample("census", dist.Normal(mu, 0.1), obs=0.3)
        numpyro.factor("penalty", -(mu**2))
        with fed.silo_plate("patients", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    factors = factorize(model, ONE, public=("census", "penalty"))
    theta = {"mu": jnp.array(0.7)}
    local = sum(factors.log_local(theta, {}, ONE[s], {"rows": 1.0}) for s in ONE)
    np.testing.assert_allclose(
        factors.log_prior(theta, ONE.shared) + local,
        pooled_log_density(model, ONE, theta),
        rtol=1e-6,
    )
    np.testing.assert_allclose(
        factors.log_prior(theta, {}),
        dist.Normal(0, 1).log_prob(0.7) + dist.Normal(0.7, 0.1).log_prob(0.3) - 0.49,
        rtol=1e-6,
    )


# How often the model is called, and with what


class Counted:
    """A model that counts its calls and keeps the arguments it was called with."""

    def __init__(self) -> None:
        self.calls: list[Array] = []

    def __call__(self, y: Array, center: Array, link: str) -> None:
        self.calls.append(y)
        assert link == "identity"
        mu = numpyro.sample("mu", dist.Normal(center.sum(), 1))
        with fed.silo_plate("patients", y.shape[0]):
            z = numpyro.sample("z", dist.Normal(mu, 1))
            numpyro.sample("y", dist.Normal(z, 1), obs=y)


def test_the_model_is_traced_without_data_and_once() -> None:
    def silos(n: int, center: np.ndarray) -> fed.Silos:
        data = {"y": np.arange(float(n)), "center": center, "link": "identity"}
        return fed.split(data, by=np.arange(n) % 3)

    model = Counted()
    first = factorize(model, silos(10, np.zeros(2)))
    assert len(model.calls) == 2  # two numbers of rows, to tell sizes apart
    assert all(isinstance(y, jax.core.Tracer) and len(y) > 1000 for y in model.calls)
    assert factorize(model, silos(10, np.zeros(2))) is first
    assert factorize(model, silos(7, np.ones(2))) is first  # other values, other sizes
    assert len(model.calls) == 2
    assert factorize(model, silos(7, np.ones(4))) == first
    assert len(model.calls) == 4
    assert isinstance(hash(first), int)


# What is refused


def with_latent(sample: Callable[[Array, Array], None]) -> Callable:
    """Return a model with something more in its silo plate."""

    def model(y: Array) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with fed.silo_plate("patients", y.shape[0]):
            sample(mu, y)
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    return model


def observed_outside(y: Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    numpyro.sample("census", dist.Normal(mu, 1), obs=1.0)
    with fed.silo_plate("patients", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def factor_outside(y: Array) -> None:
    with_latent(lambda mu, y: None)(y)
    numpyro.factor("penalty", -jnp.ones(()))


def subsampled(y: Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with fed.silo_plate("patients", y.shape[0], subsample_size=2) as rows:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[rows])


def fixed_size(y: Array) -> None:
    with fed.silo_plate("beds", 5):
        numpyro.sample("z", dist.Normal(0, 1))
    plain(y)


def reads_values(y: Array) -> None:
    if y.sum() > 0:
        with_latent(lambda mu, y: None)(y)


def global_per_row(y: Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([y.shape[0]]).to_event(1))
    with fed.silo_plate("patients", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def name_per_row(y: Array) -> None:
    for i in range(y.shape[0] // 1000):
        numpyro.sample(f"mu{i}", dist.Normal(0, 1))
    with_latent(lambda mu, y: None)(y)


def two_plates(y: Array) -> None:
    with (
        fed.silo_plate("patients", y.shape[0], dim=-1),
        fed.silo_plate("again", y.shape[0], dim=-2),
    ):
        numpyro.sample("z", dist.Normal(0, 1))


def discrete_global(y: Array) -> None:
    numpyro.sample("k", dist.Bernoulli(0.5))
    with_latent(lambda mu, y: None)(y)


def delta_global(y: Array) -> None:
    numpyro.sample("d", dist.Delta(jnp.zeros(3)).to_event(1))
    with_latent(lambda mu, y: None)(y)


REFUSED: dict[str, tuple[Callable, str]] = {
    "no silo plate": (
        plain,
        "no silo plate.*fed.silo_plate.*or mark one from outside: fed.mark_silos",
    ),
    "observed outside": (
        observed_outside,
        "observed site 'census' is outside every silo plate.*public=\\(\"census\",\\)",
    ),
    "factor outside": (factor_outside, "observed site 'penalty' is outside every silo plate"),
    "discrete": (
        with_latent(lambda mu, y: numpyro.sample("k", dist.Categorical(jnp.ones(3) / 3))),
        "latent site 'k' is discrete; expected continuous latents: sum it out",
    ),
    "discrete global": (discrete_global, "latent site 'k' is discrete"),
    "Delta": (
        with_latent(lambda mu, y: numpyro.sample("d", dist.Delta(mu))),
        "latent site 'd' is a Delta; use numpyro.deterministic",
    ),
    "Delta global": (delta_global, "latent site 'd' is a Delta"),
    "subsample_size": (
        subsampled,
        "silo plate 'patients' subsamples 2 .* give the kernel batch_size=",
    ),
    "fixed size": (
        fixed_size,
        "silo plate 'beds': its size is no argument's number of rows.*groups are \\['rows'\\]",
    ),
    "fails": (
        with_latent(lambda mu, y: y + jnp.ones(5)),
        "the model fails when traced with as many rows as {'rows': 1009} .*takes all sizes from "
        "its arguments",
    ),
    "reads values": (reads_values, "(?s)the model fails when traced .*runs under jax.jit"),
    "global per row": (
        global_per_row,
        "latent sites \\['mu'\\] change shape with a silo's number of rows",
    ),
    "name per row": (name_per_row, "latent sites \\['mu1'\\] change shape"),
    "local per row": (
        with_latent(
            lambda mu, y: numpyro.sample("z", dist.Normal(0, 1).expand([len(y)]).to_event(1))
        ),
        "latent sites \\['z'\\] change shape with a silo's number of rows",
    ),
    "two silo plates": (
        two_plates,
        "latent site 'z' is inside 2 silo plates, .*expected one: mark only the outer",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    model, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        factorize(model, ONE)


def groups(deaths: Array, births: Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with fed.silo_plate("deaths", deaths.shape[0]):
        numpyro.sample("x", dist.Normal(mu, 1), obs=deaths)
    with fed.silo_plate("births", births.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 2), obs=births)


def test_two_plates_of_one_guessed_group() -> None:
    data = {
        "oslo": {"deaths": np.arange(3.0), "births": np.ones(3)},
        "rome": {"deaths": np.ones(2), "births": np.ones(2)},
    }
    words = (
        r"arguments \['deaths', 'births'\] have as many rows as each of the silo plates "
        r".*rows={.deaths.: .deaths."
    )
    with pytest.raises(ValueError, match=words):
        factorize(groups, fed.Silos(data))
    factors = factorize(groups, fed.Silos(data, rows={"births": "births"}))
    assert dict(factors.plates) == {"deaths": "deaths", "births": "births"}


def test_local_sites_belong_to_the_federated_block() -> None:
    """Under :class:`numpyro.infer.Gibbs` other blocks condition sites of theirs."""

    def model(y: Array, _gibbs_sites: dict) -> Factors | None:
        return condition(
            with_latent(lambda mu, y: numpyro.sample("z", dist.Normal(mu, 1))), _gibbs_sites
        )(y)

    factors = factorize(model, ONE, extra={"_gibbs_sites": {"mu": jnp.ones(())}})
    assert factors.global_sites == ()
    assert [s.name for s in factors.local_sites] == ["z"]
    with pytest.raises(
        ValueError, match="site 'z' lives in a silo plate and is owned by another Gibbs block"
    ):
        factorize(model, ONE, extra={"_gibbs_sites": {"z": jnp.ones(5)}})


# A forgotten obs=


def forgetful(y: Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with fed.silo_plate("patients", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1))


def test_a_latent_site_named_as_an_argument_is_warned_of() -> None:
    with pytest.warns(
        UserWarning, match=r"site 'y' is latent, .* was obs=y forgotten\? .* rename the site"
    ):
        assert factorize(forgetful, ONE).local_sites[0].name == "y"


def test_other_latent_sites_are_not(recwarn: pytest.WarningsRecorder) -> None:
    def renamed(y: Array) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with fed.silo_plate("patients", y.shape[0]):
            level = numpyro.sample("level", dist.Normal(mu, 1))
            numpyro.sample("y", dist.Normal(level, 1), obs=y)

    assert factorize(renamed, ONE).local_sites[0].name == "level"
    assert not recwarn
