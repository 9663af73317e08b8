"""Langevin dynamics over graphs, without a server."""
