"""Tests of weights at other sizes against the projects that they are from."""

import logging
import math
import re

import numpy as np
import pytest
import references
import safetensors.numpy
from references import (
  PATCH,
  SIZE,
  same_results,
  timm_file,
  timm_vit,
)

from tests.faults.counts import further
from vit_jax import load_pretrained
from vit_jax.errors import UserError

torch = references.torch
GRID = SIZE // PATCH


def resized(table, image_size, **options):
  """Returns the patches' positions `[t, d]`, resized by torch."""
  maps = torch.from_numpy(table.reshape(1, GRID, GRID, -1)).permute(0, 3, 1, 2)
  maps = torch.nn.functional.interpolate(maps, mode='bicubic', **options)
  grid = tuple(side // PATCH for side in image_size)
  assert maps.shape[2:] == grid
  return maps.permute(0, 2, 3, 1).reshape(math.prod(grid), -1).numpy()


def with_offset(rows, columns):
  return dict(scale_factor=((rows + 0.1) / GRID, (columns + 0.1) / GRID))


# Files of the repositories, and the call in each of them.
REPOSITORIES = {
  'dino_deitsmall16_pretrain.safetensors': with_offset,
  'dinov2_vits14_pretrain.safetensors': with_offset,
  'dinov2_vits14_reg4_pretrain.safetensors': lambda *grid: dict(
    size=grid, antialias=True
  ),
  'mae_pretrain_vit_base.safetensors': lambda *grid: dict(size=grid),
  'deit_3_finetuned.safetensors': lambda *grid: dict(size=grid),
}


@pytest.mark.slow
@pytest.mark.parametrize('size', [(28, 16), *further((12, 12))])
@pytest.mark.parametrize(
  'name',
  [*REPOSITORIES][1:3]
  + further('dino_deitsmall16_pretrain.safetensors', *[*REPOSITORIES][3:]),
)
def test_positions_of_repositories_are_resized_as_there(tmp_path, name, size):
  arrays = references.state(timm_vit())
  if 'reg4' in name:
    arrays['register_tokens'] = np.zeros((1, 2, references.WIDTH), np.float32)
  safetensors.numpy.save_file(arrays, tmp_path / name)
  loaded = load_pretrained(
    str(tmp_path / name), image_size=size, num_heads=references.HEADS
  )
  grid = tuple(side // PATCH for side in size)
  actual = loaded.params['position']['embedding'][0, -math.prod(grid) :]
  options = REPOSITORIES[name](*grid)
  expected = resized(arrays['pos_embed'][0, 1:], size, **options)
  np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.slow
def test_a_given_method_wins(tmp_path, caplog):
  path = timm_file(tmp_path, timm_vit())
  keys = dict(image_size=12, num_heads=references.HEADS)
  with caplog.at_level(logging.INFO, 'vit_jax'):
    given = load_pretrained(path, position_resize='aligned', **keys)
  assert 'interpolated (position_resize: aligned)' in caplog.text
  default = load_pretrained(path, **keys)
  tables = [x.params['position']['embedding'] for x in (given, default)]
  assert abs(tables[0] - tables[1]).max() > 1e-3
  with pytest.raises(UserError, match='position_resize.*nearest'):
    load_pretrained(path, position_resize='nearest', **keys)


GAP = dict(class_token=False, global_pool='avg')


@pytest.mark.parametrize(
  'grid, keys',
  [
    ((2, 8), GAP),  # as many as 4x4
    *further([(2, 8), {}], [(6, 8), {}]),  # 7x7 with the class token
  ],
)
def test_a_rectangle_is_not_taken_for_a_square(tmp_path, grid, keys):
  """The remedy of the message gives timm's logits."""
  size = grid[0] * PATCH, grid[1] * PATCH
  reference = timm_vit(img_size=size, **keys)
  path = timm_file(tmp_path, reference)
  with pytest.raises(UserError, match=re.escape(f'{size} pixels')) as error:
    load_pretrained(path, image_size=size, num_heads=references.HEADS)
  remedy = str(error.value)
  config = remedy[remedy.index('{') : remedy.rindex('}') + 1]
  (tmp_path / 'config.json').write_text(config)
  same_results(path, reference, size, num_heads=references.HEADS)


def test_a_square_without_positions_of_other_tokens_is_resized(tmp_path):
  """As in DeiT-III; other sizes than the ambiguous one are accepted."""
  reference = timm_vit(img_size=7 * PATCH, no_embed_class=True)
  path = timm_file(tmp_path, reference)
  loaded = load_pretrained(path, image_size=20, num_heads=references.HEADS)
  assert loaded.params['position']['embedding'].shape[1] == 25
