"""``AutoSiloNormal``: the structured Gaussian family as an ordinary NumPyro guide.

The law is that of :mod:`numpyro_fed.vi.guides.normal`. On pooled data, with
:class:`numpyro.infer.SVI`, the guide draws the same noise and follows the same
(sticking-the-landing) gradients as :class:`~numpyro_fed.SFVI` does over silos.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array, lax, random
from numpyro.distributions import constraints
from numpyro.distributions.transforms import biject_to
from numpyro.distributions.util import sum_rightmost
from numpyro.infer.autoguide import AutoGuide

from numpyro_fed._typing import AnyArray, Column, ModelArgs, PyTree
from numpyro_fed.data.views import SiloRows
from numpyro_fed.density.factorize import pooled_factors
from numpyro_fed.density.factors import Factors
from numpyro_fed.density.handlers import is_silo_plate
from numpyro_fed.density.local_map import LocalMap
from numpyro_fed.density.nested import nesting
from numpyro_fed.vi.guides.amortize import Encoder, arrays_of, encoders_of, registered
from numpyro_fed.vi.guides.marginal import MarginalNormal
from numpyro_fed.vi.guides.normal import SiloNormal
from numpyro_fed.vi.guides.pooled_draw import draw
from numpyro_fed.vi.guides.start import init_near_center


class AutoSiloNormal(AutoGuide):
    r"""Gaussian guide whose local latents depend on the global ones, unit by unit.

    In unconstrained space, with :math:`u \sim N(0, I)` and :math:`\epsilon \sim N(0, I)`,

    .. math:: \theta = \mu + L u, \qquad z_g = m_g + C_g u + T_g (e^{l_g + b_g u} \odot \epsilon_g).

    :math:`\mu, L` are the server's. :math:`m, C, T, l, b`, a row for each unit g, stay in the silo.
    A unit is a plate element, or all latents of a silo together. The family holds the exact
    posterior of conjugate hierarchical Gaussians with known variances. For other models,
    ``num_local_particles`` of :class:`~numpyro_fed.SFVI` corrects its error. The guide works with
    :class:`numpyro.infer.SVI` on pooled data as any guide does.

    :param model: a model with at least one silo plate.
    :param global_cov: covariance of q(theta): ``"full"``, ``"diag"``, or an integer, the rank of a
        low-rank form (diagonal times identity plus that rank).
    :param local_cov: T: ``"diag"`` (the identity), ``"element"`` (lower triangular for each element
        of a silo plate, e.g. one child's random effects), ``"full"`` (for all latents of a silo
        together).
    :param coupling: whether the guide has C. Without it (mean field between theta and z) sds come
        out up to two times too small.
    :param scale_coupling: whether the guide has b, which costs ``d`` numbers for each latent.
    :param marginal: whether the guide leaves local latents out, those of two nested plates: silos
        integrate them out, by quadrature, in :class:`~numpyro_fed.ConduciveSFVI` without ``optim``.
    :param amortize: an encoder for each amortized local site, by the site's name: an equinox or
        flax.nnx module, or a function that declares its weights inside with
        ``numpyro.contrib.module`` or ``numpyro.param``. It is called for one element, with the
        model's arguments that it names and that have a row for each element of the site's plate. If
        there is only one such argument, its name does not matter. It returns ``(loc, log_scale)``
        in unconstrained space, each of the shape of one element, or one array with both. An
        amortized site has no C, b and T. The weights are global parameters, and silos return
        gradients in them. Those of a module are named ``<prefix>_<site>_encoder$params``.
    :param prefix: prefix of the parameters' names.
    :param init_loc_fn: start of the global sites: by default near the prior's median, and near the
        mean of a prior on the reals that is wider than sd one. Local sites start at 0 in
        unconstrained space.
    :param init_scale: sd at the start, of all latents in unconstrained space, local ones too. A
        value far below their posterior sds costs many steps of minibatches, since each element's
        turn comes seldom.
    :raises TypeError: for a model that is not callable, and for encoders that are not networks.
    :raises ValueError: for unknown options, and at the first call for a model without silo plate or
        with discrete latents.

    **References**

    1. *Federated Variational Inference Methods for Structured Latent Variable Models*, Hassan,
       Salomone & Mengersen (2023), section 3.1

    Example::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
        >>> import numpyro_fed as fed
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 1))
        ...     with fed.silo_plate("patients", y.shape[0]):
        ...         z = numpyro.sample("z", dist.Normal(mu, 1))
        ...         numpyro.sample("y", dist.Normal(z, 1), obs=y)
        >>> guide = fed.AutoSiloNormal(model)
        >>> svi = numpyro.infer.SVI(model, guide, optax.adam(0.01), numpyro.infer.Trace_ELBO())
        >>> result = svi.run(jax.random.key(0), 100, y=jnp.ones(4), progress_bar=False)
        >>> guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(3,))["z"].shape
        (3, 4)
    """

    def __init__(
        self,
        model: Callable,
        global_cov: str | int = "full",
        local_cov: str = "element",
        coupling: bool = True,
        scale_coupling: bool = True,
        *,
        marginal: bool = False,
        amortize: Mapping[str, Callable] | None = None,
        prefix: str = "auto",
        init_loc_fn: Callable = init_near_center,
        init_scale: float = 0.3,
    ) -> None:
        if not callable(model):
            raise TypeError(f"expected a model (a callable), got {type(model).__name__}")
        rank = isinstance(global_cov, int) and not isinstance(global_cov, bool) and global_cov > 0
        if global_cov not in ("full", "diag") and not rank:
            raise ValueError(
                f'global_cov: expected "full", "diag" or a rank > 0, got {global_cov!r}'
            )
        if local_cov not in ("diag", "element", "full"):
            raise ValueError(f'local_cov: expected "diag", "element" or "full", got {local_cov!r}')
        if not init_scale > 0:
            raise ValueError(f"init_scale: expected a number > 0, got {init_scale!r}")
        super().__init__(model, prefix=prefix, init_loc_fn=init_loc_fn)
        self.global_cov, self.local_cov = global_cov, local_cov
        self.coupling, self.scale_coupling = bool(coupling), bool(scale_coupling)
        self.init_scale, self.marginal = init_scale, bool(marginal)
        if marginal and amortize:
            raise ValueError(
                "marginal=True leaves local latents out; expected no amortize= beside it"
            )
        if amortize is not None and not isinstance(amortize, Mapping):
            raise TypeError(
                f"amortize: expected a dict of encoders by site, got {type(amortize).__name__}"
            )
        self.amortize = {
            site: registered(site, network, prefix) for site, network in (amortize or {}).items()
        }
        self._family: SiloNormal | None = None
        self._built: tuple[Encoder, ...] = ()

    def __repr__(self) -> str:
        amortize = f", amortize={list(self.amortize)}" if self.amortize else ""
        return (
            f"AutoSiloNormal(global_cov={self.global_cov!r}, local_cov={self.local_cov!r}, "
            f"coupling={self.coupling}, "
            f"scale_coupling={self.scale_coupling}{', marginal=True' if self.marginal else ''}"
            f"{amortize})"
        )

    def family(
        self, factors: Factors, rows: Mapping[str, Mapping[str, AnyArray]], independent: bool = True
    ) -> SiloNormal:
        """Return the guide as a family over factors.

        :param rows: for each row group the arguments that have a row for each of its elements.
        :param independent: whether elements are independent given theta; if not, a silo's latents
            are one unit.
        :raises ValueError: for a rank that is not below the number of global latents.
        """
        if isinstance(self.global_cov, int) and self.global_cov >= factors.dim:
            raise ValueError(
                f"global_cov={self.global_cov}: expected a rank below the {factors.dim} global "
                "latents; take "
                'global_cov="full"'
            )
        self._built = encoders_of(self.amortize, factors, rows)
        groups = factors.latent_groups
        if self.marginal:
            return self._marginal_family(factors, independent)
        alone = independent and len(groups) == 1 and self.local_cov != "full"
        return SiloNormal(
            factors,
            groups[0] if alone else None,
            self.global_cov,
            self.local_cov,
            self.coupling,
            self.scale_coupling,
            self.prefix,
            self.init_scale,
            self._built,
        )

    def _marginal_family(self, factors: Factors, independent: bool) -> SiloNormal:
        plates = nesting(factors)
        if plates is None or not independent:
            raise ValueError(
                "marginal=True: expected latents of two silo plates nested by index=, the inner "
                "ones independent of each other given the outer ones; got latents of "
                f"{list(factors.latent_groups)}"
            )
        settings = self.local_cov, self.coupling, self.scale_coupling, self.prefix, self.init_scale
        outer, inner = plates
        return MarginalNormal(factors, None, self.global_cov, *settings, outer=outer, inner=inner)

    def encode(
        self, params: Mapping[str, PyTree], **rows: AnyArray
    ) -> dict[str, tuple[Array, Array]]:
        """Return location and log scale of each amortized site, ``(n, *site)``, unconstrained.

        The rows may be those of the fit or new ones.

        :param params: a fit's parameters.
        :param rows: the model's arguments that the encoders take, ``(n, ...)``.
        :raises RuntimeError: before the guide has been called or fitted.
        :raises ValueError: where an argument of an encoder is missing.
        """
        if self.amortize and not self._built:
            raise RuntimeError(
                "encode: expected a guide that has been called or fitted; its sites' shapes are "
                "the model's"
            )
        lacking = sorted({name for encoder in self._built for name in encoder.inputs} - set(rows))
        if lacking:
            raise ValueError(f"encode: expected the encoders' arguments, got none of {lacking}")
        return {encoder.site: encoder(params, rows) for encoder in self._built}

    def _setup_prototype(self, *args: Column, **kwargs: Column) -> None:
        if self.marginal:
            raise ValueError(
                "marginal=True: the guide has no law of local latents, and is for "
                "fed.ConduciveSFVI alone; expected marginal=False"
            )
        super()._setup_prototype(*args, **kwargs)
        shapes = {name: jnp.shape(x) for name, x in self._init_locs.items()}
        factors = pooled_factors(self.model, self.prototype_trace, shapes)
        sizes = {n: s["args"][0] for n, s in self.prototype_trace.items() if is_silo_plate(s)}
        arrays = arrays_of(self.model, args, kwargs) if self.amortize else {}
        rows = {
            g: {k: v for k, v in arrays.items() if v.shape[:1] == (n,)} for g, n in sizes.items()
        }
        self._family = self.family(factors, rows)
        self._rows = SiloRows(
            rows={},
            shared={},
            sizes={g: jnp.asarray(n, jnp.int32) for g, n in sizes.items()},
            order={g: jnp.arange(n) for g, n in sizes.items()},
            number=jnp.zeros((), jnp.int32),
            static=(),
            pad=tuple(sizes.items()),
        )

    def _with_data(self, args: tuple, kwargs: ModelArgs) -> SiloRows:
        """Return the rows of this call for the encoders."""
        if not self.amortize:
            return self._rows
        arrays = arrays_of(self.model, args, kwargs)
        needed = {name for encoder in self._built for name in encoder.inputs}
        if not needed <= set(arrays):
            raise ValueError(
                f"the encoders need {sorted(needed)}, got {sorted(arrays)}; expected these "
                "arguments as the model takes them"
            )
        return replace(self._rows, rows={k: arrays[k] for k in needed})

    def _parameters(self) -> tuple[dict[str, Array], LocalMap | None]:
        """Register the parameters, or look them up."""
        family = self._family
        assert family is not None
        loc = family.factors.ravel(self._init_locs)
        supports = family.constraints()
        start = family.init(loc)
        # a function returns each value, as a network's weights may be callable themselves
        params = {
            name: numpyro.param(name, lambda _, x=x: x, constraint=supports[name])
            for name, x in start.items()
        }
        if not family.has_local:
            return params, None
        rows = family.init_local(self._rows)
        local = {
            name: numpyro.param(name, x, constraint=constraints.real)
            for name, (x, _) in family.named(rows).items()
        }
        return params, family.from_named(local)

    def __call__(self, *args: Column, **kwargs: Column) -> dict[str, Array]:
        """Draw all latent sites; arguments as the model's."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        family, rows = self._family, self._with_data(args, kwargs)
        assert family is not None
        params, local = self._parameters()
        sites, log_density = draw(family, params, local, rows, numpyro.prng_key())
        numpyro.sample(
            f"_{self.prefix}_log_density",
            dist.Delta(jnp.zeros(()), log_density=log_density),
            infer={"is_auxiliary": True},
        )
        return {name: self._register(name, sites[name]) for name in sorted(sites)}

    def _register(self, name: str, unconstrained: Array) -> Array:
        site = self.prototype_trace[name]
        transform = biject_to(site["fn"].support)
        value = transform(unconstrained)
        event_dim = site["fn"].event_dim
        log_density = -transform.log_abs_det_jacobian(unconstrained, value)
        log_density = sum_rightmost(
            log_density, jnp.ndim(log_density) - jnp.ndim(value) + event_dim
        )
        return numpyro.sample(name, dist.Delta(value, log_density=log_density, event_dim=event_dim))

    def _split(
        self, params: Mapping[str, PyTree]
    ) -> tuple[SiloNormal, dict[str, PyTree], LocalMap | None, dict[str, PyTree]]:
        """Return the family, and the global, the local and the model's learned parameters."""
        family = self._family
        if family is None:
            raise RuntimeError(
                "expected a guide that has been called; run SVI or call guide(...) under a seed "
                "first"
            )
        sites = self.prototype_trace
        learned = {k: v for k, v in params.items() if sites.get(k, {}).get("type") == "param"}
        own = {k: params[k] for k in family.constraints()}
        return family, own, family.from_named(params) if family.has_local else None, learned

    def sample_posterior(
        self,
        rng_key: Array,
        params: dict,
        *args: Column,
        sample_shape: tuple[int, ...] = (),
        **kwargs: Column,
    ) -> dict[str, Array]:
        """Draw all latent sites (constrained) and deterministic ones.

        :return: draws by site, ``(*sample_shape, *site)``.
        """
        family, own, local, learned = self._split(params)
        rows = self._with_data(args, kwargs)

        def one(key: Array) -> dict[str, Array]:
            sites, _ = draw(family, own, local, rows, key)
            return self._constrained(sites, learned)

        if not sample_shape:
            return one(rng_key)
        draws = lax.map(one, random.split(rng_key, sample_shape).reshape(-1))
        return jax.tree.map(lambda x: x.reshape(*sample_shape, *x.shape[1:]), draws)

    def _constrained(self, sites: dict[str, Array], learned: dict[str, Array]) -> dict[str, Array]:
        values = self._postprocess_fn({**sites, **learned})
        kinds = {k: self.prototype_trace[k]["type"] for k in values if k in self.prototype_trace}
        return {k: values[k] for k, kind in kinds.items() if kind != "param"}
