"""Tests of axial attention in place of a convolution, and of its ResNet."""

import jax
import jax.numpy as jnp
import numpy as np
from tiny_vit import KEY, abstract

from examples.axial_resnet import AxialAttention, Model
from vit_jax.arrays import tree


def layer(axis):
  return AxialAttention(axis, 2, jnp.dtype('float32'))


def random_map(rows, columns):
  """Returns a small map, and parameters of attention along its rows.

  With small activations, the epsilon of norms, 1e-4 as in the authors' code,
  matters.
  """
  rng = np.random.default_rng(0)
  x = rng.normal(0, 0.01, (2, rows, columns, 32)).astype(np.float32)
  shapes = jax.eval_shape(layer('row').init, KEY, jnp.asarray(x))
  return x, jax.tree.map(
    lambda s: rng.normal(0, 0.5, s.shape).astype(np.float32), shapes
  )


def group_norm(x, p):
  """Normalizes one line, [positions, channels], over 32 groups."""
  groups = x.reshape(len(x), 32, -1)
  groups = groups - groups.mean((0, 2), keepdims=True)
  groups = groups / np.sqrt((groups**2).mean((0, 2), keepdims=True) + 1e-4)
  return groups.reshape(x.shape) * p['scale'] + p['bias']


def test_axial_attention_equals_numpy():
  """The reference loops over lines and pairs of positions."""
  x, variables = random_map(3, 5)
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
        logits = np.array(
          [
            query[o] @ key[k] + query[o] @ r[k][:8] + key[k] @ r[k][8:16]
            for k in range(5)
          ]
        )
        weights = np.exp(logits - logits.max())
        weights /= weights.sum()
        out[o, head] = sum(
          weights[k] * (value[k] + r[k][16:]) for k in range(5)
        )
    expected[n, row] = group_norm(out.reshape(5, 32), p['gn_out'])
  ours = jax.jit(layer('row').apply)(variables, x)
  np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=1e-4)


def test_parameter_count():
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
  assert tree.size(abstract(Model(1000, variant='R50'))) == expected
