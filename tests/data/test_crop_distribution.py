"""Tests of the distribution of crops against TensorFlow's function."""

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from tests.faults.counts import further
from vit_jax.data.augment.transforms import TrainTransform

DRAWS = 20_000
# Seeds are fixed, so the tests are deterministic.
UNLIKELY = 1e-4


def tensorflows(height, width, transform):
  """Draws boxes with TensorFlow: (y, x, height, width)."""

  def draw(number):
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
      (height, width, 3),
      bounding_boxes=tf.zeros([1, 0, 4]),
      seed=tf.stack([0, tf.cast(number, tf.int32)]),
      min_object_covered=0.0,  # without objects
      aspect_ratio_range=(transform.min_aspect, transform.max_aspect),
      area_range=(transform.min_area, transform.max_area),
      max_attempts=10,
      use_image_if_no_bounding_boxes=True,
    )
    return tf.concat([begin[:2], size[:2]], axis=0)

  boxes = tf.data.Dataset.range(DRAWS).map(draw).batch(DRAWS)
  return next(iter(boxes)).numpy()


def ours(height, width, transform):
  rng = np.random.default_rng(0)
  boxes = [transform._inception_box(height, width, rng) for _ in range(DRAWS)]
  return np.array(boxes)


def place(start, length, whole, rng, slack):
  """Returns a box's relative position, which should be uniform in [0, 1)."""
  room = np.maximum(whole - length + slack, 1)
  return (start + rng.random(len(start))) / room


@pytest.mark.slow
@pytest.mark.parametrize(
  'size, settings',
  [
    ((300, 400), {}),
    *further(
      [(333, 333), dict(min_area=0.3, max_area=0.7, min_aspect=0.5)],
      [(64, 300), dict(min_area=0.2, max_aspect=2.0)],  # not always cropped
    ),
  ],
)
def test_boxes_have_tensorflows_distribution(size, settings):
  """Compares sizes, positions and their combinations (Kolmogorov-Smirnov).

  Of the `whole - length + 1` positions, TensorFlow never draws the last.
  """
  height, width = size
  transform = TrainTransform((8, 8), **settings)
  figures = []
  for make, slack in ((ours, 1), (tensorflows, 0)):
    y, x, h, w = make(*size, transform).T
    rng = np.random.default_rng(slack)
    down = place(y, h, height, rng, slack)
    right = place(x, w, width, rng, slack)
    broad, high = h * (w > h), np.where(2 * h > height, down, -right)
    figures.append([h * w, w / h, h, w, down, right, down + right, broad, high])
  for number, pair in enumerate(zip(*figures, strict=True)):
    result = scipy.stats.ks_2samp(*pair, method='asymp')
    assert result.pvalue > UNLIKELY, (number, result)
