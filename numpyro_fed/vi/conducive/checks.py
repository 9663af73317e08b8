"""Checks of conducive rounds: what they do not cover, and how they ended."""

import math
import warnings

import numpy as np

from numpyro_fed.data.views import SiloRows
from numpyro_fed.surrogates.natural_step import CONVERGED
from numpyro_fed.vi.conducive.antithetic import fewest_rows
from numpyro_fed.vi.config import FitConfig
from numpyro_fed.vi.guides.auto_silo_normal import AutoSiloNormal
from numpyro_fed.vi.guides.family import Family
from numpyro_fed.vi.loop import VIState


class JointUnits(ValueError):
    """Error of a guide that treats elements apart, although they depend on each other.

    All latents of a silo are then one unit.

    :param size: latents of the largest silo.
    """

    def __init__(self, said: str, size: int) -> None:
        super().__init__(said)
        self.size = size


def _unit_size(family: Family, rows: SiloRows) -> int:
    groups, pad = family.factors.local_groups(), dict(rows.pad)
    return sum(pad.get(groups[s.name], 1) * math.prod(s.shape) for s in family.factors.local_sites)


def check(config: FitConfig, guide: AutoSiloNormal, stacks: list[SiloRows]) -> None:
    """Refuse a model, guide or options that conducive rounds do not cover."""
    if config.optim is None and config.moving:
        raise ValueError(
            f"conducive rounds of learned parameters {list(config.moving)}: expected an optimizer "
            "that moves them in the silos, e.g. optim=optax.adam(1e-2), or "
            "latent sites alone (numpyro.sample in place of numpyro.param, a guide without "
            "amortize=)"
        )
    local = [f for f in config.families if f.has_local]
    if config.batch is not None:
        group, size = config.batch
        if local and config.optim is None:
            raise ValueError(
                f"batch_size={size} in conducive rounds with latents in the silos: expected "
                "batch_size=None, as these are integrated out at all points, or an "
                "optimizer (optim=optax.adam(1e-2)), which moves their local maps instead"
            )
        largest = max(dict(rows.pad)[group] for rows in stacks)
        if size < fewest_rows(config, largest):
            raise ValueError(
                f"batch_size={size} in conducive rounds: expected at least "
                f"{fewest_rows(config, largest):,}, so that {config.num_points // 2} pairs of "
                f"points together look at each of the {largest:,} rows of the largest silo, and at "
                f"enough for {config.factors.dim} dimensions; or a larger num_points"
            )
    if config.optim is not None and not (config.moving or local):
        raise ValueError(
            "optim: expected None in conducive rounds of a model that has neither latents in the "
            "silos nor learned parameters, as there is nothing for it to move"
        )
    if config.optim is not None:
        return
    if local and not (guide.coupling and guide.scale_coupling):
        raise ValueError(
            "conducive rounds: expected a guide with coupling=True and scale_coupling=True, as its "
            "local maps are regressed on theta, got "
            f"coupling={guide.coupling}, scale_coupling={guide.scale_coupling}"
        )
    if guide.local_cov != "full" and any(f.group is None for f in local):
        raise JointUnits(
            "conducive rounds of latents that are one unit in a silo: expected a guide with "
            f'local_cov="full", got {guide.local_cov!r}',
            max(_unit_size(config.families[rows.part], rows) for rows in stacks),
        )
    width = max((sum(math.prod(s.shape) for s in f.factors.local_sites) for f in local), default=1)
    if width > 1 and guide.local_cov == "diag":
        raise ValueError(
            f"conducive rounds of {width} latents an element: expected a guide with "
            'local_cov="element", got "diag"'
        )


def has_converged(state: VIState) -> bool:
    """Return whether q(theta) hardly moved in the last round."""
    return float(state.server.moved) <= CONVERGED


def say_how_it_ended(names: tuple[str, ...], state: VIState) -> None:
    """Warn of silos whose replies were not finite, and of a fit that has not converged."""
    # for remote silos the server counts
    kept = state.silos if isinstance(state.silos, tuple) else (state.silos,)
    missed = np.concatenate([np.ravel(s.missed) for s in kept])
    visits, rounds = np.asarray(state.visits), int(state.server.i)
    if missed.any():
        each = ", ".join(
            f"{name!r} {m} of {n}" for name, m, n in zip(names, missed, visits, strict=True) if m
        )
        warnings.warn(
            f"replies that were not finite, taken as missing (silo, rounds): {each}. Look for NaN "
            "in these silos' data, or for positions of theta at which "
            "their likelihood is not finite",
            stacklevel=3,
        )
    if not has_converged(state):
        held = int(state.server.held)
        why = (
            f"; in {held} of them the product of the approximate factors was no Gaussian near q, "
            "and the step was shortened"
            if held
            else ""
        )
        warnings.warn(
            f"q has not converged: it moved by {float(state.server.moved):.2g} sds in the last of "
            f"{rounds} rounds, "
            f"expected at most {CONVERGED}{why}. Go on with "
            "init_state=result.state, or start nearer (init_loc_fn, init_scale)",
            stacklevel=3,
        )
