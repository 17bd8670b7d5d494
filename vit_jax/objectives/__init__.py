"""Objectives: one module each."""
