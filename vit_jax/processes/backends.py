"""Settings and error messages that depend on the devices of this machine."""

import os
import pathlib
import sys
import traceback
from typing import Any

from vit_jax.errors import UserError

# Files in /dev by which Linux shows devices of a platform.
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


def hide_unused_libtpu() -> None:
  """Prevents JAX from loading a libtpu that is installed only for `plan`.

  Without a TPU, libtpu prints several lines in every command, and JAX's
  profiler crashes if the version of libtpu does not match. It must be called
  before JAX looks for devices. It does nothing if JAX_PLATFORMS is set, or if a
  device made by Google is on the bus.
  """
  if os.environ.get('JAX_PLATFORMS') or _has_devices('tpu') or _has_googles():
    return
  modules: dict[str, Any] = sys.modules
  modules['libtpu'] = None  # importing it fails
  os.environ.pop('TPU_LIBRARY_PATH', None)  # set as JAX was imported


def use_gpu_memory() -> None:
  """Lets JAX use 90 % of each GPU's memory instead of its default of 75 %.

  It must be called before JAX looks for devices. It does nothing if the user
  has set one of the two variables that JAX reads, or without a GPU.
  """
  given = os.environ.get(_FRACTION) or os.environ.get(_OLD_FRACTION)
  if not given and _has_devices('cuda'):
    os.environ[_FRACTION] = str(GPU_MEMORY_FRACTION)


def absent(error: Exception) -> UserError | None:
  """Returns the user's mistake behind an error of JAX, if there is one.

  If the devices exist but do not start, it is not the user's mistake: another
  process may hold them, or the machine is broken; starting again may help.

  Args:
    error: any error that ends a command.

  Returns:
    The error to report; None if the user's settings did not cause it.
  """
  platforms = os.environ.get('JAX_PLATFORMS', '')
  if not platforms or not _of_a_backend(error):
    return None
  first = platforms.partition(',')[0]
  if _has_devices(first):
    return None
  extra = 'tpu' if first == 'tpu' else 'gpu'
  return UserError(
    f'JAX_PLATFORMS={platforms}, but there is no such device here, or no JAX '
    'for it. Unset it to use the devices that exist, or set JAX_PLATFORMS=cpu; '
    f"on a machine with such a device, pip install 'vit_jax[{extra}]'."
  )


def _has_devices(platform: str) -> bool:
  """Returns whether the machine has devices of a platform."""
  folder, patterns = pathlib.Path('/dev'), _DEVICES.get(platform, ())
  return any(next(folder.glob(pattern), None) for pattern in patterns)


def _has_googles() -> bool:
  """Returns whether a device made by Google is on the PCI bus.

  It may be a TPU, or the network card of a virtual machine.
  """
  vendors = pathlib.Path('/sys/bus/pci/devices').glob('*/vendor')
  return any(vendor.read_text().strip() == _GOOGLE for vendor in vendors)


def _of_a_backend(error: Exception) -> bool:
  """Returns whether JAX raised an error while it looked for devices."""
  if isinstance(error, RuntimeError):
    return str(error).startswith(('Unable to init', 'Unknown backend'))
  frames = traceback.extract_tb(error.__traceback__)
  # Without a plug-in for a known platform, an assertion in JAX fails.
  return isinstance(error, AssertionError) and (
    frames[-1].filename.endswith('xla_bridge.py')
  )
