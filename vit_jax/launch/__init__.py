"""Starts a run on a cluster, and starts it again until it is done."""
