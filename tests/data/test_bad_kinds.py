"""Tests of a folder with all kinds of images that occur in datasets."""

import pathlib

import numpy as np
import pytest
from archives import bomb, cmyk
from indexed_source import mesh_of
from PIL import Image
from pillow_files import saved, turned
from sample_images import encode, noise, smooth

from vit_jax.data.augment.transforms import TrainTransform
from vit_jax.data.pipeline import stream
from vit_jax.data.pipeline.workers import Reader
from vit_jax.data.sources import folder

WHOLE_JPEG = encode(noise(40, 60), '.jpg')
WHOLE_PNG = encode(smooth(40, 60), '.png')
USABLE = {
  'cmyk.jpg': cmyk(),
  'grey.jpg': encode(smooth(30, 40)[:, :, 0], '.jpg'),
  'sixteen_bits.png': encode(smooth(30, 40).astype(np.uint16) * 257, '.png'),
  'palette.png': saved(Image.fromarray(smooth(30, 40)).quantize(16), 'PNG'),
  'transparent.png': saved(
    Image.fromarray(smooth(30, 40)).convert('RGBA'), 'PNG'
  ),
  'turned.jpg': turned('JPEG', 6),
  'one_pixel.png': encode(smooth(1, 1), '.png'),
  'one_pixel.jpg': encode(smooth(1, 1), '.jpg'),
}
BAD = {
  'empty.jpg': b'',
  'text.jpg': b'<html>404</html>',
  'undecodable.jpg': WHOLE_JPEG[:30] + b'noise' * 100,
  'truncated.jpg': WHOLE_JPEG[: len(WHOLE_JPEG) // 2],
  'grey_below.jpg': WHOLE_JPEG[: len(WHOLE_JPEG) // 2] + b'\xff\xd9',
  'truncated.png': WHOLE_PNG[: len(WHOLE_PNG) // 2],
  'bomb.png': bomb(60_000, 60_000),
}


@pytest.fixture
def photographs(tmp_path):
  """Creates a folder with the classes 'bad', 'good' and 'usable'."""
  plain = {f'{i}.jpg': WHOLE_JPEG for i in range(10)}
  kinds = {'bad': BAD, 'good': plain, 'usable': USABLE}
  for name, contents in kinds.items():
    (tmp_path / name).mkdir()
    for file, content in contents.items():
      (tmp_path / name / file).write_bytes(content)
  return tmp_path


def _epoch(source, on_bad_record='skip', report=None):
  """Returns (label, replaced) of each example of an epoch, in batches of 8."""
  reader = Reader(on_bad_record=on_bad_record, max_bad_share=0.5)
  rows = []
  transform = TrainTransform((16, 16))
  with stream.train_batches(
    source, transform, 1, 0, 0, mesh_of(), reader=reader, report=report
  ) as batches:
    for _ in range(len(source)):
      batch = next(batches)
      assert batch['image'].shape == (1, 16, 16, 3)
      rows.append(
        (
          int(batch['label'][0]),
          int(batch['replaced'][0]) if 'replaced' in batch else 0,
        )
      )
  return rows


def test_skip_replaces_bad_records_only(photographs):
  """Exactly the bad records are reported, each with its file and a reason."""
  source, seen = folder.Source('train', path=str(photographs)), []
  rows = _epoch(source, report=lambda _, record: seen.append(record))
  named = {pathlib.Path(record.where).name: record for record in seen}
  assert sorted(named) == sorted(BAD) and len(seen) == len(BAD)
  assert all(record.reason for record in seen)
  assert 'pixels' in named['bomb.png'].reason
  labels = [label for label, replaced in rows if not replaced]
  assert sorted(labels) == [1] * 10 + [2] * len(USABLE)
  assert sum(replaced > 0 for _, replaced in rows) == len(BAD)
  assert all(label != 0 for label, _ in rows)
