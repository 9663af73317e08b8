"""Base class of the federated kernels for :class:`numpyro.infer.MCMC`.

It checks arguments, prepares a kernel for its data, and constrains draws.
"""

import copy
import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import constrain_fn, transform_fn, unconstrain_fn

from numpyro_fed._typing import ModelArgs, PyTree
from numpyro_fed.data.silos import Silos
from numpyro_fed.density.factors import Factors, PooledModel
from numpyro_fed.mcmc.config import Tuning
from numpyro_fed.mcmc.options import Options
from numpyro_fed.rounds.federated import Cost
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.surrogates.gaussian import Surrogates


class FederatedKernel(MCMCKernel):
    """Base class of all kernels, with a model and a setup that is made once per data set.

    The data are the one argument of ``mcmc.run``, a :class:`Silos`.
    """

    sample_field = "z"
    _options: Options

    def __init__(self, model: Callable) -> None:
        if not callable(model):
            raise TypeError(f"expected a model (a callable), got {type(model).__name__}")
        self._model = model
        self._reset()

    def _reset(self) -> None:
        self._config: Any = None
        self._tuning: Any = None
        self._surrogates: Surrogates | None = None
        self._setup_cost = Cost()
        self._prepared_for: Silos | None = None
        self._sample_fn: Callable | None = None
        self._shown = (-1.0, "")

    def _settle(self, silos: Silos, extra: ModelArgs) -> None:
        """Set ``_config``, ``_tuning``, ``_surrogates`` and ``_setup_cost``."""
        raise NotImplementedError

    @property
    def model(self) -> PooledModel:
        """Model, callable with the arguments of ``mcmc.run``.

        A :class:`Silos` argument stands for its pooled rows.
        """
        return PooledModel(self._model)

    @property
    def surrogates(self) -> Surrogates | None:
        """Fitted surrogates; ``None`` before :meth:`init` and for kernels without any."""
        return self._surrogates

    @property
    def options(self) -> Options:
        """Arguments as the user wrote them."""
        return self._options

    @property
    def tuning(self) -> Tuning:
        """Numbers of the kernel, which its setup makes."""
        return self._tuning

    @property
    def factors(self) -> Factors | None:
        """Factors of the model; ``None`` before :meth:`init`."""
        return None if self._config is None else self._config.factors

    @property
    def silos(self) -> Silos | None:
        """Data of the last :meth:`init`."""
        return self._prepared_for

    def _arguments(
        self, model_args: tuple, model_kwargs: ModelArgs | None
    ) -> tuple[Silos, ModelArgs]:
        if len(model_args) != 1 or not isinstance(model_args[0], Silos):
            got = ", ".join(type(a).__name__ for a in model_args) or "no positional argument"
            raise ValueError(
                "expected mcmc.run(rng_key, silos) with silos = fed.split(...) or fed.Silos(...), "
                f"got {got}; one silo with all rows will do: "
                "fed.Silos({'all': {'x': x, 'y': y}})"
            )
        if isinstance(model_args[0], RemoteSilos):
            raise ValueError(
                "the rows are in remote silos; expected fed.RemoteMCMC(kernel, ...) in place of "
                "MCMC"
            )
        extra = dict(model_kwargs or {})
        unknown = set(extra) - {"_gibbs_sites"}
        if unknown:
            raise ValueError(
                f"arguments {sorted(unknown)} of mcmc.run: put all arguments of the model into the "
                "silos"
            )
        return model_args[0], extra

    def set_up(self, silos: Silos, extra: ModelArgs) -> None:
        """Make the setup for these data, unless the last one was for them.

        :param extra: further keyword arguments of the model (Gibbs conditioning).
        """
        key = silos.with_shared(**extra)
        if self._prepared_for is not None and self._prepared_for == key:
            return
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(key)):
            raise ValueError(
                "the kernel must see concrete data when it starts; expected chain_method "
                "'vectorized', "
                "'parallel' or 'sequential' (as a block of Gibbs: 'sequential')"
            )
        # parallel chains trace this code; without a trace, the context would compile each operation
        # of a program separately, which costs more time and memory than the program
        traced = isinstance(jnp.zeros(()), jax.core.Tracer)
        with jax.ensure_compile_time_eval() if traced else nullcontext():
            self._settle(silos, extra)
        self._prepared_for = key

    def _given(
        self, init_params: Mapping[str, Array] | None, model_args: tuple, extra: ModelArgs
    ) -> dict[str, Array] | None:
        """Return ``init_params`` as unconstrained arrays, or ``None``."""
        if init_params is None:
            return None
        z = {k: jnp.asarray(v) for k, v in init_params.items()}
        for name, value in z.items():
            if not isinstance(value, jax.core.Tracer) and not np.isfinite(value).all():
                raise ValueError(
                    f"init_params: expected finite values, got NaN or infinity at site {name!r}"
                )
        if extra:  # Gibbs passes constrained values to all blocks except HMC
            z = unconstrain_fn(self.model, model_args, extra, z)
        return z

    def postprocess_fn(self, model_args: tuple, model_kwargs: ModelArgs | None) -> Callable:
        """Return the map from unconstrained to constrained values and deterministic sites."""
        if self._config is None:
            return lambda z: z
        factors: Factors = self._config.factors
        if factors.transforms is not None:
            return partial(transform_fn, factors.transforms)
        kwargs = dict(model_kwargs or {})
        return partial(constrain_fn, self.model, model_args, kwargs, return_deterministic=True)

    def refresh(self, state: PyTree, model_args: tuple, model_kwargs: ModelArgs | None) -> PyTree:
        """Return the state unchanged, since it caches nothing of the conditioning sites."""
        return state

    def wrap_model(self, wrapper: Callable) -> "FederatedKernel":
        """Return a copy of the kernel, before its setup, with the model in a wrapper."""
        kernel = copy.copy(self)
        kernel._model = wrapper(self._model)
        kernel._reset()
        return kernel

    def get_diagnostics_str(self, state: PyTree) -> str:
        # a number is ready only after its round, so read no more often than the bar is drawn
        now = time.monotonic()
        if now >= self._shown[0] + 0.1:
            self._shown = (now, self._diagnostics(state))
        return self._shown[1]

    def _diagnostics(self, state: PyTree) -> str:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, object]:
        state = self.__dict__.copy()
        state["_sample_fn"] = None
        state["_shown"] = (-math.inf, "")  # another machine has another clock
        return state


def check_start(got: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> None:
    """Raise an error for initial values at wrong sites or of wrong shapes."""
    wrong = sorted(k for k in {**got, **expected} if got.get(k) != expected.get(k))
    if wrong:
        raise ValueError(
            "init_params: expected unconstrained values of all latent sites (for several chains, "
            "a chain axis first), "
            f"of shapes { {k: expected.get(k, 'no such site') for k in wrong} }, "
            f"got { {k: got.get(k, 'nothing') for k in wrong} }"
        )
