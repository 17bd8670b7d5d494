"""Tests of the directory of checkpoints, and of other entries in it."""

import math

import pytest
from etils import epath

from tests.checkpoint.states import ABOUT, restore, save, state
from vit_jax import checkpoint
from vit_jax.checkpoint import Checkpointer, steps
from vit_jax.checkpoint import restore as restore_lib
from vit_jax.errors import UserError
from vit_jax.files import paths


def test_unknown_entries_are_left_alone(tmp_path):
  """They are not read, renamed or removed."""
  save(tmp_path, 1, 2)
  folders = {'²', '000120', '9', '.9.my-notes', 'x.orbax-checkpoint-tmp'}
  files = {'notes', '3.orbax-checkpoint-tmp.txt'}
  for name in folders:
    (tmp_path / name).mkdir()
    (tmp_path / name / 'mine').touch()
  for name in files:
    (tmp_path / name).touch()
  assert restore(tmp_path)[1] == 2
  assert checkpoint.step_directory(str(tmp_path)).name == '2'
  save(tmp_path, 3)
  left = {p.name for p in tmp_path.iterdir()}
  assert left == {*folders, *files, '2', '3', 'run_id.json'}


def test_directories_that_cannot_be_used_are_refused(tmp_path):
  """A file has the name, or Orbax would not find its parts there."""
  (tmp_path / 'checkpoints').write_text('')
  with pytest.raises(UserError, match='cannot be opened'):
    Checkpointer(tmp_path / 'checkpoints', ABOUT)
  with pytest.raises(UserError, match='contains no checkpoint'):
    checkpoint.step_directory(str(tmp_path))
  for name in ('a[1]', 'a*', 'a?b'):
    with pytest.raises(UserError, match='Give a path without'):
      Checkpointer(tmp_path / name / 'checkpoints', ABOUT)
    with pytest.raises(UserError, match='Give a path without'):
      checkpoint.export_params(tmp_path / name, state(1).params, ABOUT)
    assert not (tmp_path / name).exists()


def test_unfinished_steps_are_removed(tmp_path):
  """They are left by killed saves, removals and branches; links are not."""
  save(tmp_path / 'c', 1)
  (tmp_path / 'elsewhere').mkdir()
  with paths.new_folder(epath.Path(tmp_path / 'other/4')) as folder:
    copied = folder.name
  killed, removed = '2.orbax-checkpoint-tmp', '0.orbax-checkpoint-tmp-removed'
  for name in (killed, removed, copied):
    (tmp_path / 'c' / name / 'params').mkdir(parents=True)
  link = tmp_path / 'c/3.orbax-checkpoint-tmp'
  link.symlink_to(tmp_path / 'elsewhere')
  assert restore(tmp_path / 'c')[1] == 1
  left = {p.name for p in (tmp_path / 'c').iterdir()}
  assert left == {'1', 'run_id.json', link.name}


def test_a_failed_save_frees_its_space(tmp_path, monkeypatch):
  """What it wrote is removed at once, so that a full disk has space again."""

  def no_room(writer, barrier):
    writer.wait_until_finished()
    (tmp_path / '2').rename(tmp_path / '2.orbax-checkpoint-tmp')
    raise OSError('No space left on device')

  save(tmp_path, 1)
  checkpoints = Checkpointer(tmp_path, ABOUT)
  with monkeypatch.context() as patch:
    patch.setattr(checkpoints, '_finish', no_room)
    assert checkpoints.save(2, state(2), {}) and not checkpoints.wait()
  assert checkpoints.latest_step() == checkpoints.failures == 1
  assert not list(tmp_path.glob('*tmp*'))
  assert checkpoints.save(3, state(3), {}) and checkpoints.wait()
  checkpoints.close()


def test_a_save_does_not_overwrite_other_files(tmp_path, caplog):
  """The save fails and names the directory; an empty directory is replaced."""
  save(tmp_path, 1)
  (tmp_path / '2').mkdir()
  (tmp_path / '2/mine').touch()
  (tmp_path / '3').mkdir()
  checkpoints = Checkpointer(tmp_path, ABOUT)
  assert not checkpoints.save(2, state(2), {})
  assert 'SAVING STEP 2 FAILED (1 failure(s) so far)' in caplog.text
  assert f'{tmp_path / "2"} is not a checkpoint' in caplog.text
  assert not checkpoints.is_committed(2) and (tmp_path / '2/mine').exists()
  assert checkpoints.save(3, state(3), {}) and checkpoints.wait()
  assert checkpoints.is_committed(3) and checkpoints.latest_step() == 3
  checkpoints.close()


def test_step_directory_of_a_workdir(tmp_path, monkeypatch):
  """WORKDIR is its newest step, WORKDIR@best the best, and WORKDIR@8 step 8."""
  values = {4: 0.5, 8: 0.9, 12: 0.7}
  for step in values:
    for item in ('params', 'about'):
      (tmp_path / 'checkpoints' / str(step) / item).mkdir(parents=True)
  section: dict = {'best': 'val/accuracy'}
  evals = {'val': {'name': 'classification'}}

  def load_about(step_dir):
    return {'config': {'checkpoint': section, 'evals': evals}}

  def read_metrics(step_dir):
    value = values[int(step_dir.name)]
    return {'val/accuracy': value, 'val/loss': value}

  monkeypatch.setattr(restore_lib, 'load_about', load_about)
  monkeypatch.setattr(steps, 'read_metrics', read_metrics)

  def chosen(ending):
    return restore_lib.step_directory(f'{tmp_path}{ending}').name

  assert [chosen(e) for e in ('', '@8', '@best')] == ['12', '8', '8']
  section['best'] = 'val/loss'
  assert chosen('@best') == '4'  # the lowest
  values |= dict.fromkeys(values, math.nan)
  for ending in ('@9', '@bets', '@best'):
    with pytest.raises(UserError, match=f'{ending} .*4, 8, 12.*best'):
      chosen(ending)
  values |= dict.fromkeys(values, 1.0)
  section['best'] = None
  with pytest.raises(UserError, match='@best .*4, 8, 12'):
    chosen('@best')
