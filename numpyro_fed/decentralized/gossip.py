r"""Langevin dynamics by gossip over an undirected graph.

It is the baseline of :mod:`numpyro_fed.decentralized.push_sum`. W is the symmetric, doubly
stochastic matrix of Metropolis weights, and :mod:`numpyro_fed.decentralized.nodes` defines the
potentials. A step is

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
from numpyro_fed.mcmc.options import Step


def gossip(links: Links, nodes: Nodes) -> tuple[Nodes, Array]:
    """Exchange once by gossip.

    :return: the nodes after the exchange, and their positions before it, at which they take
        gradients.
    """
    return nodes._replace(x=links.mix(nodes.x)), nodes.x


class GossipLangevin(NetworkKernel):
    """Decentralized Langevin dynamics over an undirected graph (DE-SGLD).

    It is an ensemble kernel for :class:`numpyro.infer.MCMC`, and the baseline of
    :class:`PushSumLangevin`, whose parameters and chains it shares. Every link must work both ways,
    and a failure stops both directions. Nodes hold positions rather than numerators and weights.

    **Law and bias.** As for push-sum with a constant step and without tracking. A draw is what a
    node holds, with the node's last noise, so nodes are farther apart than push-sum's.

    **What leaves a silo.** In each step, to each neighbor: d numbers.

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
        step_size: float | str | Callable | Step = "adaptive",
        batch_size: int | None = None,
        *,
        public: Sequence[str] = (),
        validate: bool = True,
    ) -> None:
        super().__init__(model, graph, step_size, batch_size, public, validate)
