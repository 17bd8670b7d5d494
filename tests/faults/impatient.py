"""Trains with short pauses between the attempts to reach the storage.

python -m tests.faults.impatient FLAGS…
"""

import gcsfs.retry

from vit_jax import train
from vit_jax.cli import process
from vit_jax.files import paths
from vit_jax.run import lock

if __name__ == '__main__':
  paths.PAUSES_S = lock.SHARED_PAUSES_S = (0.5, 1.0)
  # The client waits min(2 ** attempt, 32) seconds.
  setattr(gcsfs.retry, 'min', lambda pause_s, longest_s: 0.1)  # noqa: B010
  process.run(train.main, train.define_flags)
