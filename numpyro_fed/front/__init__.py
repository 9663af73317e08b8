"""What most people call: a fit, a dictionary of tables, a model from one line."""
