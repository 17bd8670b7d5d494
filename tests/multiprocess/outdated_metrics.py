"""Trains while only the main process has read new lines of metrics.jsonl.

python -m tests.multiprocess.outdated_metrics FLAGS…
"""

import jax

from vit_jax import train
from vit_jax.cli import process
from vit_jax.run import guards

plateau = guards.plateau


def of_outdated_file(*arguments):
  """Returns no plateau on the other processes, as for a file without lines."""
  return None if jax.process_index() else plateau(*arguments)


if __name__ == '__main__':
  guards.plateau = of_outdated_file
  process.run(train.main, train.define_flags)
