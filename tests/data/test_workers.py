"""Worker processes end with the trainer, and are restarted if killed."""

import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest
from indexed_source import mesh_of

from vit_jax.data.augment.transforms import TrainTransform
from vit_jax.data.pipeline import stream, workers
from vit_jax.data.pipeline.loader import Loader
from vit_jax.data.pipeline.workers import Processes, Reader
from vit_jax.data.sources import synthetic
from vit_jax.errors import UserError

ROOT = pathlib.Path(__file__).parents[2]
# Prints its memory maps and its workers, then waits to be killed.
TRAINER = """
import multiprocessing, sys
import numpy as np
from vit_jax.data.augment.transforms import TrainTransform
from vit_jax.data.pipeline.loader import Loader, LocalRows
from vit_jax.data.pipeline.workers import Processes
from vit_jax.data.sources import synthetic

if __name__ == '__main__':
  source = synthetic.Source('train', num_examples=64, height=8, width=8)
  loader = Loader(source, TrainTransform((8, 8)), 0, 'error')
  pool = Processes(loader, 2, 8, 2)
  local = LocalRows(np.arange(8), np.arange(8))
  for task in [pool.fill((0, 0), local, 0) for _ in range(8)]:
    pool.result(task)
  maps = [line for line in open('/proc/self/maps') if '/pym-' in line]
  assert maps and all('(deleted)' in line for line in maps), maps
  print(*[child.pid for child in multiprocessing.active_children()], flush=True)
  sys.stdin.read()
"""


def _gone(pid):
  """Waits until a process has ended; a zombie counts as ended."""
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
def test_workers_of_a_killed_trainer_end(tmp_path):
  """After kill -9, the workers end, and the shared memory has no name."""
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
    _gone(pid)  # fails at the time limit of the test


def _batches(source, reader, number, kill_at=None):
  """Returns the first batches; kills a worker after `kill_at` of them."""
  with stream.train_batches(
    source, TrainTransform((8, 8)), 8, 0, 0, mesh_of(), reader=reader
  ) as batches:
    found = []
    for step in range(number):
      if step == kill_at:
        worker = multiprocessing.active_children()[0]
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
      found.append(np.asarray(next(batches)['image']))
  return np.stack(found)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_batches_are_the_same_after_a_worker_is_killed(caplog):
  """Workers are restarted, and examples are not lost or repeated."""
  source = synthetic.Source('train', num_examples=640, height=8, width=8)
  expected = _batches(source, Reader(), 40)
  found = _batches(source, Reader(processes=2), 40, kill_at=3)
  np.testing.assert_array_equal(found, expected)
  assert 'a reader process was killed' in caplog.text


class Deadly(synthetic.Source):
  """Kills each worker process that reads its example 5."""

  def __getitem__(self, index):
    if index == 5:
      os.kill(os.getpid(), signal.SIGKILL)
    return super().__getitem__(index)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_repeatedly_killed_workers_end_the_run():
  """The run ends with a message that names the keys to change."""
  source = Deadly('train', num_examples=16, height=8, width=8)
  with pytest.raises(UserError, match=r'reader\.processes'):
    _batches(source, Reader(processes=1), 10)


def test_a_reused_buffer_has_no_rows_of_an_earlier_batch():
  """Padding of an evaluation would otherwise count as examples."""
  source = synthetic.Source('train', num_examples=8, height=8, width=8)
  pool = Processes(Loader(source, TrainTransform((8, 8)), 0, 'skip'), 1, 4, 1)
  buffer = slot, _ = pool.buffers(4)
  for array in workers._views(pool._memory[slot], pool._layouts[0]).values():
    array[...] = 1
  assert all(array.all() for array in pool.collect(buffer).values())
  batch = pool.collect(pool.buffers(4))
  assert 'mask' in batch and not any(array.any() for array in batch.values())
  pool.close()
