"""Rounds between a server and its silos: the contract, inline and remote silos, bytes, files."""
