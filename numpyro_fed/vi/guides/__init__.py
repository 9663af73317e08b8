"""Guides: the structured Gaussian family and guides that users write."""
