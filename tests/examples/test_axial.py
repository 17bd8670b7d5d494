"""Tests of the models with axial attention."""

import jax
import numpy as np
import pytest
from tiny_vit import KEY, SIZES, abstract, noise_params

from examples import axial_resnet
from examples.axial_vit import Model
from vit_jax.arrays import tree


def group_norm(x, p):
  """Normalizes one line, [positions, channels], over 32 groups."""
  groups = x.reshape(len(x), 32, -1)
  groups = groups - groups.mean((0, 2), keepdims=True)
  groups = groups / np.sqrt((groups**2).mean((0, 2), keepdims=True) + 1e-4)
  return groups.reshape(x.shape) * p['scale'] + p['bias']


def test_axial_attention_equals_numpy():
  """The reference loops over lines and pairs of positions.

  With small activations, the epsilon of norms, 1e-4 as in the authors' code,
  matters.
  """
  layer = axial_resnet.AxialAttention('row', 2, np.dtype('float32'))
  rng = np.random.default_rng(0)
  x = rng.normal(0, 0.01, (2, 3, 5, 32)).astype(np.float32)
  variables = jax.tree.map(
    lambda s: rng.normal(0, 0.5, s.shape).astype(np.float32),
    jax.eval_shape(layer.init, KEY, x),
  )
  p = variables['params']
  expected = np.zeros_like(x)
  for n, row in np.ndindex(2, 3):
    qkv = group_norm(x[n, row] @ p['qkv'].reshape(32, 64), p['gn_qkv'])
    out = np.zeros((5, 2, 16))
    for head in range(2):
      each = qkv[:, 32 * head : 32 * (head + 1)]
      query, key, value = each[:, :8], each[:, 8:16], each[:, 16:]
      for o in range(5):
        r = [p['relative'][:, 4 + other - o] for other in range(5)]
        logits = [
          query[o] @ key[k] + query[o] @ r[k][:8] + key[k] @ r[k][8:16]
          for k in range(5)
        ]
        weights = np.exp(logits - np.max(logits))
        weights /= weights.sum()
        out[o, head] = sum(
          weights[k] * (value[k] + r[k][16:]) for k in range(5)
        )
    expected[n, row] = group_norm(out.reshape(5, 32), p['gn_out'])
  ours = jax.jit(layer.apply)(variables, x)
  np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize('variant, patch', [('B/16', 16), ('B/32', 32)])
def test_parameter_counts_of_the_vit(variant, patch):
  """It has two encoders' parameters, axial positions and no class token."""
  layer = 4 * (768 * 768 + 768) + 2 * 768 * 3072 + 3072 + 768 + 4 * 768
  embedding = 3 * patch**2 * 768 + 768
  positions = 2 * (224 // patch) * 384
  head = 768 * 1000 + 1000
  expected = 2 * 12 * layer + embedding + positions + 2 * 768 + head
  assert tree.size(abstract(Model(1000, variant=variant))) == expected


def test_parameter_count_of_the_resnet():
  """The model has the parameters that its 50 layers add up to."""
  expected = 7 * 7 * 3 * 64 + 2 * 64
  before, side = 64, 56
  for i, depth in enumerate((3, 4, 6, 3)):
    inner, outer = 64 * 2**i, 256 * 2**i
    for unit in range(depth):
      expected += before * inner + 2 * inner + inner * outer + 2 * outer
      lines = inner * 2 * inner + 2 * inner // 8 * (2 * side - 1)
      expected += 2 * (lines + 2 * 2 * inner + 2 * inner)
      if unit == 0:
        expected += before * outer + 2 * outer
        side = side // 2 if i else side
      before = outer
  expected += 2048 * 1000 + 1000
  assert (
    tree.size(abstract(axial_resnet.Model(1000, variant='R50'))) == expected
  )


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
