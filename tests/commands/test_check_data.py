"""Tests of check_data: counts, damaged files, duplicates, interruption."""

import json

import cv2
import numpy as np
import pytest
import tifffile
from minimal_config import completed

from vit_jax import check_data
from vit_jax.config import completion
from vit_jax.data import inspection
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
  # The pixels of cat/1 in another format.
  _write(root / 'train/dog/same', 1, '.bmp')
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
  names = ('train/.hidden.png', 'train/cat/notes.txt')
  assert ignored == [str(photos / name) for name in names]
  text = '\n'.join(check_data._lines(summary, str(out)))
  assert '8 examples, 1 bad, 2 classes' in text and 'cat 3, dog 4' in text
  assert 'smallest 7x9, median 7x9, largest 30x20' in text


@pytest.fixture
def leaking(tmp_path):
  """Creates 12 training images; 3 are also in the test set."""
  root, other, images = tmp_path / 'leaking', tmp_path / 'other', []
  for number in range(12):
    path = root / f'train/{"ab"[number % 2]}/{number:02d}.png'
    _photograph(path, number)
    images.append(cv2.imread(str(path)))
  for name, image in {
    root / 'test/a/exact.bmp': images[0],
    root / 'test/a/small.png': cv2.resize(
      images[1], (40, 30), interpolation=cv2.INTER_AREA
    ),
    root / 'test/b/5.jpg': images[5],
    root / 'test/b/mirrored.png': images[8][:, ::-1],
    other / 'test/x/5.png': images[5],
  }.items():
    name.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(name), image, [cv2.IMWRITE_JPEG_QUALITY, 60])
  _photograph(root / 'test/b/new.png', 100)
  (root / 'test/b/broken.jpg').write_bytes(b'no image at all')
  _photograph(other / 'train/x/any.png', 101)
  return root


def _photograph(path, seed):
  """Writes an image of 60x80 smooth random pixels."""
  rng = np.random.default_rng(seed)
  coarse = rng.integers(0, 256, (9, 12, 3)).astype(np.uint8)
  path.parent.mkdir(parents=True, exist_ok=True)
  pixels = cv2.resize(coarse, (80, 60), interpolation=cv2.INTER_CUBIC)
  assert cv2.imwrite(str(path), pixels)


def _against(root, **changes):
  """Returns a config, and the path of another one with its own test set."""
  own = {'name': 'folder', 'path': str(root)}
  evals = {'test': {'name': 'classification', 'split': 'test'}}
  config = completed(source=own, evals=evals, num_classes=2, **changes)
  own['path'] = str(root.parent / 'other')
  path = root.parent / 'other.json'
  path.write_text(completion.to_json(completed(source=own, num_classes=1)))
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
  pairs = ((line['where'], line['copy_of']['where']) for line in lines)
  assert {(a[-6:], b.rpartition('/')[2]) for a, b in pairs} == {
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
  out = str(tmp_path / 'out')
  for arguments, words in (
    ((out, ['tset']), 'tset'),
    ((out, ['lost.py']), 'lost.py'),
    ((out, ['test'], 64), 'max_distance.*64'),
    (('gs://bucket/out',), 'is remote'),
  ):
    with pytest.raises(UserError, match=words):
      check_data.run(config, *arguments)


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
  changes = {'preprocess.channels': 5, 'preprocess.bits': 16, 'evals': {}}
  config = _config(tmp_path / 'photos', **changes)
  summary = check_data.run(config, str(tmp_path / 'out'))['splits']['train']
  mean = np.mean([image.mean((0, 1)) for image in images], axis=0)
  square = np.mean([(image**2).mean((0, 1)) for image in images], axis=0)
  np.testing.assert_allclose(summary['mean'], mean, rtol=1e-5)
  std = np.sqrt(square - mean**2)
  np.testing.assert_allclose(summary['std'], std, rtol=1e-5)
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


# Similar perceptual hashes


def changed(rng, value, count):
  """Returns a hash of which `count` random bits differ."""
  bits = rng.choice(64, count, replace=False)
  return value ^ np.bitwise_or.reduce(np.uint64(1) << bits.astype(np.uint64))


@pytest.mark.parametrize('max_distance', [0, 4, 11])
@pytest.mark.parametrize('pairs', [10, 2000])
def test_nearest_is_the_first_with_the_fewest_different_bits(
  max_distance, pairs, monkeypatch
):
  """The reference computes each distance from the digits of both hashes."""
  monkeypatch.setattr(inspection, '_PAIRS', pairs)  # several chunks
  rng = np.random.default_rng(max_distance)
  references = rng.integers(0, 2**64, 100, np.uint64)
  references[7] = references[80]
  near = [changed(rng, references[i % 100], i % 14) for i in range(0, 130, 3)]
  near += [references[7], changed(rng, references[80], max_distance)]
  hashes = np.array([*near, *rng.integers(0, 2**64, 50, np.uint64), near[0]])
  rows, distances = inspection.nearest(hashes, references, max_distance)
  for value, row, distance in zip(hashes, rows, distances, strict=True):
    each = [f'{int(value) ^ int(x):b}'.count('1') for x in references]
    close = min(each) <= max_distance
    expected = (each.index(min(each)), min(each)) if close else (-1, -1)
    assert (row, distance) == expected
  assert 5 < (rows < 0).sum() < len(rows) - 5


def test_copies_have_the_same_pixels_or_else_the_most_similar_hash():
  """A split without usable images has no copies."""

  def found(*examples):
    rows = np.zeros(len(examples), inspection._ROW)
    rows['contents'] = [content for content, _ in examples]
    rows['hashes'] = [perceptual for _, perceptual in examples]
    return inspection.Found(rows, np.zeros((2, 3)), [])

  splits = {
    'train': found((1, 5), (2, 4)),
    'test': found((7, 5), (1, 5)),
    'none': found(),
  }
  copies = [*inspection.copies(splits, 'train', 'test', 4)]
  assert copies == [(0, 1, 0, True), (1, 0, 1, False)]
  for names in (('train', 'none'), ('none', 'test')):
    assert not [*inspection.copies(splits, *names, 4)]
