"""Tests of every row of the table of timm against a small model of the row."""

import jax
import numpy as np
import pytest
import references
from references import timm_file, torch

from tests.faults.counts import further, slow
from vit_jax import load_pretrained
from vit_jax.models.contract import Patches
from vit_jax.weights.formats import timm_models

# One row for each option; `--ci` adds those in `SLOW`, `--all` all rows.
FAST = (
  'vit_small_patch16_dinov3',
  'eva02_tiny_patch14_336',
  'test_vit3',
)
SLOW = ('vit_pe_lang_large_patch14_448', 'vit_base_patch16_radio_v3')
ROWS = [
  row
  for row in timm_models.table().values()
  if '.' not in row.name and 'Swin' not in row.block
]
SUPPORTED = [row for row in ROWS if row.block not in timm_models.REFUSED]


def small(name):
  """Returns timm's model of an architecture with few and small layers."""
  sizes = dict(depth=2, embed_dim=64, num_heads=4, num_classes=7)
  if 'sapiens2' in name:  # keys and values of two heads in the second block
    sizes['num_kv_heads'] = (4, 2)
  if 'giant_patch14' in name:  # an even number of hidden units
    sizes['mlp_ratio'] = 6
  with torch.device('meta'):
    patch = references.timm.create_model(name, **sizes).patch_embed.patch_size[
      0
    ]
  torch.manual_seed(0)
  model = references.timm.create_model(name, img_size=4 * patch, **sizes)
  return references.noisy(model), patch


def settings(theirs, name):
  """Returns the content of config.json."""
  return dict(
    architecture=name,
    model_args=dict(num_heads=4),
    global_pool=theirs.global_pool,
    pretrained_cfg=dict(mean=(0.5,) * 3, std=(0.5,) * 3),
  )


@pytest.mark.parametrize(
  'name',
  [
    *FAST,
    *slow(*SLOW),
    *further(*(r.name for r in SUPPORTED if r.name not in FAST + SLOW)),
  ],
)
def test_logits_and_blocks_equal_timm(tmp_path, name):
  """At the size of the weights, and at a smaller one that is not square."""
  theirs, patch = small(name)
  path = timm_file(tmp_path, theirs, settings(theirs, name))
  # Ten prefix tokens and 2 x 3 patches have as many tokens as 4 x 4 patches.
  columns = 4 if 'radio_v4' in name else 3
  own, other = (4 * patch, 4 * patch), (2 * patch, columns * patch)
  references.same_results(path, theirs, own, limit=1e-5)
  theirs.set_input_size(img_size=other)
  references.same_results(path, theirs, other, limit=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
  'name',
  [
    'vit_small_patch16_rope_mixed_224',
    *further('vit_small_patch16_dinov3', 'vit_small_patch16_rope_ape_224'),
  ],
)
def test_kept_patches_have_their_own_rotations(tmp_path, name):
  """As in timm, whose dropped patches are those that are not kept here."""
  theirs, patch = small(name)
  index = np.array([[1, 3, 4, 11], [0, 2, 7, 15]])

  def keep(x):
    kept = torch.from_numpy(index)
    prefix, patches = x.split([theirs.num_prefix_tokens, 16], dim=1)
    patches = patches[torch.arange(2)[:, None], kept]
    return torch.cat([prefix, patches], dim=1), kept

  theirs.patch_drop = keep
  path = timm_file(tmp_path, theirs, settings(theirs, name))
  images = references.images(4 * patch, 2)
  pixels = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
  with torch.no_grad():
    expected = theirs.forward_features(pixels).numpy()
  model, params = load_pretrained(path)

  def encode(model, images):
    tokens = model.embed(images)[np.arange(2)[:, None], index]
    return model.encode(tokens, None, Patches((4, 4), index))

  run = jax.jit(lambda params: model.apply(params, images, method=encode))
  found = run({'params': params})
  difference = np.abs(found - expected).max()
  assert difference < 1e-5 * np.abs(expected).max()
