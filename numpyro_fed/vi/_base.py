"""Base of SFVI and SFVI-Avg in the shape of :class:`numpyro.infer.SVI`.

It wires model, guide, silos and rounds together, and has no mathematics.
"""

import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.handlers import seed, trace

from numpyro_fed._typing import PyTree
from numpyro_fed.data.mixed import MixedSilos
from numpyro_fed.data.silos import Silos
from numpyro_fed.density.check import check_own_factorization
from numpyro_fed.density.factors import Factors
from numpyro_fed.density.fingerprint import fingerprint, program_hash
from numpyro_fed.privacy.differential import Privacy, Spent, expected_error
from numpyro_fed.rounds.checkpoint import Checkpoint, facts_of_run
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.vi.algorithms import ALGORITHMS, own_params
from numpyro_fed.vi.config import FitConfig
from numpyro_fed.vi.expected import expected_messages, num_parameters
from numpyro_fed.vi.guides.auto_silo_normal import AutoSiloNormal
from numpyro_fed.vi.guides.learned import factored
from numpyro_fed.vi.loop import (
    Participation,
    VIState,
    advance,
    answering_of,
    in_step,
    inline_rounds,
    ledger,
    participation_of,
    run_rounds,
)
from numpyro_fed.vi.options import Options
from numpyro_fed.vi.remote import RemoteRounds, kept_by, ledger_of_calls
from numpyro_fed.vi.result import VIResult, global_params, local_params, shape_of, stacked_params
from numpyro_fed.vi.setup import Setup, config_of_silo, first_params, make_setup

__all__ = ["FederatedVI"]

_jit_advance = partial(jax.jit, static_argnames=("federated", "config", "who"))(advance)


class FederatedVI:
    """Base of :class:`SFVI` and :class:`SFVIAvg`; see there for the parameters."""

    algorithm: str

    def __init__(self, model: Callable, guide: Any, options: Options) -> None:
        if not callable(model):
            raise TypeError(f"expected a model (a callable), got {type(model).__name__}")
        if not callable(guide) or isinstance(guide, type):
            raise TypeError(
                f"expected a guide, e.g. fed.AutoSiloNormal(model), got {type(guide).__name__}"
            )
        self.model, self.guide = model, guide
        self._options = options.checked()
        self._setup: tuple[Any, Setup] | None = None

    @property
    def privacy(self) -> Privacy | None:
        """Privacy budget of each silo's rows."""
        return self._options.privacy

    @property
    def secure_sum(self) -> bool:
        """Flag of secure sums: over a wire the server sees only the sum of the replies."""
        return self._options.secure_sum

    @property
    def rounds_only(self) -> bool:
        """Flag of a closed fit: remote silos answer rounds alone, and no questions."""
        return self._options.rounds_only

    @property
    def _federated(self) -> Callable:
        return ALGORITHMS[self.algorithm].federated

    def setup(self, silos: Silos | MixedSilos) -> Setup:
        """Return the setup before the first round.

        It is kept, so that the same data are examined once.
        """
        if self._setup is None or self._setup[0] is not silos:
            self._setup = (silos, make_setup(self.model, self.guide, silos, self._options))
        return self._setup[1]

    def planned(self, known: Silos, independent: bool) -> FitConfig:
        """Return the plan of a remote silo's fit, as the silo makes it.

        See :func:`~numpyro_fed.vi.setup.config_of_silo`.
        """
        return config_of_silo(self.model, self.guide, known, self._options, independent)

    def factored(self, known: Silos) -> Factors:
        """Return the model's factors, with learned parameters as a shared argument."""
        return factored(self.model, (known,))[2][0]

    def num_parameters(self, silos: Silos) -> int:
        """Return how many numbers silos see: of theta, and of learned and shared parameters."""
        config = self.planned(silos, True)
        return num_parameters(config, self.messages(config, silos))

    def messages(self, config: FitConfig, known: Silos) -> dict[str, PyTree]:
        """Return shapes and types of the messages that a silo of this fit receives."""
        return expected_messages(self.algorithm, config, self.model, known)

    def check_factors(self, silos: Silos) -> None:
        """Check the factorization on one silo's own rows."""
        _, (part,), (factors,) = factored(self.model, (silos,))
        check_own_factorization(factors, part)

    def described(self, factors: Factors, shared: dict[str, Any]) -> dict[str, Any]:
        """Return the facts that distinguish this fit from another.

        These are its options, its guide, and the programs of its optimizers. Networks of amortized
        guides are not compared.
        """
        options = {
            k: v
            for k, v in vars(self._options).items()
            if k not in ("optim", "local_optim", "validate")
        }
        x = jax.ShapeDtypeStruct((2,), jnp.result_type(float))

        def program(optim: Any) -> str:
            return (
                ""
                if optim is None
                else program_hash(lambda x: optim.update(x, optim.init(x), x), x)
            )

        if isinstance(self.guide, AutoSiloNormal):
            guide = (
                f"{self.guide!r}, init_scale={self.guide.init_scale}, prefix={self.guide.prefix!r}"
            )
        else:
            rows = {
                leaf: jax.ShapeDtypeStruct((1, *spec.shape), spec.dtype)
                for leaf, _, spec in factors.rows
            }

            def values(key: Array, rows: dict) -> dict:
                sites = trace(seed(self.guide, key)).get_trace(**shared, **rows)
                return {k: v["value"] for k, v in sites.items() if v["type"] in ("sample", "param")}

            guide = program_hash(values, jax.random.key(0), rows)
        programs = [program(self._options.optim), program(self._options.local_optim)]
        return {
            "fit": type(self).__name__,
            "options": options,
            "guide": guide,
            "optimizers": programs,
        }

    def init(self, rng_key: Array, silos: Silos | MixedSilos, *, init_from: Any = None) -> VIState:
        """Return the state before the first round.

        :param rng_key: seed of all draws.
        :param silos: the data.
        :param init_from: a :class:`VIResult` of the same model, guide and silos (e.g. of a few
            SFVI-Avg rounds); its parameters are the start.
        :raises ValueError: for a structure of model, guide or data that the fit does not cover.
        """
        setup, algorithm = self.setup(silos), ALGORITHMS[self.algorithm]
        params = first_params(setup, self.guide, rng_key)
        start: Any = None if setup.remote else setup.local
        if init_from is not None:
            params, start = self._taken_from(init_from, setup, params)
        server = algorithm.federated(setup.config, setup.stacks).init(rng_key, params)
        if setup.remote:
            return RemoteRounds(self.algorithm, self._federated, setup).start(server, params, start)
        silo_states = tuple(
            in_step(
                setup.config, partial(algorithm.init_silo, setup.config, rows.part, params), local
            )
            for rows, local in zip(setup.stacks, start, strict=True)
        )
        return VIState(server, silo_states, jnp.zeros(len(setup.names), jnp.int32))

    def _taken_from(self, result: Any, setup: Setup, params: dict) -> tuple[dict, Any]:
        """Return a result's global parameters, unconstrained, and the silos' own.

        The latter are stacked, or for remote silos the place where they keep them.
        """
        if not isinstance(result, VIResult):
            raise TypeError(f"init_from: expected the result of a run, got {type(result).__name__}")
        if setup.remote:
            own = setup.config.families[0].has_local
            return global_params(result, setup, params), kept_by(
                result.state, setup, "init_from"
            ) if own else None
        expected = {**setup.config.constrain(params), **local_params(setup, setup.local)}
        got = {k: shape_of(v) for k, v in result.params.items()}
        shapes = {k: shape_of(v) for k, v in expected.items()}
        wrong = sorted(k for k in {*shapes, *got} if got.get(k) != shapes.get(k))
        if wrong:
            raise ValueError(
                "init_from: expected a result of the same model, guide and silos, with parameters "
                "of shapes "
                f"{ {k: shapes.get(k) for k in wrong} }, got { {k: got.get(k) for k in wrong} }"
            )
        given = jax.tree.map(jnp.asarray, {k: result.params[k] for k in expected})
        return setup.config.unconstrain({k: given[k] for k in params}), stacked_params(setup, given)

    def _silo_params(self, setup: Setup, state: VIState, averaged: bool) -> list:
        """Return the silos' own parameters, in coordinates whitened by the server's q."""
        out = []
        for rows, own in zip(setup.stacks, state.silos, strict=True):
            one = partial(
                own_params, setup.config, rows.part, params=state.server.params, averaged=averaged
            )
            # one clock may stand for all silos
            axes = jax.tree.map(lambda x: 0 if x.ndim else None, own)
            out.append(jax.vmap(one, in_axes=(axes,))(own))
        return out

    def _say_how_it_ended(self, setup: Setup, state: VIState) -> None:
        """Warn of problems that are particular to an algorithm."""

    def update(self, state: VIState, silos: Silos | MixedSilos) -> tuple[VIState, Array]:
        """Make one round of all silos; return the new state, and minus the bound before it."""
        if isinstance(silos, RemoteSilos):
            raise ValueError(
                "update() and evaluate() are not built for remote silos; expected run()"
            )
        setup = self.setup(silos)
        state, info = _jit_advance(self._federated, setup.config, None, state, setup.stacks)
        return state, info.loss

    def evaluate(self, state: VIState, silos: Silos | MixedSilos) -> Array:
        """Return a new estimate of minus the bound; the state does not change."""
        return self.update(state, silos)[1]

    def get_params(self, state: VIState) -> dict[str, Array]:
        """Return the parameters of a state, in their supports.

        They are the last iterates, under the names that the guide has in SVI.
        """
        if state is not None and not isinstance(state, VIState):
            raise TypeError(
                f"expected a state, e.g. result.state, got {type(state).__name__}; a result has "
                ".params"
            )
        if self._setup is None:
            raise ValueError(
                "expected an object that has been initialized; call init(rng_key, silos) first"
            )
        setup = self._setup[1]
        return self._named(setup, state.server.params, state, False)

    def fitted(self, result: VIResult, silos: Silos | MixedSilos) -> tuple[dict[str, Array], list]:
        """Return a result's global parameters, constrained, and the silos' own for each stack."""
        setup = self.setup(silos)
        if result.partition != setup.partition():
            raise ValueError(
                "expected the silos of the run, got others of the same names: their rows are other "
                "rows of the pooled data"
            )
        params = jax.tree.map(jnp.asarray, {k: result.params[k] for k in setup.config.supports})
        return params, [] if setup.remote else stacked_params(setup, result.params)

    def _checked(self, state: Any, silos: Silos | MixedSilos) -> VIState:
        """Check a state for the fit to go on from, and return it.

        Optimizers' clocks may be one for each silo, or one for all.

        :raises TypeError: where it is no state.
        :raises ValueError: where it is a state of another fit.
        """
        if not isinstance(state, VIState):
            raise TypeError(
                f"init_state: expected result.state, got {type(state).__name__}; a result goes to "
                "init_from="
            )
        setup, key = self.setup(silos), jax.random.key(0)
        if setup.remote:
            server = self._federated(setup.config, setup.stacks).init(
                key, first_params(setup, self.guide, key)
            )
            expected = VIState(
                server,
                kept_by(state, setup, "init_state"),  # type: ignore[arg-type]
                state.visits,
            )
        else:
            expected = self.init(key, silos)
        same = jax.tree.structure(state) == jax.tree.structure(expected)  # type: ignore[operator]
        pairs = zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True) if same else []
        if not same or any(
            jnp.shape(x)[: jnp.ndim(y)] != jnp.shape(y) and jnp.ndim(y) for x, y in pairs
        ):
            raise ValueError(
                "init_state: expected a state of the same kind of fit, model, guide, optimizer and "
                "silos; to start from another fit "
                "give its result as init_from="
            )
        return state

    def _named(
        self, setup: Setup, params: dict[str, Array], state: VIState, averaged: bool
    ) -> dict[str, Array]:
        """Return global parameters in their supports, and those of inline silos, by name."""
        named = setup.config.constrain(params)
        if setup.remote:
            return named
        return {**named, **local_params(setup, self._silo_params(setup, state, averaged))}

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
        checkpoint: str | Path | None = None,
        checkpoint_every: int = 10,
    ) -> VIResult:
        """Make rounds of communication, with all silos or some in each.

        :param rng_key: seed of all draws (unused with ``init_state``).
        :param num_rounds: number of rounds; with ``tol`` the largest number.
        :param silos: the data, or :class:`RemoteSilos`: the same rounds, made where the rows are.
            The result then has global parameters alone.
        :param participation: the fraction of silos that take part in a round (that many are drawn
            without replacement), or each silo's probability of taking part, by name. Replies are
            weighted by one over it, so that the gradient stays unbiased; an absent silo keeps its
            state. Default: all.
        :param tol: stop when the mean loss has converged: that of the last quarter of the rounds is
            within ``tol`` nats of that of the quarter before (at least 250 rounds each). Conducive
            rounds stop when the loss moved less than ``tol`` in a round, and q less than .05 sds.
        :param init_from: as for :meth:`init`.
        :param init_state: a state to go on from.
        :param answering: for SFVI over remote silos, the probability that a silo answers, one for
            all or by name. Use it where this probability is known and does not depend on the
            rounds. Missing replies then count zero, the others one over it. Default: silent silos
            are asked again, and the fit stops if they stay silent.
        :param checkpoint: for remote silos, a file for the state after every ``checkpoint_every``
            rounds. If it exists, the fit goes on from it, as if it had not stopped: the silos keep
            the states that it names. Silos that gave up on the server have to be connected again
            (:func:`numpyro_fed.engines.wire.connect`).
        :param checkpoint_every: largest number of rounds that an interruption loses.
        :raises ValueError: for arguments out of range, before anything is compiled.
        :raises RuntimeError: where remote silos did not answer before the first round was made,
            naming them.
        :warns UserWarning: when a loss is not finite (naming round and silo; the last finite state
            is returned); after Ctrl-C, and where remote silos stay silent (the rounds so far are
            returned); for silos that never took part.
        """
        if (
            isinstance(num_rounds, bool)
            or not isinstance(num_rounds, int | np.integer)
            or num_rounds < 1
        ):
            raise ValueError(f"num_rounds: expected a whole number >= 1, got {num_rounds!r}")
        if tol is not None and not (math.isfinite(tol) and tol > 0):
            raise ValueError(f"tol: expected a number of nats > 0, got {tol!r}")
        if init_from is not None and init_state is not None:
            raise ValueError("init_from and init_state: expected one of them, got both")
        self._options.check_rounds(num_rounds, tol, participation, answering, init_state)
        setup = self.setup(silos)
        who = participation_of(participation, setup.names)
        known = answering_of(answering, setup.names, setup.remote, self.algorithm == "sfvi")
        config, keeper = setup.config, Checkpoint(checkpoint, checkpoint_every)
        rounds = saved = None
        with keeper.held():
            if setup.remote:
                facts = (
                    self._facts(rng_key, setup, silos, who, known) if checkpoint is not None else {}
                )
                rounds = RemoteRounds(
                    self.algorithm, self._federated, setup, who, known, keeper, facts
                )
                saved = rounds.saved()
            elif checkpoint is not None:
                raise ValueError(
                    "checkpoint: silos in this process keep nothing; expected None, and "
                    "init_state=result.state to go on"
                )
            if saved is not None:
                if init_from is not None or init_state is not None:
                    raise ValueError(
                        f"checkpoint: {keeper.place} is there, and the fit goes on from it; "
                        "expected no init_from or init_state beside it"
                    )
                state, made = saved
                if len(made) > num_rounds:
                    raise ValueError(
                        f"num_rounds={num_rounds}: {keeper.place} is of {len(made)} rounds; "
                        "expected as many or more, or another file"
                    )
            elif init_state is None:
                state, made = self.init(rng_key, silos, init_from=init_from), np.zeros(0)
            else:
                state, made = self._checked(init_state, silos), np.zeros(0)
            arguments = config, state, setup.names, num_rounds, tol, progress_bar
            if rounds is not None:
                if saved is not None or init_state is None:  # else another result holds the state
                    rounds.owns(state)
                state, losses, stopped = run_rounds(rounds, *arguments, at_once=1, before=made)
                rounds.tidy(state)
            else:
                state, losses, stopped = run_rounds(
                    inline_rounds(self._federated, config, who, setup.stacks), *arguments
                )
        self._say_how_it_ended(setup, state)
        _warn_of_absent(setup, state)
        spent = self._spent(setup, state, who, known)
        return self._result(setup, state, losses, silos.names, spent, stopped)

    def _result(
        self,
        setup: Setup,
        state: VIState,
        losses: np.ndarray,
        order: tuple[str, ...],
        spent: Spent | None,
        stopped: str | None,
    ) -> VIResult:
        """Return a run's result; costs are in the ``order`` of the user's silos."""
        config = setup.config
        average = state.server.params if state.server.average is None else state.server.average
        params = self._named(setup, average, state, True)
        if setup.remote:
            costs = ledger_of_calls(state, setup.names, order)
        else:
            costs = ledger(self._federated, config, state, setup.stacks, setup.names, order)
        whitening = config.families[0].whitening(config.constrain(average))
        return VIResult(params, state, losses, costs, setup.partition(), whitening, spent, stopped)

    def _facts(
        self,
        rng_key: Array,
        setup: Setup,
        silos: Any,
        who: Participation | None,
        known: Participation | None,
    ) -> dict[str, Any]:
        """Return the facts that a checkpoint has to share with this fit."""
        drawn = {"participation": who, "answering": known}
        return {
            "model and fit": fingerprint(setup.config.factors, setup.parts[0], self),
            **facts_of_run(rng_key, silos),
            **{
                name: None if p is None else np.asarray(p.probability).tolist()
                for name, p in drawn.items()
            },
        }

    def _spent(self, setup: Setup, state: VIState, *drawn: Participation | None) -> Spent | None:
        """Return the privacy that a fit has spent; ``None`` without a budget.

        :param drawn: laws of the silos' participation and answers.
        """
        if self.privacy is None:
            return None
        rounds, noise = int(state.server.i), setup.config.noise
        assert noise is not None
        counts = np.ones(len(setup.names))
        for who in drawn:
            counts = counts if who is None else counts / who.probability
        error = expected_error(noise, float(counts.sum()), max(rounds, 1))
        silos, epsilon = setup.parts[0], self.privacy.spent(rounds)
        simulated = not (isinstance(silos, RemoteSilos) and silos.carrier.guarded)
        return Spent(
            epsilon, self.privacy.delta, noise.clip, rounds, self.privacy.epsilon, error, simulated
        )


def _warn_of_absent(setup: Setup, state: VIState) -> None:
    never = [name for name, n in zip(setup.names, np.asarray(state.visits), strict=True) if n == 0]
    if never:
        shown = ", ".join(map(repr, never[:5])) + (", ..." if len(never) > 5 else "")
        warnings.warn(
            f"{len(never)} of {len(setup.names)} silos never took part ({shown}): their data "
            "are not in the fit. Run more "
            "rounds, or raise participation",
            stacklevel=3,
        )
