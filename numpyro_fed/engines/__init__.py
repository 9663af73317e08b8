"""Engines for rounds over several processes or organizations.

The default engine, :mod:`numpyro_fed.rounds.inline`, runs them in one process.
"""
