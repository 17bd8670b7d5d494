"""Tests of every row of the table of timm against a small model of the row."""

import functools

import jax
import numpy as np
import pytest
import references
from references import timm_file, torch

from vit_jax import load_pretrained
from vit_jax.errors import UserError
from vit_jax.weights.formats import timm_models

# One row for each combination of options
SAMPLE = (
  'vit_small_patch16_dinov3',
  'vit_small_plus_patch16_dinov3_qkvb',
  'eva02_tiny_patch14_336',
  'eva02_base_patch14_224',
  'eva02_base_patch16_clip_224',
  'eva02_enormous_patch14_clip_224',
  'eva_giant_patch14_clip_224',
  'vit_mediumd_patch16_rope_reg1_gap_256',
  'vit_pe_core_base_patch16_224',
  'vit_pe_core_gigantic_patch14_448',
  'vit_pe_lang_large_patch14_448',
  'vit_small_patch16_rope_ape_224',
  'vit_small_patch16_rope_mixed_ape_224',
  'vit_base_patch16_sapiens2',
  'aimv2_large_patch14_224',
  'beit3_base_patch16_224',
  'vit_base_patch16_rpn_224',
  'vit_base_patch16_radio_v3',
  'vit_so150m2_patch16_reg1_gap_256',
  'vit_so150m_patch16_reg4_map_256',
  'test_vit3',
  'test_vit4',
)
ROWS = [
  row
  for row in timm_models.table().values()
  if '.' not in row.name and 'Swin' not in row.block
]
SUPPORTED = [row for row in ROWS if row.block in timm_models.SUPPORTED]


def small(name):
  """Returns timm's model of an architecture with few and small layers."""
  sizes = dict(depth=2, embed_dim=64, num_heads=4, num_classes=7)
  if 'sapiens2' in name:
    sizes['num_kv_heads'] = (4, 2)
  if name.endswith('_xp_224') or 'pwee' in name:
    sizes['block_fn'] = timm_models.find(name)
  torch.manual_seed(0)
  with torch.device('meta'):
    patch = references.timm.create_model(name).patch_embed.patch_size[0]
  model = references.timm.create_model(name, img_size=4 * patch, **sizes)
  return references.noisy(model), patch


def outputs(model, images):
  """Returns logits and the tokens after each block of timm's model."""
  return references.run(model, images)


@functools.cache
def predict(model):
  return jax.jit(
    lambda params, images: model.apply(
      {'params': params}, images, None, ('layers',), method='predict'
    )
  )


def relative_difference(actual, expected):
  return np.abs(actual - expected).max() / np.abs(expected).max()


def check(tmp_path, name):
  theirs, patch = small(name)
  row = timm_models.find(name)
  pool = dict(global_pool=theirs.global_pool)
  config = dict(
    architecture=name,
    model_args=dict(num_heads=4),
    pretrained_cfg=dict(mean=(0.5,) * 3, std=(0.5,) * 3),
    **pool,
  )
  path = timm_file(tmp_path, theirs, config)
  for size, limit in (
    ((4 * patch, 4 * patch), 1e-5),
    ((2 * patch, 3 * patch), 1e-4),
  ):
    images = np.random.default_rng(0).uniform(-1, 1, (2, *size, 3))
    images = images.astype(np.float32)
    if size != (4 * patch, 4 * patch):
      theirs.set_input_size(img_size=size)
    ours, params = load_pretrained(path, image_size=size)
    found = ours.apply(
      {'params': params}, images, None, ('layers',), method='predict'
    )
    logits, layers = outputs(theirs, images)
    assert np.ptp(logits) > 0.1
    worst = relative_difference(found['layers'], layers)
    assert worst < limit, (name, size, worst)
    worst = relative_difference(found['logits'], logits)
    assert worst < limit, (name, size, worst, row)


@pytest.mark.parametrize('name', SAMPLE)
def test_logits_and_blocks_equal_timm(tmp_path, name):
  """At the size of the weights, and at a smaller one that is not square."""
  check(tmp_path, name)


@pytest.mark.long
@pytest.mark.parametrize('name', [row.name for row in SUPPORTED])
def test_all_rows_equal_timm(tmp_path, name):
  check(tmp_path, name)
