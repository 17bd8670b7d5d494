"""Checkpoints by Orbax; the only room that imports it.

A step directory holds these items: `params`; `average` (of the parameters,
where one is kept); `training` (all else of the state); `about` (JSON: resolved
config, class names, preprocessing); `manifest` (JSON: shape, dtype and checksum
of every leaf, and whose step it is); `metrics` (JSON, where `best` is set).
Trees are written as nested dicts by path, so the files depend on no Python
class.
"""

from vit_jax.checkpoint.items import FORMAT, READABLE, check_shapes
from vit_jax.checkpoint.manager import Checkpointer
from vit_jax.checkpoint.steps import latest as latest_step
from vit_jax.checkpoint.weights import (
  export_params,
  held_items,
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
  'held_items',
  'latest_step',
  'load_about',
  'load_average',
  'load_extra',
  'load_params',
  'step_directory',
)
