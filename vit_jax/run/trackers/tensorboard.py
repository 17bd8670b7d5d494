"""Writes metrics as TensorBoard events.

It is enabled by config.log.tensorboard, if the package tensorboard is
installed. The file is written by TensorBoard's own modules, because the summary
writers of CLU import TensorFlow, which takes seconds at every start.
"""

import functools
import importlib
import math
import pathlib
import socket
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from tensorboard.summary.writer.record_writer import RecordWriter

from vit_jax.files import paths
from vit_jax.files.paths import with_retries
from vit_jax.run import metrics, tracking

# Type checkers do not find the content of generated modules.
_event_pb2: Any = importlib.import_module('tensorboard.compat.proto.event_pb2')
_UPLOAD_EVERY_S = 60.0  # each upload writes all events of this start again


class Tracker:
  """Writes events to a new file in the workdir at each start of the run.

  If the workdir is in an object store, the events are written to a local
  directory, whose files are uploaded at most once a minute and at the end.
  """

  def __init__(self, run: tracking.Run, /):
    """Opens the file of events.

    Args:
      run: description of the run.
    """
    self._workdir, self._uploaded_at = run.workdir, time.monotonic()
    self._local = None
    if paths.is_remote(run.workdir):
      self._local = tempfile.TemporaryDirectory(prefix='vit_jax_events_')
      folder = pathlib.Path(self._local.name)
    else:
      folder = pathlib.Path(run.workdir)
      folder.mkdir(parents=True, exist_ok=True)
    self._events = RecordWriter((folder / _file_name()).open('xb'))
    self._append(_event_pb2.Event(file_version='brain.Event:2'))

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Writes the metrics of a step; see `tracking.Tracker`."""
    event = _event_pb2.Event(step=step)
    for name, value in values.items():
      event.summary.value.add(tag=name, simple_value=value)
    self._append(event)
    if time.monotonic() - self._uploaded_at > _UPLOAD_EVERY_S:
      self._upload()

  def rewind(self, step: int) -> None:
    """Makes TensorBoard drop the metrics from `step` on; see `Tracker`."""
    start = _event_pb2.SessionLog(status=_event_pb2.SessionLog.START)
    self._append(_event_pb2.Event(step=step, session_log=start))
    # metrics.jsonl has kept the training metrics of the step.
    for line_step, values in metrics.read(self._workdir):
      if line_step == step:
        self.write(
          step, {k: math.nan if v is None else v for k, v in values.items()}
        )

  def _append(self, event: Any) -> None:
    event.wall_time = time.time()
    self._events.write(event.SerializeToString())
    self._events.flush()

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


def _file_name() -> str:
  """Returns a new name for a file of events.

  TensorBoard recognizes the files by `tfevents`, and reads them in the order of
  their names. The fraction of the second makes the name unique.
  """
  second, fraction = divmod(time.time_ns(), 10**9)
  return f'events.out.tfevents.{second}.{socket.gethostname()}.{fraction:09}.v2'
