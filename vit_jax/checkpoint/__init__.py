"""Saves and restores checkpoints; the only package that imports Orbax.

A step directory contains these items: `params`; `average` (the average of the
parameters, if one is kept); `extra` (the objective's own state); `training`
(all other leaves of the state); `about` (JSON: completed config, class names,
preprocessing); `manifest` (JSON: shape, dtype and checksum of every leaf, and
the id of the run that wrote the step); `metrics` (JSON, if `checkpoint.best` is
set). Trees are written as nested dicts by path, so reading the files requires
no Python class.
"""

from vit_jax.checkpoint.items import FORMAT as FORMAT
from vit_jax.checkpoint.manager import Checkpointer as Checkpointer
from vit_jax.checkpoint.restore import RemovedError as RemovedError
from vit_jax.checkpoint.restore import export_params as export_params
from vit_jax.checkpoint.restore import list_items as list_items
from vit_jax.checkpoint.restore import load_about as load_about
from vit_jax.checkpoint.restore import load_arrays as load_arrays
from vit_jax.checkpoint.restore import load_average as load_average
from vit_jax.checkpoint.restore import step_directory as step_directory
from vit_jax.checkpoint.steps import latest as latest_step

__all__ = ('latest_step',)
