"""Trains while only the main process has read new lines of metrics.jsonl.

python -m tests.multiprocess.outdated_metrics FLAGS…
"""

import jax

from vit_jax import train
from vit_jax.cli import entry, process
from vit_jax.run import early_stopping

plateau = early_stopping.plateau


def of_outdated_file(workdir, config):
  """Returns no plateau on the other processes, as for a file without lines."""
  return None if jax.process_index() else plateau(workdir, config)


if __name__ == '__main__':
  early_stopping.plateau = of_outdated_file
  process.run(train.main, entry.define_flags)
