"""Conducive rounds: a Gaussian factor for each silo, found by natural-gradient steps."""
