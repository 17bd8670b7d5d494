"""Weights of this and other projects."""
