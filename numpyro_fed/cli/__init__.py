"""Command ``numpyro-fed``."""
