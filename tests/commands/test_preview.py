"""Tests of the images that preview draws."""

import cv2
import numpy as np
import pytest
from minimal_config import completed

from vit_jax import preview


def test_preview_of_training_images():
  """They are those of the step, with both classes of mixed images."""
  config = completed(
    source={'name': 'synthetic', 'num_examples': 64, 'num_classes': 10},
    **{'mix.mixup': 1.0},
  )
  first = preview.run(config, 12, 0)
  later = preview.run(config, 4, 1)
  assert len(first) == 12 and max(len(lines) for _, lines in first) == 2
  for (one, _), (other, _) in zip(first[8:], later, strict=True):
    np.testing.assert_array_equal(one, other)


def test_small_pictures_are_enlarged(tmp_path):
  """Each is drawn once, in a grid."""
  pixels = np.full((8, 12, 3), 200, np.uint8)
  preview.draw([(pixels, ['cat'])] * 5, str(tmp_path / 'grid.png'))
  drawn = cv2.imread(str(tmp_path / 'grid.png'))
  count = (drawn == 200).all(-1).sum()
  assert count == pytest.approx(5 * 130 * 195, rel=0.2)
