"""Tests of check_data: counts, damaged files, duplicates, interruption."""

import json

import cv2
import numpy as np
import pytest
import tifffile
from minimal_config import completed

from vit_jax import check_data
from vit_jax.config import completion
from vit_jax.data.storage.class_folders import UNLABELLED
from vit_jax.errors import UserError


def _write(path, seed, ending='.png', size=(9, 7)):
  pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
  path.parent.mkdir(parents=True, exist_ok=True)
  assert cv2.imwrite(str(path.with_suffix(ending)), pixels)


@pytest.fixture
def photos(tmp_path):
  """Creates six good training and two good other images, and every fault."""
  root = tmp_path / 'photos'
  for number in range(3):
    _write(root / f'train/cat/{number}', number)
    _write(root / f'train/dog/{number}', 10 + number, size=(20, 30))
  _write(
    root / 'train/dog/same', 1, '.bmp'
  )  # the pixels of cat/1 in another format
  _write(root / 'val/cat/a', 50)
  _write(root / 'val/dog/a', 10, size=(20, 30))  # also in the training data
  (root / 'train/cat/broken.jpg').write_bytes(b'no image at all')
  (root / 'train/cat/notes.txt').write_text('cats')
  (root / 'train/.hidden.png').write_bytes(b'')
  return root


def _config(photos, **changes):
  source = {'name': 'folder', 'path': str(photos)}
  evals = {'val': {'name': 'classification', 'split': 'val'}}
  sections = dict(source=source, evals=evals, num_classes=2)
  return completed(**sections | changes)


def _lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_summary_lists_every_fault(photos, tmp_path):
  """Numbers and lists agree with the files."""
  out = tmp_path / 'out'
  summary = check_data.run(_config(photos), str(out))
  assert json.loads((out / 'summary.json').read_text()) == summary
  train, val = summary['splits']['train'], summary['splits']['val']
  assert (train['examples'], train['bad']) == (8, 1)
  assert train['classes'] == {'cat': 3, 'dog': 4}
  assert (train['heights'], train['widths']) == ([9, 9, 20], [7, 7, 30])
  assert (val['examples'], val['bad']) == (2, 0)
  assert (summary['duplicates'], summary['leaks']) == (2, 1)
  assert summary['other_label'] == 1
  (bad,) = _lines(out / 'bad.jsonl')
  assert bad['where'].endswith('train/cat/broken.jpg')
  assert bad['split'] == 'train' and '15 bytes' in bad['reason']
  groups = [
    sorted((e['split'], e['class'], e['where'].rpartition('/')[2]) for e in g)
    for g in _lines(out / 'duplicates.jsonl')
  ]
  assert sorted(groups) == [
    [('train', 'cat', '1.png'), ('train', 'dog', 'same.bmp')],
    [('train', 'dog', '0.png'), ('val', 'dog', 'a.png')],
  ]
  ignored = (out / 'ignored.txt').read_text().splitlines()
  assert ignored == [
    str(photos / 'train/.hidden.png'),
    str(photos / 'train/cat/notes.txt'),
  ]
  text = '\n'.join(check_data._lines(summary, str(out)))
  assert '8 examples, 1 bad, 2 classes' in text and 'cat 3, dog 4' in text
  assert 'smallest 7x9, median 7x9, largest 30x20' in text


@pytest.fixture
def leaking(tmp_path):
  """Creates 12 training images; 3 are also in the test set."""
  root = tmp_path / 'leaking'
  for number in range(12):
    _photograph(root / f'train/{"ab"[number % 2]}/{number:02d}.png', number)
  copies = {}
  for number in (0, 1, 5, 8):
    path = root / f'train/{"ab"[number % 2]}/{number:02d}.png'
    copies[number] = cv2.imread(str(path))
  (root / 'test/a').mkdir(parents=True)
  (root / 'test/b').mkdir()
  cv2.imwrite(str(root / 'test/a/exact.bmp'), copies[0])
  cv2.imwrite(str(root / 'test/a/small.png'), _half(copies[1]))
  quality = [cv2.IMWRITE_JPEG_QUALITY, 60]
  cv2.imwrite(str(root / 'test/b/5.jpg'), copies[5], quality)
  cv2.imwrite(str(root / 'test/b/mirrored.png'), copies[8][:, ::-1])
  _photograph(root / 'test/b/new.png', 100)
  (root / 'test/b/broken.jpg').write_bytes(b'no image at all')
  other = tmp_path / 'other'
  (other / 'test/x').mkdir(parents=True)
  cv2.imwrite(str(other / 'test/x/5.png'), copies[5])
  _photograph(other / 'train/x/any.png', 101)
  return root


def _photograph(path, seed):
  """Writes an image of 60x80 smooth random pixels."""
  rng = np.random.default_rng(seed)
  coarse = rng.integers(0, 256, (9, 12, 3)).astype(np.uint8)
  path.parent.mkdir(parents=True, exist_ok=True)
  pixels = cv2.resize(coarse, (80, 60), interpolation=cv2.INTER_CUBIC)
  assert cv2.imwrite(str(path), pixels)


def _half(pixels):
  height, width = pixels.shape[:2]
  size = width // 2, height // 2
  return cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)


def _against(root, **changes):
  """Returns a config, and the path of another one with its own test set."""
  own = {'name': 'folder', 'path': str(root)}
  evals = {'test': {'name': 'classification', 'split': 'test'}}
  config = completed(source=own, evals=evals, num_classes=2, **changes)
  other = completed(
    source=dict(own, path=str(root.parent / 'other')), num_classes=1
  )
  path = root.parent / 'other.json'
  path.write_text(completion.to_json(other))
  return config, str(path)


def test_training_images_of_a_test_set_are_listed(leaking, tmp_path):
  """Exact, resized and compressed copies are; a mirrored image is not."""
  (config, other), out = _against(leaking), tmp_path / 'out'
  summary = check_data.run(config, str(out), ['test', other])
  name = f'{tmp_path}/other/test'
  assert summary['overlap'] == {
    'test': {'same_pixels': 1, 'similar': 2},
    name: {'same_pixels': 1, 'similar': 0},
  }
  assert summary['remaining'] == 9
  lines = _lines(out / 'overlap.jsonl')
  found = {
    (line['where'][-6:], line['copy_of']['where'].rpartition('/')[2])
    for line in lines
  }
  assert found == {
    *{('00.png', 'exact.bmp'), ('01.png', 'small.png')},
    *{('05.png', '5.jpg'), ('05.png', '5.png')},
  }
  assert {line['copy_of']['split'] for line in lines} == {'test', name}
  text = '\n'.join(check_data._lines(summary, str(out)))
  assert 'train.num_examples=9' in text and 'overlap.jsonl' in text

  # With the list, nothing is found any more.
  path = str(out / 'overlap.jsonl')
  config, _ = _against(leaking, **{'train.leave_out': path})
  summary = check_data.run(config, str(tmp_path / 'again'), ['test', other])
  assert summary['splits']['train']['examples'] == summary['remaining'] == 9
  assert (tmp_path / 'again/overlap.jsonl').read_text() == ''


def test_messages_of_wrong_comparisons(leaking, tmp_path):
  config, _ = _against(leaking)
  for value in ('tset', 'lost.py'):
    with pytest.raises(UserError, match=value):
      check_data.run(config, str(tmp_path / 'out'), [value])
  with pytest.raises(UserError, match='max_distance.*64'):
    check_data.run(config, str(tmp_path / 'out'), ['test'], 64)
  with pytest.raises(UserError, match='is remote'):
    check_data.run(config, 'gs://bucket/out')


def test_mean_and_std_of_each_channel(tmp_path):
  """Every usable image has the same weight, whatever its size."""
  rng, images = np.random.default_rng(0), []
  for number, side in enumerate((4, 9, 12)):
    image = rng.integers(0, 3000 + 500 * number, (side, 6, 5), np.uint16)
    folder = tmp_path / 'photos' / 'ab'[number % 2]
    folder.mkdir(parents=True, exist_ok=True)
    keys = dict(photometric='minisblack', planarconfig='contig')
    tifffile.imwrite(folder / f'{number}.tif', image, **keys)
    images.append(image / 65535)
  tifffile.imwrite(folder / 'rgb.tif', np.zeros((4, 4, 3), np.uint8))
  config = _config(
    tmp_path / 'photos',
    **{'preprocess.channels': 5, 'preprocess.bits': 16, 'evals': {}},
  )
  summary = check_data.run(config, str(tmp_path / 'out'))['splits']['train']
  mean = np.mean([image.mean((0, 1)) for image in images], axis=0)
  square = np.mean([(image**2).mean((0, 1)) for image in images], axis=0)
  np.testing.assert_allclose(summary['mean'], mean, rtol=1e-5)
  np.testing.assert_allclose(
    summary['std'], np.sqrt(square - mean**2), rtol=1e-5
  )
  assert summary['bad'] == 1
  (bad,) = _lines(tmp_path / 'out/bad.jsonl')
  assert 'rgb.tif' in bad['where'] and 'uint16 [y, x, 5]' in bad['reason']


def test_a_source_without_labels(tmp_path):
  """Its examples have no label at all."""
  config = completed(
    source=dict(name='tests.plugins.unlabelled', num_examples=5),
    evals={},
    **{'train.num_examples': 5},
  )
  summary = check_data.run(config, str(tmp_path))
  assert summary['splits']['train']['classes'] == {UNLABELLED: 5}
  assert summary['duplicates'] == 0
