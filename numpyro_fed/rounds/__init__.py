"""A round between a server and its silos.

The contract, silos at hand and remote, bytes and files.
"""
