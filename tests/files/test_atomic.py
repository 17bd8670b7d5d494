"""Tests of atomic writes of small files."""

import os

import pytest
from etils import epath

from vit_jax.errors import UserError
from vit_jax.files import paths


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


def test_write_syncs_before_it_renames(tmp_path, monkeypatch):
  """After renaming, the directory is synced."""
  done, sync, replace = [], os.fsync, os.replace

  def fsync(handle):
    kind = 'folder' if os.path.isdir(f'/proc/self/fd/{handle}') else 'file'
    done.append(f'sync {kind}')
    sync(handle)

  def rename(*names):
    done.append('rename')
    replace(*names)

  monkeypatch.setattr(os, 'fsync', fsync)
  monkeypatch.setattr(os, 'replace', rename)
  path = epath.Path(tmp_path) / 'run.json'
  paths.write(path, b'content')
  assert done == ['sync file', 'rename', 'sync folder']
  assert path.read_bytes() == b'content'
  assert path.stat().mode & 0o777 == 0o644


def test_save_creates_the_directory(tmp_path):
  """If a file is in the way, the message contains its path."""
  path = epath.Path(tmp_path) / 'a' / 'b' / 'table.csv'
  paths.save(path, 'x')
  assert path.read_text() == 'x'
  with pytest.raises(UserError, match='table.csv.*cannot be written'):
    paths.save(path / 'c.csv', 'x')
