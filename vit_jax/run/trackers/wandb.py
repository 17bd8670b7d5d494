"""Sends metrics to Weights & Biases.

It is enabled by config.log.trackers = dict(wb=dict(name='wandb')). A run that
resumes continues the same W&B run. If steps are repeated, W&B keeps their first
values.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from vit_jax.files import paths
from vit_jax.run import tracking

# `import wandb` would import this module.
wandb: Any = importlib.import_module('wandb')


class Tracker:
  """Writes to a run of a W&B project."""

  def __init__(
    self,
    run: tracking.Run,
    /,
    *,
    project: str = 'vit_jax',
    entity: str | None = None,
    mode: str = 'online',
  ):
    """Starts the W&B run, or continues it.

    Args:
      run: description of the run.
      project: name of the project.
      entity: user or team; by default the user's default entity.
      mode: 'online', 'offline' (sent later by `wandb sync`) or 'disabled'.
    """
    local = not paths.is_remote(run.workdir)
    self._run = wandb.init(
      project=project,
      entity=entity,
      mode=mode,
      name=run.name,
      id=run.identity,
      resume='allow',
      dir=str(run.workdir) if local else None,
      config=run.config,
    )

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Sends the metrics of a step."""
    self._run.log(dict(values), step=step)

  def close(self) -> None:
    """Waits until all metrics are sent."""
    self._run.finish()
