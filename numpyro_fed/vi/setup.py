"""Setup of a variational fit: the model and guide checked, the silos stacked."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from numpyro_fed._typing import PyTree
from numpyro_fed.data.mixed import MixedSilos
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.views import SiloRows, outlines, stack, thin
from numpyro_fed.density.check import check_batch, check_factorization
from numpyro_fed.density.factorize import factorize
from numpyro_fed.density.factors import PARAMS, Factors, LearnedModel, made_up_rows
from numpyro_fed.density.independence import independent_units
from numpyro_fed.privacy.differential import Noise
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.vi.conducive.silo_factor import number_of_points
from numpyro_fed.vi.config import FitConfig
from numpyro_fed.vi.guides.auto_silo_normal import AutoSiloNormal
from numpyro_fed.vi.guides.family import Family
from numpyro_fed.vi.guides.learned import factored
from numpyro_fed.vi.guides.marginal import MarginalNormal
from numpyro_fed.vi.guides.normal import SiloNormal
from numpyro_fed.vi.guides.user_guide import guide_family
from numpyro_fed.vi.options import Options

# rows to check in a fit by minibatches, as all may not fit into memory: 60,000 images of 784 pixels
# (190 MB in float32) are checked whole
_CHECK_ROWS = 100_000


# for each structure the number of rows of each group in all silos
Totals = tuple[tuple[tuple[str, int], ...], ...]


class Setup(NamedTuple):
    """The setup of a fit, from :func:`make_setup`.

    :param config: the static facts.
    :param parts: the silos of each structure, with the first values of learned parameters among
        their shared arguments.
    :param stacks: the silos' rows.
    :param names: the silos' names, in the order of the stacks.
    :param local: for each stack the silos' first parameters. Empty for remote silos, whose stacks
        have no rows either.
    """

    config: FitConfig
    parts: tuple[Silos, ...]
    stacks: list[SiloRows]
    names: tuple[str, ...]
    local: list

    @property
    def remote(self) -> bool:
        """Flag of remote silos: their rows are not in this process."""
        return isinstance(self.parts[0], RemoteSilos)

    @property
    def draws_latents(self) -> bool:
        """Flag of silos that can draw their latents, and not only integrate them out."""
        return all(self.config.families[rows.part].can_draw(rows) for rows in self.stacks)

    @property
    def globals_alone(self) -> bool:
        """Flag of draws of theta alone: latents stay in remote silos, or cannot be drawn."""
        return self.remote or not self.draws_latents

    @property
    def totals(self) -> Totals:
        """Number of rows of each group in all silos, for each structure."""
        return tuple(tuple((g, sum(n)) for g, n in part.sizes.items()) for part in self.parts)

    def as_one(self) -> "Setup":
        """Return the setup with all silos of a structure as one, which needs no padding.

        The factors sum to the same. Silos whose latents are one unit stay apart.
        """
        stacks, local, families, parts, names = [], [], [], [], []
        for i, (family, part) in enumerate(zip(self.config.families, self.parts, strict=True)):
            if family.has_local and family.group is None:
                mine = [(r, p) for r, p in zip(self.stacks, self.local, strict=True) if r.part == i]
            else:
                part = part.as_one()
                family = replace(family, factors=family.factors.for_silos(part))
                rows = [without_params(r) for r in stack(part, i)]
                mine = [(r, _first_local(family, r)) for r in rows]
            stacks += [r for r, _ in mine]
            local += [p for _, p in mine]
            families.append(family)
            parts.append(part)
            names += [part.names[n] for r, _ in mine for n in np.asarray(r.number)]
        config = replace(self.config, families=tuple(families))
        return Setup(config, tuple(parts), stacks, tuple(names), local)

    def partition(self) -> str:
        """Return a fingerprint of the assignment of pooled rows to silos.

        For remote silos it is one of their numbers of rows.
        """
        digest = hashlib.sha256()
        for part in self.parts:
            for group, sizes in part.sizes.items():
                order = b"" if self.remote else np.asarray(part.order[group]).tobytes()
                digest.update(repr((part.names, group, sizes)).encode() + order)
        return digest.hexdigest()


def _parts_of(silos: Silos | MixedSilos) -> tuple[Silos, ...]:
    """Return the silos, sorted into parts of one structure each."""
    if isinstance(silos, MixedSilos):
        return silos.parts
    if not isinstance(silos, Silos):
        raise ValueError(
            "expected silos = fed.split(...), fed.Silos(...) or fed.MixedSilos(...), got "
            f"{type(silos).__name__}; one "
            "silo with all rows will do: fed.Silos({'all': {'x': x, 'y': y}})"
        )
    return (silos,)


def make_setup(
    model: Callable, guide: Callable, silos: Silos | MixedSilos, options: Options
) -> Setup:
    """Check model, guide and data, check the factorization, and stack the silos."""
    config, parts = _config_and_parts(model, guide, _parts_of(silos), options)
    if options.validate:
        for family, part in zip(config.families, parts, strict=True):
            some = _some(part, config.batch)
            check_factorization(family.factors, some)
            if config.batch is not None and not family.has_local:
                check_batch(family.factors, some, *config.batch)
    stacks, names = [], []
    for i, part in enumerate(parts):
        for rows in outlines(part, i) if isinstance(part, RemoteSilos) else stack(part, i):
            stacks.append(without_params(rows))
            names += [part.names[n] for n in np.asarray(rows.number)]
    here = [] if isinstance(parts[0], RemoteSilos) else stacks
    local = [_first_local(config.families[rows.part], rows) for rows in here]
    return Setup(config, parts, stacks, tuple(names), local)


@partial(jax.jit, static_argnums=0)
def _first_local(family: Family, rows: SiloRows) -> PyTree:
    """Return the first parameters of a stack's silos."""
    return jax.vmap(family.init_local, in_axes=(rows.axes,))(rows)


def without_params(rows: SiloRows) -> SiloRows:
    """Return a stack of silos without the values of the model's learned parameters."""
    return replace(rows, shared={k: v for k, v in rows.shared.items() if k != PARAMS})


def config_of_silo(
    model: Callable, guide: Callable, known: Silos, options: Options, independent: bool
) -> FitConfig:
    """Return the config of a remote silo's fit, as the silo makes it for itself.

    It follows from facts about all silos, and asks none.

    :param known: the silos' facts.
    :param independent: whether elements are independent given theta. The server finds it by a check
        in the silos; it holds if ``families[0].group`` of the server's config is not ``None``.
    """
    return _config_and_parts(model, guide, _parts_of(known), options, independent)[0]


def _config_and_parts(
    model: Callable,
    guide: Callable,
    parts: tuple[Silos, ...],
    options: Options,
    independent: bool | None = None,
) -> tuple[FitConfig, tuple[Silos, ...]]:
    """Return the static facts, and the silos with first values of the learned parameters.

    These values are among the silos' shared arguments.
    """
    plain = parts
    learned, parts, factors = factored(model, plain)
    _check_globals(factors, parts)
    batch = _batch(options, factors, parts)
    families = tuple(
        _family(guide, f, part, own, options, batch, independent)
        for f, part, own in zip(factors, parts, plain, strict=True)
    )
    for family in families:
        if set(family.constraints()) != set(families[0].constraints()):
            one, other = set(family.constraints()), set(families[0].constraints())
            raise ValueError(
                f"the guide has the global parameters {sorted(one ^ other)} in some structures of "
                "silos and not in others"
            )
    _check_marginal(options, families)
    twice = sorted(set(learned) & set(families[0].constraints()))
    if twice:
        raise ValueError(
            f"parameters {twice} are in the model and in the guide; expected different names"
        )
    config = FitConfig(
        families,
        options.optim,
        options.local_optim,
        int(options.num_particles),
        int(options.num_local_particles),
        batch,
        tuple(sorted(learned)),
        int(options.num_local_steps),
        _num_points(options, families[0]),
        _noise(options, families, sum(map(len, parts))),
        options.secure_sum,
        {name: support for name, (support, _) in learned.items()} | families[0].constraints(),
    )
    return config, parts


def _check_marginal(options: Options, families: tuple[Family, ...]) -> None:
    """Refuse latents that are integrated out where they have to move."""
    steps = options.optim, options.local_optim, options.batch_size
    rounds = options.num_points is not None and steps == (None, None, None)
    if any(isinstance(family, MarginalNormal) for family in families) and not rounds:
        raise ValueError(
            "marginal=True: silos integrate latents out in conducive rounds without an optimizer "
            "or minibatches; expected fed.ConduciveSFVI(model, guide), or marginal=False"
        )


def _num_points(options: Options, family: Family) -> int:
    if options.num_points is None:
        return 0
    assert isinstance(family, SiloNormal)
    return number_of_points(family, options.num_points)


def _noise(options: Options, families: tuple[Family, ...], num_silos: int) -> Noise | None:
    if options.privacy is None:
        return None
    if not isinstance(families[0], SiloNormal):
        raise ValueError(
            "privacy: expected fed.AutoSiloNormal(model), whose q(theta) is Gaussian, got a guide "
            "of your own"
        )
    return options.privacy.noise(num_silos if options.secure_sum else 1)


def _some(silos: Silos, batch: tuple[str, int] | None) -> Silos:
    """Return the rows for checks: a part of them where the fit uses minibatches."""
    return (
        silos
        if batch is None or isinstance(silos, RemoteSilos)
        else thin(silos, batch[0], _CHECK_ROWS)
    )


def _check_globals(factors: list[Factors], parts: tuple[Silos, ...]) -> None:
    if not factors[0].dim:
        raise ValueError(
            "the model has no global latent site; expected one at least (learned parameters alone "
            "will not do: give one of them a prior, with "
            "numpyro.sample outside the silo plates)"
        )
    for f, part in zip(factors, parts, strict=True):
        if f.global_sites != factors[0].global_sites:
            one, other = dict(factors[0].global_sites), dict(f.global_sites)
            wrong = sorted(k for k in {*one, *other} if one.get(k) != other.get(k))
            raise ValueError(
                f"silo {part.names[0]!r} and silo {parts[0].names[0]!r} differ in structure and in "
                "the global sites "
                f"{wrong}; expected the same global sites in all silos: sample them in every "
                "branch of the model"
            )


def _batch(
    options: Options, factors: list[Factors], parts: tuple[Silos, ...]
) -> tuple[str, int] | None:
    if options.batch_size is None:
        return None
    if len(parts) > 1:
        raise ValueError(
            "batch_size: expected silos of one structure, got several; take batch_size=None"
        )
    factors[0].check_minibatch()
    group = factors[0].batch_group()
    if (
        factors[0].local_sites
        and factors[0].latent_groups != (group,)
        and options.num_local_particles > 1
    ):
        raise ValueError(
            f"batch_size={options.batch_size} of {group!r} with "
            f"num_local_particles={options.num_local_particles}: "
            f"importance weights of the latents of {factors[0].latent_groups} need all their rows; "
            "expected "
            "num_local_particles=1, or batch_size=None"
        )
    return group, int(options.batch_size)


def _family(
    guide: Callable,
    factors: Factors,
    silos: Silos,
    plain: Silos,
    options: Options,
    batch: tuple[str, int] | None,
    known: bool | None = None,
) -> Family:
    """Return the variational family over one structure's factors.

    :param plain: the silos without the model's learned parameters.
    :param known: whether elements are independent; ``None``: check it where it matters.
    """
    independent = known is not False
    if (
        known is None
        and (options.num_local_particles > 1 or batch is not None)
        and len(factors.latent_groups) == 1
    ):
        independent = independent_units(factors, _some(silos, batch)) is not None
    if isinstance(guide, AutoSiloNormal):
        if guide.marginal:
            independent = known is not None or independent_units(factors, silos) is not None
        _check_guides_model(guide, factors, plain)
        one = made_up_rows(factors.rows, silos.index)
        own = {
            g: {k: one[k] for k in factors.leaves(g) if k not in silos.index}
            for g in factors.latent_groups
        }
        family: Family = guide.family(factors, own, independent)
    else:
        family = guide_family(
            guide, factors, plain, silos.shared.get(PARAMS, {}), independent, known is None
        )
    if batch is not None and family.group is None and batch[0] in factors.latent_groups:
        raise ValueError(
            f"batch_size={batch[1]} of {batch[0]!r}: their latents are one unit in each silo "
            '(local_cov="full", several '
            "plates with latents, or elements that depend on each other); expected batch_size=None"
        )
    return family


def _check_guides_model(guide: AutoSiloNormal, factors: Factors, silos: Silos) -> None:
    """Refuse a guide that was made for a model with other sites."""
    model = factors.model.model if isinstance(factors.model, LearnedModel) else factors.model
    if guide.model is model:
        return
    other = factorize(guide.model, silos)
    if (other.global_sites, other.local_sites) != (factors.global_sites, factors.local_sites):
        names = [
            [n for n, _ in f.global_sites] + [s.name for s in f.local_sites]
            for f in (factors, other)
        ]
        raise ValueError(
            f"the guide was made for another model: expected latent sites {names[0]}, "
            f"got {names[1]}"
        )
