"""Tests of local paths and addresses of objects, and of atomic writes."""

import os
import pathlib

import pytest
from etils import epath

from vit_jax.errors import StorageError, UserError
from vit_jax.files import paths


@pytest.mark.parametrize(
  'given, located',
  [
    ('runs/a', f'{os.getcwd()}/runs/a'),
    ('~/a', f'{pathlib.Path.home()}/a'),
    ('./gs:/a', f'{os.getcwd()}/gs:/a'),
    ('gs://bucket', 'gs://bucket'),
    (epath.Path('gs://bucket/a'), 'gs://bucket/a'),
  ],
)
def test_locate_makes_local_paths_absolute(given, located):
  """Addresses on gs:// stay as they are."""
  assert os.fspath(paths.locate(given)) == located
  assert paths.is_remote(paths.locate(given)) == located.startswith('gs')


@pytest.mark.parametrize(
  'given', ['s3://b/run', 'gs:/b/run', 'gs://', 'gs:///run', 'file:///tmp']
)
def test_other_schemes_are_refused(given):
  """They would otherwise be local directories with names such as 's3:'."""
  with pytest.raises(UserError, match='gs://BUCKET/PATH'):
    paths.locate(given)


def test_only_paths_py_makes_paths_absolute():
  """`epath.Path('gs://b').absolute()` would be a local path."""
  package = pathlib.Path(paths.__file__).parents[1]
  for path in package.rglob('*.py'):
    if path.name == 'paths.py' or path.parent.name == 'prepare':
      continue  # data sets are prepared on local disks only
    text = path.read_text()
    assert '.absolute()' not in text and '.resolve()' not in text, path


def test_check_writable(tmp_path, monkeypatch):
  """A file is written, read back and deleted."""
  folder = epath.Path(tmp_path)
  paths.check_writable(folder / 'new')
  assert list((tmp_path / 'new').iterdir()) == []
  (tmp_path / 'file').write_text('')
  with pytest.raises(UserError, match='cannot be written'):
    paths.check_writable(folder / 'file' / 'below')
  monkeypatch.setattr(type(folder), 'read_text', lambda self: 'something else')
  with pytest.raises(StorageError, match='the content differs'):
    paths.check_writable(folder / 'new')
  assert list((tmp_path / 'new').iterdir()) == []


def test_nearest_suggests_a_similar_existing_path(tmp_path):
  """A path that exists, or is below a file, gets no suggestion."""
  for name in ('photos', 'paper.pdf'):
    (tmp_path / name).touch()
  hint = f' Did you mean {tmp_path}/photos?'
  for name, expected in (('photo', hint), ('photos', ''), ('elsewhere', '')):
    assert paths.nearest(tmp_path / name) == expected
  assert paths.nearest(tmp_path / 'paper.pdf' / 'photo') == ''


@pytest.mark.parametrize(
  'call',
  [
    lambda: 'a\udcff.png'.encode(),
    lambda: 'a\udcff.png'.encode('utf-32'),
    lambda: b'\xff\xdc\0\0'.decode('utf-32-le'),
    lambda: open('/tmp/a\0b'),
  ],
)
def test_names_that_no_file_may_have_are_user_errors(call):
  """Each is a single message, wherever in a command it is raised."""
  with pytest.raises(ValueError) as raised:
    call()
  assert isinstance(paths.name_error(raised.value), UserError)
  assert paths.name_error(ValueError('another')) is None


# Atomic writes


@pytest.mark.parametrize('broken', ['fsync', 'replace'])
def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch, broken):
  """No temporary file remains."""
  path = epath.Path(tmp_path) / 'config.json'
  paths.write(path, 'before')

  def fail(*_):
    assert path.read_text() == 'before'
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(os, broken, fail)
  with pytest.raises(OSError, match='No space'):
    paths.write(path, 'after')
  assert [p.name for p in tmp_path.iterdir()] == ['config.json']
  assert path.read_text() == 'before'


def test_save_syncs_before_it_renames(tmp_path, monkeypatch):
  """The directory is created, and synced after renaming.

  If a file is in the way, the message contains its path.
  """
  done, sync, replace = [], os.fsync, os.replace

  def fsync(handle):
    is_folder = os.path.isdir(f'/proc/self/fd/{handle}')
    done.append('sync folder' if is_folder else 'sync file')
    sync(handle)

  def rename(*names):
    done.append('rename')
    replace(*names)

  monkeypatch.setattr(os, 'fsync', fsync)
  monkeypatch.setattr(os, 'replace', rename)
  path = epath.Path(tmp_path) / 'a' / 'b' / 'table.csv'
  paths.save(path, b'content')
  assert done == ['sync file', 'rename', 'sync folder']
  assert path.read_bytes() == b'content'
  assert path.stat().mode & 0o777 == 0o644
  with pytest.raises(UserError, match='table.csv.*cannot be written'):
    paths.save(path / 'c.csv', 'x')
