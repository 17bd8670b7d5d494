"""Sets up JAX for the devices of this machine, and explains missing ones."""

import os
import pathlib
import sys
import traceback
from typing import Any

from vit_jax.errors import UserError

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
