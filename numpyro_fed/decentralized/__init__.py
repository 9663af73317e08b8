"""Langevin dynamics over graphs, without a server."""

from numpyro_fed.decentralized import remote

__all__ = ["remote"]  # its import registers how this process drives networks of remote silos
