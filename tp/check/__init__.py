"""Checks that a model says the same at every width, and finds the statement where it does not."""
