"""A Vision Transformer and a masked autoencoder in torch, from the papers.

Only names and shapes of parameters are those of vit_jax.
"""

import numpy as np
import torch
import torch.nn.functional as F

from vit_jax.arrays import tree

EPSILON = 1e-6


def leaves(params):
  """Converts nested arrays to float64 tensors that require gradients."""
  if isinstance(params, dict):
    return {key: leaves(each) for key, each in params.items()}
  return torch.tensor(np.asarray(params, np.float64), requires_grad=True)


def gradients(tensors):
  """Returns all gradients in the same nesting; zero if there is none."""
  if isinstance(tensors, dict):
    return {key: gradients(each) for key, each in tensors.items()}
  if tensors.grad is None:
    return np.zeros(tensors.shape)
  return tensors.grad.numpy()


def dense(x, p, inputs=1):
  return torch.tensordot(x, p['kernel'], inputs) + p.get('bias', 0)


def norm(x, p):
  return F.layer_norm(x, x.shape[-1:], p['scale'], p['bias'], EPSILON)


def block(x, stack, i, gelu, rotate=None):
  """Computes layer i of a stack; `rotate` is applied to queries and keys."""
  attention, mlp = stack['attention'], stack['mlp']

  def at(p):
    return {key: leaf[i] for key, leaf in p.items()}

  y = norm(x, at(stack['norm1']))
  names = 'query', 'key', 'value'
  parts = [dense(y, at(attention[n])).transpose(1, 2) for n in names]
  if rotate is not None:
    parts[:2] = map(rotate, parts[:2])
  y = F.scaled_dot_product_attention(*parts)
  y = dense(y.transpose(1, 2), at(attention['out']), 2)
  x = x + (y * stack['scale1'][i] if 'scale1' in stack else y)
  y = dense(norm(x, at(stack['norm2'])), at(mlp['fc1']))
  y = dense(F.gelu(y, approximate=gelu), at(mlp['fc2']))
  return x + (y * stack['scale2'][i] if 'scale2' in stack else y)


def encoder(x, p, gelu='none', rotations=None):
  for i in range(len(p['layers']['norm1']['scale'])):
    x = block(x, p['layers'], i, gelu, rotations and rotations[i])
  return norm(x, p['norm'])


def patches(images, side):
  """Converts `[n, y, x, c]` to `[n, patches, side · side · c]` by unfold."""
  n, *_, channels = images.shape
  cut = images.unfold(1, side, side).unfold(2, side, side)
  # [n, rows, columns, c, y, x] → pixels as (y, x, c)
  return cut.permute(0, 1, 2, 4, 5, 3).reshape(n, -1, side * side * channels)


def embed(images, p, side):
  """Multiplies patches with the kernel `[y, x, c, d]`."""
  kernel = p['kernel'].reshape(-1, p['kernel'].shape[-1])
  return patches(images, side) @ kernel + p['bias']


def sincos(rows, columns, width, last_included=False):
  """Computes MAE's table: column, then row, each sines then cosines.

  In big_vision, the last frequency is 1/10000 (`last_included`).
  """
  quarter = width // 4
  periods = 10000 ** (np.arange(quarter) / (quarter - last_included))
  y, x = np.mgrid[:rows, :columns].reshape(2, -1, 1) / periods
  return torch.tensor(np.hstack([np.sin(x), np.cos(x), np.sin(y), np.cos(y)]))


def assert_gradients(found, tensors):
  """Checks that gradients agree to 1e-5 of their largest entry."""
  expected, found = tree.flatten(gradients(tensors)), tree.flatten(found)
  assert expected.keys() == found.keys()
  for path, leaf in found.items():
    # Keys have no bias gradient, because it shifts all logits of a row equally.
    known = path.replace('key', 'query') if 'key/bias' in path else path
    scale = np.abs(expected[known]).max()
    assert scale > 0, path
    np.testing.assert_allclose(
      leaf, expected[path], rtol=0, atol=1e-5 * scale, err_msg=path
    )
