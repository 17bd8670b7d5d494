"""Starts a run on a cluster, and restarts it until it is finished."""
