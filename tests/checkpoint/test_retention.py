"""Tests of which steps are kept."""

import contextlib
import json
import math
import types

import jax
import pytest
from etils import epath

from tests.checkpoint.states import ABOUT, restore, save, state
from tests.faults.counts import further
from vit_jax.checkpoint import Checkpointer, agreement, manifest, steps
from vit_jax.errors import UserError
from vit_jax.weights import pretrained

NAME = 'val/accuracy'


@contextlib.contextmanager
def _opened(folder, best=NAME):
  evals = {'val': {'name': 'classification'}}
  about = ABOUT | {'config': {'checkpoint': {'best': best}, 'evals': evals}}
  with contextlib.closing(Checkpointer(folder, about, best=best)) as opened:
    yield opened


def _save(folder, values, first=1):
  """Saves steps from `first` on with these values of a metric."""
  with _opened(folder) as checkpoints:
    for step, value in enumerate(values, first):
      assert checkpoints.save(step, state(step), {NAME: value})
    assert checkpoints.wait() and not checkpoints.failures


def _steps(folder):
  return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())


@pytest.mark.slow
@pytest.mark.parametrize(
  'content',
  [
    '',
    *further('[]', '{"step": 2, "va'),
    json.dumps({NAME: 0.9}),  # of format 2, without a checksum
  ],
)
def test_a_step_with_damaged_metrics_is_kept(tmp_path, content, caplog):
  """Later saves and starts work; flipped bits are tested in test_manifest."""
  _save(tmp_path, [0.1, 0.9])
  (tmp_path / '2/metrics/metrics').write_text(content)
  _save(tmp_path, [0.2, 0.3, 0.25], first=3)
  assert _steps(tmp_path) == [2, 4, 5]
  assert f'{tmp_path / "2"} is kept' in caplog.text
  assert restore(tmp_path)[1] == 5
  assert not list(tmp_path.glob('*.bad'))


@pytest.mark.parametrize(
  'best, values, is_late',
  [
    (NAME, (0.1, 0.9, 0.3, 0.2, 0.4), True),
    (NAME, (math.nan, 0.5, 0.1, 0.1, 0.1), False),
    ('val/loss', (2.5, 0.5, 1.5, 1.0, 2.0), False),  # the lowest is the best
  ],
)
def test_the_best_step_is_kept_after_a_restart(tmp_path, best, values, is_late):
  """A metric may be written when an interrupted evaluation is repeated."""
  line = None
  for step, value in enumerate(values, start=1):
    for metrics in [{}] * is_late + [{best: value}]:
      with _opened(tmp_path, best) as checkpoints:
        checkpoints.save(step, state(step), metrics)
        checkpoints.wait()
        line = checkpoints.best_line()
  assert _steps(tmp_path) == [2, 4, 5]
  assert line and f'best {best} {values[1]} at step 2' in line


def test_a_failed_write_of_late_metrics_is_counted(tmp_path):
  """The step stays intact."""
  with _opened(tmp_path) as checkpoints:
    checkpoints.save(1, state(1), {})
    checkpoints.wait()
    (tmp_path / '1/metrics').write_text('in the way')
    assert checkpoints.save(1, state(1), {NAME: 0.5})
    assert checkpoints.failures == 1 and checkpoints.latest_step() == 1


@pytest.mark.slow
def test_retention_removes_only_steps_of_the_run(tmp_path):
  """Directories of the user and steps of other runs stay."""
  save(tmp_path / 'other', 3)
  folder = tmp_path / 'run'
  (folder / '7').mkdir(parents=True)
  (folder / '7/notes.txt').write_text('mine')
  save(folder, 11)
  (tmp_path / 'other/3').rename(folder / '3')
  save(folder, 12, 13, 14)
  assert _steps(folder) == [3, 7, 13, 14]
  assert (folder / '7/notes.txt').read_text() == 'mine'
  assert restore(folder)[1] == 14


def test_a_step_that_is_removed_while_it_is_read(tmp_path, monkeypatch):
  """A command takes the next newest step, or the message says what happened."""
  weights = {'model': {'name': 'vit'}, 'num_classes': 2, 'image_size': [4, 4]}
  save(tmp_path, 1, 2, about=ABOUT | weights)
  read, pauses = manifest.read, types.SimpleNamespace(sleep=lambda _: None)
  monkeypatch.setattr(agreement, 'time', pauses)

  def remove_and_read(step_dir):
    if step_dir.name == '2' and step_dir.exists():
      steps.remove(step_dir.parent, 2)
    return read(step_dir)

  with monkeypatch.context() as patch:
    patch.setattr(manifest, 'read', remove_and_read)
    source = pretrained.find(str(tmp_path))
  assert source.path == str(tmp_path / '1')
  steps.remove(epath.Path(tmp_path), 1)
  with pytest.raises(UserError, match='1 was removed while .*checkpoint.keep'):
    source.load({'head': jax.ShapeDtypeStruct((1,), 'float32')})
