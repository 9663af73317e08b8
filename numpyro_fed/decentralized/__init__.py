"""Langevin dynamics over graphs, without a server."""

from numpyro_fed.decentralized import remote

__all__ = ["remote"]  # which registers how networks are driven over remote silos
