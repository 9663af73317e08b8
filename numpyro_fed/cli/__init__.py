"""The command ``numpyro-fed``."""
