"""Engines: where the rounds of an algorithm run. ``inline`` is the default: one process, jitted."""
