"""Tests of weights at other sizes against the projects that they are from."""

import logging
import re

import numpy as np
import pytest
import references
import safetensors.numpy
from references import PATCH, SIZE, same_results, timm_file, timm_vit, torch

from tests.faults.counts import further
from vit_jax import load_pretrained
from vit_jax.errors import UserError

GRID = SIZE // PATCH


def with_offset(rows, columns):
  return dict(scale_factor=((rows + 0.1) / GRID, (columns + 0.1) / GRID))


def plain(rows, columns):
  return dict(size=(rows, columns))


def antialiased(rows, columns):
  return dict(size=(rows, columns), antialias=True)


# Files of the repositories, and the arguments of `interpolate` in each of them
REPOSITORIES = {
  'dinov2_vits14_pretrain.safetensors': with_offset,
  'dinov2_vits14_reg4_pretrain.safetensors': antialiased,
  'dino_deitsmall16_pretrain.safetensors': with_offset,
  'mae_pretrain_vit_base.safetensors': plain,
  'deit_3_finetuned.safetensors': plain,
}


@pytest.mark.slow
@pytest.mark.parametrize('size', [(28, 16), *further((12, 12))])
@pytest.mark.parametrize(
  'name', [*REPOSITORIES][:2] + further(*[*REPOSITORIES][2:])
)
def test_positions_of_repositories_are_resized_as_there(tmp_path, name, size):
  arrays = references.state(timm_vit())
  if 'reg4' in name:
    arrays['register_tokens'] = np.zeros((1, 2, references.WIDTH), np.float32)
  safetensors.numpy.save_file(arrays, tmp_path / name)
  loaded = load_pretrained(
    str(tmp_path / name), image_size=size, num_heads=references.HEADS
  )
  rows, columns = (side // PATCH for side in size)
  maps = arrays['pos_embed'][0, 1:].reshape(1, GRID, GRID, -1)
  expected = torch.nn.functional.interpolate(
    torch.from_numpy(maps).permute(0, 3, 1, 2),
    mode='bicubic',
    **REPOSITORIES[name](rows, columns),
  )
  actual = loaded.params['position']['embedding'][0, -rows * columns :]
  np.testing.assert_allclose(
    actual.reshape(rows, columns, -1),
    expected[0].permute(1, 2, 0).numpy(),
    atol=1e-5,
  )


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
