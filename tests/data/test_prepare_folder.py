"""Tests of preparing datasets from folders of images."""

import pytest

from tests import archives
from vit_jax.data.sources import tfds
from vit_jax.errors import UserError
from vit_jax.prepare import folder


def fill(root, classes, count, seed=0):
  """Writes CLASS/IMAGE; returns {content: class}."""
  found = {}
  for number, name in enumerate(classes):
    (root / name).mkdir(parents=True)
    for i in range(count):
      kind = ('.jpg', '.PNG', '.webp')[i % 3]
      content = archives.photograph(
        1000 * seed + 100 * number + i, kind.lower()
      )
      (root / name / f'{i}{kind}').write_bytes(content)
      found[content] = name
  return found


def read(data_dir, split):
  source = tfds.Source(split, dataset='my_set', data_dir=str(data_dir))
  items = [source[i] for i in range(len(source))]
  return source.class_names, {
    item['image']: source.class_names[item['label']] for item in items
  }


@pytest.mark.parametrize('workers', [1, 2])
def test_a_folder_of_classes_becomes_one_split(tmp_path, workers):
  """Every image occurs once; other files are listed or ignored."""
  expected = fill(tmp_path / 'in', ['tabby cat', 'dog', 'ñandú'], 9)
  (tmp_path / 'in/dog/broken.jpg').write_bytes(b'no image')
  (tmp_path / 'in/dog/notes.txt').write_text('not an image')
  (tmp_path / 'in/.cache').mkdir()
  folder.prepare(
    tmp_path / 'in',
    tmp_path / 'out',
    'my_set',
    workers=workers,
    shard_bytes=3_000,
  )
  names, found = read(tmp_path / 'out', 'train')
  assert names == ['dog', 'tabby cat', 'ñandú']
  assert found == expected
  left_out = (tmp_path / 'out/my_set/1.0.0/undecodable.txt').read_text()
  assert left_out.startswith('train/dog/broken.jpg\t')
  assert left_out.count('\n') == 1
  shards = list((tmp_path / 'out/my_set/1.0.0').glob('*.array_record-*'))
  assert len(shards) > 1
  labels = [list(found.values()).index(name) for name in names]
  assert max(labels) < 12  # shuffled, so all classes come early


def test_folders_of_splits_keep_their_names(tmp_path):
  """train/, val/ and test/ share the classes."""
  expected = {
    split: fill(tmp_path / 'in' / split, classes, 4, seed)
    for seed, (split, classes) in enumerate(
      {'train': ['a', 'b'], 'val': ['b'], 'test': ['a', 'c']}.items()
    )
  }
  folder.prepare(tmp_path / 'in', tmp_path / 'out', 'my_set')
  for split, content in expected.items():
    assert read(tmp_path / 'out', split) == (['a', 'b', 'c'], content)


def test_messages_of_wrong_folders(tmp_path):
  fill(tmp_path / 'undecodable', ['a'], 0)
  (tmp_path / 'undecodable/a/1.jpg').write_bytes(b'x')
  fill(tmp_path / 'newline', ['a\nb'], 1)
  fill(tmp_path / 'nothing', ['a'], 1)
  fill(tmp_path / 'nothing', ['b'], 0)
  fill(tmp_path / 'dead', ['a'], 1)
  (tmp_path / 'dead/a/gone.jpg').symlink_to('nowhere')
  (tmp_path / 'empty').mkdir()
  (tmp_path / 'file').write_text('')
  for name, message in (
    ('undecodable', 'no image of the split'),
    ('newline', 'as a class name'),
    ('empty', 'contains no folders'),
    ('dead', 'a/gone.jpg .*broken link'),
    ('nothing', '/b .*no image'),
    ('file', '--source is .* not a directory'),
    ('absent', '--source is .* not a directory'),
  ):
    with pytest.raises(UserError, match=message):
      folder.prepare(tmp_path / name, tmp_path / 'out', 'my_set')
  for name in ('My', '../x', 'a-b', '', '1a'):
    with pytest.raises(UserError, match='--name is'):
      folder.prepare(tmp_path / 'dead', tmp_path / 'out', name)
