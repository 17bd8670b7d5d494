"""Sets environment variables to compile for devices that are not present."""

import importlib.util
import os
import re
from collections.abc import Sequence

LOCAL = 'local'  # topology of the devices of this machine
GPU_EXTRA = "pip install 'vit_jax[plan-gpu]'"

# Without these variables, libtpu looks for TPUs and queries a metadata server,
# and logs errors because this machine has neither.
_WITHOUT_TPU = {
  'JAX_PLATFORMS': 'cpu',
  'TPU_SKIP_MDS_QUERY': '1',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',  # ignores the lock that a crash leaves
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_ACCELERATOR_TYPE': 'v3-8',
  'TPU_MIN_LOG_LEVEL': '3',
  'TPU_STDERR_LOG_LEVEL': '3',
  # JAX's CUDA plug-in checks the versions of libraries that only a GPU needs.
  'JAX_SKIP_CUDA_CONSTRAINTS_CHECK': '1',
}


def prepare(argv: Sequence[str]) -> None:
  """Sets the environment variables that JAX reads when it is imported.

  Args:
    argv: command line. With `--topology=local` the platform is not changed.
  """
  # Programs for devices that do not exist cannot be loaded from the cache.
  os.environ['JAX_ENABLE_COMPILATION_CACHE'] = 'false'
  local = re.compile(rf'--?topology[= ]{LOCAL}')
  if not local.search(' '.join(argv)):
    os.environ.update(_WITHOUT_TPU)


def has_gpu_compiler() -> bool:
  """Returns whether JAX's CUDA plug-in is installed."""
  return any(
    importlib.util.find_spec(f'jax_cuda{version}_plugin') is not None
    for version in (12, 13)
  )
