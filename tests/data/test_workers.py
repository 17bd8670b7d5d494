"""Worker processes end with the trainer; a killed one is one message."""

import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys

import jax
import pytest

from vit_jax.arrays import sharding
from vit_jax.data.augment.transforms import TrainTransform
from vit_jax.data.pipeline import stream
from vit_jax.data.pipeline.reader import Reader
from vit_jax.data.sources import synthetic
from vit_jax.errors import UserError

ROOT = pathlib.Path(__file__).parents[2]
# Says what it mapped and which workers it started, then waits to be killed.
TRAINER = """
import multiprocessing, sys
import numpy as np
from vit_jax.data.augment.transforms import TrainTransform
from vit_jax.data.pipeline.loader import Loader, Share
from vit_jax.data.pipeline.workers import Processes
from vit_jax.data.sources import synthetic

if __name__ == '__main__':
  source = synthetic.Source('train', num_examples=64, height=8, width=8)
  loader = Loader(source, TrainTransform((8, 8)), 0, 'error')
  pool = Processes(loader, 2, 8, 2)
  share = Share(np.arange(8), np.arange(8))
  for future in [pool.fill(0, share, 0) for _ in range(8)]:
    pool.result(future)
  maps = [line for line in open('/proc/self/maps') if '/pym-' in line]
  assert maps and all('(deleted)' in line for line in maps), maps
  print(*[child.pid for child in multiprocessing.active_children()], flush=True)
  sys.stdin.read()
"""


def _gone(pid):
  """Waits until a process has ended; a zombie has."""
  status = pathlib.Path(f'/proc/{pid}/status')
  while True:
    try:
      if 'State:\tZ' in status.read_text():
        return
    except (FileNotFoundError, ProcessLookupError):
      return


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.skipif(sys.platform != 'linux', reason='looks into /proc')
def test_a_killed_trainer_leaves_nothing(tmp_path):
  """After kill -9 its workers end; their memory had lost its name before."""
  script = tmp_path / 'trainer.py'
  script.write_text(TRAINER)
  trainer = subprocess.Popen(
    [sys.executable, str(script)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
    env=os.environ | {'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'},
  )
  with trainer:
    assert trainer.stdout is not None
    workers = [int(pid) for pid in trainer.stdout.readline().split()]
    assert workers
    trainer.kill()
  for pid in workers:
    _gone(pid)  # the test's time limit is the assertion


@pytest.mark.slow
def test_a_killed_worker_is_one_message():
  """What a person can do about it, and no traceback of a pool."""
  source = synthetic.Source('train', num_examples=64, height=8, width=8)
  mesh = sharding.make_mesh(jax.devices()[:1])
  reader = Reader(processes=1)
  with stream.train_batches(
    *(source, TrainTransform((8, 8)), 8, 0, 0, mesh), reader=reader
  ) as batches:
    next(batches)
    [worker] = multiprocessing.active_children()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(UserError, match='a reader process was killed'):
      while True:
        next(batches)
