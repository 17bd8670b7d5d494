"""Starts the processes of a run and describes what they run on."""

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
from vit_jax.processes.interruption import HERE

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
  """Joins the processes of a run, if there are several.

  Flags determine them if they are given. Under SLURM with several tasks, and on
  Cloud TPU, JAX finds them. Otherwise this is the only process.

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
  with peers.losses_reported():
    jax.distributed.initialize(
      coordinator_address,
      num_processes,
      process_id,
      initialization_timeout=timeout_s,
      heartbeat_timeout_seconds=peers.HEARTBEAT_S,
    )
  if HERE.installed or peers.client() is not None:
    HERE.install()  # JAX has replaced the handler of SIGTERM
    HERE.react = peers.leave_interrupted
  peers.listen()
  return True


def _check_processes(
  coordinator_address: str | None,
  num_processes: int | None,
  process_id: int | None,
) -> None:
  """Refuses flags that JAX would ignore or answer with a traceback."""
  check_range('--num_processes', num_processes, at_least=1)
  last = math.inf if num_processes is None else num_processes - 1
  check_range('--process_id', process_id, at_least=0, at_most=last)
  if coordinator_address is None:
    if (num_processes or 1) > 1 or process_id:
      raise UserError(
        f'--num_processes={num_processes} --process_id={process_id} without '
        '--coordinator_address: give all three, with the same HOST:PORT of '
        'process 0 on all processes, or none to run only one process.'
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
  """Keeps compiled programs on disk, so that a restart compiles nothing.

  They are kept in $JAX_COMPILATION_CACHE_DIR, or in ~/.cache/vit_jax/compiled.
  Programs for CPUs are not kept, because they contain instructions of one
  machine. JAX_ENABLE_COMPILATION_CACHE=false turns the cache off.
  """
  config: Any = jax.config
  if jax.default_backend() != 'cpu' and not config.jax_compilation_cache_dir:
    folder = pathlib.Path.home() / '.cache/vit_jax/compiled'
    jax.config.update('jax_compilation_cache_dir', str(folder))


def keep_host_memory() -> None:
  """Keeps freed memory for the next step, if there is only a CPU.

  XLA's CPU backend allocates the buffers of every step again. glibc returns
  such large buffers to the system, which then has to clear every page of them:
  a third of all processor time in the step of a small model. It must be called
  before JAX starts any thread. Compiling, which allocates from many threads,
  becomes slower. Nothing is done if the user has set glibc's MALLOC_ variables.
  """
  accelerator = _on_tpu() or pathlib.Path('/dev/nvidia0').exists()
  given = any(name.startswith('MALLOC_') for name in os.environ)
  if accelerator or given or platform.libc_ver()[0] != 'glibc':
    return
  mallopt = ctypes.CDLL(None).mallopt
  for option, value in (
    (-8, 1),  # M_ARENA_MAX: all threads use the one arena that can grow
    (-4, 0),  # M_MMAP_MAX
    (-1, -1),  # M_TRIM_THRESHOLD: never
    (-2, 64 * 2**20),  # M_TOP_PAD
  ):
    mallopt(option, value)


def _on_tpu() -> bool:
  """Returns whether this machine has TPU chips that JAX will use."""
  if os.environ.get('JAX_PLATFORMS', 'tpu').split(',')[0] != 'tpu':
    return False
  chips = any(
    pathlib.Path(device).exists() for device in ('/dev/accel0', '/dev/vfio/0')
  )
  return chips and versions.of_package('libtpu') is not None


def is_main() -> bool:
  """Returns whether this process writes the run's files and log."""
  return jax.process_index() == 0


def process_file(path: epath.Path) -> epath.Path:
  """Returns the path of a file that every process has for itself.

  Args:
    path: path for the main process.

  Returns:
    The path; on other processes, with their index before the suffix.
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
  # Orbax logs through absl, gcsfs through its own logger. Their errors are
  # raised as exceptions too, and reported once. A full disk would otherwise
  # bury that message in thousands of lines.
  absl_logging.set_verbosity(absl_logging.FATAL)
  for name in ('gcsfs', 'asyncio', 'fsspec'):
    logging.getLogger(name).setLevel(logging.CRITICAL)
  sys.excepthook = functools.partial(_report_uncaught, sys.excepthook)


def _report_uncaught(
  report: Callable[..., None], kind: type[BaseException], *error: Any
) -> None:
  """Reports an uncaught error, except those of TensorStore's failed writes.

  After a failed save, each of its many futures reports to an event loop that
  Orbax has closed. The failure itself was raised and logged.

  Args:
    report: the hook that was installed before.
    kind: type of the error.
    *error: the error and its traceback.
  """
  if kind is RuntimeError and str(error[0]) == 'Event loop is closed':
    return
  report(kind, *error)


def describe_run() -> dict[str, Any]:
  """Returns the content of `run.json`: versions, devices, command, time."""
  devices = jax.devices()
  return {
    'time': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
    'command': [sys.executable, *sys.orig_argv[1:]],
    'commit': versions.commit(),
    'python': platform.python_version(),
    'packages': {name: versions.of_package(name) for name in _PACKAGES},
    'platform': devices[0].platform,
    'device_kind': devices[0].device_kind,
    'num_devices': len(devices),
    'num_processes': jax.process_count(),
    'hostname': platform.node(),
  }
