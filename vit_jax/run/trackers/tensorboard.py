"""Writes metrics as TensorBoard events.

It is enabled by config.log.tensorboard, if CLU and TensorFlow are installed.
"""

import functools
import pathlib
import tempfile
import time
from collections.abc import Mapping

from clu import metric_writers

from vit_jax.files import paths
from vit_jax.files.outages import with_retries
from vit_jax.run import tracking

_UPLOAD_EVERY_S = 60.0  # each upload writes all events of this start again


class Tracker:
  """Writes events to the workdir.

  If the workdir is in an object store, TensorFlow writes the events to a local
  directory, whose files are uploaded at most once a minute and at the end.
  """

  def __init__(self, run: tracking.Run, /):
    """Opens the file of events.

    Args:
      run: description of the run.
    """
    self._workdir, self._uploaded_at = run.workdir, time.monotonic()
    self._local = None
    folder = str(run.workdir)
    if paths.is_remote(run.workdir):
      self._local = tempfile.TemporaryDirectory(prefix='vit_jax_events_')
      folder = self._local.name
    self._events = metric_writers.SummaryWriter(folder)

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Writes a line; see `tracking.Tracker`."""
    self._events.write_scalars(step, dict(values))
    self._events.flush()
    if time.monotonic() - self._uploaded_at > _UPLOAD_EVERY_S:
      self._upload()

  def _upload(self) -> None:
    """Uploads the events so far, if the workdir is in an object store."""
    self._uploaded_at = time.monotonic()
    if self._local is None:
      return
    for file in pathlib.Path(self._local.name).iterdir():
      target = self._workdir / file.name
      write = functools.partial(target.write_bytes, file.read_bytes())
      with_retries(write, target, 'written')

  def close(self) -> None:
    """Closes the events, and removes the local directory."""
    self._events.close()
    self._upload()
    if self._local is not None:
      self._local.cleanup()
