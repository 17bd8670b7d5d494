"""Tests of Swin Transformers against timm and Hugging Face."""

import json

import jax
import jax.numpy as jnp
import minimal_config
import numpy as np
import pytest
import references
from references import huggingface, same_results, timm_file, timm_vit, torch

from tests.faults.counts import further
from vit_jax import load_pretrained
from vit_jax.arrays import sharding, tree
from vit_jax.arrays.pixels import IMAGENET
from vit_jax.errors import UserError
from vit_jax.models.contract import abstract_params
from vit_jax.models.swin import resize_bias
from vit_jax.weights import architecture, pretrained, resizing
from vit_jax.weights.formats import swin

SIZES = dict(width=24, depths=(2, 2, 2), num_heads=2, window_size=4)
AUTHORS = dict(name='swin', dtype='float32', **SIZES)
TIMM = AUTHORS | dict(window_rule='timm')
HEADS = [2, 4, 8]
MEAN = (0.5, 0.5, 0.5)
PLAIN = dict(mean=[*MEAN], std=[*MEAN])  # nothing is folded


def randomize(model, scale=0.2):
  """Sets random parameters of a useful scale and the evaluation mode."""
  torch.manual_seed(0)
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      parameter.normal_(0, scale)
      if 'patch_embed' in name and 'proj' in name:
        parameter *= 0.01  # LayerNorm's ε matters if the variance is small
  return model.eval()


SMALL = dict(
  embed_dim=SIZES['width'],
  depths=[*SIZES['depths']],
  num_heads=HEADS,
  window_size=SIZES['window_size'],
)


def timm_swin_transformer(image_size):
  keys = SMALL | dict(img_size=image_size, drop_path_rate=0.0, depth=None)
  return randomize(timm_vit('swin_tiny_patch4_window7_224', **keys))


def hugging_face_swin():
  keys = SMALL | dict(image_size=64, patch_size=4, num_labels=7)
  return randomize(huggingface('SwinForImageClassification', **keys))


def saved_there(folder, model):
  """Writes a directory as the library does, for pixels in [-1, 1]."""
  model.save_pretrained(folder)
  settings = dict(image_mean=MEAN, image_std=MEAN, size=64, resample=3)
  (folder / 'preprocessor_config.json').write_text(json.dumps(settings))
  return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
  'library, size',
  [
    ('timm', (76, 92)),
    ('transformers', (76, 92)),
    *further(['timm', (48, 48)], ['timm', (24, 24)], ['timm', (68, 68)]),
  ],
)
def test_logits_and_blocks_equal_the_library(tmp_path, library, size):
  """Maps that windows fill, do not fill, and small ones.

  76x92 pixels have maps of 19x23, 10x12 and 5x6: timm pads after the shift,
  Hugging Face before it, as the authors' code for detection does. At 48 pixels,
  the second map is 6x6, padded to 8x8. At 24, the second is 3x3, smaller than a
  window, and the third is 2x2, from an odd map.
  """
  if library == 'timm':
    theirs = timm_swin_transformer(size)
    stages = theirs.layers
    config = dict(
      architecture='swin_tiny',
      model_args=dict(num_heads=HEADS),  # of all stages, as timm writes them
      pretrained_cfg=dict(input_size=(3, *size), **PLAIN),
    )
    path = timm_file(tmp_path, theirs, config)
  else:
    theirs = hugging_face_swin()
    stages = theirs.swin.encoder.layers
    path = saved_there(tmp_path, theirs)
  source = pretrained.find(path)
  assert source.description.model == (TIMM if library == 'timm' else AUTHORS)
  assert source.image_size == (size if library == 'timm' else (64, 64))
  blocks = [block for stage in stages for block in stage.blocks]
  assert len(blocks) == 6
  same_results(path, theirs, size, limit=1e-5, blocks=blocks)


@pytest.mark.slow
def test_gradients_equal_timm(tmp_path):
  """They are compared for every parameter, with timm's names."""
  theirs, images = timm_swin_transformer(48), references.images(48)
  model, params = load_pretrained(timm_file(tmp_path, theirs), **PLAIN)
  weights = np.random.default_rng(1).normal(size=(3, 7)).astype(np.float32)
  logits = theirs(torch.tensor(images).permute(0, 3, 1, 2))
  (logits * torch.tensor(weights)).sum().backward()

  def loss(params):
    return (model.apply({'params': params}, images) * weights).sum()

  grads = tree.flatten(jax.device_get(jax.jit(jax.grad(loss))(params)))
  ours = dict(swin.NAMES.export(grads))
  for name, parameter in theirs.named_parameters():
    expected = parameter.grad.numpy()
    scale = max(np.abs(expected).max(), 1.0)
    np.testing.assert_allclose(
      ours[name], expected, rtol=0, atol=1e-4 * scale, err_msg=name
    )


@pytest.mark.slow
def test_files_of_the_authors_are_read(tmp_path):
  """Merging is at the end of stages, and buffers give the size."""
  model = timm_swin_transformer(64)
  path = timm_file(tmp_path / 'a', model)
  renamed = {}
  for name, array in references.state(model).items():
    name = name.replace('head.fc', 'head')
    for stage in (1, 2):
      name = name.replace(
        f'layers.{stage}.downsample', f'layers.{stage - 1}.downsample'
      )
    renamed[name] = array
  mask, index = np.zeros((49, 16, 16)), np.zeros((16, 16))
  renamed['layers.0.blocks.1.attn_mask'] = mask
  renamed['mask_token'] = np.zeros((1, 1, 16))  # of SimMIM
  renamed['layers.0.blocks.0.attn.relative_position_index'] = index
  file = str(tmp_path / 'authors.pth')
  torch.save({'model': {k: torch.tensor(v) for k, v in renamed.items()}}, file)
  source = pretrained.find(file)
  assert source.image_size == (112, 112)
  assert source.description.model == AUTHORS
  assert source.description.statistics == IMAGENET
  params = [load_pretrained(each).params for each in (path, file)]
  jax.tree.map(np.testing.assert_array_equal, *params)


@pytest.mark.parametrize('old, new', [(7, 12), (12, 7), (4, 3)])
def test_resized_bias_tables_equal_torch(old, new):
  """`interpolate(mode='bicubic')`, as in the authors' code."""
  table = np.random.default_rng(0).normal(size=(2, (2 * old - 1) ** 2, 3))
  table = table.astype(np.float32)
  maps = torch.tensor(table).reshape(2, 2 * old - 1, 2 * old - 1, 3)
  expected = torch.nn.functional.interpolate(
    maps.permute(0, 3, 1, 2), (2 * new - 1, 2 * new - 1), mode='bicubic'
  )
  expected = expected.permute(0, 2, 3, 1).reshape(2, -1, 3).numpy()
  ours = resize_bias(jnp.asarray(table), new)
  np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_another_window_is_named(tmp_path):
  """The message contains the shapes in the file and in the model.

  Fine-tuning resizes the tables if a config sets another window.
  """
  path = timm_file(tmp_path / 'there', timm_swin_transformer(64))
  words = r'bias_table.*\[49, 2\] in the file, \[121, 2\].*(.*\n)*.*leave out'
  with pytest.raises(UserError, match=words) as error:
    load_pretrained(path, image_size=96, window_size=6, num_heads=2)
  assert path in str(error.value)
  loaded, source = load_pretrained(path, window_size=4), pretrained.find(path)
  mesh = sharding.make_mesh(jax.devices()[:1])
  model = source.changed(window_size=6).model()
  adapted = resizing.adapt(loaded.params, model, source, (96, 96), None, mesh)
  assert tree.shapes(adapted) == tree.shapes(abstract_params(model, (96, 96)))
  for given, window in ((7, SIZES['window_size']), (8, 8)):  # 7 is the default
    section = dict(name='swin', window_size=given)
    section |= dict(width=None, depths=None, num_heads=None)
    config = minimal_config.completed(model=section)
    assert architecture.adopt(config, source).model.window_size == window
