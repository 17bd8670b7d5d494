"""The model of configs/vit5.py against an implementation in PyTorch.

The reference is written from the paper and the description of the authors'
code: registers follow the patches, and a rotation's plane consists of two
adjacent channels.
"""

import operator

import jax
import numpy as np
import torch

from tests.objectives import torch_vit
from tests.objectives.torch_vit import dense
from vit_jax.config import loading, schema
from vit_jax.models import contract

HEADS, CHANNELS, REGISTERS = 2, 8, 4


def model_and_params(side):
  section = loading.load('configs/vit5.py:model=S').model.to_dict()
  section |= dict(
    variant=None, patch_size=4, width=16, depth=2, mlp_dim=24, num_heads=2
  )
  section |= dict(dtype='float32', rope_grid=side // 4, drop_path=0.0)
  section |= dict(drop_path_first=0.0, pixels='symmetric')
  model, rng = schema.build('model', section, 5), np.random.default_rng(0)
  shapes = contract.abstract_params(model, (side, side))

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
  x = torch_vit.embed(torch.from_numpy(images), p['embedding'], 4)
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
    x = x + layer['scale1'] * dense(y, attention['out'], 2)
    y, mlp = rms(x, layer['norm2']['scale']), layer['mlp']
    y = dense(torch.nn.functional.gelu(dense(y, mlp['fc1'])), mlp['fc2'])
    x = x + layer['scale2'] * y
  return dense(rms(x, p['encoder']['norm']['scale'])[:, 0], p['head'])


def test_logits_equal_the_reference():
  side = 16
  model, params = model_and_params(side)
  images = np.random.default_rng(1).normal(size=(3, side, side, 3))
  images = images.astype(np.float32)
  ours = jax.jit(model.apply)({'params': params}, images)
  expected = reference(params, images, side).numpy()
  np.testing.assert_allclose(ours, expected, atol=1e-4)
  assert np.ptp(expected, axis=0).min() > 0.1
