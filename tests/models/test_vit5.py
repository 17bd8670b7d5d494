"""The model of configs/vit5.py against an implementation in PyTorch.

The reference is written from the paper and the description of the authors'
code: registers follow the patches, and a rotation's plane consists of two
adjacent channels.
"""

import operator

import jax
import numpy as np
import pytest

from vit_jax.config import loading, schema

torch = pytest.importorskip('torch')
HEADS, CHANNELS, REGISTERS = 2, 8, 4


def model_and_params(side):
  section = loading.load('configs/vit5.py:model=S').model.to_dict()
  section |= dict(
    variant=None, patch_size=4, width=16, depth=2, mlp_dim=24, num_heads=2
  )
  section |= dict(dtype='float32', rope_grid=side // 4, drop_path=0.0)
  section |= dict(drop_path_first=0.0, pixels='symmetric')
  model = schema.build('model', section, 5)
  images = jax.ShapeDtypeStruct((1, side, side, 3), np.float32)
  shapes = jax.eval_shape(model.init, jax.random.key(0), images)['params']
  rng = np.random.default_rng(0)

  def random(path, leaf):
    mean = 1.0 if 'scale' in jax.tree_util.keystr(path) else 0.0
    return rng.normal(mean, 0.3, leaf.shape).astype(np.float32)

  return model, jax.tree_util.tree_map_with_path(random, shapes)


def rms(x, scale):
  return scale * x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def rotated(x, side, base):
  """Rotates adjacent channels of `[n, side * side, heads, channels]`."""
  count = CHANNELS // 4
  rates = base ** (-torch.arange(count) / count)
  at = torch.arange(side, dtype=torch.float32)
  rows = (at[:, None] * rates).repeat_interleave(side, 0)
  columns = (at[:, None] * rates).repeat(side, 1)
  angles = torch.cat([rows, columns], -1)[None, :, None]
  even, odd = x[..., 0::2], x[..., 1::2]
  turned = (
    even * angles.cos() - odd * angles.sin(),
    odd * angles.cos() + even * angles.sin(),
  )
  return torch.stack(turned, -1).flatten(-2)


def adjacent(x):
  """Reorders channels whose planes are i and i + channels / 2."""
  return x.unflatten(-1, (2, CHANNELS // 2)).transpose(-1, -2).flatten(-2)


def reference(params, images, side):
  p = jax.tree.map(lambda leaf: torch.from_numpy(np.array(leaf)), params)
  n, grid = len(images), side // 4
  x = torch.from_numpy(images).reshape(n, grid, 4, grid, 4, 3)
  x = x.permute(0, 1, 3, 2, 4, 5).reshape(n, grid * grid, 48)
  x = x @ p['embedding']['kernel'].reshape(48, 16) + p['embedding']['bias']
  x = x + p['position']['embedding'].reshape(1, grid * grid, 16)
  tokens = [
    p[name].reshape(1, -1, 16).expand(n, -1, -1)
    for name in ('cls', 'registers')
  ]
  x = torch.cat([tokens[0], x, tokens[1]], 1)
  layers = p['encoder']['layers']
  for i in range(2):
    layer = jax.tree.map(operator.itemgetter(i), layers)
    attention, y = layer['attention'], rms(x, layer['norm1']['scale'])
    q, k, v = (
      torch.einsum('ntd,dhc->nthc', y, attention[name]['kernel'])
      for name in ('query', 'key', 'value')
    )
    q, k = (
      rms(adjacent(z), adjacent(attention[f'{name}_norm']['scale']))
      for name, z in (('query', q), ('key', k))
    )
    q, k = (
      torch.cat(
        [
          z[:, :1],
          rotated(z[:, 1:-REGISTERS], grid, 1e4),
          rotated(z[:, -REGISTERS:], 2, 100.0),
        ],
        1,
      )
      for z in (q, k)
    )
    weights = torch.einsum('nthc,nshc->nhts', q, k) / CHANNELS**0.5
    y = torch.einsum('nhts,nshc->nthc', weights.softmax(-1), v)
    out = attention['out']
    y = torch.einsum('nthc,hcd->ntd', y, out['kernel']) + out['bias']
    x = x + layer['scale1'] * y
    y, mlp = rms(x, layer['norm2']['scale']), layer['mlp']
    y = y @ mlp['fc1']['kernel'] + mlp['fc1']['bias']
    y = torch.nn.functional.gelu(y) @ mlp['fc2']['kernel'] + mlp['fc2']['bias']
    x = x + layer['scale2'] * y
  x = rms(x, p['encoder']['norm']['scale'])[:, 0]
  return x @ p['head']['kernel'] + p['head']['bias']


def test_logits_equal_the_reference():
  side = 16
  model, params = model_and_params(side)
  images = np.random.default_rng(1).normal(size=(3, side, side, 3))
  images = images.astype(np.float32)
  ours = jax.jit(model.apply)({'params': params}, images)
  expected = reference(params, images, side).numpy()
  np.testing.assert_allclose(ours, expected, atol=1e-4)
  assert np.ptp(expected, axis=0).min() > 0.1
