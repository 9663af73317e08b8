"""ArviZ data, tables and figures of finished runs."""
