"""Weights of other projects: one file a format, each an explicit name table."""
