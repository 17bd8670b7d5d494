"""Devices that this machine has not: what JAX is to say of them, and we."""

import os
import pathlib
import sys
import traceback
from typing import Any

from vit_jax.errors import UserError

# Where Linux shows devices of a platform, if there are any.
_DEVICES = {
  'tpu': ('accel*', 'vfio/[0-9]*'),
  'cuda': ('nvidia[0-9]*', 'dxg'),
  'gpu': ('nvidia[0-9]*', 'dxg', 'kfd'),
}
_GOOGLE = '0x1ae0'  # PCI's number for the maker


def hide_unused_libtpu() -> None:
  """Keeps JAX from loading a libtpu that is here for `plan` alone.

  Where there is no TPU it complains in several lines of every command, and
  JAX's profiler crashes if its version is not the one that JAX was made for.
  Must come before JAX looks for devices. Does nothing where JAX_PLATFORMS says
  what to look for, or where something of Google's is on the bus.
  """
  if os.environ.get('JAX_PLATFORMS') or _has_devices('tpu') or _has_googles():
    return
  modules: dict[str, Any] = sys.modules
  modules['libtpu'] = None  # importing it fails
  os.environ.pop('TPU_LIBRARY_PATH', None)  # set as JAX was imported


def absent(error: Exception) -> UserError | None:
  """The user's error behind JAX's, if there is one.

  Where the devices exist and do not start there is none: another process may
  hold them, or the machine is broken, and a later try may go well.

  Args:
    error: any.
  """
  wanted = os.environ.get('JAX_PLATFORMS', '')
  if not wanted or not _of_a_backend(error):
    return None
  first = wanted.partition(',')[0]
  if _has_devices(first):
    return None
  extra = 'tpu' if first == 'tpu' else 'gpu'
  return UserError(
    f'JAX_PLATFORMS={wanted}, and there is no such device here, or no JAX for '
    'it. Unset it, and JAX takes what there is; JAX_PLATFORMS=cpu is always '
    f"there; on a machine that has one, pip install 'vit_jax[{extra}]'."
  )


def _has_devices(platform: str) -> bool:
  """Whether the machine shows devices of a platform; False for others."""
  folder, patterns = pathlib.Path('/dev'), _DEVICES.get(platform, ())
  return any(next(folder.glob(pattern), None) for pattern in patterns)


def _has_googles() -> bool:
  """Whether a device made by Google is on the PCI bus: a TPU, or a network."""
  vendors = pathlib.Path('/sys/bus/pci/devices').glob('*/vendor')
  return any(vendor.read_text().strip() == _GOOGLE for vendor in vendors)


def _of_a_backend(error: Exception) -> bool:
  """Whether JAX raised it as it looked for devices."""
  if isinstance(error, RuntimeError):
    return str(error).startswith(('Unable to init', 'Unknown backend'))
  frames = traceback.extract_tb(error.__traceback__)
  # With no plug-in for a platform that is known, JAX asserts.
  return isinstance(error, AssertionError) and (
    frames[-1].filename.endswith('xla_bridge.py')
  )
