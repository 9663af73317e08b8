r"""Langevin dynamics by gossip over an undirected graph.

The baseline of :mod:`numpyro_fed.decentralized.push_sum`.

With the symmetric, doubly stochastic matrix W of Metropolis weights, and the potentials of
:mod:`numpyro_fed.decentralized.nodes`,

.. math:: X_i \leftarrow \sum_j W_{ij} X_j - \alpha \nabla U_i(X_i) + \sqrt{2 \alpha}\, \xi_i .

A draw of node i is :math:`X_i`. The average follows Langevin dynamics on U with step :math:`\alpha
/ m`.

Reference: Gürbüzbalaban, Gao, Hu, Zhu (2021), Decentralized stochastic gradient Langevin dynamics
and Hamiltonian Monte Carlo, JMLR 22 (DE-SGLD). Weights: Xiao, Boyd, Kim (2007), Distributed average
consensus with least-mean-square deviation, JPDC 67.
"""

from collections.abc import Callable, Sequence

import networkx as nx
from jax import Array

from numpyro_fed.decentralized._kernel import NetworkKernel
from numpyro_fed.decentralized.graphs import TimeVaryingGraph
from numpyro_fed.decentralized.mixing import Links
from numpyro_fed.decentralized.nodes import Nodes

__all__ = ["GossipLangevin", "gossip"]


def gossip(links: Links, nodes: Nodes) -> tuple[Nodes, Array]:
    """One exchange, as :func:`numpyro_fed.decentralized.push_sum.push_sum`.

    Positions are those of before.
    """
    return nodes._replace(x=links.mix(nodes.x)), nodes.x


class GossipLangevin(NetworkKernel):
    """Decentralised Langevin dynamics over an undirected graph (DE-SGLD), an ensemble kernel for
    :class:`numpyro.infer.MCMC`.

    The baseline of :class:`PushSumLangevin`, whose parameters and chains it has: every link must
    work both ways (a link that fails fails in both directions), and nodes hold positions rather
    than numerators and weights.

    **Law and bias.** As push-sum with a constant step and without tracking. A draw is what a node
    holds, its own last noise included, so that nodes are farther apart than push-sum's. What leaves
    a silo: each step, to each neighbour, d numbers.

    **Reference.** Gürbüzbalaban, Gao, Hu, Zhu: Decentralized stochastic gradient Langevin dynamics
    and Hamiltonian Monte Carlo, JMLR 2021.

    **Example**::

        >>> import numpyro_fed as fed
        >>> kernel = fed.GossipLangevin(lambda y: None, fed.graphs.star(4), step_size=1e-3)
    """

    _exchange = staticmethod(gossip)
    _both_ways = True

    def __init__(
        self,
        model: Callable,
        graph: TimeVaryingGraph | nx.Graph,
        step_size: float | str | Callable = "adaptive",
        batch_size: int | None = None,
        *,
        preconditioner: str | None = None,
        bias_target: float = 0.02,
        public: Sequence[str] = (),
        validate: bool = True,
    ) -> None:
        super().__init__(
            model, graph, step_size, batch_size, preconditioner, bias_target, public, validate
        )
