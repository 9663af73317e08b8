"""Factors of a model: the global term and one term for each silo."""
