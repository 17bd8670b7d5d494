"""Tests of workdirs whose data, settings or files changed between starts."""

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
  return cli.command(
    'train', *cli.flags('configs/l16_i21k.py', workdir, flags), *more
  )


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
def test_the_restored_step_is_compared(tmp_path, trained):
  """Falling back to an older step does not skip the comparison of the data.

  The newest step cannot be compared, because the item that describes it is
  damaged. The older step that is restored has the correct description.
  """
  workdir, pets = _copy(trained, tmp_path)
  (workdir / 'config.json').unlink()  # it would be compared as well
  (workdir / 'checkpoints/4/manifest/metadata').write_text('{"damaged": 1}')
  _rename_class(pets)
  injected('a damaged description and other data')
  _, err = cli.run(_train(workdir, pets), code=2)
  assert "1 only before ('cat'), 1 only now ('zcat')" in err
  assert 'step 2' in err and 'Traceback' not in err
  assert not (workdir / 'config.json').exists()  # nothing was trained
