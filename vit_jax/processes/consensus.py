"""Exchanges numbers, text and JSON values between the processes of a run.

This is the only module that uses JAX's internal modules, because JAX has no
public interface to the key-value store of its coordination service, and none to
react to the loss of a process.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax._src.distributed import global_state
from jax._src.lib import _jax
from jax.experimental import multihost_utils

from vit_jax.errors import UserError

_bindings: Any = _jax


def client() -> Any:
  """Returns JAX's coordination client; None if there is only one process."""
  return global_state.client if num_processes() > 1 else None


def index() -> int:
  """Returns the index of this process, without initializing devices."""
  return global_state.process_id


def num_processes() -> int:
  """Returns the number of processes, without initializing devices."""
  return global_state.num_processes


def check_num_processes() -> None:
  """Compares the number of processes with that of process 0.

  Raises:
    UserError: this process was given another number.
  """
  service, key, own = client(), 'vit_jax/num_processes', str(num_processes())
  if index() == 0:
    service.key_value_set(key, own)
  elif (first := service.blocking_key_value_get(key, 60_000)) != own:
    raise UserError(
      f'--num_processes is {own} on process {index()}, but {first} on process '
      '0: give all processes the same number.'
    )


def shut_down() -> None:
  """Waits at JAX's shutdown barrier for the other processes, if any."""
  if client() is not None:
    global_state.shutdown()


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
  new_client = _bindings.get_distributed_runtime_client

  def new_client_with_callback(*args: Any, **kwargs: Any) -> Any:
    return new_client(*args, missed_heartbeat_callback=callback, **kwargs)

  _bindings.get_distributed_runtime_client = new_client_with_callback
  try:
    yield
  finally:
    _bindings.get_distributed_runtime_client = new_client


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


def gather_failures(name: str, failure: str, timeout_ms: int) -> list[str]:
  """Gathers the failures of a call that every process makes, if any.

  Unlike the other functions, a background thread may call it, because it does
  not use the devices.

  Args:
    name: name of the call, which must be new.
    failure: failure of this process; '' if it succeeded.
    timeout_ms: time for the other processes to call this function.

  Returns:
    Failures with the indices of their processes, on every process.
  """
  service = client()
  if service is None:
    return [failure] if failure else []
  folder = f'vit_jax/failures/{name}/'
  if failure:
    service.key_value_set(f'{folder}{index()}', f'process {index()}: {failure}')
  service.wait_at_barrier(folder, timeout_ms)
  return [text for _, text in service.key_value_dir_get(folder)]


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
