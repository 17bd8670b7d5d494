"""Sends metrics to MLflow.

It is enabled by config.log.trackers =
dict(ml=dict(name='examples.mlflow_tracker', uri='…')). A run that resumes
continues the same MLflow run, which is found by a tag.
"""

import importlib
import time
from collections.abc import Mapping
from typing import Any

from vit_jax.run import tracking

# The package is not installed where types are checked.
mlflow: Any = importlib.import_module('mlflow')
_TAG = 'vit_jax.run'
_MAX_PARAMS = 100  # per request
_MAX_LENGTH = 500  # characters of a value that every store accepts


class Tracker:
  """Writes to a run of an MLflow experiment."""

  def __init__(
    self,
    run: tracking.Run,
    /,
    *,
    uri: str | None = None,
    experiment: str = 'vit_jax',
  ):
    """Starts the MLflow run, or continues it.

    Args:
      run: description of the run.
      uri: address of the tracking server or of a local store
        ('sqlite:///runs.db'); by default that of $MLFLOW_TRACKING_URI.
      experiment: name of the experiment, which is created if necessary.
    """
    identity = run.identity
    self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
    existing = self._client.get_experiment_by_name(experiment)
    experiment_id = (
      existing.experiment_id
      if existing
      else self._client.create_experiment(experiment)
    )
    found = self._client.search_runs(
      [experiment_id], filter_string=f"tags.`{_TAG}` = '{identity}'"
    )
    if found:
      self._id = found[0].info.run_id
      self._client.update_run(self._id, status='RUNNING')
      return
    tags = {_TAG: identity}
    created = self._client.create_run(
      experiment_id, tags=tags, run_name=run.name
    )
    self._id = created.info.run_id
    params = [
      mlflow.entities.Param(key, str(value)[:_MAX_LENGTH])
      for key, value in run.config.items()
    ]
    for start in range(0, len(params), _MAX_PARAMS):
      part = params[start : start + _MAX_PARAMS]
      self._client.log_batch(self._id, params=part)

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Logs a line; see `tracking.Tracker`."""
    now = int(1000 * time.time())
    metrics = [
      mlflow.entities.Metric(key, float(value), now, step)
      for key, value in values.items()
    ]
    self._client.log_batch(self._id, metrics=metrics)

  def close(self) -> None:
    """Marks the run as ended."""
    self._client.set_terminated(self._id)
