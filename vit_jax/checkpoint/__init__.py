"""Saves and restores checkpoints; the only package that imports Orbax.

A step directory contains these items: `params`; `average` (the average of the
parameters, if one is kept); `extra` (the objective's own state); `training`
(all other leaves of the state); `about` (JSON: completed config, class names,
preprocessing); `manifest` (JSON: shape, dtype and checksum of every leaf, and
the id of the run that wrote the step); `metrics` (JSON, if `checkpoint.best` is
set). Trees are written as nested dicts by path, so reading the files requires
no Python class.
"""

from vit_jax.checkpoint.items import FORMAT, READABLE, check_shapes
from vit_jax.checkpoint.manager import Checkpointer
from vit_jax.checkpoint.steps import latest as latest_step
from vit_jax.checkpoint.weights import (
  export_params,
  list_items,
  load_about,
  load_average,
  load_extra,
  load_params,
  step_directory,
)

__all__ = (
  'FORMAT',
  'READABLE',
  'Checkpointer',
  'check_shapes',
  'export_params',
  'list_items',
  'latest_step',
  'load_about',
  'load_average',
  'load_extra',
  'load_params',
  'step_directory',
)
