"""Tests of every row of the table of timm against a small model of the row."""

import functools

import jax
import numpy as np
import pytest
import references
from references import timm_file, torch

from vit_jax import load_pretrained
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
  if 'sapiens2' in name:  # keys and values of two heads in the second block
    sizes['num_kv_heads'] = (4, 2)
  with torch.device('meta'):
    patch = references.timm.create_model(name, **sizes).patch_embed.patch_size[
      0
    ]
  torch.manual_seed(0)
  model = references.timm.create_model(name, img_size=4 * patch, **sizes)
  return references.noisy(model), patch


def check(folder, name):
  theirs, patch = small(name)
  config = dict(
    architecture=name,
    model_args=dict(num_heads=4),
    global_pool=theirs.global_pool,
    pretrained_cfg=dict(mean=(0.5,) * 3, std=(0.5,) * 3),
  )
  path = timm_file(folder, theirs, config)
  own, other = (4 * patch, 4 * patch), (2 * patch, 3 * patch)
  for size, limit in ((own, 1e-5), (other, 1e-4)):
    images = np.random.default_rng(0).uniform(-1, 1, (2, *size, 3))
    images = images.astype(np.float32)
    if size == other:
      theirs.set_input_size(img_size=size)
    ours, params = load_pretrained(path, image_size=size)
    run = functools.partial(ours.apply, method='predict')
    found = jax.jit(run, static_argnums=(2, 3))(
      {'params': params}, images, None, ('layers',)
    )
    logits, layers = references.run(theirs, images)
    assert np.ptp(logits) > 0.1
    for actual, expected in (
      (found['layers'], layers),
      (found['logits'], logits),
    ):
      difference = np.abs(actual - expected).max() / np.abs(expected).max()
      assert difference < limit, (name, size)


@pytest.mark.parametrize('name', SAMPLE)
def test_logits_and_blocks_equal_timm(tmp_path, name):
  """At the size of the weights, and at a smaller one that is not square."""
  check(tmp_path, name)


@pytest.mark.long
@pytest.mark.parametrize('name', [row.name for row in SUPPORTED])
def test_all_rows_equal_timm(tmp_path, name):
  check(tmp_path, name)
