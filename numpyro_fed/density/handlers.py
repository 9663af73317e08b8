"""Silo plates, by which a model marks the sites that live in silos.

A *silo plate* is an ordinary :class:`numpyro.plate` whose message in the trace carries a mark.
Sites inside a marked plate are *local* to the silo that holds the plate's element; all others are
*global*. Nothing else about the model changes: NUTS, SVI, Predictive and every effect handler see
plain plates.
"""

from collections.abc import Callable

import numpyro
import numpyro.distributions as dist
from numpyro.primitives import Messenger

from numpyro_fed._compat import is_of

__all__ = [
    "NO_STEPS",
    "PUBLIC",
    "is_public",
    "is_silo_plate",
    "mark_silos",
    "silo_plate",
    "unobserved",
]

_MARK = "silo_plate"
_TOGETHER = "silo_rows_together"
PUBLIC = "known_to_all_silos"  # of an observed site outside every silo plate
NO_STEPS = (
    "scan and cond of numpyro.contrib.control_flow go neither inside a silo plate nor around one; "
    "expected, inside it, a Python loop over the steps, or one distribution of the whole path, "
    "its steps the last axis: dist.GaussianRandomWalk, or dist.Normal(...).to_event(1)"
)


class mark_silos(Messenger):
    """Effect handler that marks plates of a model as silo plates, without a change of the model.

    It composes with the handlers of :mod:`numpyro.handlers` in any order.

    :param fn: the model.
    :param plate_names: names of the model's plates whose elements live in silos.
    :param row_wise: as in :func:`silo_plate`.
    :raises ValueError: for no name, or, after a run of the model, for a name that no plate has.

    Example::

        >>> import numpyro, numpyro.distributions as dist
        >>> import numpyro_fed as fed
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 1))
        ...     with numpyro.plate("patients", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> marked = fed.mark_silos(model, "patients")
    """

    def __init__(
        self, fn: Callable | None = None, *plate_names: str, row_wise: bool = True
    ) -> None:
        if not plate_names:
            raise ValueError(
                'expected the name of at least one plate, got none: mark_silos(model, "patients")'
            )
        self.plate_names = frozenset(plate_names)
        self._marks = {_MARK: True} | ({} if row_wise else {_TOGETHER: True})
        super().__init__(fn)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the model, and look whether it had plates of all names."""
        if self.fn is None:  # used as a decorator
            return super().__call__(*args, **kwargs)
        self._seen: set[str] = set()
        self._stepped = False
        result = super().__call__(*args, **kwargs)
        missing = self.plate_names - self._seen
        if missing:
            raise ValueError(
                f"mark_silos: expected plates {sorted(self.plate_names)} in the model, did not "
                f"find {sorted(missing)}; use the names that the model gives to numpyro.plate"
                + (f"; {NO_STEPS}" if self._stepped else "")
            )
        return result

    def process_message(self, msg: dict) -> None:
        """Write the mark into the message of a plate that has one of the names."""
        if msg["type"] == "plate" and msg["name"] in self.plate_names:
            msg["infer"] = {**msg.get("infer", {}), **self._marks}
            if self.fn is not None:
                self._seen.add(msg["name"])
        elif msg["type"] == "control_flow" and self.fn is not None:
            self._stepped = True


def silo_plate(
    name: str,
    size: int,
    subsample_size: int | None = None,
    dim: int | None = None,
    *,
    row_wise: bool = True,
) -> numpyro.plate:
    """Return a :class:`numpyro.plate` whose elements each belong to exactly one silo.

    :param name: name of the plate.
    :param size: number of elements in the data that the model is called with. Take it from the data
        (``x.shape[0]``): the same model is called with all rows, one silo's rows, and a minibatch.
    :param subsample_size: as in :class:`numpyro.plate`. Leave it out for the kernels of this
        library: their ``batch_size=`` subsamples at no cost per step.
    :param dim: as in :class:`numpyro.plate`.
    :param row_wise: ``False`` where a row's term depends on other rows of its silo, as in a risk
        set or a Gaussian process. The model is then called with each silo's own rows, never with
        padding or a minibatch, and each size of silo adds to what is compiled.
    :return: the plate, to be used as a context manager.

    Example::

        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_fed as fed
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 1))
        ...     with fed.silo_plate("patients", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> trace = numpyro.handlers.trace(numpyro.handlers.seed(model, 0)).get_trace(jnp.ones(3))
        >>> fed.handlers.is_silo_plate(trace["patients"])
        True
    """
    with mark_silos(None, name, row_wise=row_wise):
        return numpyro.plate(name, size, subsample_size=subsample_size, dim=dim)


def is_silo_plate(site: dict) -> bool:
    """Return whether a site of a trace is a marked plate."""
    return site["type"] == "plate" and bool(site.get("infer", {}).get(_MARK, False))


def takes_rows_together(site: dict) -> bool:
    """Return whether a site of a trace is a silo plate with ``row_wise=False``."""
    return is_silo_plate(site) and bool(site["infer"].get(_TOGETHER, False))


def is_public(site: dict) -> bool:
    """Return whether all silos know the data of an observed site, as of a published result."""
    return bool(site["infer"].get(PUBLIC, False))


class unobserved(Messenger):  # named as NumPyro names its handlers
    """Handler that draws observed sites from their distributions; factors stay.

    Use it inside :class:`numpyro.handlers.seed`.
    """

    def process_message(self, msg: dict) -> None:
        """Take the value from an observed site."""
        if msg["type"] == "sample" and msg["is_observed"] and not is_of(msg["fn"], dist.Unit):
            msg["is_observed"], msg["value"] = False, None
