"""Conducive rounds: one approximate factor for each silo, by natural-gradient steps."""
