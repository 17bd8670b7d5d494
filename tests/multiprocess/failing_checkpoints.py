"""Trains while one process cannot read or write checkpoints.

python -m tests.multiprocess.failing_checkpoints KIND PROCESS FLAGS…
"""

import errno
import resource
import sys

import jax

from vit_jax import train
from vit_jax.checkpoint import items
from vit_jax.cli import process

KIND, PROCESS = sys.argv[1], int(sys.argv[2])
read_arrays = items.read_arrays
calls = []


def read(path, abstract):
  """Fails in this process for the newest step, once or always."""
  if jax.process_index() == PROCESS and path.parent.name == '8':
    calls.append(path)
    if KIND == 'limit':  # it can read, but will not be able to write
      resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, -1))
    if KIND == 'EIO always' or (KIND == 'EIO once' and len(calls) == 1):
      raise OSError(errno.EIO, 'injected')
    if KIND == 'damaged':
      raise ValueError('DATA_LOSS: injected')
  return read_arrays(path, abstract)


if __name__ == '__main__':
  items.read_arrays = read
  del sys.argv[1:3]
  process.run(train.main, train.define_flags)
