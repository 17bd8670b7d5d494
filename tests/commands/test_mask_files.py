"""Tests of the files of predicted masks."""

import numpy as np
import pytest

from vit_jax.cli import mask_files
from vit_jax.data.augment import windows
from vit_jax.data.images.decode import decode_map
from vit_jax.errors import UserError


@pytest.mark.parametrize('count, kind', [(256, 'uint8'), (257, 'uint16')])
def test_masks_are_read_as_they_are_written(count, kind):
  """With a palette, the indices are the classes."""
  classes = np.random.default_rng(0).integers(0, count, (9, 7), np.int32)
  read = decode_map(mask_files.encode(classes, count))
  np.testing.assert_array_equal(read, classes)
  assert read.dtype == kind


def test_names_of_masks():
  """They are relative to the folder of all images, and differ."""
  given = ['x/a.jpg', 'x/b/a.jpg']
  assert mask_files._mask_paths(given, 'out') == ['out/a.png', 'out/b/a.png']
  assert mask_files._mask_paths(['a.jpg'], 'out') == ['out/a.png']
  with pytest.raises(UserError, match=r'a\.png'):
    mask_files._mask_paths(['x/a.jpg', 'x/a.png'], 'out')
  with pytest.raises(UserError, match=r'replace images, such as .*x/a\.png'):
    mask_files._mask_paths(['x/a.png', 'x/b.jpg'], './x')


@pytest.mark.parametrize('size', [(32, 32), (20, 100), (4000, 3000), (33, 31)])
def test_windows_for_any_size(size):
  """Both numbers are powers of 2 that are large enough."""
  pixels = np.zeros((*size, 3), np.uint8)
  found = windows.EvalTransform((32, 32), classes=2).fitting(*size)
  views = found.views(pixels)  # raises DecodeError if they are too small
  used = (views['corners'][:, 0] >= 0).sum()
  assert used <= found.windows < 2 * used
  assert max(size) <= found.label_size < 2 * max(size)
