"""What to say where JAX is told to use devices that this machine has not."""

import os
import pathlib
import traceback

from vit_jax.errors import UserError

# Where Linux shows devices of a platform, if there are any.
_DEVICES = {
  'tpu': ('accel*', 'vfio/[0-9]*'),
  'cuda': ('nvidia[0-9]*', 'dxg'),
  'gpu': ('nvidia[0-9]*', 'dxg', 'kfd'),
}


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
  folder, patterns = pathlib.Path('/dev'), _DEVICES.get(first, ())
  if any(next(folder.glob(pattern), None) for pattern in patterns):
    return None
  extra = 'tpu' if first == 'tpu' else 'gpu'
  return UserError(
    f'JAX_PLATFORMS={wanted}, and there is no such device here, or no JAX for '
    'it. Unset it, and JAX takes what there is; JAX_PLATFORMS=cpu is always '
    f"there; on a machine that has one, pip install 'vit_jax[{extra}]'."
  )


def _of_a_backend(error: Exception) -> bool:
  """Whether JAX raised it as it looked for devices."""
  if isinstance(error, RuntimeError):
    return str(error).startswith(('Unable to init', 'Unknown backend'))
  frames = traceback.extract_tb(error.__traceback__)
  # With no plug-in for a platform that is known, JAX asserts.
  return isinstance(error, AssertionError) and (
    frames[-1].filename.endswith('xla_bridge.py')
  )
