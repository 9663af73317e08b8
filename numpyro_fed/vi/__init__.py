"""Structured federated variational inference."""
