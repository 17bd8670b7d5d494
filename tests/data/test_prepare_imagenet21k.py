"""Tests of preparing ImageNet-21k from small archives of its layout."""

import collections
import functools
import itertools

import pytest

from tests import archives
from tests.faults.counts import further
from vit_jax.data.images.decode import decode
from vit_jax.data.sources import tfds
from vit_jax.errors import UserError
from vit_jax.prepare import imagenet21k, shards

SMALL = dict(
  part_bytes=1, shard_bytes=4_000
)  # one part per synset, several shards
VERSION = 'imagenet21k/1.0.0'


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
  """Returns TFDS directory, contents and left-out names of a dataset."""
  folder = tmp_path_factory.mktemp('imagenet21k')
  contents, bad = archives.with_trouble()
  source = archives.write(folder / 'fall11_whole.tar', contents)
  imagenet21k.prepare(source, folder / 'tfds', **SMALL)
  return folder, contents, bad


def test_every_image_occurs_once_with_its_synset(prepared):
  """Bytes, label and name of each image are compared."""
  folder, contents, bad = prepared
  source = tfds.Source(
    'train', dataset='imagenet21k', data_dir=str(folder / 'tfds')
  )
  assert source.class_names == sorted(contents)
  expected = {
    content: sorted(contents).index(wnid)
    for wnid, files in contents.items()
    for name, content in files.items()
    if f'{wnid}/{name}' not in bad
  }
  found = [source[i] for i in range(len(source))]
  assert len(found) == len(expected) == 8 * 12 + 3
  assert {item['image']: item['label'] for item in found} == expected
  for item in found:
    assert decode(item['image']).shape[2] == 3


def test_left_out_images_are_listed(prepared):
  """Each has its reason, one per line whatever its name."""
  folder, _, bad = prepared
  lines = (folder / 'tfds' / VERSION / 'undecodable.txt').read_text()
  names, reasons = zip(
    *(line.split('\t') for line in lines.splitlines()), strict=True
  )
  assert sorted(names) == sorted(name.replace('\n', '\\n') for name in bad)
  assert all(reasons)
  everything = [p for p in folder.rglob('*') if p.is_file()]
  assert not [p for p in everything if 'evil' in p.name or 'JPEG' in p.name]
  assert not (folder / 'tfds/.prepare/imagenet21k').exists()


def test_images_are_shuffled_over_classes(prepared):
  """Neighbours share a class about as often as by chance, in every part."""
  folder, *_ = prepared
  source = tfds.Source(
    'train', dataset='imagenet21k', data_dir=str(folder / 'tfds')
  )
  labels = [source[i]['label'] for i in range(len(source))]
  same = sum(a == b for a, b in itertools.pairwise(labels))
  assert same < 30  # 12 by chance, 91 in the archive's order
  first = collections.Counter(labels[:32])
  assert len(first) >= 6 and max(first.values()) <= 11  # a random sample


@pytest.mark.parametrize(
  'kind, settings',
  [
    ('fall11_whole.tar', dict(part_bytes=30_000, workers=2)),
    ('winter21_whole.tar.gz', dict(part_bytes=1)),
    *further(
      ['fall11_whole.tar', dict(part_bytes=2**20)],
      ['winter21_whole.tar.gz', dict(part_bytes=1, workers=2)],
    ),
  ],
)
def test_files_do_not_depend_on_the_settings(
  tmp_path, prepared, kind, settings
):
  """Layout, parts and workers do not change the result."""
  folder, contents, _ = prepared
  source = archives.write(tmp_path / kind, contents)
  settings = dict(shard_bytes=SMALL['shard_bytes']) | settings
  imagenet21k.prepare(source, tmp_path / 'tfds', **settings)
  ours, expected = tmp_path / 'tfds' / VERSION, folder / 'tfds' / VERSION
  assert archives.tree(ours) == archives.tree(expected)
  names = [name for name in archives.tree(ours) if 'array_record' in name]
  assert len(names) > 3


def test_class_list_determines_the_labels(tmp_path):
  """It may contain synsets that the archive lacks."""
  contents = archives.synsets(3)
  names = ['n00000005', *reversed(sorted(contents)), 'n00000007']
  lists = tmp_path / 'ids.txt'
  lists.write_text(''.join(f'{name}, a word\n' for name in names))
  source = archives.write(tmp_path / 'fall11_whole.tar', contents)
  prepare = functools.partial(
    imagenet21k.prepare, source, tmp_path / 'tfds', class_list=lists
  )
  prepare()
  found = tfds.Source(
    'train', dataset='imagenet21k', data_dir=str(tmp_path / 'tfds')
  )
  assert found.class_names == names
  by_image = {
    image: names.index(wnid)
    for wnid, files in contents.items()
    for image in files.values()
  }
  for i in range(len(found)):
    assert found[i]['label'] == by_image[found[i]['image']]
  for text, message in (
    ('tench\n', "'tench'"),
    ('n00000001\nn00000001\n', "'n00000001'"),
    ('', 'a different synset'),
  ):
    lists.write_text(text)
    with pytest.raises(UserError, match=message):
      prepare()


def test_a_full_disk_is_reported(tmp_path, monkeypatch):
  """Before: twice the archive is required; existing files count."""
  source = archives.write(tmp_path / 'fall11_whole.tar', archives.synsets(3))
  free = collections.namedtuple('Usage', 'free')(100)
  with monkeypatch.context() as patch:
    patch.setattr(shards.shutil, 'disk_usage', lambda _: free)
    with pytest.raises(UserError, match='GB are needed'):
      imagenet21k.prepare(source, tmp_path / 'tfds')
    (tmp_path / 'tfds/.prepare/imagenet21k/there').write_bytes(bytes(200_000))
    imagenet21k.prepare(source, tmp_path / 'tfds')


def test_a_second_process_is_refused(tmp_path):
  source = archives.write(tmp_path / 'fall11_whole.tar', archives.synsets(2))
  with shards.locked(tmp_path / 'tfds', 'imagenet21k'):
    with pytest.raises(UserError, match='another process is preparing'):
      imagenet21k.prepare(source, tmp_path / 'tfds')


def test_an_archive_without_usable_images_is_refused(tmp_path):
  source = archives.write(
    tmp_path / 'fall11_whole.tar', {'n00000001': archives.BAD}
  )
  with pytest.raises(UserError, match='none of the images'):
    imagenet21k.prepare(source, tmp_path / 'tfds')
