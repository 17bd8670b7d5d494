"""Tests of TPU kernels, interpreted, with rotations of other projects."""

import numpy as np
import pytest
import references
from references import timm_file

from tests.faults.counts import further
from vit_jax import load_pretrained

HEADS = 2
SIZES = dict(embed_dim=32 * HEADS, num_heads=HEADS)  # the least for kernels
EVA = dict(
  architecture='eva02_base_patch14_224',
  model_args=dict(num_heads=HEADS),
  pretrained_cfg=dict(mean=(0.5,) * 3, std=(0.5,) * 3),
)


def eva02(folder):
  """Writes a small EVA-02 of timm: one prefix token."""
  model = references.timm_vit(EVA['architecture'], **SIZES)
  return timm_file(folder, model, EVA)


def dinov3(folder):
  """Writes a small DINOv3 of transformers: four registers."""
  references.huggingface(
    'DINOv3ViTModel',
    hidden_size=SIZES['embed_dim'],
    num_attention_heads=HEADS,
    num_register_tokens=4,
  ).save_pretrained(folder)
  return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize('write', [dinov3, *further(eva02)])
def test_kernels_equal_xla(tmp_path, write):
  """They differ only by the order of sums."""
  model, params = load_pretrained(write(tmp_path), attention='kernel')
  assert model.kernels is not None and model.reference.kernels is None
  x = references.images()
  ours, theirs = (
    np.asarray(references.jitted(each)(params, x))
    for each in (model, model.reference)
  )
  assert np.ptp(theirs) > 0.1
  assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()
