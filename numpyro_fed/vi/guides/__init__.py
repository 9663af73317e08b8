"""Guides: the structured normal family, and users' own."""
