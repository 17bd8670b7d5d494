"""Starts the processes of a run, and sets up their memory, cache and log."""

import ctypes
import datetime
import functools
import logging
import math
import os
import pathlib
import platform
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
from absl import logging as absl_logging
from etils import epath

from vit_jax.errors import UserError, check_range
from vit_jax.processes import peers, versions
from vit_jax.processes.interruption import HANDLER

log = logging.getLogger('vit_jax')
_PACKAGES = (
  'jax',
  'jaxlib',
  'flax',
  'optax',
  'orbax-checkpoint',
  'libtpu',
  'tensorflow-datasets',
  'ml-collections',
  'clu',
  'numpy',
)


def start_distributed(
  coordinator_address: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
) -> None:
  """Connects the processes of a run, if there are several.

  The arguments specify the processes. Without arguments, JAX finds them under
  SLURM with several tasks and on Cloud TPU; otherwise this is the only process.

  Args:
    coordinator_address: 'HOST:PORT' of process 0.
    num_processes: number of processes.
    process_id: index of this process.

  Raises:
    UserError: the flags are inconsistent.
  """
  _check_processes(coordinator_address, num_processes, process_id)
  joined = join(coordinator_address, num_processes, process_id)
  if joined and jax.process_count() > 1:
    log.info('process %d of %d', jax.process_index(), jax.process_count())


def join(
  coordinator_address: str | None,
  num_processes: int | None,
  process_id: int | None,
  timeout_s: int = 300,
) -> bool:
  """Connects to the other processes, and starts polling their messages.

  Args:
    coordinator_address: 'HOST:PORT' of process 0; None to let JAX find it.
    num_processes: number of processes.
    process_id: index of this process.
    timeout_s: time for the other processes to start.

  Returns:
    Whether there are other processes.
  """
  if coordinator_address is None and not _found_by_jax():
    return False
  with peers.handle_lost_peers():
    jax.distributed.initialize(
      coordinator_address,
      num_processes,
      process_id,
      initialization_timeout=timeout_s,
      heartbeat_timeout_seconds=peers.HEARTBEAT_S,
    )
  if HANDLER.installed or peers.client() is not None:
    HANDLER.install()  # JAX has replaced the handler of SIGTERM
    HANDLER.react = peers.exit_interrupted
  peers.listen()
  return True


def _check_processes(
  coordinator_address: str | None,
  num_processes: int | None,
  process_id: int | None,
) -> None:
  """Refuses flags that JAX would ignore, or reject with an obscure error."""
  check_range('--num_processes', num_processes, at_least=1)
  last = math.inf if num_processes is None else num_processes - 1
  check_range('--process_id', process_id, at_least=0, at_most=last)
  if coordinator_address is None:
    if (num_processes or 1) > 1 or process_id:
      raise UserError(
        f'--num_processes={num_processes} and --process_id={process_id} are '
        'given without --coordinator_address: give all three, with the '
        'HOST:PORT of process 0 on all processes, or none to run one process.'
      )
    return
  if not re.fullmatch(r'.+:\d+', coordinator_address):
    raise UserError(
      f'--coordinator_address is {coordinator_address!r}; give HOST:PORT of '
      'process 0.'
    )
  if not _found_by_jax() and None in (num_processes, process_id):
    raise UserError(
      '--coordinator_address needs --num_processes=N and --process_id=I '
      f'(0 to N - 1), too; got {num_processes} and {process_id}.'
    )


def _found_by_jax() -> bool:
  """Returns whether JAX finds the processes of this run by itself."""
  return int(os.environ.get('SLURM_NTASKS', '1')) > 1 or _on_tpu()


def cache_compilations() -> None:
  """Enables JAX's compilation cache, so that a restart compiles nothing.

  The cache is $JAX_COMPILATION_CACHE_DIR, or ~/.cache/vit_jax/compiled.
  Programs for CPUs are not cached, because they use the instructions of one
  type of machine. JAX_ENABLE_COMPILATION_CACHE=false disables the cache.
  """
  config: Any = jax.config
  if jax.default_backend() != 'cpu' and not config.jax_compilation_cache_dir:
    folder = pathlib.Path.home() / '.cache/vit_jax/compiled'
    jax.config.update('jax_compilation_cache_dir', str(folder))


def keep_host_memory() -> None:
  """Makes malloc keep freed memory for the next step, if JAX runs on the CPU.

  XLA's CPU backend allocates the buffers of every step again. By default glibc
  returns such large buffers to the system, which must clear all their pages at
  the next allocation: a third of all CPU time in the step of a small model.
  Compiling, which allocates from many threads, becomes slower.

  This function must be called before JAX starts any thread. It does nothing if
  the user has set glibc's MALLOC_ variables.
  """
  accelerator = _on_tpu() or pathlib.Path('/dev/nvidia0').exists()
  set_by_user = any(name.startswith('MALLOC_') for name in os.environ)
  if accelerator or set_by_user or platform.libc_ver()[0] != 'glibc':
    return
  mallopt = ctypes.CDLL(None).mallopt
  for option, value in (
    (-8, 1),  # M_ARENA_MAX: all threads use the main arena, which can grow
    (-4, 0),  # M_MMAP_MAX: large buffers are not mapped separately
    (-1, -1),  # M_TRIM_THRESHOLD: memory is never returned to the system
    (-2, 64 * 2**20),  # M_TOP_PAD: bytes to request when the arena grows
  ):
    mallopt(option, value)


def _on_tpu() -> bool:
  """Returns whether this machine has TPU chips that JAX will use."""
  if os.environ.get('JAX_PLATFORMS', 'tpu').split(',')[0] != 'tpu':
    return False
  chips = any(
    pathlib.Path(device).exists() for device in ('/dev/accel0', '/dev/vfio/0')
  )
  return chips and versions.package_version('libtpu') is not None


def is_main() -> bool:
  """Returns whether this is process 0, which writes the run's files."""
  return jax.process_index() == 0


def process_file(path: epath.Path) -> epath.Path:
  """Returns this process's path for a file that each process writes separately.

  Args:
    path: path for the main process.

  Returns:
    The path; on other processes, the path with their index before the suffix.
  """
  if is_main():
    return path
  return path.with_suffix(f'.{jax.process_index()}{path.suffix}')


def start_logging() -> None:
  """Sends this package's log to stderr, and silences noisy libraries."""
  handler = logging.StreamHandler(sys.stderr)
  handler.setFormatter(logging.Formatter('%(asctime)s %(message)s', '%H:%M:%S'))
  log.handlers[:] = [handler]
  log.propagate = False
  log.setLevel(logging.INFO)
  # Orbax logs through absl, gcsfs through its own logger. Their errors are also
  # raised as exceptions, and reported once. If a disk is full, thousands of log
  # lines would hide that report.
  absl_logging.set_verbosity(absl_logging.FATAL)
  for name in ('gcsfs', 'asyncio', 'fsspec'):
    logging.getLogger(name).setLevel(logging.CRITICAL)
  sys.unraisablehook = functools.partial(_report_unraisable, sys.unraisablehook)


def _report_unraisable(report: Callable[[Any], None], caught: Any) -> None:
  """Reports an error of a callback, unless it results from a failed save.

  After a failed save, each of TensorStore's many futures uses an event loop
  that Orbax has closed. The failure itself was already raised and logged.

  Args:
    report: original hook, which prints the traceback.
    caught: argument of `sys.unraisablehook`.
  """
  error = caught.exc_value
  if isinstance(error, RuntimeError) and str(error) == 'Event loop is closed':
    return
  report(caught)


def describe_run() -> dict[str, Any]:
  """Returns the content of `run.json`: versions, devices, command, time."""
  devices = jax.devices()
  return {
    'time': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
    'command': [sys.executable, *sys.orig_argv[1:]],
    'commit': versions.commit(),
    'python': platform.python_version(),
    'packages': {name: versions.package_version(name) for name in _PACKAGES},
    'platform': devices[0].platform,
    'device_kind': devices[0].device_kind,
    'num_devices': len(devices),
    'num_processes': jax.process_count(),
    'hostname': platform.node(),
  }
