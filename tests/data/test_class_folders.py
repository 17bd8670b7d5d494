"""Tests of which files of a folder are used, by the source and `prepare`."""

import os
import shutil

import pytest
from test_sources_folder import fill, open_folder, paths_of

from vit_jax.data.sources import folder, tfds
from vit_jax.data.storage import class_folders
from vit_jax.errors import UserError
from vit_jax.prepare import folder as builder


@pytest.mark.parametrize(
  'layout',
  [
    ('train', 'val', 'test'),
    ('Train', 'Val', 'Test'),
    ('training', 'valid', 'testing'),
    ('TRAIN', 'validation', 'Testing'),
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
  fill(tmp_path, 'train/1.jpg', 'bus/1.jpg', 'test/1.jpg')
  assert open_folder(tmp_path).class_names == ['bus', 'test', 'train']
  fill(tmp_path / 'flat', 'train/1.jpg', 'test/1.jpg')
  assert open_folder(tmp_path / 'flat').class_names == ['test', 'train']
  shutil.rmtree(tmp_path / 'flat')
  fill(tmp_path, 'train/steam/1.jpg')
  with pytest.raises(UserError, match="one class, 'steam'"):
    folder.divide(str(tmp_path))


def test_prepare_uses_the_same_files(tmp_path):
  """Nested files, GIFs and links; no hidden files or other extensions."""
  root = tmp_path / 'in'
  fill(
    root,
    'train/a/1.gif',
    'train/a/deep/er/2.JPG',
    'train/b/3.jfif',
    'train/b/.4.jpg',
    'train/.c/5.jpg',
    'train/b/6.txt',
    'Val/a/7.png',
  )
  (root / 'train' / 'b' / 'link.png').symlink_to(root / 'Val' / 'a' / '7.png')
  builder.prepare(root, tmp_path / 'out', 'my_set')
  for split, count in {'train': 4, 'val': 1}.items():
    ours = open_folder(root, split)
    theirs = tfds.Source(
      split, dataset='my_set', data_dir=str(tmp_path / 'out')
    )
    assert len(ours) == count
    assert examples(ours) == examples(theirs)


def examples(source):
  found = [source[i] for i in range(len(source))]
  return sorted((each['image'], each['label']) for each in found)


def test_file_names_that_are_not_utf8_are_read(tmp_path):
  fill(tmp_path / 'in', 'a/1.jpg')
  os.rename(
    tmp_path / 'in/a/1.jpg', os.fsencode(tmp_path / 'in/a') + b'/\xff.jpg'
  )
  assert open_folder(tmp_path / 'in')[0]['label'] == 0
  builder.prepare(tmp_path / 'in', tmp_path / 'out', 'my_set')


def test_a_class_that_is_a_broken_link_is_refused(tmp_path):
  """Leaving it out would shift the labels of all later classes."""
  fill(tmp_path, 'a/1.jpg', 'c/1.jpg')
  (tmp_path / 'b').symlink_to(tmp_path / 'gone')
  with pytest.raises(UserError, match='/b .*broken link'):
    open_folder(tmp_path)
  (tmp_path / 'b').unlink()
  (tmp_path / 'a' / '2.jpg').symlink_to(
    tmp_path / 'a' / '2.jpg'
  )  # a link to itself
  with pytest.raises(UserError, match='a/2.jpg .*broken link'):
    open_folder(tmp_path)


@pytest.mark.parametrize('name', ['absent', 'file/below', 'x' * 5000, 'a\0b'])
def test_invalid_paths_are_refused(tmp_path, name):
  """Missing, below a file, too long, or with a null byte."""
  (tmp_path / 'file').touch()
  (tmp_path / 'self').symlink_to(tmp_path / 'self')
  for path in (f'{tmp_path}/{name}', f'{tmp_path}/self'):
    with pytest.raises(UserError, match='which is not a directory'):
      class_folders.roots(path, 'source.path')


def test_divide_holds_out_a_tenth(tmp_path):
  """Of train if there is no val, and of everything if there is no split."""
  fill(tmp_path, *(f'train/{k}/{i}.jpg' for k in 'ab' for i in range(20)))
  fill(tmp_path, 'test/a/1.jpg')
  for root in (tmp_path, tmp_path / 'train'):
    found = folder.divide(str(root))
    assert (found.num_examples, found.num_classes) == (36, 2)
    held_out = open_folder(root, found.held_out)
    assert [held_out[i]['label'] for i in range(4)] == [0, 0, 1, 1]
    assert len(open_folder(root, found.train)) == 36


@pytest.mark.parametrize('count', [2, 5])
def test_divide_refuses_too_few_images(tmp_path, count):
  """No image of a class with one image can be held out and trained on."""
  fill(tmp_path, *(f'{k}/1.jpg' for k in 'abcde'[:count]))
  with pytest.raises(
    UserError, match=f'{count} images of {count} classes: too'
  ):
    folder.divide(str(tmp_path))
