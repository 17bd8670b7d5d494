"""Tests of the directory of checkpoints, and of other entries in it."""

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
  before = ['²', '000120', '9', '.9.my-notes']
  before += ['notes', '3.orbax-checkpoint-tmp.txt']
  for name in before[:4]:
    (tmp_path / name).mkdir()
    (tmp_path / name / 'mine').touch()
  for name in before[4:]:
    (tmp_path / name).touch()
  assert restore(tmp_path)[1] == 2
  assert checkpoint.step_directory(str(tmp_path)).name == '2'
  save(tmp_path, 3)
  left = {p.name for p in tmp_path.iterdir()}
  assert left == {*before, '2', '3', 'run_id.json'}


def test_a_file_in_place_of_the_directory_is_refused(tmp_path):
  (tmp_path / 'checkpoints').write_text('')
  with pytest.raises(UserError, match='cannot be opened'):
    Checkpointer(tmp_path / 'checkpoints', ABOUT)
  with pytest.raises(UserError, match='contains no checkpoint'):
    checkpoint.step_directory(str(tmp_path))


def test_unfinished_steps_are_removed(tmp_path):
  """They are left by killed saves, removals and branches, and are no links."""
  save(tmp_path / 'c', 1)
  (tmp_path / 'elsewhere').mkdir()
  with paths.new_folder(epath.Path(tmp_path / 'other/4')) as folder:
    copied = folder.name
  for name in (
    '2.orbax-checkpoint-tmp',
    '0.orbax-checkpoint-tmp-removed',
    copied,
  ):
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


@pytest.mark.parametrize('name', ['a[1]', 'a*', 'a?b'])
def test_paths_with_glob_characters_are_refused(tmp_path, name):
  """Orbax would not find the parts of a checkpoint there."""
  with pytest.raises(UserError, match=r'lose parts|without \['):
    Checkpointer(tmp_path / name / 'checkpoints', ABOUT)
  assert not (tmp_path / name).exists()
  with pytest.raises(UserError, match=r'lose parts|without \['):
    checkpoint.export_params(tmp_path / name, state(1).params, ABOUT)


def test_step_directory_of_a_workdir(tmp_path, monkeypatch):
  """WORKDIR is its newest step, WORKDIR@best the best, and WORKDIR@8 step 8."""
  values = {4: 0.5, 8: 0.9, 12: 0.7}
  for step in values:
    for item in ('params', 'about'):
      (tmp_path / 'checkpoints' / str(step) / item).mkdir(parents=True)
  section: dict = {'best': 'val/accuracy'}
  evals = {'val': {'name': 'classification'}}
  monkeypatch.setattr(
    restore_lib,
    'load_about',
    lambda step_dir: {'config': {'checkpoint': section, 'evals': evals}},
  )
  monkeypatch.setattr(
    steps,
    'read_metrics',
    lambda step_dir: dict.fromkeys(
      ('val/accuracy', 'val/loss'), values[int(step_dir.name)]
    ),
  )

  def chosen(ending):
    return restore_lib.step_directory(f'{tmp_path}{ending}').name

  assert [chosen(e) for e in ('', '@8', '@best')] == ['12', '8', '8']
  section['best'] = 'val/loss'
  assert chosen('@best') == '4'  # the lowest
  for ending in ('@9', '@bets'):
    with pytest.raises(UserError, match=f'{ending} .*4, 8, 12'):
      chosen(ending)
  refused = pytest.raises(UserError, match='@best .*4, 8, 12.*checkpoint.best')
  values.update(dict.fromkeys(values, float('nan')))
  with refused:
    chosen('@best')
  values.update(dict.fromkeys(values, 1.0))
  section['best'] = None
  with refused:
    chosen('@best')
