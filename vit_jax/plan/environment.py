"""The environment in which libtpu compiles on a machine without a TPU."""

import os
import re
from collections.abc import Sequence

LOCAL = 'local'  # the topology that stands for this machine's own backend

# libtpu looks for the machine it expects to run on; the last four keep it from
# asking a metadata server and from complaining about what it does not find.
_WITHOUT_TPU = {
  'JAX_PLATFORMS': 'cpu',
  'TPU_SKIP_MDS_QUERY': '1',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',  # else a crash leaves a lock behind
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_ACCELERATOR_TYPE': 'v3-8',
  'TPU_MIN_LOG_LEVEL': '3',
  'TPU_STDERR_LOG_LEVEL': '3',
}


def prepare(argv: Sequence[str]) -> None:
  """Sets the variables that jax reads when it is imported.

  Args:
    argv: the command line; `--topology=local` leaves the platform alone.
  """
  # A program for absent devices cannot be loaded from the cache again.
  os.environ['JAX_ENABLE_COMPILATION_CACHE'] = 'false'
  local = re.compile(rf'--?topology[= ]{LOCAL}')
  if not local.search(' '.join(argv)):
    os.environ.update(_WITHOUT_TPU)
