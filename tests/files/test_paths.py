"""Tests of local paths and addresses of objects."""

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
    ('/runs/a', '/runs/a'),
    ('~/a', f'{pathlib.Path.home()}/a'),
    ('./gs:/a', f'{os.getcwd()}/gs:/a'),
    ('gs://bucket', 'gs://bucket'),
    ('gs://bucket/a/b', 'gs://bucket/a/b'),
    (epath.Path('gs://bucket/a'), 'gs://bucket/a'),
  ],
)
def test_locate_makes_local_paths_absolute(given, located):
  """Addresses on gs:// stay as they are."""
  assert os.fspath(paths.locate(given)) == located
  assert paths.is_remote(paths.locate(given)) == located.startswith('gs')


@pytest.mark.parametrize(
  'given',
  ['s3://b/run', 'gs:/b/run', 'gs://', 'gs:///run', 'az://b', 'file:///tmp'],
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
  """A path that exists gets no suggestion."""
  for name in ('photos', 'paper.pdf'):
    (tmp_path / name).touch()
  hint = f' Did you mean {tmp_path}/photos?'
  assert paths.nearest(tmp_path / 'photo') == hint
  assert paths.nearest(tmp_path / 'photos') == ''
  assert paths.nearest(tmp_path / 'elsewhere') == ''


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
