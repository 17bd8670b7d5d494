"""Optimizers, schedules and their rules."""
