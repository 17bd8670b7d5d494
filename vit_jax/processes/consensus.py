"""Exchanges numbers, text and JSON values between the processes of a run.

This is the only module that uses JAX's internal modules, because JAX has no
public interface to the key-value store of its coordination service, and none to
react to the loss of a process. If a future JAX moves the internal ones, runs of
several processes still work, but a process that ends early is noticed only by
JAX itself, after minutes, and ends the others with an abort.
"""

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

log = logging.getLogger('vit_jax')


def _internals() -> tuple[Any, Any] | None:
  """Returns JAX's distributed state and its bindings; None if they moved."""
  try:
    from jax._src.distributed import global_state
    from jax._src.lib import _jax
  except ImportError:
    return None
  state = ('client', 'num_processes', 'process_id', 'shutdown')
  complete = all(hasattr(global_state, name) for name in state)
  if complete and hasattr(_jax, 'get_distributed_runtime_client'):
    return global_state, _jax
  return None


_INTERNALS = _internals()


def client() -> Any:
  """Returns JAX's coordination client; None if there is only one process.

  It is also None if this JAX has other internals.
  """
  if _INTERNALS is None or num_processes() == 1:
    return None
  return _INTERNALS[0].client


def index() -> int:
  """Returns the index of this process, without initializing devices."""
  return jax.process_index() if _INTERNALS is None else _INTERNALS[0].process_id


def num_processes() -> int:
  """Returns the number of processes, without initializing devices."""
  if _INTERNALS is None:
    return jax.process_count()
  return _INTERNALS[0].num_processes


def shut_down() -> None:
  """Waits at JAX's shutdown barrier for the other processes, if any."""
  if _INTERNALS is not None and client() is not None:
    _INTERNALS[0].shutdown()


@contextlib.contextmanager
def calling_on_loss(callback: Callable[[object], None]) -> Iterator[None]:
  """Makes JAX's client call a function when another process is lost.

  `jax.distributed.initialize` must be called in the body. By default JAX's
  client aborts the process (134) when the coordination service reports a loss
  or no longer responds. JAX has no public way to set another callback, so the
  constructor of the client is replaced meanwhile. JAX 0.10 to 0.12 cannot
  convert the argument of the callback and aborts, which `peers` handles.

  Args:
    callback: function of the status of the service.
  """
  if _INTERNALS is None:
    log.warning(
      'JAX %s has other internal modules than the tested versions: if one '
      'process ends, the others end only after minutes, with an abort. Install '
      'a tested version of JAX (constraints.txt) to avoid this.',
      jax.__version__,
    )
    yield
    return
  bindings = _INTERNALS[1]
  new_client = bindings.get_distributed_runtime_client

  def new_client_with_callback(*args: Any, **kwargs: Any) -> Any:
    return new_client(*args, missed_heartbeat_callback=callback, **kwargs)

  bindings.get_distributed_runtime_client = new_client_with_callback
  try:
    yield
  finally:
    bindings.get_distributed_runtime_client = new_client


def gather_integer(value: int) -> list[int]:
  """Gathers an integer below 2^31 from each process, by process index.

  All processes must call it.
  """
  if jax.process_count() == 1:
    return [int(value)]
  return multihost_utils.process_allgather(np.int32(value)).tolist()


def gather_text(text: str) -> list[str]:
  """Gathers a text from each process.

  All processes must call it.

  Args:
    text: text of this process.

  Returns:
    The texts of all processes, by process index, on every process.
  """
  if jax.process_count() == 1:
    return [text]
  data = np.frombuffer(text.encode(), np.uint8)
  sizes = gather_integer(len(data))
  # Only arrays of equal shape can be gathered, so all are padded to the
  # longest.
  padded = np.zeros(max(sizes), np.uint8)
  padded[: len(data)] = data
  rows = multihost_utils.process_allgather(padded)
  return [
    row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)
  ]


def from_main(function: Callable[[], Any]) -> Any:
  """Calls a function on the main process; returns its value on every process.

  All processes must call this function. It is used to read the files of a
  workdir, because other processes may still see older versions of them.

  Args:
    function: function that returns a JSON-able value.
  """
  if jax.process_count() == 1:
    return function()
  text = json.dumps(function()).encode() if jax.process_index() == 0 else b''
  size = multihost_utils.broadcast_one_to_all(np.array(len(text), np.int32))
  data = np.zeros(int(size), np.uint8)
  data[: len(text)] = np.frombuffer(text, np.uint8)
  return json.loads(multihost_utils.broadcast_one_to_all(data).tobytes())
