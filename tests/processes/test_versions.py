"""Tests of the version and commit of the running code."""

import re
import subprocess

import pytest

from vit_jax.processes import versions


@pytest.fixture(autouse=True)
def _afresh():
  versions.commit.cache_clear()
  yield
  versions.commit.cache_clear()


def _git(folder, *arguments):
  names = '-c', 'user.name=nobody', '-c', 'user.email=nobody@nowhere'
  subprocess.run(['git', '-C', str(folder), *names, *arguments], check=True)


def test_commit_of_changed_trees_and_archives(tmp_path, monkeypatch):
  """'+' marks uncommitted changes; an archive contains its commit."""
  package = tmp_path / 'vit_jax'
  package.mkdir()
  monkeypatch.setattr(versions, '_ROOT', package)
  (package / 'commit.txt').write_text('$Format:%H$\n')
  (package / 'code.py').write_text('a = 1\n')
  _git(tmp_path, 'init', '-q')
  _git(tmp_path, 'add', '.')
  _git(tmp_path, 'commit', '-qm', 'one')
  head = versions.commit()
  assert re.fullmatch('[0-9a-f]{40}', head)
  (package / 'code.py').write_text('a = 2\n')
  versions.commit.cache_clear()
  assert versions.commit() == head + '+'
  (package / 'commit.txt').write_text('1234\n')
  versions.commit.cache_clear()
  assert versions.commit() == '1234'


def test_commit_and_versions_that_are_unknown(tmp_path, monkeypatch):
  """An installed package has no commit, and a missing one has no version."""
  monkeypatch.setattr(versions, '_ROOT', tmp_path)
  assert versions.commit() is None
  assert versions.package_version('no-such-package') is None
  assert versions.package_version('jax')
