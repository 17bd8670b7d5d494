"""Tests of the parameters of the models with axial attention."""

import numpy as np
import pytest
from tiny_vit import SIZES, abstract, noise_params

from examples import axial_resnet
from examples.axial_vit import Model
from vit_jax.arrays import tree


@pytest.mark.parametrize('variant, patch', [('B/16', 16), ('B/32', 32)])
def test_parameter_counts(variant, patch):
  """It has two encoders' parameters, axial positions and no class token."""
  layer = 4 * (768 * 768 + 768) + 2 * 768 * 3072 + 3072 + 768 + 4 * 768
  embedding = 3 * patch**2 * 768 + 768
  positions = 2 * (224 // patch) * 384
  head = 768 * 1000 + 1000
  expected = 2 * 12 * layer + embedding + positions + 2 * 768 + head
  assert tree.size(abstract(Model(1000, variant=variant))) == expected


RESNET = axial_resnet.Model(0, depths=(2, 2, 1), num_heads=2, dtype='float32')


@pytest.mark.parametrize(
  'model, old, new, axis, count',
  [
    (Model(0, **SIZES | dict(depth=2)), (8, 12), (20, 12), 0, 2),
    pytest.param(RESNET, (40, 64), (64, 96), -1, 10, marks=pytest.mark.slow),
  ],
  ids=['vit', 'resnet'],
)
def test_adapt_interpolates_positions_with_aligned_ends(
  model, old, new, axis, count
):
  """Those of a side of the same length do not change."""
  flat = tree.flatten(noise_params(model, old))
  sized = {
    k: np.asarray(leaf) for k, leaf in flat.items() if k.startswith(model.sized)
  }
  assert len(sized) == count
  expected = tree.flatten(abstract(model, new))
  for path, leaf in model.adapt(sized, old, new, 'aligned').items():
    assert leaf.shape == expected[path].shape, path
    ends = (x.take([0, -1], axis) for x in (leaf, sized[path]))
    np.testing.assert_allclose(*ends, rtol=1e-6)
    if leaf.shape == sized[path].shape:
      np.testing.assert_array_equal(leaf, sized[path])
