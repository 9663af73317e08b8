"""Noise, masks, keys and guards: what keeps a silo's replies from telling its rows."""
