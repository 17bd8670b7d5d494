"""Tests of the sizes of resized images and of random boxes.

The numbers are those of torchvision.
"""

import numpy as np
import pytest

from vit_jax.data.augment import transforms

# (height, width) of images after torchvision's Resize(256), computed with
# torchvision 0.28. The exact longer side is in the comment.
RESIZED_256 = {
  (375, 500): (256, 341),  # 341.33
  (500, 375): (341, 256),
  (480, 641): (256, 341),  # 341.87
  (707, 455): (397, 256),  # 397.78
  (449, 449): (256, 256),
  (100, 199): (256, 509),  # 509.44
  (3, 2): (384, 256),
  (767, 766): (256, 256),  # 256.33
}


@pytest.mark.parametrize('size', RESIZED_256)
def test_the_longer_side_is_rounded_down(size):
  """The shorter side is 256 pixels for a centre of 224."""
  found = transforms.shorter_side_size(*size, 224, 224, 224 / 256)
  assert found == RESIZED_256[size]


def test_the_shorter_side_is_the_quotient_of_whole_numbers():
  """A fraction that was computed from two sides gives the second one again.

  In floating point, the quotient may be slightly below a whole number.
  """
  for side in range(1, 400):
    for resized in (side, side + 1, side + 25, 2 * side):
      fraction = side / resized
      found = transforms.shorter_side_size(90, 90, side, side, fraction)
      assert found == (resized, resized)


@pytest.mark.parametrize('height, width', [(96, 224), (224, 96)])
def test_the_centre_fits_with_its_longer_side(height, width):
  """The image is resized to 256 pixels for a centre that is not square."""
  found = transforms.shorter_side_size(300, 400, height, width, 224 / 256)
  assert found == (256, 341)


class Counting(np.random.Generator):
  """A generator that counts its uniform numbers."""

  count = 0

  def uniform(self, *limits):
    self.count += 1
    return super().uniform(*limits)


@pytest.mark.parametrize(
  'size, box',
  [
    ((10, 1000), (0, 493, 10, 13)),
    ((1000, 10), (493, 0, 13, 10)),
  ],
)
def test_boxes_that_do_not_fit_are_replaced_by_the_centre(size, box):
  """Ten pairs of area and aspect ratio are drawn before."""
  rng = Counting(np.random.PCG64(0))
  assert transforms.random_box(*size, (1.0, 1.0), rng) == box
  assert rng.count == 2 * 10


def test_boxes_have_all_positions():
  """A box of 2x2 pixels has nine positions in an image of 4x4 pixels."""
  rng = np.random.default_rng(0)
  boxes = {
    transforms.random_box(4, 4, (0.25, 0.25), rng, (1.0, 1.0))
    for _ in range(300)
  }
  assert boxes == {(y, x, 2, 2) for y in range(3) for x in range(3)}
