"""Tests of which steps are kept."""

import contextlib
import json
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


def _save(folder, *pairs, best=NAME):
  """Saves steps with their values of a metric."""
  evals = {'val': {'name': 'classification'}}
  about = ABOUT | {'config': {'checkpoint': {'best': best}, 'evals': evals}}
  with contextlib.closing(
    Checkpointer(folder, about, best=best)
  ) as checkpoints:
    for step, value in pairs:
      assert checkpoints.save(step, state(step), {best: value})
    assert checkpoints.wait() and not checkpoints.failures
    return checkpoints.best_line()


def _steps(folder):
  return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())


@pytest.mark.slow
@pytest.mark.parametrize('content', ['', *further('[]', '{"step": 2, "va')])
def test_a_step_with_damaged_metrics_is_kept(tmp_path, content, caplog):
  """Later saves and starts work; flipped bits are tested in test_manifest."""
  _save(tmp_path, (1, 0.1), (2, 0.9))
  (tmp_path / '2/metrics/metrics').write_text(content)
  with caplog.at_level('WARNING', logger='vit_jax'):
    _save(tmp_path, (3, 0.2), (4, 0.3), (5, 0.25))
  assert _steps(tmp_path) == [2, 4, 5]
  assert f'{tmp_path / "2"} is kept' in caplog.text
  assert restore(tmp_path)[1] == 5
  assert not list(tmp_path.glob('*.bad'))


def test_metrics_of_format_2_count(tmp_path):
  """They have no checksum."""
  _save(tmp_path, (1, 0.1), (2, 0.9))
  (tmp_path / '2/metrics/metrics').write_text(json.dumps({NAME: 0.9}))
  _save(tmp_path, (3, 0.2), (4, 0.3), (5, 0.25))
  assert _steps(tmp_path) == [2, 4, 5]


def test_the_lowest_loss_is_kept(tmp_path):
  pairs = [(1, 2.5), (2, 0.5), (3, 1.5), (4, 1.0), (5, 2.0)]
  line = _save(tmp_path, *pairs, best='val/loss')
  assert _steps(tmp_path) == [2, 4, 5]
  assert line and 'best val/loss 0.5 at step 2' in line


def test_nan_is_not_the_best(tmp_path):
  """An evaluation that failed may give NaN."""
  _save(tmp_path, (1, float('nan')), (2, 0.5), (3, 0.1), (4, 0.1), (5, 0.1))
  assert _steps(tmp_path) == [2, 4, 5]


@pytest.mark.slow
def test_retention_removes_only_steps_of_the_run(tmp_path):
  """Directories of the user and steps of other runs stay."""
  save(tmp_path / 'other', 3)
  folder = tmp_path / 'run'
  folder.mkdir()
  (folder / '7').mkdir()
  (folder / '7/notes.txt').write_text('mine')
  (folder / 'backup.orbax-checkpoint-tmp').mkdir()
  save(folder, 11)
  (tmp_path / 'other/3').rename(folder / '3')
  save(folder, 12, 13, 14)
  assert _steps(folder) == [3, 7, 13, 14]
  assert (folder / '7/notes.txt').read_text() == 'mine'
  assert (folder / 'backup.orbax-checkpoint-tmp').is_dir()
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
