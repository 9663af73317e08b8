"""Base class of the kernels over a network of nodes as :class:`numpyro.infer.mcmc.MCMCKernel`.

It connects setup and steps to MCMC and holds no mathematics.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
from jax import Array, random
from numpyro.util import is_prng_key

from numpyro_fed._typing import ModelArgs
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.views import SiloRows, stack, stack_states
from numpyro_fed.decentralized.graphs import TimeVaryingGraph, from_networkx
from numpyro_fed.decentralized.mixing import Mixing, mixing
from numpyro_fed.decentralized.networks import (
    LEAST_WEIGHT,
    NetworkState,
    advance,
    current_step_size,
    look_around,
)
from numpyro_fed.decentralized.nodes import Nodes
from numpyro_fed.decentralized.start import first_nodes
from numpyro_fed.mcmc._base import FederatedKernel, check_start
from numpyro_fed.mcmc.adaptation import Adaptation, begin, check_seen, look_cost
from numpyro_fed.mcmc.config import NetworkConfig
from numpyro_fed.mcmc.options import Options, Step, as_step
from numpyro_fed.mcmc.setup import model_setup
from numpyro_fed.rounds.federated import Cost, Ledger
from numpyro_fed.rounds.remote import RemoteSilos


class NetworkKernel(FederatedKernel):
    """Base class of the kernels over a network of nodes.

    :class:`~numpyro_fed.PushSumLangevin` and :class:`~numpyro_fed.GossipLangevin` document the
    parameters.
    """

    is_ensemble_kernel = True
    default_fields = (
        "z", "diverging", "consensus_error", "push_sum_weight", "local_accept_prob", "step_size",
    )  # fmt: skip
    _exchange: ClassVar[Callable]
    _both_ways: ClassVar[bool] = False

    def __init__(
        self,
        model: Callable,
        graph: TimeVaryingGraph | nx.Graph,
        step_size: float | str | Callable | Step,
        batch_size: int | None,
        public: Sequence[str],
        validate: bool,
        tracking: bool = False,
    ) -> None:
        super().__init__(model)
        if isinstance(graph, nx.Graph):
            graph = from_networkx(graph)
        if not isinstance(graph, TimeVaryingGraph):
            raise TypeError(
                f"graph: expected one of numpyro_fed.graphs or networkx, got {type(graph).__name__}"
            )
        step = as_step(step_size)
        if isinstance(step.size, str) and step.size != "adaptive":
            raise ValueError(
                'step_size: expected a positive number, a schedule or "adaptive" for a network, '
                f"got {step.size!r}"
            )
        if step.noise_correction or step.control_variates:
            raise ValueError(
                "step_size: noise_correction and control_variates are for FSGLD, not for networks; "
                f"expected False, got {step!r}"
            )
        graph.connectivity()
        if self._both_ways and not (graph.is_symmetric and graph.weights is None):
            raise ValueError(
                "graph: gossip needs links that work both ways, and makes its weights itself; "
                "expected an undirected networkx graph, or PushSumLangevin for a directed one"
            )
        if not self._both_ways:
            least, node = graph.least_weight()
            if not least > LEAST_WEIGHT:
                raise ValueError(
                    f"graph: node {node!r} gives away nearly all it has and receives little: its "
                    f"push-sum weight falls to {least:.1g} (the mean is 1), and draws divide by "
                    f"it. Expected weights above {LEAST_WEIGHT:g}: let more nodes send to this node"
                )
        self._graph, self._tracking, self._step = graph, tracking, step
        needs = "score" if step.preconditioner is not None else None
        unit = replace(step, size=1.0)  # alpha of networks is checked above
        self._options = Options(
            unit, 1, batch_size, needs, 0.0, None, public, validate, element_batches=False
        ).checked()

    def __repr__(self) -> str:
        name = getattr(self._model, "__name__", type(self._model).__name__)
        return f"{type(self).__name__}({name}, {self._graph!r}, step_size={self._step.size!r})"

    def _reset(self) -> None:
        super()._reset()
        self._stacks: tuple[Silos, list[SiloRows]] | None = None
        self._mixing: Mixing | None = None
        self._price = (0.0, 0.0)

    @property
    def config(self) -> NetworkConfig:
        """Static facts of the kernel, which its setup makes."""
        return self._config

    @property
    def mixing(self) -> Mixing | None:
        """Arrays of the graph; ``None`` before :meth:`init`."""
        return self._mixing

    @property
    def batch_size(self) -> int | None:
        """Rows of a node's minibatch, or ``None`` for all rows."""
        return self._options.batch_size

    @property
    def learns_step_size(self) -> bool:
        """True if the kernel learns its step size in warm-up."""
        return self._step.learned

    @property
    def graph(self) -> TimeVaryingGraph:
        """Graph of the network."""
        return self._graph

    @property
    def tracking(self) -> bool:
        """True if nodes track gradients."""
        return self._tracking

    def _settle(self, silos: Silos, extra: ModelArgs) -> None:
        graph = self._graph.ordered(silos.names)
        made = model_setup(self._model, silos, extra, self._options)
        h, schedule = self._step.size, self._step.schedule
        constant = schedule is None and not self._step.learned
        tuning = made.tuning._replace(
            step_size=jnp.asarray(h if constant else jnp.nan, made.tuning.loc.dtype)
        )
        if tuning.latents is not None and not isinstance(silos, RemoteSilos):
            group = None if made.units is None else made.units.group
            rows = stack_states(tuning.latents.rows, silos, group)
            tuning = tuning._replace(latents=tuning.latents._replace(rows=rows))
        self._config = NetworkConfig(
            made.factors, made.units, made.batch, len(silos), schedule, graph.fails,
            self._both_ways, type(self)._exchange,
            tuple((g, sum(n)) for g, n in silos.sizes.items()),
        )  # fmt: skip
        self._tuning, self._surrogates, self._setup_cost = tuning, made.surrogates, made.cost
        self._mixing = mixing(graph, both_ways=self._both_ways)
        self._stacks = (silos, self._stacked(silos))
        if self._step.learned:
            m = len(silos)
            added = graph.added_variance(gossip=self._both_ways, tracking=self._tracking)
            self._price = (added + 1 / (4 * m), 1 / (4 * m))

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: Mapping[str, Array] | None = None,
        model_args: tuple = (),
        model_kwargs: ModelArgs | None = None,
    ) -> NetworkState:
        """Prepare the kernel for the data and the graph, and return the first state.

        :param rng_key: a key for each chain.
        :param init_params: unconstrained values of all latent sites, a chain axis first. By default
            each node starts at its own draw of the surrogate posterior. Without a fit (no
            preconditioner, no local latents) the draw is uniform on (-2, 2).
        """
        silos, extra = self._arguments(model_args, model_kwargs)
        if extra:
            raise ValueError(
                "a network of nodes cannot be a block of Gibbs; expected mcmc.run(rng_key, silos)"
            )
        chains = 1 if is_prng_key(rng_key) else len(rng_key)
        self.check_chains(chains, len(silos))
        self.set_up(silos, extra)
        self._sample_fn = self.sample
        z = self._given(init_params, model_args, extra)
        return self.first_state(rng_key, chains, num_warmup, z, silos)[0]

    def check_chains(self, chains: int, m: int) -> None:
        """Raise an error unless the number of chains is a multiple of the number of nodes."""
        if chains == 1 or chains % m:
            raise ValueError(
                f"num_chains: a node is a chain, so expected a multiple of the {m} nodes, got "
                f'{chains}; write MCMC(..., num_chains={m}, chain_method="vectorized"), or {4 * m} '
                "for four independent networks"
            )

    def first_state(
        self, rng_key: Array, chains: int, num_warmup: int, z: dict[str, Array] | None, silos: Silos
    ) -> tuple[NetworkState, Array]:
        """Return a prepared kernel's first state, and the key of the first local latents.

        :param rng_key: a key for each chain.
        :param z: unconstrained values of all latent sites, or ``None``.
        """
        assert self._tuning is not None
        assert self._mixing is not None
        m = len(silos)
        key, key_start, key_learn = random.split(rng_key[0], 3)
        start = partial(
            first_nodes, self._config, self._tuning, self._rows(silos), silos, chains // m,
            self._tracking,
        )  # fmt: skip
        template = jax.eval_shape(lambda key: start(key, None)[1], key_start)
        if z is not None:
            check_start(
                {k: v.shape for k, v in z.items()}, {k: v.shape for k, v in template.items()}
            )
        nodes, z = start(key_start, z)
        zero, none = jnp.zeros(chains, nodes.x.dtype), jnp.zeros(chains, jnp.uint32)
        state = NetworkState(
            i=jnp.zeros((), jnp.int32), z=z, nodes=nodes, push_sum_weight=zero + 1,
            consensus_error=zero, diverging=zero > 0, local_accept_prob=zero + 1, step_size=zero,
            sent=none, received=none,
            adaptation=self._adaptation(key_learn, num_warmup, nodes, silos), rng_key=key,
            tuning=self._tuning, mixing=self._mixing,
        )  # fmt: skip
        return state._replace(
            step_size=zero + current_step_size(self._config, state)
        ), random.split(key_start)[1]

    def _adaptation(
        self, key: Array, num_warmup: int, nodes: Nodes, silos: Silos
    ) -> Adaptation | None:
        if not self._step.learned:
            return None
        key_first, key_look = random.split(key)
        first = begin(
            key_first,
            nodes.x.shape[-1],
            self._price,
            self._step.bias_target,
            num_warmup,
            nodes.x.dtype,
        )
        learned = look_around(self._config, self._tuning, first, key_look, nodes, self._rows(silos))
        check_seen(learned)
        return learned

    def _rows(self, silos: Silos) -> list[SiloRows]:
        """Return the silos' rows in stacks, gathered once."""
        if self._stacks is not None and self._stacks[0] == silos:
            return self._stacks[1]
        return self._stacked(silos)

    def _stacked(self, silos: Silos) -> list[SiloRows]:
        if isinstance(silos, RemoteSilos):
            return []
        units = self._config.units
        return stack(silos, pad=None if units is None or units.group is not None else units.pad)

    def sample(
        self, state: NetworkState, model_args: tuple, model_kwargs: ModelArgs | None
    ) -> NetworkState:
        """Make one step of all nodes."""
        assert self._sample_fn is not None, "`init` must be called before `sample`"
        silos, _ = self._arguments(model_args, model_kwargs)
        if len(silos) != state.nodes.x.shape[1]:
            raise ValueError(
                f"the state has {state.nodes.x.shape[1]} nodes, the data {len(silos)} silos; start "
                "a new MCMC"
            )
        return advance(self._config, state, self._rows(silos))

    def _diagnostics(self, state: NetworkState) -> str:
        return (
            f"step size {float(state.step_size[0]):.2e}, "
            f"consensus error {float(state.consensus_error.mean()):.1e}"
        )

    def ledger(self, state: NetworkState) -> Ledger:
        """Return steps, gradient evaluations and bytes of each node, over all networks.

        Down counts the messages to a node, up those from it. The one fit of the surrogates,
        and the curvature measurements of ``"adaptive"``, count as if there were a server. Gradients
        are those of the node's part of the potential. A Hessian-vector product counts as one
        gradient, and Metropolis moves do not count. With remote silos, in each step a node's
        position goes down, and its gradient goes up.

        :param state: the state up to which to count, for example ``mcmc.last_state``.
        :raises ValueError: before the kernel has run.
        """
        if self._config is None or self._prepared_for is None:
            raise ValueError("expected a kernel that has run; call mcmc.run(rng_key, silos) first")
        networks, m = state.nodes.x.shape[:2]
        message = self._message_bytes()
        once = self._setup_cost + Cost(int(state.i), int(state.i)).times(networks)
        if state.adaptation is not None:
            once += look_cost(state.adaptation, self._config.factors.dim)
        if isinstance(self._prepared_for, RemoteSilos):
            size = int(state.i) * networks * self._config.factors.dim
            size *= self._tuning.loc.dtype.itemsize
            costs = [once + Cost(0, 0, size, size)] * m
            return Ledger(self._prepared_for.names, *zip(*costs, strict=True))
        sent, received = (
            np.asarray(x, np.int64).reshape(networks, m).sum(0) * message
            for x in (state.sent, state.received)
        )
        costs = [
            once + Cost(0, 0, int(down), int(up)) for down, up in zip(received, sent, strict=True)
        ]
        return Ledger(self._prepared_for.names, *zip(*costs, strict=True))

    def _message_bytes(self) -> int:
        """Return the bytes of a message along one link: X, Y of push-sum, and any tracker."""
        numbers = self._config.factors.dim * (2 if self._tracking else 1) + (
            0 if self._both_ways else 1
        )
        return numbers * self._tuning.loc.dtype.itemsize
