"""Tests of weights at other sizes against the projects that they are from."""

import functools
import logging
import math

import jax
import numpy as np
import pytest
import references
import safetensors.numpy
import scipy.ndimage
from references import (
  PATCH,
  SIZE,
  huggingface,
  same_results,
  timm,
  timm_file,
  timm_vit,
)
from test_huggingface import written

from tests.faults.counts import further
from vit_jax import load_pretrained
from vit_jax.arrays.pixels import IMAGENET, NONE
from vit_jax.errors import UserError
from vit_jax.weights import pretrained

torch = references.torch
# (height, width): larger and not square, larger, smaller
SIZES = [(28, 16), *further([(24, 24)], [(12, 12)])]
GRID = SIZE // PATCH


@pytest.mark.parametrize('size', SIZES)
def test_timms_weights_have_timms_logits(tmp_path, size):
  """timm's own filter of checkpoints resizes the positions there."""
  path = timm_file(tmp_path, timm_vit())
  there = timm_vit(img_size=size)
  state = timm.models.vision_transformer.checkpoint_filter_fn(
    timm_vit().state_dict(), there
  )
  there.load_state_dict(state)
  same_results(path, there, size, num_heads=references.HEADS)


@pytest.mark.parametrize('size', SIZES)
@pytest.mark.parametrize('kind', ['ViT', 'Dinov2WithRegisters'])
def test_weights_of_transformers_have_its_features(tmp_path, kind, size):
  """Smaller sizes of all types are in test_huggingface_types."""
  dino = kind.startswith('Dinov2')
  changes = dict(intermediate_size=None, mlp_ratio=2) if dino else {}
  reference = huggingface(kind, **changes)
  options = {} if dino else dict(interpolate_pos_encoding=True)
  same_results(
    written(tmp_path, reference),
    functools.partial(reference, **options),
    size,
    IMAGENET if dino else NONE,
  )


def resized(table, image_size, **options):
  """Returns the patches' positions `[t, d]`, resized by torch."""
  maps = torch.from_numpy(table.reshape(1, GRID, GRID, -1)).permute(0, 3, 1, 2)
  maps = torch.nn.functional.interpolate(maps, mode='bicubic', **options)
  grid = tuple(side // PATCH for side in image_size)
  assert maps.shape[2:] == grid
  return maps.permute(0, 2, 3, 1).reshape(math.prod(grid), -1).numpy()


# Files of the repositories, and the call in each of them.
REPOSITORIES = {
  'dino_deitsmall16_pretrain.safetensors': lambda rows, columns: dict(
    scale_factor=((rows + 0.1) / GRID, (columns + 0.1) / GRID)
  ),
  'dinov2_vits14_pretrain.safetensors': lambda rows, columns: dict(
    scale_factor=((rows + 0.1) / GRID, (columns + 0.1) / GRID)
  ),
  'mae_pretrain_vit_base.safetensors': lambda *grid: dict(size=grid),
  'deit_3_finetuned.safetensors': lambda *grid: dict(size=grid),
}


@pytest.mark.parametrize('size', SIZES)
@pytest.mark.parametrize('name', REPOSITORIES)
def test_positions_of_repositories_are_resized_as_there(tmp_path, name, size):
  arrays = references.state(timm_vit())
  safetensors.numpy.save_file(arrays, tmp_path / name)
  loaded = load_pretrained(
    str(tmp_path / name), image_size=size, num_heads=references.HEADS
  )
  actual = loaded.params['position']['embedding'][0, 1:]
  grid = tuple(side // PATCH for side in size)
  options = REPOSITORIES[name](*grid)
  expected = resized(arrays['pos_embed'][0, 1:], size, **options)
  np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_registers_of_dinov2_use_antialiasing(tmp_path):
  """As `interpolate_antialias=True` and `interpolate_offset=0.0` there."""
  arrays = references.state(timm_vit(reg_tokens=2, no_embed_class=True))
  arrays['register_tokens'] = arrays.pop('reg_token')
  cls = np.zeros((1, 1, references.WIDTH), np.float32)
  arrays['pos_embed'] = np.concatenate([cls, arrays['pos_embed']], 1)
  path = str(tmp_path / 'dinov2_vits14_reg4_pretrain.safetensors')
  safetensors.numpy.save_file(arrays, path)
  loaded = load_pretrained(path, image_size=12, num_heads=references.HEADS)
  actual = loaded.params['position']['embedding'][0, -9:]
  expected = resized(
    arrays['pos_embed'][0, 1:], (12, 12), size=(3, 3), antialias=True
  )
  np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize('size', SIZES)
def test_the_papers_weights_keep_the_papers_method(tmp_path, size, caplog):
  """Linear with aligned corners, by SciPy; the log names the method."""
  source = pretrained.find(timm_file(tmp_path, timm_vit()))
  source = source.changed(num_heads=references.HEADS)
  loaded = load_pretrained(source.path, num_heads=references.HEADS)
  about = {k: v for k, v in source.about.items() if k != 'position_resize'}
  path = str(tmp_path / 'own.npz')
  pretrained.save(path, loaded.params, about)
  with caplog.at_level(logging.INFO, 'vit_jax'):
    small = load_pretrained(path, image_size=size)
  assert 'interpolated (as in the project of the weights: aligned)' in (
    caplog.text
  )
  table = np.asarray(loaded.params['position']['embedding'])[0, 1:]
  grid = tuple(side // PATCH for side in size)
  zoom = (grid[0] / GRID, grid[1] / GRID, 1)
  expected = scipy.ndimage.zoom(table.reshape(GRID, GRID, -1), zoom, order=1)
  np.testing.assert_allclose(
    small.params['position']['embedding'][0, 1:],
    expected.reshape(math.prod(grid), -1),
    atol=1e-5,
  )


@pytest.mark.parametrize('ending', ['npz', 'safetensors'])
def test_converted_weights_keep_the_method(tmp_path, ending):
  """The notes of a written file contain it."""
  folder = written(tmp_path / 'there', huggingface('ViT'))
  there = load_pretrained(folder)
  path = str(tmp_path / f'weights.{ending}')
  pretrained.save(path, there.params, pretrained.find(folder).about)
  both = [load_pretrained(p, image_size=12).params for p in (folder, path)]
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *both)
  about = pretrained.find(path).about
  assert about['position_resize'] == 'bicubic_no_antialias'


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


def rectangular(tmp_path):
  """Writes weights for 6x8 patches and the class token: 49 = 7x7 positions."""
  reference = timm_vit(img_size=(6 * PATCH, 8 * PATCH))
  return reference, timm_file(tmp_path, reference)


def test_a_rectangle_is_not_taken_for_a_square(tmp_path):
  """The remedy of the message gives timm's logits."""
  size = 6 * PATCH, 8 * PATCH
  reference, path = rectangular(tmp_path)
  with pytest.raises(UserError, match=f'{size[0]}x{size[1]} pixels') as error:
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
