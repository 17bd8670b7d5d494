"""Tests of a preparation that is killed and continued."""

import os
import subprocess
import sys
import textwrap
import time

import pytest

from tests import archives, cli
from vit_jax.errors import UserError
from vit_jax.prepare import imagenet21k

SMALL = dict(
  part_bytes=1, shard_bytes=4_000
)  # one part per synset, several shards
VERSION = 'imagenet21k/1.0.0'


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
  """Returns (TFDS directory, contents) of an uninterrupted preparation."""
  folder = tmp_path_factory.mktemp('whole')
  contents, _ = archives.with_trouble()
  source = archives.write(folder / 'fall11_whole.tar', contents)
  imagenet21k.prepare(source, folder / 'tfds', **SMALL)
  return folder, contents


# Prepares in a child that is killed before its fourth file appears, repeatedly
# until one finishes; prints the number of attempts.
KILLED = """
  import os, pathlib, signal, sys
  from vit_jax.prepare import imagenet21k, shards

  def killed_after(replace, number):
    count = 0
    def counted(*paths):
      nonlocal count
      count += 1
      if count > number:
        os.kill(os.getpid(), signal.SIGKILL)
      replace(*paths)
    return counted

  tries, status = 0, 1
  while status:
    tries += 1
    child = os.fork()
    if not child:
      os.replace = killed_after(os.replace, 3)
      os.rename = killed_after(os.rename, tries % 2)
      source, target = map(pathlib.Path, sys.argv[1:])
      imagenet21k.prepare(source, target, part_bytes=1, shard_bytes=4_000)
      os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
  print(tries)
"""


@pytest.mark.parametrize('kind', ['fall11_whole.tar', 'winter21_whole.tar.gz'])
def test_a_preparation_killed_repeatedly_writes_the_same_files(
  tmp_path, prepared, kind
):
  """Each attempt continues where the last was killed."""
  folder, contents = prepared
  source = archives.write(tmp_path / kind, contents)
  done = subprocess.run(
    [sys.executable, '-c', textwrap.dedent(KILLED), source, tmp_path / 'tfds'],
    cwd=cli.ROOT,
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  ours, expected = tmp_path / 'tfds' / VERSION, folder / 'tfds' / VERSION
  assert archives.tree(ours) == archives.tree(expected)
  # Two files per part, two notes, two files per shard; three files per attempt.
  shards = sum('array_record' in name for name in archives.tree(ours))
  files = 2 * len(contents) + 2 + 2 * shards
  assert files / 3 <= int(done.stdout) <= files / 3 + shards


def test_workers_end_with_a_killed_parent(tmp_path):
  """Otherwise they would write files during the next attempt."""
  program = f"""
    import functools
    from vit_jax.prepare import shards
    from tests.data.test_prepare_resume import wait_here
    if __name__ == '__main__':
      task = functools.partial(wait_here, {str(tmp_path)!r})
      list(shards.unordered([task, task], 2))
  """
  script = tmp_path / 'main.py'
  script.write_text(textwrap.dedent(program))
  parent = subprocess.Popen(
    [sys.executable, script],
    cwd=cli.ROOT,
    env=cli.environment() | {'PYTHONPATH': str(cli.ROOT)},
  )
  wait_until(lambda: len(list(tmp_path.glob('*.pid'))) == 2)
  parent.kill()
  parent.wait()
  workers = [int(path.stem) for path in tmp_path.glob('*.pid')]
  wait_until(lambda: not any(map(is_alive, workers)))


def wait_here(folder):
  """Runs a task that never ends."""
  open(f'{folder}/{os.getpid()}.pid', 'w').close()
  time.sleep(600)


def wait_until(condition, timeout_s=60):
  end = time.monotonic() + timeout_s
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.05)


def is_alive(pid):
  """Returns whether a process runs; zombies do not count."""
  try:
    with open(f'/proc/{pid}/stat') as file:
      return file.read().rpartition(')')[2].split()[0] != 'Z'
  except FileNotFoundError:
    return False


def test_work_of_another_archive_is_not_continued(tmp_path, prepared):
  folder, contents = prepared
  other = {wnid: dict(list(f.items())[:5]) for wnid, f in contents.items()}
  first = archives.write(tmp_path / 'fall11_whole.tar', other)
  with pytest.raises(UserError, match='lacks 7 of the 8 synsets'):
    lists = tmp_path / 'list.txt'
    lists.write_text(f'{next(iter(contents))}\n')
    imagenet21k.prepare(first, tmp_path / 'tfds', class_list=lists, **SMALL)
  assert (tmp_path / 'tfds/.prepare/imagenet21k/parts/00007.json').exists()
  second = archives.write(tmp_path / 'fall11_whole.tar', contents)
  imagenet21k.prepare(second, tmp_path / 'tfds', **SMALL)
  ours, expected = tmp_path / 'tfds' / VERSION, folder / 'tfds' / VERSION
  assert archives.tree(ours) == archives.tree(expected)
