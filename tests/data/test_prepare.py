"""Tests of the command `prepare`."""

import errno
import os

import pytest

from tests import archives, cli
from vit_jax.errors import UserError
from vit_jax.prepare import __main__ as prepare
from vit_jax.prepare import imagenet21k, shards


@pytest.fixture
def source(tmp_path):
  return archives.write(
    tmp_path / 'fall11_whole.tar', archives.synsets(6, count=8)
  )


@pytest.mark.slow
def test_the_command_that_missing_data_suggest(tmp_path, source):
  """A second preparation finds the first one."""
  absent = ('--config=configs/l16_i21k.py', f'--workdir={tmp_path}/run')
  data = f'--config.source.data_dir={tmp_path}/tfds'
  _, err = cli.run(cli.command('train', *absent, data), code=2)
  assert 'vit_jax.prepare imagenet21k --data_dir=' in err

  command = cli.command(
    'prepare',
    'imagenet21k',
    f'--data_dir={tmp_path}/tfds',
    f'--source={source}',
  )
  _, err = cli.run(command)
  assert '48 images in 6 classes' in err
  _, err = cli.run(command[:-1])
  assert 'imagenet21k is already prepared' in err


@pytest.mark.slow
def test_without_a_name_prepare_lists_datasets():
  """The list says what a person has to do; the exit code is 0."""
  out, _ = cli.run(cli.command('prepare'))
  assert out == prepare.LISTING.read_text()
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
    (['imagenet21k', '--source=/nowhere.tar'], 'No such file'),
    (['imagenet21k', '--source=gs://b/x.tar'], 'cp -r gs://b/x.tar DIR/'),
    (['folder', '--source=x'], '--source=x has no effect for folder'),
    (['digits', '--source=x'], '--source=x has no effect'),
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
