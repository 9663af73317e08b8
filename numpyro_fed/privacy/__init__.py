"""Noise, masks, keys and guards, which keep a silo's rows from being read off its replies."""
