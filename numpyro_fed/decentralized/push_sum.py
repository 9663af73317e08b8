r"""Langevin dynamics by push-sum over directed links that change with time.

All nodes sample one posterior. A(t) is the column-stochastic matrix of the links that work at step
t, :math:`U = \sum_i U_i` the potential of :mod:`numpyro_fed.decentralized.nodes`, and
:math:`\alpha` the step size. A step is

.. math::
    W &= A(t) X, \qquad Y \leftarrow A(t) Y, \qquad Z_i = W_i / Y_i \\
    X_i &\leftarrow W_i - \alpha \nabla U_i(Z_i) + \sqrt{2 \alpha}\, \xi_i,
    \qquad \xi_i \sim N(0, I).

A draw of node i is :math:`Z_i`. With *tracked* gradients each node moves along its share of the sum
of all gradients, :math:`S \leftarrow A S + g(Z) - g(Z_{\text{before}})`, with noise of variance
:math:`2 \alpha Y_i`. Derived in docs/derivations/push_sum.md.

Law, for a constant step: on Gaussian posteriors the chain is a linear recursion
(tests/decentralized/test_push_sum.py), and its law is O(alpha) from the posterior. The disagreement
of nodes adds variance. Where silos differ it also shifts the mean, which tracking removes. For
diminishing steps the law is the posterior.

Reference: Kolesov, Kungurtsev (2020), equation 4 (equation 3 is illegible in print;
that page derives it). Nedić, Olshevsky, Shi (2017), Achieving geometric convergence for
distributed optimization over time-varying graphs, SIAM J. Optim. 27(4), push-DIGing.
"""

from collections.abc import Callable, Sequence

import networkx as nx
from jax import Array

from numpyro_fed.decentralized._kernel import NetworkKernel
from numpyro_fed.decentralized.graphs import TimeVaryingGraph
from numpyro_fed.decentralized.mixing import Links
from numpyro_fed.decentralized.nodes import Nodes
from numpyro_fed.mcmc.options import Step


def push_sum(links: Links, nodes: Nodes) -> tuple[Nodes, Array]:
    """Exchange once by push-sum.

    :return: the nodes with W, Y and mixed trackers, before each adds its own drift and noise, and
        their positions Z ``(m, d)``.
    """
    mixed, weight = links.mix(nodes.x), links.mix(nodes.weight)
    tracker = None if nodes.tracker is None else links.mix(nodes.tracker)
    return nodes._replace(x=mixed, weight=weight, tracker=tracker), mixed / weight[:, None]


class PushSumLangevin(NetworkKernel):
    """Decentralized Langevin dynamics over a directed, time-varying graph.

    It is an ensemble kernel for :class:`numpyro.infer.MCMC`. There is no server: silo i is node i
    of the graph and sends to its out-neighbors alone. One ``sample()`` is one step: each node
    sends, receives, and takes a Langevin step of its own.

    **Chains.** A node is a chain: ``MCMC(kernel, num_chains=R * m, chain_method="vectorized")``
    runs R independent networks of the m nodes, one after the other in the chain axis. Nodes of one
    network nearly agree, so they are not independent draws. With ``node=``,
    :func:`numpyro_fed.to_inference_data` takes one node, or the average, of every network.

    **Law and bias.** With a constant step, every node's draws follow the posterior up to O(step
    size). Where silos differ this is true of the mean too, unless ``gradient_tracking=True``
    removes its bias. With a schedule that diminishes, draws follow the posterior in the limit.

    ``step_size="adaptive"`` learns a step in warm-up from what the first network meets. At this
    step the worst node's standard deviation (sd) is a factor ``1 + bias_target`` too large along
    the stiffest direction, if silos are alike. Where links fail it is a guide only
    (``graph.added_variance()``). Fields of ``sample_stats``: ``consensus_error``, the squared
    distance of a node from the average in unconstrained space; ``push_sum_weight``; ``step_size``;
    ``local_accept_prob`` (NaN for remote silos with latents).

    **What leaves a silo.** In each step, to each out-neighbor: its share of X and Y, d + 1 numbers
    (with tracking 2 d + 1). Under ``"adaptive"``, in warm-up, all nodes receive the average of X
    and a direction (2 d numbers), and send two gradients and a Hessian-vector product there (3 d).
    With a preconditioner or local latents, once: what the fit of :class:`numpyro_fed.FSGLD`'s
    surrogates sends. The latter are averages over nodes. This engine takes them at once; a network
    without a server would take them by push-sum. Rows and local latents never leave a silo.

    **Local latents** never leave their node, and move by Metropolis steps given the node's own
    position. In the result all nodes of a network carry the same ones.

    :param model: a NumPyro model with at least one silo plate.
    :param graph: who sends to whom, from :mod:`numpyro_fed.graphs`, or a networkx graph.
    :param step_size: alpha: a number, a schedule of the number of steps
        (:func:`numpyro_fed.polynomial_decay`, or of optax), or ``"adaptive"``. A :class:`Step` also
        sets ``bias_target``, and whitens steps by a fit of surrogates unless its
        ``preconditioner`` is ``None``.
    :param batch_size: rows of a node's minibatch (with replacement), or ``None`` for all rows.
    :param gradient_tracking: let nodes track the sum of all gradients, and weigh their noise by Y.
    :param public: observed sites outside every silo plate whose data all silos know.
    :param validate: check the factorization before the first step.
    :raises ValueError: for arguments, graphs, data and models that the kernel cannot use, before
        compilation.

    **Reference.** Kolesov, Kungurtsev: Decentralized Langevin dynamics over a directed graph, 2020,
    equation 4.

    **Example**::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_fed as fed
        >>> from numpyro.infer import MCMC
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with fed.silo_plate("patients", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> silos = fed.Silos({
        ...     "bern": {"y": jnp.arange(20.0)},
        ...     "oslo": {"y": jnp.ones(9)},
        ...     "rome": {"y": jnp.zeros(5)},
        ... })
        >>> graph = fed.graphs.ring(3).with_link_failures(0.1)
        >>> kernel = fed.PushSumLangevin(model, graph, step_size=0.01)
        >>> mcmc = MCMC(
        ...     kernel, num_warmup=50, num_samples=100, num_chains=6,
        ...     chain_method="vectorized", progress_bar=False,
        ... )
        >>> mcmc.run(jax.random.key(0), silos)
        >>> mcmc.get_samples(group_by_chain=True)["mu"].shape
        (6, 100)
    """

    _exchange = staticmethod(push_sum)

    def __init__(
        self,
        model: Callable,
        graph: TimeVaryingGraph | nx.Graph,
        step_size: float | str | Callable | Step = "adaptive",
        batch_size: int | None = None,
        *,
        gradient_tracking: bool = False,
        public: Sequence[str] = (),
        validate: bool = True,
    ) -> None:
        super().__init__(model, graph, step_size, batch_size, public, validate, gradient_tracking)
