"""Tests of the Vision Transformer with axial attention."""

import jax
import numpy as np
import pytest
from tiny_vit import SIZES, abstract, images_of, noise_params

from examples.axial_vit import Model
from vit_jax.arrays import tree

TINY = SIZES | dict(depth=2)


def run(model, params, images, *inputs):
  """Runs `predict`, compiled, with all intermediate results."""
  want = ('tokens', 'layers')
  predict = jax.jit(
    lambda *args: model.apply(
      {'params': args[0]}, *args[1:], want=want, method='predict'
    )
  )
  return predict(params, images, *inputs or (None,))


@pytest.mark.parametrize('variant, patch', [('B/16', 16), ('B/32', 32)])
def test_parameter_counts(variant, patch):
  """It has two encoders' parameters, axial positions and no class token."""
  layer = 4 * (768 * 768 + 768) + 2 * 768 * 3072 + 3072 + 768 + 4 * 768
  embedding = 3 * patch**2 * 768 + 768
  positions = 2 * (224 // patch) * 384
  head = 768 * 1000 + 1000
  expected = 2 * 12 * layer + embedding + positions + 2 * 768 + head
  assert tree.size(abstract(Model(1000, variant=variant))) == expected


def norm(x, p):
  x = x - x.mean(-1, keepdims=True)
  x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
  return x * p['scale'] + p['bias']


def attend(x, p):
  """Computes multi-head attention of the tokens of a line, [tokens, d]."""
  parts = {
    name: np.einsum('td,dhc->htc', x, p[name]['kernel'])
    + p[name]['bias'][:, None]
    for name in ('query', 'key', 'value')
  }
  logits = parts['query'] @ parts['key'].swapaxes(1, 2)
  weights = np.exp(logits / np.sqrt(parts['query'].shape[-1]))
  weights /= weights.sum(-1, keepdims=True)
  y = weights @ parts['value']
  return np.einsum('htc,hcd->td', y, p['out']['kernel']) + p['out']['bias']


def mlp(x, p):
  x = x @ p['fc1']['kernel'] + p['fc1']['bias']
  x = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
  return x @ p['fc2']['kernel'] + p['fc2']['bias']


def test_model_equals_numpy():
  """Tokens attend to those of their row, then to those of their column."""
  model = Model(5, **TINY)
  params, images = noise_params(model, (8, 12)), images_of(2, 8, 12)
  out = jax.device_get(run(model, params, images))
  params = jax.device_get(params)
  rows, columns = params['position']['rows'], params['position']['columns']
  x = np.zeros((2, 2, 3, 16))
  for n, y, z in np.ndindex(2, 2, 3):
    patch = images[n, 4 * y : 4 * y + 4, 4 * z : 4 * z + 4]
    x[n, y, z] = np.einsum('yxc,yxcd->d', patch, params['embedding']['kernel'])
    x[n, y, z] += params['embedding']['bias']
    x[n, y, z] += np.concatenate([rows[y], columns[z]])
  layers = params['encoder']['layers']
  for i in range(4):
    kind = ('row', 'column')[i % 2]
    block = jax.tree.map(lambda leaf, i=i: leaf[i // 2], layers[kind])
    normed = norm(x, block['norm1'])
    for n in range(2):
      if kind == 'row':
        for y in range(2):
          x[n, y] += attend(normed[n, y], block['attention'])
      else:
        for z in range(3):
          x[n, :, z] += attend(normed[n, :, z], block['attention'])
    x += mlp(norm(x, block['norm2']), block['mlp'])
    np.testing.assert_allclose(
      out['layers'][:, i], x.reshape(2, 6, 16), rtol=1e-4, atol=1e-4
    )
  tokens = norm(x, params['encoder']['norm']).reshape(2, 6, 16)
  np.testing.assert_allclose(out['tokens'], tokens, rtol=1e-4, atol=1e-4)
  logits = tokens.mean(1) @ params['head']['kernel'] + params['head']['bias']
  np.testing.assert_allclose(out['logits'], logits, rtol=1e-4, atol=1e-4)


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
