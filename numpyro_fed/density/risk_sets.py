"""Risk sets of Cox's partial likelihood."""

import jax.numpy as jnp
from jax import Array, lax


def log_risk(eta: Array, time: Array, strata: Array) -> Array:
    r"""Return the log of the summed hazards of those at risk when each row's time ends.

    Where row i has an event, its term of Cox's partial likelihood is
    :math:`\eta_i - \log \sum_{j \in R_i} e^{\eta_j}`, with ties as by Breslow. :math:`R_i` are the
    rows of the same stratum whose time is not below :math:`t_i`. This is the second term. It takes
    n log n steps, and no array of n by n.

    :param eta: log hazard of each row ``(n,)``.
    :param time: time of the event or of censoring ``(n,)``.
    :param strata: stratum of each row ``(n,)``: an index, such as one of each silo.
    :return: ``(n,)``.

    **Reference.** Breslow: Covariance analysis of censored survival data, Biometrics 1974.

    **Example**::

        >>> import jax.numpy as jnp, numpyro_fed as fed
        >>> time, strata = jnp.array([3.0, 1.0, 2.0, 5.0]), jnp.array([0, 0, 0, 1])
        >>> jnp.exp(fed.log_risk(jnp.zeros(4), time, strata)).round(4).tolist()
        [1.0, 3.0, 2.0, 1.0]
    """
    order = jnp.lexsort((-time, strata))  # in each stratum the longest time first
    time, strata = time[order], strata[order]
    begins = jnp.append(True, strata[1:] != strata[:-1])
    ends = jnp.append(begins[1:] | (time[1:] != time[:-1]), True)  # the last of equal times
    sums = lax.associative_scan(_within, (begins, eta[order]))[1]
    last = lax.cummin(jnp.where(ends, jnp.arange(len(ends)), len(ends)), reverse=True)
    return jnp.zeros_like(sums).at[order].set(sums[last])


def _within(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
    """Add on the log scale, anew from where a stratum begins."""
    (begins, before), (new, here) = left, right
    return begins | new, jnp.where(new, here, jnp.logaddexp(before, here))
