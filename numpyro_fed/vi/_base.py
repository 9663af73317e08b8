"""Variational fits in the shape of :class:`numpyro.infer.SVI`: wiring without mathematics."""

import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.stages import Lowered

from numpyro_fed._typing import Facts, PyTree
from numpyro_fed.data.mixed import MixedSilos
from numpyro_fed.data.silos import Silos
from numpyro_fed.density.fingerprint import fingerprint
from numpyro_fed.rounds.checkpoint import Checkpoint, facts_of_run
from numpyro_fed.rounds.remote import RemoteSilos
from numpyro_fed.vi.algorithms import ALGORITHMS
from numpyro_fed.vi.definition import FitDefinition
from numpyro_fed.vi.first_params import first_params
from numpyro_fed.vi.inline import InlineRounds, advance
from numpyro_fed.vi.loop import Rounds, VIState, run_rounds
from numpyro_fed.vi.participation import (
    Participation,
    answering_of,
    participation_of,
    warn_of_absent,
)
from numpyro_fed.vi.remote import kept_by
from numpyro_fed.vi.remote_rounds import RemoteRounds
from numpyro_fed.vi.result import (
    FARTHER,
    VIResult,
    global_params,
    local_params,
    named_params,
    shape_of,
    spent_privacy,
    stacked_params,
)
from numpyro_fed.vi.setup import Setup

_jit_advance = partial(jax.jit, static_argnames=("federated", "config", "who"))(advance)


class FederatedVI(FitDefinition):
    """Base of :class:`~numpyro_fed.SFVI` and its kin; see there for the parameters.

    :cvar algorithm: name in :data:`numpyro_fed.vi.algorithms.ALGORITHMS`.
    """

    def init(
        self, rng_key: Array, silos: Silos | MixedSilos, *, init_from: VIResult | None = None
    ) -> VIState:
        """Return the state before the first round.

        :param rng_key: seed of all draws.
        :param silos: the data.
        :param init_from: a :class:`VIResult` of the same model, guide and silos (e.g. of a few
            SFVI-Avg rounds); its parameters are the start.
        :raises ValueError: for a structure of model, guide or data that the fit does not cover.
        """
        setup = self.setup(silos)
        params = first_params(setup, self.guide, rng_key)
        own: PyTree = None if setup.remote else setup.local
        if init_from is not None:
            params, own = self._taken_from(init_from, setup, params)
        return self._rounds(setup).start(rng_key, params, own)

    def lower(self, rng_key: Array, silos: Silos | MixedSilos) -> Lowered | None:
        """Return the program of rounds over silos here, traced and not yet compiled."""
        setup = self.setup(silos)
        rounds = self._rounds(setup)
        if not isinstance(rounds, InlineRounds):
            return None
        return rounds.lower(self.init(rng_key, silos))

    def _rounds(
        self,
        setup: Setup,
        who: Participation | None = None,
        known: Participation | None = None,
        keeper: Checkpoint | None = None,
        facts: Facts | None = None,
    ) -> Rounds:
        if setup.remote:
            return RemoteRounds(self.algorithm, setup, who, known, keeper, facts)
        return InlineRounds(self.algorithm, setup, who)

    def _taken_from(self, result: VIResult, setup: Setup, params: dict) -> tuple[dict, PyTree]:
        """Return a result's global parameters, unconstrained, and the silos' own.

        The latter are stacked, or for remote silos the place where they keep them.
        """
        if not isinstance(result, VIResult):
            raise TypeError(f"init_from: expected the result of a run, got {type(result).__name__}")
        if setup.remote:
            keep = setup.config.families[0].has_local
            own = kept_by(result.state, setup, "init_from") if keep else None
            return global_params(result, setup, params), own
        config = setup.config
        local = local_params(config, setup.totals, setup.stacks, setup.local)
        expected = {**config.constrain(params), **local}
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
        return config.unconstrain({k: given[k] for k in params}), stacked_params(setup, given)

    def _say_how_it_ended(self, setup: Setup, state: VIState) -> None:
        """Warn of problems that are particular to an algorithm."""

    def update(self, state: VIState, silos: Silos | MixedSilos) -> tuple[VIState, Array]:
        """Make one round of all silos; return the new state, and minus the bound before it."""
        if isinstance(silos, RemoteSilos):
            raise ValueError(
                "update() and evaluate() are not built for remote silos; expected run()"
            )
        setup = self.setup(silos)
        state, info = _jit_advance(
            ALGORITHMS[self.algorithm].federated, setup.config, None, state, setup.stacks
        )
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

    def fitted(self, result: VIResult, silos: Silos | MixedSilos) -> dict[str, Array]:
        """Return a result's global parameters, constrained, if its silos are these."""
        setup = self.setup(silos)
        if result.partition != setup.partition():
            raise ValueError(
                "expected the silos of the run, got others of the same names: their rows are other "
                "rows of the pooled data"
            )
        return jax.tree.map(jnp.asarray, {k: result.params[k] for k in setup.config.supports})

    def _checked(self, state: VIState, silos: Silos | MixedSilos) -> VIState:
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
            server = self._rounds(setup).first_server(key, first_params(setup, self.guide, key))
            expected = VIState(server, kept_by(state, setup, "init_state"), state.visits)
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
        if setup.remote:
            return setup.config.constrain(params)
        return named_params(
            setup.config, setup.totals, averaged, setup.stacks, params, state.server.params,
            list(state.silos),
        )  # fmt: skip

    def run(
        self,
        rng_key: Array,
        num_rounds: int,
        silos: Silos | MixedSilos,
        *,
        progress_bar: bool = True,
        participation: float | Mapping[str, float] | None = None,
        tol: float | None = None,
        init_from: VIResult | None = None,
        init_state: VIState | None = None,
        answering: float | Mapping[str, float] | None = None,
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
            rounds and after the last. If it exists, the fit goes on from it, as if it had not
            stopped: the silos keep the states that it names. Silos that gave up on the server have
            to be connected again (:func:`numpyro_fed.engines.wire.connect`).
        :param checkpoint_every: largest number of rounds that an interruption loses.
        :raises ValueError: for arguments out of range, before anything is compiled.
        :raises RuntimeError: where remote silos did not answer before the first round was made,
            naming them.
        :warns UserWarning: when the loss still falls at the end; when a loss is not finite (naming
            round and silo; the last finite state is returned); after Ctrl-C, and where remote silos
            stay silent (the rounds so far are returned); for silos that never took part.
        """
        if init_from is not None and init_state is not None:
            raise ValueError("init_from and init_state: expected one of them, got both")
        self._options.check_rounds(num_rounds, tol, participation, answering, init_state)
        setup = self.setup(silos)
        who = participation_of(participation, setup.names)
        adds_up = ALGORITHMS[self.algorithm].adds_up
        known = answering_of(answering, setup.names, setup.remote, adds_up)
        keeper, facts = Checkpoint(checkpoint, checkpoint_every), None
        if checkpoint is not None:
            facts = self._facts(rng_key, setup, silos, who, known)
        with keeper.held():
            rounds = self._rounds(setup, who, known, keeper, facts)
            run = rounds.saved()
            if run is not None:
                _check_saved(keeper, run.made, num_rounds, init_from, init_state)
            elif init_state is not None:
                run = rounds.run_of(self._checked(init_state, silos))
            else:
                run = rounds.run_of(self.init(rng_key, silos, init_from=init_from))
            run = run_rounds(rounds, run, num_rounds, tol, progress_bar)
        state = run.state
        self._say_how_it_ended(setup, state)
        warn_of_absent(setup.names, state.visits)
        costs = rounds.ledger(state, silos.names)
        spent = spent_privacy(self.privacy, setup, int(state.server.i), who, known)
        average = state.server.params if state.server.average is None else state.server.average
        params = self._named(setup, average, state, True)
        whitening = setup.config.families[0].whitening(params)
        losses, partition = run.record["losses"], setup.partition()
        result = VIResult(params, state, losses, costs, partition, whitening, spent, run.stopped)
        if result.falling:
            warnings.warn(f"{result.said_of_loss}; {FARTHER}", stacklevel=2)
        return result

    def _facts(
        self,
        rng_key: Array,
        setup: Setup,
        silos: Silos | MixedSilos,
        who: Participation | None,
        known: Participation | None,
    ) -> Facts:
        """Return the facts that a checkpoint has to share with this fit.

        :raises ValueError: for silos in this process.
        """
        if not setup.remote:
            raise ValueError(
                "checkpoint: silos in this process keep nothing; expected None, and "
                "init_state=result.state to go on"
            )
        assert isinstance(silos, Silos)
        drawn = {"participation": who, "answering": known}
        return {
            "model and fit": fingerprint(setup.config.factors, setup.parts[0], self),
            **facts_of_run(rng_key, silos),
            **{
                name: None if p is None else np.asarray(p.probability).tolist()
                for name, p in drawn.items()
            },
        }


def _check_saved(
    keeper: Checkpoint,
    made: int,
    num_rounds: int,
    init_from: VIResult | None,
    init_state: VIState | None,
) -> None:
    """Refuse arguments of a run that exclude the checkpoint from which it goes on."""
    if init_from is not None or init_state is not None:
        raise ValueError(
            f"checkpoint: {keeper.place} is there, and the fit goes on from it; expected no "
            "init_from or init_state beside it"
        )
    if made > num_rounds:
        raise ValueError(
            f"num_rounds={num_rounds}: {keeper.place} is of {made} rounds; expected "
            "as many or more, or another file"
        )
