"""Tests of the command `prepare`, and of preparing TFDS datasets by name."""

import errno
import logging
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
from etils import epath

from tests import archives, cli
from vit_jax.data.sources import digits, tfds
from vit_jax.errors import UserError
from vit_jax.prepare import __main__ as prepare
from vit_jax.prepare import imagenet21k, named, shards


@pytest.fixture
def source(tmp_path):
  return archives.write(
    tmp_path / 'fall11_whole.tar', archives.synsets(6, count=8)
  )


@pytest.mark.slow
def test_the_command_that_missing_data_suggest(tmp_path, source):
  """A second preparation finds the first one."""
  absent = ('--config=configs/l16_i21k.py', f'--workdir={tmp_path}/run')
  data_dir = f'{tmp_path}/tfds'
  data = f'--config.source.data_dir={data_dir}'
  _, err = cli.run(cli.command('train', *absent, data), code=2)
  assert 'vit_jax.prepare imagenet21k --data_dir=' in err
  command = cli.command('prepare', 'imagenet21k', f'--data_dir={data_dir}')
  _, err = cli.run([*command, f'--source={source}'])
  assert '48 images in 6 classes' in err
  _, err = cli.run(command)
  assert 'imagenet21k is already prepared' in err


@pytest.mark.slow
def test_without_a_name_prepare_lists_datasets():
  """The list says what a person has to do; the exit code is 0."""
  out, _ = cli.run(cli.command('prepare'))
  for name in ('imagenet21k', 'imagenet2012_real', 'clevr', 'digits'):
    assert f'  {name} ' in out
  assert max(map(len, out.splitlines())) <= 80


def test_an_incomplete_dataset_directory_is_not_overwritten(tmp_path, source):
  target = tmp_path / 'tfds/imagenet21k/1.0.0'
  target.mkdir(parents=True)
  (target / 'precious').write_text('')
  arguments = dict(source=str(source), data_dir=str(tmp_path / 'tfds'))
  with pytest.raises(UserError, match='exists and is not a complete'):
    prepare.run('imagenet21k', workers=1, **arguments)
  (target / 'precious').rename(tmp_path / 'precious')
  prepare.run('imagenet21k', workers=1, **arguments)
  assert shards.is_prepared(tmp_path / 'tfds', 'imagenet21k')


@pytest.mark.parametrize(
  'arguments, message',
  [
    (['imagenet21k'], '--source is missing.*fall11_whole.tar'),
    (['imagenet21k', '--source=gs://b/x.tar'], 'cp -r gs://b/x.tar DIR/'),
    (['folder', '--source=x'], '--source=x has no effect for folder'),
    (['digits', '--workers=-1'], '--workers is -1'),
    (['digits', '--data_dir=gs://bucket/x'], '--data_dir .*gs://bucket/x'),
    (['digits', '--data_dir=/dev/null/x'], 'cannot be written'),
  ],
)
def test_messages_of_wrong_arguments(arguments, message, tmp_path):
  """Each is a UserError with the given value."""
  flags = dict(data_dir=str(tmp_path), workers=1)
  for argument in arguments[1:]:
    key, _, value = argument.removeprefix('--').partition('=')
    flags[key] = value
  flags['workers'] = int(flags['workers'])
  with pytest.raises(UserError, match=message):
    prepare.run(arguments[0], **flags)


def test_a_full_disk_is_reported(tmp_path, source, monkeypatch):
  """It shows in the shard writer, or as an error of a file."""
  os.symlink('/dev/full', tmp_path / 'shard.tmp')
  with pytest.raises(UserError, match='No space left'):
    shards.write_shard(tmp_path / 'shard', lambda: iter([bytes(10**6)] * 9))

  def full(*_, **__):
    raise OSError(errno.ENOSPC, 'No space left on device')

  monkeypatch.setattr(imagenet21k, 'prepare', full)
  with pytest.raises(UserError, match='is full.*--data_dir'):
    prepare.run('imagenet21k', source=str(source), data_dir=str(tmp_path))


# Datasets of TFDS, by name


def test_prepared_datasets_are_left_as_they_are(tmp_path, caplog, monkeypatch):
  """Those of TFDS, and those of the user's own builders."""
  monkeypatch.setattr(logging.getLogger('vit_jax'), 'propagate', True)
  caplog.set_level(logging.INFO, 'vit_jax')
  digits.prepare(epath.Path(tmp_path / 'in'))
  for name in ('cifar10', 'mine'):
    shutil.copytree(tmp_path / 'in/digits', tmp_path / 'tfds' / name)
    before = archives.tree(tmp_path / 'tfds')
    named.prepare(name, tmp_path / 'tfds')
    assert archives.tree(tmp_path / 'tfds') == before
    assert f'{name} is already prepared' in caplog.text
  with pytest.raises(UserError, match='min.* is not a known data set'):
    named.prepare('min', tmp_path / 'tfds')


@pytest.mark.slow
def test_imagenet2012_needs_downloaded_archives(tmp_path):
  """Missing archives are named; with them the dataset is prepared."""
  manual = tmp_path / 'downloads/manual'
  message = 'ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar'
  with pytest.raises(UserError, match=f'{manual}: {message}.*image-net'):
    named.prepare('imagenet2012', tmp_path)
  assert not manual.exists()
  manual.mkdir(parents=True)
  train = archives.synsets(0) | {
    wnid: archives.synset_files(wnid, 3, seed)
    for seed, wnid in enumerate(['n01440764', 'n01443537'])
  }
  archives.write(manual / 'ILSVRC2012_img_train.tar', train)
  with pytest.raises(UserError, match='manual: ILSVRC2012_img_val.tar'):
    named.prepare('imagenet2012', tmp_path)
  images = {
    f'ILSVRC2012_val_{i:08d}.JPEG': archives.photograph(i) for i in (1, 2)
  }
  (manual / 'ILSVRC2012_img_val.tar').write_bytes(archives.tar(images))
  named.prepare('imagenet2012', tmp_path)
  for split, content in (
    ('train', [image for files in train.values() for image in files.values()]),
    ('validation', list(images.values())),
  ):
    source = tfds.Source(split, dataset='imagenet2012', data_dir=str(tmp_path))
    found = [source[i]['image'] for i in range(len(source))]
    assert sorted(found) == sorted(content) and source.num_classes == 1000


@pytest.mark.parametrize(
  'name, message',
  [
    ('imagnet21k', "did you mean 'imagenet21k'"),
    ('folder', '(?!.*mean .folder).*configs/folder.py:path=DIR'),
    ('../cifar10', 'is not a known data set'),
    ('cifar10:9.9.9', 'only: 3.0.2'),
    ('sun397/small', 'has the configs tfds, standard-part1'),
    ('imagenet2012_real', 'manual: ILSVRC2012_img_val.tar'),
    ('resisc45', 'NWPU-RESISC45.*1drv.ms'),
    ('diabetic_retinopathy_detection/btgraham-300', 'kaggle.com'),
    ('imagenet_lt', 'manual: the files that TFDS requires'),
  ],
)
def test_messages_of_wrong_names(tmp_path, name, message):
  """Unknown names, and datasets that a person has to download."""
  with pytest.raises(UserError, match=message):
    named.prepare(name, tmp_path)
  assert not os.listdir(tmp_path)


# Hides TensorFlow.
WITHOUT_TENSORFLOW = """
  import importlib.machinery, pathlib, sys
  finder = importlib.machinery.PathFinder
  find = finder.find_spec
  finder.find_spec = classmethod(
    lambda cls, name, *rest: find(name, *rest)
    if name.split('.')[0] != 'tensorflow' else None
  )
  from vit_jax.prepare import __main__ as prepare
  from vit_jax.errors import UserError
  source, target = sys.argv[1:]
  prepare.run('imagenet21k', source=source, data_dir=target, workers=1)
  prepare.run('imagenet21k', source=source, data_dir=target, workers=1)
  for name in ('cifar10', 'digits'):
    try:
      prepare.run(name, data_dir=target)
    except UserError as error:
      print(error)
"""


@pytest.mark.slow
def test_own_builders_do_not_need_tensorflow(tmp_path):
  """TFDS's builders say what they need."""
  source = archives.write(tmp_path / 'fall11_whole.tar', archives.synsets(2))
  program = textwrap.dedent(WITHOUT_TENSORFLOW)
  done = subprocess.run(
    [sys.executable, '-c', program, source, tmp_path / 'tfds'],
    cwd=cli.ROOT,
    env=cli.environment(),
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert done.stdout.count("pip install 'vit_jax[tensorflow]'") == 1
  assert (tmp_path / 'tfds/digits/1.0.0/dataset_info.json').exists()
