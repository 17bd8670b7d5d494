"""Weights & Biases: config.log.trackers = dict(wb=dict(name='wandb')).

A run that resumes goes on in the same run there, which keeps the first value of
steps that are repeated.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from vit_jax.files import paths
from vit_jax.run import tracking

wandb: Any = importlib.import_module('wandb')  # this module has its name


class Tracker:
  """Writes to a run of a project."""

  def __init__(
    self,
    run: tracking.Run,
    /,
    *,
    project: str = 'vit_jax',
    entity: str | None = None,
    mode: str = 'online',
  ):
    """Starts the run there, or goes on with it.

    Args:
      run: of which it is told.
      project: that the run belongs to.
      entity: user or team; by default the user's own.
      mode: 'online', 'offline' (to be sent by `wandb sync`) or 'disabled'.
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
    """Logs a line."""
    self._run.log(dict(values), step=step)

  def close(self) -> None:
    """Waits until all is sent."""
    self._run.finish()
