"""Evaluators: one module each."""
