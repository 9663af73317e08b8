"""What SFVI and SFVI-Avg share in the shape of :class:`numpyro.infer.SVI`: wiring, no mathematics."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.handlers import seed, trace

from numpyro_fed.density import Factors
from numpyro_fed.engines.remote import RemoteSilos
from numpyro_fed.engines.roster import program_hash
from numpyro_fed.federation import Ledger
from numpyro_fed.mixed import MixedSilos
from numpyro_fed.silos import Silos
from numpyro_fed.storage import stacked_mask, to_pooled_order
from numpyro_fed.vi.guides import AutoSiloNormal
from numpyro_fed.vi.normal import SiloNormal
from numpyro_fed.vi.plan import Options, Plan, Prepared, factored, first_params, own_params, planned_alone, prepare
from numpyro_fed.vi.remote import RemoteRounds, kept_by, ledger_of_calls
from numpyro_fed.vi.rounds import (
    VIState,
    advance,
    answering_of,
    at_hand,
    in_step,
    ledger,
    participation_of,
    run_rounds,
)

__all__ = ["FederatedVI", "VIResult"]

_jit_advance = partial(jax.jit, static_argnames=("federated", "plan", "who"))(advance)


@dataclass(frozen=True, repr=False)
class VIResult:
    """What ``run`` returns.

    :ivar params: parameters in their supports, averaged over the last rounds (SFVI-Avg: of the last): q(theta)'s, the model's learned ones, and the local
        ones (in the pooled order of their plate; not of silos elsewhere, where they stay), under the names that the guide has in :class:`numpyro.infer.SVI`.
    :ivar state: the state after the last round, from which ``run(..., init_state=result.state)`` goes on.
    :ivar losses: minus the estimated bound in each round, a NumPy array.
    :ivar ledger: rounds, gradient evaluations and bytes of each silo.
    :ivar partition: a fingerprint of the silos: which pooled row is in which.
    :ivar whitening: mean ``(d,)`` and a square root of the covariance of a Gaussian q(theta), ``(d, d)`` or its diagonal, in unconstrained space; else ``None``.
    """

    params: dict[str, Any]
    state: VIState
    losses: np.ndarray
    ledger: Ledger
    partition: str
    whitening: tuple[np.ndarray, np.ndarray] | None = None

    def __repr__(self) -> str:
        tail = self.losses[-max(1, len(self.losses) // 10) :] if len(self.losses) else np.full(1, np.nan)
        shapes = ", ".join(f"{k}{_shape(v)}" for k, v in self.params.items())
        return (
            f"VIResult: {len(self.losses):,} rounds, mean loss {tail.mean():.2f} over the last {len(tail):,}\n"
            f"  params: {shapes}\n{self.ledger}"
        )


class FederatedVI:
    """Base of :class:`SFVI` and :class:`SFVIAvg`; see there for the parameters."""

    _algorithm: str
    _federated: Callable
    _init_silo: Callable

    def __init__(self, model: Callable, guide: Any, options: Options) -> None:
        if not callable(model):
            raise TypeError(f"expected a model (a callable), got {type(model).__name__}")
        if not callable(guide) or isinstance(guide, type):
            raise TypeError(f"expected a guide, e.g. fed.AutoSiloNormal(model), got {type(guide).__name__}")
        self.model, self.guide = model, guide
        self._options = options.checked()
        self._prepared: tuple[Any, Prepared] | None = None

    def prepared(self, silos: Silos | MixedSilos) -> Prepared:
        """Everything settled before the first round; kept, so that the same data are looked at once."""
        if self._prepared is None or self._prepared[0] is not silos:
            self._prepared = (silos, prepare(self.model, self.guide, silos, self._options))
        return self._prepared[1]

    def planned(self, known: Silos, independent: bool) -> Plan:
        """The plan of silos elsewhere as a silo makes it, see :func:`~numpyro_fed.vi.plan.planned_alone`."""
        return planned_alone(self.model, self.guide, known, self._options, independent)

    def factored(self, known: Silos) -> Factors:
        """The model's factors, with learned parameters as a shared argument."""
        return factored(self.model, (known,))[2][0]

    def described(self, factors: Factors, shared: dict[str, Any]) -> dict[str, Any]:
        """What tells this fit from another: its options, its guide, and the programs of its optimisers. Of amortised guides networks are not compared."""
        options = {k: v for k, v in vars(self._options).items() if k not in ("optim", "local_optim", "validate")}
        x = jax.ShapeDtypeStruct((2,), jnp.result_type(float))

        def program(optim: Any) -> str:
            return "" if optim is None else program_hash(lambda x: optim.update(x, optim.init(x), x), x)

        if isinstance(self.guide, AutoSiloNormal):
            guide = f"{self.guide!r}, init_scale={self.guide.init_scale}, prefix={self.guide.prefix!r}"
        else:
            rows = {leaf: jax.ShapeDtypeStruct((1, *spec.shape), spec.dtype) for leaf, _, spec in factors.rows}

            def values(key: Array, rows: dict) -> dict:
                sites = trace(seed(self.guide, key)).get_trace(**shared, **rows)
                return {k: v["value"] for k, v in sites.items() if v["type"] in ("sample", "param")}

            guide = program_hash(values, jax.random.key(0), rows)
        programs = [program(self._options.optim), program(self._options.local_optim)]
        return {"fit": type(self).__name__, "options": options, "guide": guide, "optimisers": programs}

    def init(self, rng_key: Array, silos: Silos | MixedSilos, *, init_from: Any = None) -> VIState:
        """The state before the first round.

        :param rng_key: seed of all draws.
        :param silos: the data.
        :param init_from: a :class:`VIResult` of the same model, guide and silos (e.g. of a few SFVI-Avg rounds), whose parameters are
            the start.
        :raises ValueError: for every structure of model, guide or data that is not covered, in words.
        """
        prepared = self.prepared(silos)
        params = first_params(prepared, self.guide, rng_key)
        start: Any = None if prepared.elsewhere else prepared.local
        if init_from is not None:
            params, start = self._taken_from(init_from, prepared, params)
        server = self._federated(prepared.plan, prepared.stacks).init(rng_key, params)
        if prepared.elsewhere:
            return RemoteRounds(self._algorithm, self._federated, prepared).start(server, params, start)
        silo_states = tuple(
            in_step(prepared.plan, partial(self._init_silo, prepared.plan, rows.part, params), local)
            for rows, local in zip(prepared.stacks, start, strict=True)
        )
        return VIState(server, silo_states, jnp.zeros(len(prepared.names), jnp.int32))

    def _taken_from(self, result: Any, prepared: Prepared, params: dict) -> tuple[dict, Any]:
        """Global parameters of a result, unconstrained, and the silos' own: stacked, or where silos elsewhere keep them."""
        if not isinstance(result, VIResult):
            raise TypeError(f"init_from: expected the result of a run, got {type(result).__name__}")
        if prepared.elsewhere:
            own = prepared.plan.families[0].has_local
            return global_params(result, prepared, params), kept_by(
                result.state, prepared, "init_from"
            ) if own else None
        expected = {**prepared.plan.constrain(params), **local_params(prepared, prepared.local)}
        got = {k: _shape(v) for k, v in result.params.items()}
        shapes = {k: _shape(v) for k, v in expected.items()}
        wrong = sorted(k for k in {*shapes, *got} if got.get(k) != shapes.get(k))
        if wrong:
            raise ValueError(
                "init_from: expected a result of the same model, guide and silos, with parameters of shapes "
                f"{ {k: shapes.get(k) for k in wrong} }, got { {k: got.get(k) for k in wrong} }"
            )
        given = jax.tree.map(jnp.asarray, {k: result.params[k] for k in expected})
        return prepared.plan.unconstrain({k: given[k] for k in params}), stacked_params(prepared, given)

    def _silo_params(self, prepared: Prepared, state: VIState, averaged: bool) -> list:
        """The silos' own parameters, in the coordinates of the server's."""
        out = []
        for rows, own in zip(prepared.stacks, state.silos, strict=True):
            one = partial(own_params, prepared.plan, rows.part, params=state.server.params, averaged=averaged)
            axes = jax.tree.map(lambda x: 0 if x.ndim else None, own)  # a clock may be one for all
            out.append(jax.vmap(one, in_axes=(axes,))(own))
        return out

    def _say_how_it_ended(self, prepared: Prepared, state: VIState) -> None:
        """Warn of what only the algorithm knows."""

    def update(self, state: VIState, silos: Silos | MixedSilos) -> tuple[VIState, Array]:
        """One round of all silos: the new state, and minus the bound before it."""
        if isinstance(silos, RemoteSilos):
            raise ValueError("update() and evaluate() are not built for silos that are elsewhere; expected run()")
        prepared = self.prepared(silos)
        state, info = _jit_advance(self._federated, prepared.plan, None, state, prepared.stacks)
        return state, info.loss

    def evaluate(self, state: VIState, silos: Silos | MixedSilos) -> Array:
        """Minus the bound, estimated anew; the state is as it was."""
        return self.update(state, silos)[1]

    def get_params(self, state: VIState) -> dict[str, Array]:
        """Parameters of a state in their supports: the last iterates, under the names that the guide has in SVI."""
        if state is not None and not isinstance(state, VIState):
            raise TypeError(f"expected a state, e.g. result.state, got {type(state).__name__}; a result has .params")
        if self._prepared is None:
            raise ValueError("expected an object that has been initialised; call init(rng_key, silos) first")
        prepared = self._prepared[1]
        return self._named(prepared, state.server.params, state, False)

    def fitted(self, result: VIResult, silos: Silos | MixedSilos) -> tuple[dict[str, Array], list]:
        """A result's global parameters in their supports, and for each stack the silos' own."""
        prepared = self.prepared(silos)
        if result.partition != prepared.partition():
            raise ValueError(
                "expected the silos of the run, got others of the same names: their rows are other rows of the pooled data"
            )
        params = jax.tree.map(jnp.asarray, {k: result.params[k] for k in prepared.plan.supports})
        return params, [] if prepared.elsewhere else stacked_params(prepared, result.params)

    def _checked(self, state: Any, silos: Silos | MixedSilos) -> VIState:
        """A state to go on from, or an error in words; clocks may be one for each silo."""
        if not isinstance(state, VIState):
            raise TypeError(
                f"init_state: expected result.state, got {type(state).__name__}; a result goes to init_from="
            )
        prepared, key = self.prepared(silos), jax.random.key(0)
        if prepared.elsewhere:
            server = self._federated(prepared.plan, prepared.stacks).init(key, first_params(prepared, self.guide, key))
            expected = VIState(server, kept_by(state, prepared, "init_state"), state.visits)  # type: ignore[arg-type]
        else:
            expected = self.init(key, silos)
        same = jax.tree.structure(state) == jax.tree.structure(expected)  # type: ignore[operator]
        pairs = zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True) if same else []
        if not same or any(jnp.shape(x)[: jnp.ndim(y)] != jnp.shape(y) and jnp.ndim(y) for x, y in pairs):
            raise ValueError(
                "init_state: expected a state of the same kind of fit, model, guide, optimiser and silos; to start from another fit "
                "give its result as init_from="
            )
        return state

    def _named(self, prepared: Prepared, params: dict[str, Array], state: VIState, averaged: bool) -> dict[str, Array]:
        """Global parameters in their supports, and those of the silos that are at hand."""
        named = prepared.plan.constrain(params)
        if prepared.elsewhere:
            return named
        return {**named, **local_params(prepared, self._silo_params(prepared, state, averaged))}

    def run(
        self,
        rng_key: Array,
        num_rounds: int,
        silos: Silos | MixedSilos,
        *,
        progress_bar: bool = True,
        participation: Any = None,
        tol: float | None = None,
        init_from: Any = None,
        init_state: VIState | None = None,
        answering: Any = None,
    ) -> VIResult:
        """Rounds of communication, each with all silos or some.

        :param rng_key: seed of all draws (unused with ``init_state``).
        :param num_rounds: how many rounds; with ``tol`` at most so many.
        :param silos: the data, or :class:`RemoteSilos`: the same rounds where the rows are, of which global parameters are the result.
        :param participation: the fraction of silos that take part in a round (so many are drawn without replacement), or for each
            silo's name the probability that it does. Replies are weighted by one over it, so that the gradient stays unbiased; an
            absent silo keeps its state. Default: all.
        :param tol: stop when the mean loss of the last quarter of the rounds is within ``tol`` nats of that of the quarter before
            (of at least 250 rounds each); conducive rounds, which have no noise: when the loss moved less than that in a round and q less than .05 sds.
        :param init_from: as for :meth:`init`.
        :param init_state: go on from there.
        :param answering: of SFVI over silos elsewhere the probability that a silo answers, one for all or by name, where it is known and does not depend on the
            rounds: missing replies then count zero, the others one over it. Default: silent silos are asked again, and the fit stops if they stay silent.
        :raises ValueError: in words, before anything is compiled, for arguments that make no sense.
        :raises RuntimeError: naming the silos elsewhere that did not answer before the first round was made.
        :warns UserWarning: when a loss is not finite (naming round and silo; the last finite state is returned), after Ctrl-C (the
            rounds so far are returned), where silos elsewhere stay silent (likewise), and for silos that never took part.
        """
        if isinstance(num_rounds, bool) or not isinstance(num_rounds, int | np.integer) or num_rounds < 1:
            raise ValueError(f"num_rounds: expected a whole number >= 1, got {num_rounds!r}")
        if tol is not None and not (math.isfinite(tol) and tol > 0):
            raise ValueError(f"tol: expected a number of nats > 0, got {tol!r}")
        if init_from is not None and init_state is not None:
            raise ValueError("init_from and init_state: expected one of them, got both")
        prepared = self.prepared(silos)
        who = participation_of(participation, prepared.names)
        known = answering_of(answering, prepared.names, prepared.elsewhere, self._algorithm == "sfvi")
        if init_state is None:
            state = self.init(rng_key, silos, init_from=init_from)
        else:
            state = self._checked(init_state, silos)
        plan = prepared.plan
        arguments = plan, state, prepared.names, num_rounds, tol, progress_bar
        if prepared.elsewhere:
            rounds = RemoteRounds(self._algorithm, self._federated, prepared, who, known)
            if init_state is None:  # else it is another result's
                rounds.owns(state)
            state, losses = run_rounds(rounds, *arguments, at_once=1)
            rounds.tidy(state)
        else:
            state, losses = run_rounds(at_hand(self._federated, plan, who, prepared.stacks), *arguments)
        self._say_how_it_ended(prepared, state)
        never = [name for name, n in zip(prepared.names, np.asarray(state.visits), strict=True) if n == 0]
        if never:
            shown = ", ".join(map(repr, never[:5])) + (", ..." if len(never) > 5 else "")
            warnings.warn(
                f"{len(never)} of {len(prepared.names)} silos never took part ({shown}): their data are not in the fit. Run more "
                "rounds, or raise participation",
                stacklevel=2,
            )
        average = state.server.params if state.server.average is None else state.server.average
        params = self._named(prepared, average, state, True)
        if prepared.elsewhere:
            costs = ledger_of_calls(state, prepared.names, silos.names)
        else:
            costs = ledger(self._federated, plan, state, prepared.stacks, prepared.names, silos.names)
        family = plan.families[0]
        whitening = family.whitening(plan.constrain(average)) if isinstance(family, SiloNormal) else None
        return VIResult(params, state, losses, costs, prepared.partition(), whitening)


def global_params(result: VIResult, prepared: Prepared, params: dict) -> dict:
    """A result's global parameters, unconstrained, or an error in words where they are others than the fit's."""
    shapes = {k: _shape(v) for k, v in prepared.plan.constrain(params).items()}
    got = {k: _shape(result.params[k]) for k in shapes if k in result.params}
    if got != shapes:
        raise ValueError(
            f"init_from: expected a result of the same model and guide, with global parameters of shapes {shapes}, got {got}"
        )
    return prepared.plan.unconstrain(jax.tree.map(jnp.asarray, {k: result.params[k] for k in params}))


def _shape(value: Any) -> list:
    """Of an array; of the arrays of a network."""
    return list(value.shape) if hasattr(value, "shape") else [list(x.shape) for x in jax.tree.leaves(value)]


def local_params(prepared: Prepared, local: list) -> dict[str, Array]:
    """The silos' parameters as arrays over their plate's elements in pooled order (over silos where these are the units)."""
    plan, out = prepared.plan, {}
    for part, family in enumerate(plan.families):
        if not family.has_local:
            continue
        mine = [(r, family.named(p)) for r, p in zip(prepared.stacks, local, strict=True) if r.part == part]
        for name, (_, group) in mine[0][1].items():
            out[name + plan.suffix(part)] = _in_order([(r, p[name][0]) for r, p in mine], group, prepared.parts[part])
    return out


def stacked_params(prepared: Prepared, params: dict[str, Array]) -> list:
    """The inverse of :func:`local_params`; padding has its first values."""
    plan, out = prepared.plan, []
    for rows, first in zip(prepared.stacks, prepared.local, strict=True):
        family = plan.families[rows.part]
        if not family.has_local or not family.named(first):
            out.append(first)
            continue
        new = {}
        for name, (x, group) in family.named(first).items():
            given = params[name + plan.suffix(rows.part)]
            if group is None:
                new[name] = given[(rows.number, *[slice(n) for n in x.shape[2:]])][:, None]
            else:
                own = stacked_mask(rows, group)
                new[name] = jnp.where(own.reshape(*own.shape, *[1] * (x.ndim - 2)), given[rows.order[group]], x)
        out.append(family.from_named(new))
    return out


def _in_order(rows: list, group: str | None, silos: Silos) -> Array:
    if group is None:
        widest = [max(x.shape[i] for _, x in rows) for i in range(2, rows[0][1].ndim)]
        total = [len(silos), *widest]
        out = jnp.zeros(total, rows[0][1].dtype)
        for r, x in rows:
            out = out.at[(r.number, *[slice(n) for n in x.shape[2:]])].set(x[:, 0])
        return out
    out = jnp.zeros((sum(silos.sizes[group]), *rows[0][1].shape[2:]), rows[0][1].dtype)
    for r, x in rows:
        out = to_pooled_order(out, r, group, x)
    return out
