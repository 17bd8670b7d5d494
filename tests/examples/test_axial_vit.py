"""Tests of the Vision Transformer with axial attention."""

import numpy as np
import pytest
from tiny_vit import SIZES, abstract, noise_params

from examples.axial_vit import Model
from vit_jax.arrays import tree

TINY = SIZES | dict(depth=2)


@pytest.mark.parametrize('variant, patch', [('B/16', 16), ('B/32', 32)])
def test_parameter_counts(variant, patch):
  """It has two encoders' parameters, axial positions and no class token."""
  layer = 4 * (768 * 768 + 768) + 2 * 768 * 3072 + 3072 + 768 + 4 * 768
  embedding = 3 * patch**2 * 768 + 768
  positions = 2 * (224 // patch) * 384
  head = 768 * 1000 + 1000
  expected = 2 * 12 * layer + embedding + positions + 2 * 768 + head
  assert tree.size(abstract(Model(1000, variant=variant))) == expected


def test_adapt_interpolates_rows_and_columns():
  """They are interpolated separately, with aligned ends."""
  model = Model(0, **TINY)
  flat = tree.flatten(noise_params(model, (8, 12)))
  sized = {
    k: np.asarray(leaf) for k, leaf in flat.items() if k.startswith(model.sized)
  }
  expected = tree.flatten(abstract(model, (20, 12)))
  adapted = model.adapt(sized, (8, 12), (20, 12), 'aligned')
  for path, leaf in adapted.items():
    assert leaf.shape == expected[path].shape
    np.testing.assert_allclose(leaf[[0, -1]], sized[path][[0, -1]], rtol=1e-6)
  np.testing.assert_array_equal(
    adapted['position/columns'], sized['position/columns']
  )
