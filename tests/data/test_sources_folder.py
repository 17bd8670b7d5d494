"""Tests of the source `folder`: files, order and labels."""

import collections
import os
import shutil

import contract
import pytest
from minimal_config import with_outputs
from ml_collections import ConfigDict

from vit_jax.cli import inputs
from vit_jax.data.images.headers import DecodeError
from vit_jax.data.sources import folder
from vit_jax.errors import UserError
from vit_jax.training import data


def fill(root, *paths):
  """Writes an image to each path; returns {path: its bytes}."""
  images = {}
  for path in paths:
    images[path] = contract.png(len(path) * 1000 + ord(path[-5]))
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(images[path])
  return images


def paths_of(source, root):
  return [source.where(i).removeprefix(f'{root}/') for i in range(len(source))]


def open_folder(root, split='train', **settings):
  return folder.Source(split, path=str(root), **settings)


def test_classes_and_files_are_sorted(tmp_path):
  """The first level is the class; files may be nested below it."""
  order = ['cat/a-b.PNG', 'cat/a/1.jpg', 'cat/a/b/1.JPEG', 'dog/x/cat/1.webp']
  images = fill(tmp_path, *order)
  fill(tmp_path, 'cat/.2.jpg', '.git/a/1.jpg', 'cat/.thumbs/1.jpg', 'loose.jpg')
  (tmp_path / 'cat' / 'notes.txt').touch()
  source = open_folder(tmp_path)
  expected = [(images[path], path[0] == 'd') for path in order]
  contract.check(source, expected, order)
  assert source.class_names == ['cat', 'dog']
  assert sorted(source.ignored()) == sorted(
    f'{tmp_path}/{name}'
    for name in '.git cat/.2.jpg cat/.thumbs cat/notes.txt loose.jpg'.split()
  )


def test_all_splits_have_the_labels_of_train(tmp_path):
  """Other folders are left out."""
  train = [f'train/{name}/1.jpg' for name in 'abc']
  images = fill(tmp_path, *train, 'val/c/4.jpg', 'devkit/z/5.jpg')
  source = open_folder(tmp_path, 'val')
  assert source.class_names == ['a', 'b', 'c']
  contract.check(source, [(images['val/c/4.jpg'], 2)], ['c/4.jpg'])
  both = open_folder(tmp_path, 'val+train')
  assert paths_of(both, tmp_path) == ['val/c/4.jpg', *train]
  # A mistyped folder of another split does not become a class.
  fill(tmp_path, 'val/bb/2.jpg')
  with pytest.raises(UserError, match="'bb'.*did you mean 'b'"):
    open_folder(tmp_path, 'val')


@pytest.mark.slow
def test_parts_have_the_same_fraction_of_each_class(tmp_path):
  """A class that is too small to be divided belongs to the first part."""
  sizes = {'a': 50, 'b': 20, 'c': 10, 'd': 2, 'e': 1}
  fill(tmp_path, *(f'{k}/{i}.jpg' for k, n in sizes.items() for i in range(n)))
  contract.check_parts(lambda split: open_folder(tmp_path, split), '90%')

  def counts(split):
    paths = paths_of(open_folder(tmp_path, split), tmp_path)
    return collections.Counter(path[0] for path in paths)

  assert counts('train[90%:]') == {'a': 5, 'b': 2, 'c': 1}
  assert counts('train[:10%]').keys() == sizes.keys()
  assert counts('train[:50%]') == {'a': 25, 'b': 10, 'c': 5, 'd': 1, 'e': 1}
  assert counts('train[:5]') == dict.fromkeys(sizes, 1)


def test_parts_depend_on_names_only(tmp_path):
  """The location of the folder and its other classes do not matter."""
  paths = [f'{k}/{i}.jpg' for k in 'ab' for i in range(20)]
  fill(tmp_path / 'one', *paths)
  fill(tmp_path / 'two' / 'train', *paths, *(f'c/{i}.jpg' for i in range(20)))
  fill(tmp_path / 'two' / 'val', 'a/1.jpg')
  found = paths_of(open_folder(tmp_path / 'one', 'train[75%:]'), tmp_path)
  other = open_folder(tmp_path / 'two', 'train[75%:]')
  there = paths_of(other, tmp_path / 'two')
  expected = [path.removeprefix('one/') for path in found]
  assert [p.removeprefix('train/') for p in there if '/c/' not in p] == expected


def test_links_are_followed(tmp_path):
  """Cycles are not followed; a broken link is named."""
  root = tmp_path / 'data'
  fill(root, 'cat/1.jpg')
  fill(tmp_path, 'elsewhere/2.jpg', 'elsewhere/x/3.jpg')
  (root / 'dog').symlink_to(tmp_path / 'elsewhere')
  (root / 'cat' / '4.jpg').symlink_to(root / 'cat' / '1.jpg')
  for name, target in (('loop', 'cat'), ('up', ''), ('self', 'cat/self')):
    (root / 'cat' / name).symlink_to(root / target)
  expected = ['cat/1.jpg', 'cat/4.jpg', 'dog/2.jpg', 'dog/x/3.jpg']
  assert paths_of(open_folder(root), root) == expected
  # Leaving out a class would shift the labels of all later classes.
  for name in ('dog/5.jpg', 'bird', 'cat/6.jpg'):
    target = root / name if name[0] == 'c' else tmp_path / 'nowhere'
    (root / name).symlink_to(target)
    with pytest.raises(UserError, match=f'{name} .*broken link'):
      open_folder(root)
    (root / name).unlink()


def test_class_map_and_folders_must_agree(tmp_path):
  """Classes without images are refused, unless `allow_empty` is set."""
  fill(tmp_path / 'data', 'train/a/1.jpg', 'train/b/2.jpg', 'test/b/3.jpg')
  (tmp_path / 'data' / 'train' / 'd').mkdir()
  listed = tmp_path / 'classes.txt'

  def labels(text, split='train', **settings):
    listed.write_text(text)
    path = str(listed) if text else None
    source = open_folder(tmp_path / 'data', split, class_map=path, **settings)
    return source.class_names, source.labels().tolist()

  names = ['d', 'an A', 'c', 'b']
  found = labels('d\na\tan A\nc\nb\n', allow_empty=True)
  assert found == (names, [1, 3])
  assert labels('', allow_empty=True) == (['a', 'b', 'd'], [0, 1])
  assert labels('a\nc\n\nb\n', 'test') == (['a', 'c', 'b'], [2])
  for text, split, words in (
    ('', 'train', '/d .*no image.*allow_empty'),
    ('a\nc\n', 'test', "'b', which is not one of the 2 classes"),
  ):
    with pytest.raises(UserError, match=words):
      labels(text, split)
  (tmp_path / 'data' / 'train' / 'd').rmdir()
  with pytest.raises(UserError, match="lists 1 classes.*'c'"):
    labels('a\nc\nb\n')


@pytest.mark.parametrize(
  'path, split, words',
  [
    ('absent', 'train', 'which is not a directory'),
    ('x' * 5000, 'train', 'which is not a directory'),
    ('a\0b', 'train', 'which is not a directory'),
    ('self', 'train', 'which is not a directory'),
    ('empty', 'train', "source.name='manifest'"),
    ('gs://bucket/data', 'train', 'gcsfuse'),
    ('data', 'test', "no split 'test'.*allowed: train"),
  ],
)
def test_messages_of_wrong_paths(tmp_path, monkeypatch, path, split, words):
  """Each says what to do."""
  monkeypatch.chdir(tmp_path)
  fill(tmp_path, 'notes.png', 'data/cat/1.jpg')
  (tmp_path / 'empty').mkdir()
  (tmp_path / 'self').symlink_to(tmp_path / 'self')
  with pytest.raises(UserError, match=words):
    open_folder(path, split)


def test_a_fingerprint_depends_on_every_label(tmp_path):
  """Lists with the same names in the same order may swap two folders."""
  folders = [f'{i:02d}' for i in range(40)]
  fill(tmp_path / 'data', *(f'{name}/1.jpg' for name in folders))
  found = []
  for keys in (folders, [*folders[:14], '15', '14', *folders[16:]]):
    lines = (f'{key}\tclass {i}' for i, key in enumerate(keys))
    (tmp_path / 'map.txt').write_text('\n'.join(lines))
    class_map = str(tmp_path / 'map.txt')
    source = open_folder(tmp_path / 'data', class_map=class_map)
    found.append(source.fingerprint)
  first, second = found
  assert first['class_names'] == second['class_names']
  assert first['records'] == second['records'] and first != second


def test_a_single_class_is_refused_by_supervised_objectives(tmp_path):
  """MAE and DINO accept it, because they do not need labels."""
  fill(tmp_path, *(f'photos/{i}.jpg' for i in range(4)))
  source = dict(name='folder', path=str(tmp_path))
  member = dict(source, weight=1.0)
  config = ConfigDict(
    dict(
      source=source,
      train=dict(split='train', num_examples=4, leave_out=None, balanced=False),
      objective=dict(name='mae'),
      num_classes=0,
    )
  )
  assert len(data.open_train(with_outputs(config))) == 4
  config.objective.name, config.num_classes = 'supervised', 1
  for section in (source, dict(name='mixture', members={'a': member})):
    config.source = section
    with pytest.raises(UserError, match="one class, 'photos'"):
      data.open_train(with_outputs(config))


def test_other_endings(tmp_path):
  """`endings` replaces those of image formats, also in `divide`."""
  fill(tmp_path, *(f'{name}/{i}.npy' for name in 'ab' for i in range(10)))
  fill(tmp_path, 'a/preview.jpg', 'b/preview.jpg')
  assert len(open_folder(tmp_path)) == 2
  assert len(open_folder(tmp_path, endings=('.npy',))) == 20
  found = folder.divide(str(tmp_path), ('.npy',))
  assert (found.num_examples, found.num_classes) == (18, 2)


def test_names_in_another_unicode_form_are_the_same_class(tmp_path):
  """macOS decomposes accents; a list of classes may also be composed."""
  composed, decomposed = 'caf\u00e9', 'cafe\u0301'
  fill(tmp_path, f'train/{composed}/1.jpg', 'train/bar/2.jpg')
  fill(tmp_path, f'val/{decomposed}/3.jpg', 'val/bar/4.jpg')
  train, val = (open_folder(tmp_path, split) for split in ('train', 'val'))
  assert train.class_names == val.class_names == ['bar', composed]
  assert val.labels().tolist() == [0, 1]
  listed = tmp_path / 'classes.txt'
  listed.write_text(f'{decomposed}\nbar\n')
  source = open_folder(tmp_path, class_map=str(listed))
  assert sorted(source.labels().tolist()) == [0, 1]
  # Two folders whose names differ only in their form remain two classes.
  fill(tmp_path, f'train/{decomposed}/5.jpg')
  assert open_folder(tmp_path).num_classes == 3


def test_predict_takes_the_images_of_the_source_folder(tmp_path):
  """Links are followed, and files that macOS adds are left out."""
  store, linked = tmp_path / 'store', tmp_path / 'linked'
  fill(store, 'cat/1.jpg', 'cat/._1.jpg', 'cat/notes.txt', 'dog/2.JPG', '3.png')
  linked.mkdir()
  (linked / 'cat').symlink_to(store / 'cat')
  (linked / 'circle').symlink_to(linked)
  assert inputs.image_paths([str(store)]) == [
    f'{store}/{name}' for name in ('3.png', 'cat/1.jpg', 'dog/2.JPG')
  ]
  assert inputs.image_paths([str(linked)]) == [f'{linked}/cat/1.jpg']


@pytest.mark.parametrize(
  'layout',
  [
    ('training', 'valid', 'Test'),
    ('TRAIN', 'validation', 'testing'),
    ('train', 'dev', 'test'),
  ],
)
def test_common_names_of_splits_are_found(tmp_path, layout):
  """A split can be requested by any of these names."""
  fill(tmp_path, *(f'{name}/{k}/1.jpg' for name in layout for k in 'ab'))
  for name, asked in zip(layout, ('train', 'val', 'test'), strict=True):
    for split in (asked, name):
      source = open_folder(tmp_path, split)
      assert source.class_names == ['a', 'b']
      expected = [f'{name}/a/1.jpg', f'{name}/b/1.jpg']
      assert paths_of(source, tmp_path) == expected
  assert len(open_folder(tmp_path, 'all')) == 6
  found = folder.divide(str(tmp_path))
  assert (found.train, found.held_out) == ('train', 'val')


def test_classes_may_have_names_of_splits(tmp_path):
  """A folder 'train' is a class unless it contains folders."""
  fill(tmp_path, 'train/1.jpg', 'test/1.jpg')
  assert open_folder(tmp_path).class_names == ['test', 'train']
  fill(tmp_path, 'bus/1.jpg')
  assert open_folder(tmp_path).class_names == ['bus', 'test', 'train']
  shutil.rmtree(tmp_path / 'test')
  fill(tmp_path, 'train/steam/1.jpg')
  with pytest.raises(UserError, match="one class, 'steam'"):
    folder.divide(str(tmp_path))


def test_file_names_that_are_not_utf8_are_read(tmp_path):
  fill(tmp_path, 'a/1.jpg')
  os.rename(tmp_path / 'a/1.jpg', os.fsencode(tmp_path / 'a') + b'/\xff.jpg')
  assert open_folder(tmp_path)[0]['label'] == 0


def test_divide_holds_out_a_tenth(tmp_path):
  """Of train if there is no val, and of everything if there is no split.

  Images without labels are not divided for a classifier, and neither are so
  few that a class would lack images for training or evaluation.
  """
  fill(tmp_path, *(f'train/{k}/{i}.jpg' for k in 'ab' for i in range(20)))
  fill(tmp_path, 'test/a/1.jpg')
  for root in (tmp_path, tmp_path / 'train'):
    found = folder.divide(str(root))
    assert (found.num_examples, found.num_classes) == (36, 2)
    held_out = open_folder(root, found.held_out)
    assert [held_out[i]['label'] for i in range(4)] == [0, 0, 1, 1]
    assert len(open_folder(root, found.train)) == 36
  with pytest.raises(UserError, match='train/a has no labels'):
    folder.divide(f'{tmp_path}/train/a')
  for count in (2, 5):
    root = tmp_path / f'few{count}'
    fill(root, *(f'{k}/1.jpg' for k in 'abcde'[:count]))
    with pytest.raises(UserError, match=f'{count} images of {count} classes'):
      folder.divide(str(root))


def test_masks_are_at_the_same_paths(tmp_path):
  """Splits may contain images only; an image without a mask is a bad record."""
  fill(tmp_path / 'images', 'train/1.jpg', 'train/2.png', 'val/3.jpg')
  masks = fill(tmp_path / 'masks', 'train/1.png', 'train/2.png')
  given = dict(masks=str(tmp_path / 'masks'))
  source = open_folder(tmp_path / 'images', **given)
  assert [source[i]['mask'] for i in range(2)] == [*masks.values()]
  before = source.fingerprint
  (tmp_path / 'masks' / 'train' / '2.png').write_bytes(b'other')
  assert open_folder(tmp_path / 'images', **given).fingerprint != before
  val = open_folder(tmp_path / 'images', 'val', **given)
  with pytest.raises(DecodeError, match=r'masks/val/3\.png'):
    val[0]
