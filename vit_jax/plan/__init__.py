"""Predicts memory, time and cost of a training run from its compiled step."""
