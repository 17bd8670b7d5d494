"""Tests of images of other sizes than the parameters, against torch."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_vit import SIZES, abstract, images_of, noise_params

from tests.faults.counts import further
from vit_jax.arrays import tree
from vit_jax.models.vit import Model

MADE_FOR, OTHER = (28, 28), (12, 20)  # pixels; grids of 7x7 and 3x5
CASES = [
  ('learned', 'stem', {}),
  ('learned', 'stem', dict(prefix_positions=False)),
  ('learned', 'layers', {}),
  ('2d', 'shared', {}),
]


def model_of(kind, at, **options):
  return Model(
    5, **SIZES, position=kind, position_at=at, registers=1, **options
  )


def interpolated(table, old, new, offset):
  """Interpolates embeddings `[…, patches, d]` by torch's bicubic method."""
  width = table.shape[-1]
  maps = table.reshape(-1, *old, width).permute(0, 3, 1, 2)
  more = np.broadcast_to(offset, 2)
  ratios = [float((n + m) / o) for n, m, o in zip(new, more, old, strict=True)]
  maps = F.interpolate(maps, scale_factor=ratios, mode='bicubic')
  assert tuple(maps.shape[-2:]) == tuple(new)
  maps = maps.permute(0, 2, 3, 1).reshape(*table.shape[:-2], -1, width)
  return maps


def for_other(params, offset):
  """Returns parameters for a plain model of size `OTHER`, made by torch."""
  flat = dict(tree.flatten(params))
  for path, leaf in flat.items():
    name, table = path.rpartition('/')[2], torch.tensor(np.asarray(leaf))
    if path.endswith('position/embedding'):
      first = table.shape[-2] - 49
      patches = interpolated(table[..., first:, :], (7, 7), (3, 5), offset)
      table = torch.cat([table[..., :first, :], patches], -2)
    elif name in ('rows', 'columns'):
      new = {'rows': 3, 'columns': 5}[name]
      # Of equal columns, so that only the one axis is interpolated.
      table = table[:, None].expand(7, 7, -1).reshape(49, -1)
      table = interpolated(table, (7, 7), (new, 7), (offset, 0))
      table = table.reshape(new, 7, -1)[:, 0]
    flat[path] = jnp.asarray(table.numpy())
  return tree.unflatten(flat)


@pytest.mark.slow
@pytest.mark.parametrize('offset', [0.1, *further(0.0)])
@pytest.mark.parametrize(
  'kind, at, options', [*CASES[::3], *further(*map(list, CASES[1:3]))]
)
def test_learned_positions_are_interpolated_as_in_dino(
  kind, at, options, offset
):
  """The plain model with torch's interpolation gives the same logits.

  The parameters and the results of the own size do not change.
  """
  model = model_of(kind, at, **options)
  free = model.at_sizes(MADE_FOR, offset)
  assert abstract(free, OTHER) == abstract(model, MADE_FOR)
  params = noise_params(model, MADE_FOR)
  same, other = images_of(2, *MADE_FOR), images_of(2, *OTHER)

  def logits(model, params, images):
    return model.apply({'params': params}, images)

  np.testing.assert_array_equal(
    logits(free, params, same), logits(model, params, same)
  )
  ours = logits(free, params, other)
  expected = logits(model, for_other(params, offset), other)
  # Float32 on both sides; logits of order one
  np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)
  wrong = logits(model, for_other(params, 0.1 - offset), other)
  assert np.abs(wrong - ours).max() > 1e-3
