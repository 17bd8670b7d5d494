"""Cores, memory, devices and limits of the machine that a process runs on."""

import contextlib
import ctypes
import logging
import os
import pathlib
import platform
import resource
import sys
import threading
import traceback
from typing import Any

from vit_jax.errors import UserError
from vit_jax.processes import versions

log = logging.getLogger('vit_jax')

_CGROUPS_OF_PROCESS = pathlib.Path('/proc/self/cgroup')
_CGROUPS = pathlib.Path('/sys/fs/cgroup')
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
_OLD_FRACTION = 'XLA_PYTHON_CLIENT_MEM_FRACTION'  # name in older versions
_THREADS = 64  # a small run on CPUs has about 100, some of which already exist
_ADDRESS_BYTES = 2 * 2**30  # a small run on CPUs reserves 2.4 GiB


def cores() -> int:
  """Returns the number of cores that this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def memory_bytes() -> int:
  """Returns the bytes of memory that this process may use.

  It is the machine's memory, or less if a container or a batch system limits
  the process.
  """
  total = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  return min([total, *_limits()])


def _limits() -> list[int]:
  """Returns the memory limits of the control groups and ancestors, in bytes."""
  try:
    groups = _CGROUPS_OF_PROCESS.read_text().splitlines()
  except OSError:
    return []
  found = []
  for group in groups:  # '0::/job' (version 2), '4:memory:/job' (version 1)
    _, controllers, path = group.split(':', 2)
    if controllers and 'memory' not in controllers.split(','):
      continue
    root = _CGROUPS / 'memory' if controllers else _CGROUPS
    name = 'memory.limit_in_bytes' if controllers else 'memory.max'
    own = root / path.strip('/')
    for folder in (own, *own.parents):
      # In a container, only its own group exists, at the root. 'max' means no
      # limit.
      with contextlib.suppress(OSError, ValueError):
        found.append(int((folder / name).read_text()))
  return found


def check_limits() -> None:
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


def _reserved() -> int:
  """Returns the bytes of address space in use; 0 if unknown."""
  try:
    pages = pathlib.Path('/proc/self/statm').read_text().split()[0]  # total
  except OSError:
    return 0
  return int(pages) * resource.getpagesize()


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


def keep_host_memory() -> None:
  """Makes malloc keep freed memory for the next step, if JAX runs on the CPU.

  XLA's CPU backend allocates the buffers of every step again. By default glibc
  returns such large buffers to the system, which must clear all their pages at
  the next allocation: a third of all CPU time in the step of a small model.
  Compiling, which allocates from many threads, becomes slower.

  This function must be called before JAX starts any thread. It does nothing if
  the user has set glibc's MALLOC_ variables.
  """
  accelerator = on_tpu() or _has_devices('cuda')
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


def _is_from_backend(error: Exception) -> bool:
  """Returns whether an error was raised while JAX looked for devices."""
  if isinstance(error, RuntimeError):
    return str(error).startswith(('Unable to init', 'Unknown backend'))
  frames = traceback.extract_tb(error.__traceback__)
  # For a known platform without its plug-in, JAX raises an AssertionError.
  return isinstance(error, AssertionError) and (
    frames[-1].filename.endswith('xla_bridge.py')
  )


def on_tpu() -> bool:
  """Returns whether this machine has TPU chips that JAX will use."""
  first = os.environ.get('JAX_PLATFORMS', 'tpu').partition(',')[0]
  is_usable = first == 'tpu' and versions.package_version('libtpu') is not None
  return is_usable and _has_devices('tpu')


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
