"""An evaluator that kills its own process once."""

import os
import pathlib
import signal
import time

from vit_jax.evaluators import classification


class Evaluator(classification.Evaluator):
  """Sends SIGKILL at the first evaluation after a checkpoint is complete."""

  def __init__(self, setting, /, *, split: str, after: str):
    """Takes the arguments of classification, and a checkpoint directory.

    A file next to the workdir records that the process was killed.
    """
    super().__init__(setting, split=split)
    self._checkpoint = pathlib.Path(after)

  def run(self, weights):
    folder, name = self._checkpoint.parent, self._checkpoint.name
    done = pathlib.Path(f'{folder.parent}.killed')
    # Saving runs in the background; this process waits for its end.
    while any(path.name.startswith(f'{name}.') for path in folder.glob('*')):
      time.sleep(0.05)
    if self._checkpoint.exists() and not done.exists():
      done.touch()
      os.kill(os.getpid(), signal.SIGKILL)
    return super().run(weights)
