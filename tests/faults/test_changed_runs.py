"""Tests of workdirs whose data, settings or files changed between starts."""

import json
import shutil

import cv2
import numpy as np
import pytest

from tests import cli
from tests.faults.counts import further, injected

RUN = {
  **{k: v for k, v in cli.SMALL_L16.items() if not k.startswith('source')},
  'source.name': 'folder',
  'train.split': 'train',
  'train.num_examples': 24,
  'evals.val.split': 'val',
  'num_classes': 3,
  'batch_size': 8,
  'model.depth': 1,
  'total': '4 steps',
  'schedule.warmup': '1 steps',
  'evals.val.every': '4 steps',
  'checkpoint.every': '2 steps',
}


def _write_pets(root):
  """Writes eight training and two evaluation images of each class."""
  rng = np.random.default_rng(0)
  for split, count in (('train', 8), ('val', 2)):
    for name in ('cat', 'dog', 'eel'):
      folder = root / split / name
      folder.mkdir(parents=True)
      for number in range(count):
        pixels = rng.integers(0, 256, (32, 32, 3), np.uint8)
        cv2.imwrite(str(folder / f'{number}.png'), pixels)


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """Returns a workdir after 4 steps on photographs, and the photographs."""
  folder = tmp_path_factory.mktemp('other')
  _write_pets(folder / 'pets')
  cli.run(_train(folder / 'run', folder / 'pets'))
  return folder


def _train(workdir, pets, *more):
  flags = RUN | {'source.path': pets}
  return [
    *cli.command('train', *cli.flags('configs/l16_i21k.py', workdir, flags)),
    *more,
  ]


def _copy(trained, folder):
  """Returns copies; the run was killed just before it was finished."""
  shutil.copytree(trained / 'run', folder / 'run')
  cli.remove_finished_event(folder / 'run')
  shutil.copytree(trained / 'pets', folder / 'pets')
  return folder / 'run', folder / 'pets'


def _rename_class(pets):
  for split in ('train', 'val'):
    (pets / split / 'cat').rename(pets / split / 'zcat')


def _rename_file(pets):
  (pets / 'train/dog/0.png').rename(pets / 'train/dog/9.png')


@pytest.mark.slow
@pytest.mark.parametrize(
  'change, message',
  [
    (_rename_class, "1 only before ('cat'), 1 only now ('zcat')"),
    *further([_rename_file, 'data: listing:']),
  ],
)
def test_changed_data_are_refused(tmp_path, trained, change, message):
  """Labels or positions would have another meaning."""
  workdir, pets = _copy(trained, tmp_path)
  change(pets)
  injected('data that changed between two starts')
  again = _train(workdir, pets, '--config.source.path=' + str(pets))
  _, err = cli.run(again, code=2)
  assert message in err and 'Traceback' not in err
  assert cli.records(workdir) == cli.records(trained / 'run')


@pytest.mark.slow
@pytest.mark.parametrize('item', ['manifest', *further('about')])
def test_the_restored_step_is_compared(tmp_path, trained, item):
  """Falling back to an older step does not skip the comparison of the data.

  The newest step cannot be compared, because the item that describes it is
  damaged. The older step that is restored has the correct description.
  """
  workdir, pets = _copy(trained, tmp_path)
  (workdir / 'config.json').unlink()  # it would be compared as well
  (workdir / f'checkpoints/4/{item}/metadata').write_text('{"damaged": 1}')
  _rename_class(pets)
  injected('a damaged description and other data')
  _, err = cli.run(_train(workdir, pets), code=2)
  assert "1 only before ('cat'), 1 only now ('zcat')" in err
  assert 'step 2' in err and 'Traceback' not in err
  assert not (
    workdir / 'config.json'
  ).exists()  # the refused run does not write it


@pytest.mark.slow
@pytest.mark.long
def test_moved_data_are_accepted(tmp_path, trained):
  """A folder may be moved or copied; config.json may be lost."""
  workdir, pets = _copy(trained, tmp_path)
  (workdir / 'config.json').write_bytes(b'')
  injected('an empty config.json')
  _, err = cli.run(_train(workdir, pets))
  assert 'resuming at step 4' in err and 'config.json is damaged' in err
  assert json.loads((workdir / 'config.json').read_text())['seed'] == 0
  (workdir / 'config.json').unlink()
  _, err = cli.run(_train(workdir, pets, '--config.seed=1'), code=2)
  assert 'seed: 0 before, 1 now' in err and 'Traceback' not in err


@pytest.mark.slow
@pytest.mark.long
def test_changed_settings_of_jax_are_refused(tmp_path, trained, monkeypatch):
  """Another generator would give other dropout and other initial values."""
  workdir, pets = _copy(trained, tmp_path)
  monkeypatch.setenv('JAX_THREEFRY_PARTITIONABLE', '0')
  injected('another setting of JAX')
  _, err = cli.run(_train(workdir, pets), code=2)
  assert 'jax_threefry_partitionable: True before, False now' in err
  _, err = cli.run(_train(workdir, pets, '--allow_config_change'))
  assert 'resumed with changes' in err
  assert len(cli.events(workdir, 'config_change')) == 1
  cli.remove_finished_event(workdir)
  # No checkpoint was saved, so the change must be allowed again.
  _, err = cli.run(_train(workdir, pets), code=2)
  assert '--allow_config_change' in err


@pytest.mark.slow
@pytest.mark.long
def test_a_removed_workdir_ends_the_run(tmp_path):
  """The next line raises one message, and the workdir is not created again."""
  workdir = tmp_path / 'run'
  flags = cli.ENDLESS | {'checkpoint.best': 'None'}
  process = cli.start(
    cli.command('train', *cli.flags('configs/l16_i21k.py', workdir, flags))
  )
  cli.wait_for_step(workdir, 5, [process])
  injected('a workdir that is removed')
  workdir.rename(tmp_path / 'gone')
  _, err = cli.finish(process, code=2)
  assert 'the directory was moved' in err and 'Traceback' not in err
  assert err.count('error:') == 1
  assert not (workdir / 'events.jsonl').exists()
