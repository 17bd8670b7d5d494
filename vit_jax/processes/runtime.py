"""Starts the processes of a run, and prepares each of them.

This includes the limits of the system, the devices of the machine, memory, the
cache of compiled programs, the log, and the versions of packages.
"""

import contextlib
import ctypes
import datetime
import functools
import importlib.metadata
import logging
import math
import os
import pathlib
import platform
import re
import resource
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import jax
from absl import logging as absl_logging
from etils import epath

from vit_jax.errors import UserError, check_range
from vit_jax.processes import consensus, peers
from vit_jax.processes.interruption import HANDLER

log = logging.getLogger('vit_jax')

VARIABLE = 'VIT_JAX_PARENT'  # process id of the sweep or study
_PR_SET_PDEATHSIG = 1
_ROOT = pathlib.Path(__file__).parents[1]
# Patterns of files in /dev that exist if there are devices of a platform.
_DEVICES = {
  'tpu': ('accel*', 'vfio/[0-9]*'),
  'cuda': ('nvidia[0-9]*', 'dxg'),
  'gpu': ('nvidia[0-9]*', 'dxg', 'kfd'),
}
_GOOGLE = '0x1ae0'  # PCI vendor id
# Fraction of a GPU's memory that JAX may use. The remainder is for the CUDA
# context, cuDNN and NCCL. NVIDIA's documentation recommends 0.8 to 0.9.
GPU_MEMORY_FRACTION = 0.9
_FRACTION = 'XLA_CLIENT_MEM_FRACTION'
_OLD_FRACTION = 'XLA_PYTHON_CLIENT_MEM_FRACTION'
_THREADS = 64  # a small run on CPUs has about 100, some of which already exist
_ADDRESS_BYTES = 2 * 2**30  # a small run on CPUs reserves 2.4 GiB
_EXIT_S = 50  # time for the interpreter to exit
# Settings of JAX that change dtypes, or that compiled steps do not allow, with
# the only values that commands support.
_SETTINGS = {
  'jax_enable_x64': False,
  'jax_disable_jit': False,
  'jax_numpy_rank_promotion': 'allow',
  'jax_numpy_dtype_promotion': 'standard',
}
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


def end_with_parent() -> None:
  """Asks the kernel to send SIGTERM when the parent that set VARIABLE ends."""
  parent = os.environ.pop(VARIABLE, '')
  if not parent:
    return
  prctl = getattr(ctypes.CDLL(None), 'prctl', None)
  if prctl is None:
    return
  prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
  if os.getppid() != int(parent):  # the parent ended before the request
    os.kill(os.getpid(), signal.SIGTERM)


def package_version(name: str) -> str | None:
  """Returns the version of a package; None if it is not installed."""
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return None


@functools.cache
def commit() -> str | None:
  """Returns the commit of this package, with '+' if files were changed.

  Returns:
    The commit; None if neither git nor `git archive` provides it.
  """

  def git(*arguments: str) -> str:
    return subprocess.run(
      ['git', '-C', str(_ROOT), *arguments],
      capture_output=True,
      text=True,
      check=True,
    ).stdout.strip()

  try:
    archived = (_ROOT / 'commit.txt').read_text().strip()
    if not archived.startswith('$'):  # `git archive` wrote the commit there
      return archived
    changed = git('status', '--porcelain', '--untracked-files=no')
    return git('rev-parse', 'HEAD') + ('+' if changed else '')
  except (OSError, subprocess.CalledProcessError):
    return None


def hide_unused_libtpu() -> None:
  """Prevents JAX from loading a libtpu that is installed only for `plan`.

  Without a TPU, libtpu prints several lines in every command, and JAX's
  profiler crashes if the version of libtpu does not match. This function must
  be called before JAX looks for devices. It does nothing if JAX_PLATFORMS is
  set, or if the PCI bus has a device made by Google.
  """
  if (
    os.environ.get('JAX_PLATFORMS')
    or _has_devices('tpu')
    or _has_google_device()
  ):
    return
  modules: dict[str, Any] = sys.modules
  modules['libtpu'] = None  # makes `import libtpu` fail
  os.environ.pop('TPU_LIBRARY_PATH', None)  # importing JAX sets it


def use_gpu_memory() -> None:
  """Lets JAX use 90 % of each GPU's memory instead of its default of 75 %.

  This function must be called before JAX looks for devices. It does nothing if
  the user has set one of the two variables that JAX reads, or if there is no
  GPU.
  """
  set_by_user = os.environ.get(_FRACTION) or os.environ.get(_OLD_FRACTION)
  if not set_by_user and _has_devices('cuda'):
    os.environ[_FRACTION] = str(GPU_MEMORY_FRACTION)


def reset_settings() -> None:
  """Resets settings of JAX that commands do not support, with a warning.

  Users set them in their environment for other programs.
  """
  for name, supported in _SETTINGS.items():
    value = getattr(jax.config, name)
    if value != supported:
      jax.config.update(name, supported)
      log.warning(
        '%s=%s is ignored: this program supports only %s',
        name.upper(),
        value,
        supported,
      )


def user_error(error: Exception) -> UserError | None:
  """Returns the error to report if JAX_PLATFORMS names an absent platform.

  If the devices exist but do not start, the user's setting is not the cause:
  another process may be using them, or the machine is broken. Starting again
  may then help.

  Args:
    error: any error that ends a command.

  Returns:
    The error to report; None if JAX_PLATFORMS is not the cause of `error`.
  """
  platforms = os.environ.get('JAX_PLATFORMS', '')
  if not platforms or not _is_from_backend(error):
    return None
  first = platforms.partition(',')[0]
  if _has_devices(first):
    return None
  extra = 'tpu' if first == 'tpu' else 'gpu'
  return UserError(
    f'JAX_PLATFORMS={platforms}, but this machine has no such device, or JAX '
    'was installed without support for it. Unset the variable to use the '
    'devices that exist, or set JAX_PLATFORMS=cpu; on a machine with such a '
    f"device, pip install 'vit_jax[{extra}]'."
  )


def _has_devices(platform: str) -> bool:
  """Returns whether the machine has devices of a platform."""
  folder, patterns = pathlib.Path('/dev'), _DEVICES.get(platform, ())
  return any(next(folder.glob(pattern), None) for pattern in patterns)


def _has_google_device() -> bool:
  """Returns whether a device made by Google is on the PCI bus.

  It may be a TPU, or the network card of a virtual machine.
  """
  vendors = pathlib.Path('/sys/bus/pci/devices').glob('*/vendor')
  return any(vendor.read_text().strip() == _GOOGLE for vendor in vendors)


def _is_from_backend(error: Exception) -> bool:
  """Returns whether an error was raised while JAX looked for devices."""
  if isinstance(error, RuntimeError):
    return str(error).startswith(('Unable to init', 'Unknown backend'))
  frames = traceback.extract_tb(error.__traceback__)
  # For a known platform without its plug-in, JAX raises an AssertionError.
  return isinstance(error, AssertionError) and (
    frames[-1].filename.endswith('xla_bridge.py')
  )


def check() -> None:
  """Checks that threads and address space are available.

  Raises:
    UserError: a limit of the system is too low.
  """
  limit = resource.getrlimit(resource.RLIMIT_AS)[0]
  if limit != resource.RLIM_INFINITY and limit < _reserved() + _ADDRESS_BYTES:
    raise UserError(
      f'{_reserved() >> 20} of {limit >> 20} MiB of address space are used; a '
      f'run needs {_ADDRESS_BYTES >> 20} MiB more: use `ulimit -v unlimited`.'
    )
  ended = threading.Event()
  threads = []
  try:
    for _ in range(_THREADS):
      threads.append(threading.Thread(target=ended.wait, daemon=True))
      threads[-1].start()
  except RuntimeError as error:
    raise UserError(
      f'only {len(threads) - 1} of {_THREADS} threads could be started '
      f'({error}): raise the limit (ulimit -u, or the number of processes of '
      'the container).'
    ) from error
  finally:
    ended.set()


class _SignalEvent(ctypes.Structure):
  """C's `struct sigevent` for a timer that sends a signal (SIGEV_SIGNAL)."""

  _fields_ = (
    ('value', ctypes.c_void_p),
    ('signal', ctypes.c_int),
    ('notify', ctypes.c_int),
    ('unused', ctypes.c_char * 48),
  )


def bound_exit(code: int) -> None:
  """Ends the process if the interpreter does not exit in time.

  Threads that hang would otherwise keep the process alive. Starting another
  thread to end it may be impossible, and Python code no longer runs while the
  interpreter exits. So a timer sends the signal whose number is the exit code,
  and the signal's handler is C's `_exit`, whose argument is this number.

  Args:
    code: exit code of the process; without timers or such a signal, SIGALRM
      ends the process.
  """
  with contextlib.suppress(ValueError):  # not the main thread
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_EXIT_S + 5)
  # macOS has no timer_create; some codes are not the number of a signal.
  with contextlib.suppress(AttributeError, ValueError, OSError):
    libc, timer = ctypes.CDLL(None), ctypes.c_void_p()
    event = _SignalEvent(signal=code, notify=0)
    # At exit, Python resets the signals that have handlers of its own.
    signal.signal(code, signal.SIG_DFL)
    libc.signal(code, libc._exit)
    # CLOCK_MONOTONIC; interval and start, each in seconds and nanoseconds.
    libc.timer_create(1, ctypes.byref(event), ctypes.byref(timer))
    times = (ctypes.c_long * 4)(0, 0, _EXIT_S, 0)
    libc.timer_settime(timer, 0, times, None)


def _reserved() -> int:
  """Returns the bytes of address space in use; 0 if unknown."""
  try:
    pages = pathlib.Path('/proc/self/statm').read_text().split()[0]
  except OSError:
    return 0
  return int(pages) * resource.getpagesize()


def start_distributed(
  coordinator_address: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
  timeout_s: int = 300,
) -> bool:
  """Connects the processes of a run, and starts polling their messages.

  The arguments specify the processes. Without arguments, JAX finds them under
  SLURM with several tasks and on Cloud TPU; otherwise this is the only process.

  Args:
    coordinator_address: 'HOST:PORT' of process 0.
    num_processes: number of processes.
    process_id: index of this process.
    timeout_s: time for the other processes to start.

  Returns:
    Whether there are other processes.

  Raises:
    UserError: the flags are inconsistent, or differ between the processes.
    ConnectionError: not all processes have started in time.
  """
  _check_processes(coordinator_address, num_processes, process_id)
  if coordinator_address is None and not _found_by_jax():
    return False
  try:
    with peers.handle_lost_peers():
      jax.distributed.initialize(
        coordinator_address,
        num_processes,
        process_id,
        initialization_timeout=timeout_s,
        heartbeat_timeout_seconds=peers.HEARTBEAT_S,
      )
  except RuntimeError as error:  # without the cause, which JAX cannot convert
    raise ConnectionError(
      f'the {consensus.num_processes()} processes did not connect within '
      f'{timeout_s} s. Start all of them, with the same --coordinator_address '
      'and --num_processes'
    ) from error
  if HANDLER.installed or peers.client() is not None:
    HANDLER.install()  # JAX has replaced the handler of SIGTERM
    HANDLER.react = peers.exit_interrupted
  peers.LISTENER.start()
  if peers.client() is not None:
    consensus.check_num_processes()
    log.info('process %d of %d', peers.index(), consensus.num_processes())
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
    is_wrong = (num_processes or 1) > 1 or process_id
  else:
    is_missing = None in (num_processes, process_id) and not _found_by_jax()
    is_wrong = is_missing or not re.fullmatch(r'.+:\d+', coordinator_address)
  if is_wrong:
    raise UserError(
      f'got --coordinator_address={coordinator_address}, --num_processes='
      f'{num_processes} and --process_id={process_id}: give all three, with '
      'the HOST:PORT of process 0 and a --process_id from 0 to N - 1, or none.'
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
  accelerator = _on_tpu() or _has_devices('cuda')
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
  first = os.environ.get('JAX_PLATFORMS', 'tpu').partition(',')[0]
  is_usable = first == 'tpu' and package_version('libtpu') is not None
  return is_usable and _has_devices('tpu')


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
    'commit': commit(),
    'python': platform.python_version(),
    'packages': {name: package_version(name) for name in _PACKAGES},
    'platform': devices[0].platform,
    'device_kind': devices[0].device_kind,
    'num_devices': len(devices),
    'num_processes': jax.process_count(),
    'hostname': platform.node(),
  }
