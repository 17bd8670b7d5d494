"""Tests of preparing ImageNet-21k from small archives of its layout."""

import collections
import gzip
import itertools
import os
import subprocess
import sys
import tarfile
import textwrap
import time

import pytest

from tests import archives, cli
from tests.faults.counts import injected, slow
from vit_jax.data.images.decode import decode
from vit_jax.data.sources import tfds
from vit_jax.errors import UserError
from vit_jax.prepare import imagenet21k, shards

SMALL = dict(shard_bytes=4_000)  # several shards
VERSION = 'imagenet21k/1.0.0'
CONTENTS = archives.synsets(3, count=4)
LAYOUTS = ['fall11_whole.tar', 'winter21_whole.tar']


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
  """Returns TFDS directory, contents and left-out names of a dataset."""
  folder = tmp_path_factory.mktemp('imagenet21k')
  contents, bad = archives.with_trouble()
  source = archives.write(folder / 'fall11_whole.tar', contents)
  imagenet21k.prepare(source, folder / 'tfds', **SMALL)
  return folder / 'tfds', contents, bad


def examples(data_dir):
  """Returns the source and its examples."""
  source = tfds.Source('train', dataset='imagenet21k', data_dir=str(data_dir))
  return source, [source[i] for i in range(len(source))]


def assert_equal(data_dir, prepared):
  """Checks that two preparations have the same files; returns their names."""
  ours, expected = (archives.tree(x / VERSION) for x in (data_dir, prepared))
  assert ours == expected
  return ours


def pictures_of(data):
  return [
    item if isinstance(item, imagenet21k.Skipped) else (item.name, item.data)
    for item in imagenet21k.pictures('n00000001', data)
  ]


def test_unsafe_names_and_links_are_skipped():
  """They are listed and not used; a link is not followed."""
  good, link = archives.photograph(1), tarfile.TarInfo('a')
  link.type, link.linkname = tarfile.SYMTYPE, '/etc/passwd'
  files = {'a': link, './good.JPEG': good}
  injected('a link in an archive')
  for name in ('../../evil', '/etc/evil', 'a/../../evil', 'a//evil'):
    files = {name: good, **files}
    injected('a name that leaves its archive')
  *skipped, last = pictures_of(archives.tar(files))
  assert all(isinstance(item, imagenet21k.Skipped) for item in skipped)
  assert len(skipped) == 5 and 'link' in skipped[-1].reason
  assert last == ('good.JPEG', good)


def test_a_damaged_synset_gives_the_images_before_the_damage():
  """The damage is listed."""
  files = archives.synset_files('n00000001', 3, 0)
  data = archives.tar(files)
  third = [i for i in range(0, len(data), 512) if data[i : i + 3] == b'n00'][2]
  overwritten = data[:third] + b'x' * 512 + data[third + 512 :]
  for damaged, count in ((data[: third + 600], 2), (overwritten, 2), (b'', 0)):
    found = pictures_of(damaged)
    assert [item[0] for item in found] == [*[*files][:count], 'n00000001.tar']
    assert found[-1].reason.startswith('damaged after')
  assert pictures_of(b'\0' * 10240) == []


def test_incomplete_and_other_archives_are_refused(tmp_path):
  """They are not used as a smaller dataset."""
  source = archives.write(tmp_path / LAYOUTS[0], CONTENTS)
  second, data = imagenet21k.synsets(source)[1], source.read_bytes()
  source.unlink()
  header = data[: second.offset - 512] + b'x' * 512 + data[second.offset :]
  other = archives.tar({'cat/1.jpg': b'x', 'notes.txt': b'y'})
  for name, content, message in (
    # Python's tarfile would end at a damaged header silently.
    ('header.tar', header, r'byte [\d,]+ is not'),
    ('cut.tar', data[: len(data) * 2 // 3], 'not a complete archive'),
    ('winter21_whole.tar.gz', gzip.compress(data), r'\(tar -xf\)'),
    ('text.tar', b'no archive' * 100, 'not a complete archive'),
    ('other.tar', other, 'contains no nXXXXXXXX.tar'),
    ('nowhere', None, 'No such file'),
    ('', None, 'contains no nXXXXXXXX.tar'),
  ):
    if content:
      (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
      imagenet21k.synsets(tmp_path / name)


def test_every_image_occurs_once_with_its_synset(prepared):
  """Bytes and label of each image are compared; the others are listed."""
  data_dir, contents, bad = prepared
  source, found = examples(data_dir)
  assert source.class_names == sorted(contents)
  expected = {
    content: sorted(contents).index(wnid)
    for wnid, files in contents.items()
    for name, content in files.items()
    if f'{wnid}/{name}' not in bad
  }
  assert len(found) == len(expected) == 8 * 12 + 3
  assert {item['image']: item['label'] for item in found} == expected
  assert all(decode(item['image']).shape[2] == 3 for item in found)
  lines = (data_dir / VERSION / 'undecodable.txt').read_text().splitlines()
  names, reasons = zip(*(line.split('\t') for line in lines), strict=True)
  assert sorted(names) == sorted(name.replace('\n', '\\n') for name in bad)
  assert all(reasons)
  written = [path.name for path in data_dir.parent.rglob('*')]
  assert not [name for name in written if 'evil' in name or 'JPEG' in name]
  assert not (data_dir / '.prepare/imagenet21k').exists()


def test_images_are_shuffled_over_classes(prepared):
  """Neighbours share a class about as often as by chance, in every part."""
  _, found = examples(prepared[0])
  labels = [item['label'] for item in found]
  same = sum(a == b for a, b in itertools.pairwise(labels))
  assert same < 30  # 12 by chance, 91 in the archive's order
  first = collections.Counter(labels[:32])
  assert len(first) >= 6 and max(first.values()) <= 11  # a random sample


@pytest.mark.parametrize(
  'kind, workers',
  [('directory', 1), *slow(['winter21_whole.tar', 2])],
)
def test_files_do_not_depend_on_the_settings(tmp_path, prepared, kind, workers):
  """Layout and workers do not change the result."""
  data_dir, contents, _ = prepared
  source = tmp_path / kind
  if kind == 'directory':
    source.mkdir()
    (source / 'ReadMe.txt').write_text('not a synset')
    for wnid, files in contents.items():
      (source / f'{wnid}.tar').write_bytes(archives.tar(files))
  else:
    archives.write(source, contents)
  imagenet21k.prepare(source, tmp_path / 'tfds', workers=workers, **SMALL)
  names = assert_equal(tmp_path / 'tfds', data_dir)
  assert sum('array_record' in name for name in names) > 3


def test_a_class_list_determines_the_labels(tmp_path):
  """It may contain synsets that the archive lacks."""
  names = ['n00000005', *reversed(sorted(CONTENTS)), 'n00000007']
  lists = tmp_path / 'ids.txt'
  lists.write_text(''.join(f'{name}, a word\n' for name in names))
  source = archives.write(tmp_path / 'fall11_whole.tar', CONTENTS)
  imagenet21k.prepare(source, tmp_path / 'tfds', class_list=lists)
  opened, found = examples(tmp_path / 'tfds')
  assert opened.class_names == names
  by_image = {
    image: names.index(wnid)
    for wnid, files in CONTENTS.items()
    for image in files.values()
  }
  assert {item['image']: item['label'] for item in found} == by_image
  for text, message in (
    ('tench\n', "'tench'"),
    ('n00000001\nn00000001\n', "'n00000001'"),
    ('', 'a different synset'),
  ):
    lists.write_text(text)
    with pytest.raises(UserError, match=message):
      imagenet21k.prepare(source, tmp_path / 'tfds', class_list=lists)


def test_preparations_that_cannot_start(tmp_path, monkeypatch):
  """The disk is too full, another process prepares, or no image is usable."""
  source = archives.write(tmp_path / 'fall11_whole.tar', CONTENTS)
  free = collections.namedtuple('Usage', 'free')(100)
  with monkeypatch.context() as patch:
    patch.setattr(shards.shutil, 'disk_usage', lambda _: free)
    with pytest.raises(UserError, match='GB are needed'):
      imagenet21k.prepare(source, tmp_path / 'tfds')
    # Existing files count as part of the space needed.
    (tmp_path / 'tfds/.prepare/imagenet21k/there').write_bytes(bytes(200_000))
    imagenet21k.prepare(source, tmp_path / 'tfds')
  with shards.locked(tmp_path / 'tfds'):
    with pytest.raises(UserError, match='another run uses .*data_dir'):
      imagenet21k.prepare(source, tmp_path / 'tfds')
  archives.write(source, {'n00000001': archives.BAD})
  with pytest.raises(UserError, match='none of the images'):
    imagenet21k.prepare(source, tmp_path / 'bad')


# Prepares in a child that is killed before its fourth file appears, repeatedly
# until one finishes; prints the number of attempts.
KILLED = """
  import os, pathlib, signal, sys
  from vit_jax.prepare import imagenet21k

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
      imagenet21k.prepare(source, target, shard_bytes=4_000)
      os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
  print(tries)
"""


@pytest.mark.parametrize('kind', LAYOUTS)
def test_a_preparation_killed_repeatedly_writes_the_same_files(
  tmp_path, prepared, kind
):
  """Each attempt continues where the last was killed."""
  data_dir, contents, _ = prepared
  source = archives.write(tmp_path / kind, contents)
  program = textwrap.dedent(KILLED)
  command = [sys.executable, '-c', program, source, tmp_path / 'tfds']
  done = subprocess.run(
    command, cwd=cli.ROOT, capture_output=True, text=True, timeout=600
  )
  assert done.returncode == 0, done.stderr[-3000:]
  names = assert_equal(tmp_path / 'tfds', data_dir)
  # A file per synset, a plan, a file per shard; three files per attempt.
  files = len(contents) + 1 + sum('array_record' in name for name in names)
  assert files // 3 <= int(done.stdout) <= files // 3 + 2


@pytest.mark.slow
def test_workers_end_with_a_killed_parent(tmp_path):
  """Otherwise they would write files during the next attempt."""
  program = f"""
    import functools
    from vit_jax.prepare import shards
    from tests.data.test_prepare_imagenet21k import wait_here
    if __name__ == '__main__':
      task = functools.partial(wait_here, {str(tmp_path)!r})
      list(shards.unordered([task, task], 2))
  """
  script = tmp_path / 'main.py'
  script.write_text(textwrap.dedent(program))
  environment = cli.environment() | {'PYTHONPATH': str(cli.ROOT)}
  command = [sys.executable, script]
  parent = subprocess.Popen(command, cwd=cli.ROOT, env=environment)
  cli.wait_until(lambda: len(list(tmp_path.glob('*.pid'))) == 2)
  parent.kill()
  parent.wait()
  workers = [int(path.stem) for path in tmp_path.glob('*.pid')]
  cli.wait_until(lambda: not any(map(is_alive, workers)))


def wait_here(folder):
  """Runs a task that never ends."""
  open(f'{folder}/{os.getpid()}.pid', 'w').close()
  time.sleep(600)


def is_alive(pid):
  """Returns whether a process runs; zombies do not count."""
  try:
    with open(f'/proc/{pid}/stat') as file:
      return file.read().rpartition(')')[2].split()[0] != 'Z'
  except FileNotFoundError:
    return False


def test_work_of_another_archive_is_not_continued(tmp_path, prepared):
  data_dir, contents, _ = prepared
  other = {wnid: dict(list(f.items())[:5]) for wnid, f in contents.items()}
  lists = tmp_path / 'list.txt'
  lists.write_text(f'{next(iter(contents))}\n')
  first = archives.write(tmp_path / 'fall11_whole.tar', other)
  with pytest.raises(UserError, match='lacks 7 of the 8 synsets'):
    imagenet21k.prepare(first, tmp_path / 'tfds', class_list=lists, **SMALL)
  with shards.locked(tmp_path / 'tfds') as work:
    imagenet21k._index(work, imagenet21k.synsets(first), 1)
  second = archives.write(tmp_path / 'fall11_whole.tar', contents)
  imagenet21k.prepare(second, tmp_path / 'tfds', **SMALL)
  assert_equal(tmp_path / 'tfds', data_dir)
