"""Tests of options of the Vision Transformer; `weights` compares with timm."""

import jax
import numpy as np
import pytest
from tiny_vit import abstract, images_of, noise_params

from vit_jax.arrays import tree
from vit_jax.models.vit import Model

SIZE = (12, 16)
SIZES = dict(
  patch_size=4, width=32, depth=2, mlp_dim=64, num_heads=2, dtype='float32'
)


def predict(model, *want):
  params, images = noise_params(model, SIZE), images_of(2, *SIZE)
  return jax.jit(
    lambda params: model.apply(
      {'params': params}, images, want=want, method='predict'
    )
  )(params)


def test_logits_of_a_distilled_model_are_the_mean_of_its_heads():
  out = predict(Model(5, **SIZES, distilled=True), 'heads')
  assert out['heads'].shape == (2, 2, 5)
  np.testing.assert_allclose(out['logits'], out['heads'].mean(1), rtol=1e-5)
  assert np.abs(out['heads'][:, 0] - out['heads'][:, 1]).max() > 0.1


def test_registers_are_not_pooled():
  out = predict(Model(0, **SIZES, pool='gap', registers=3), 'tokens')
  expected = out['tokens'][:, 3:].mean(1)
  np.testing.assert_allclose(out['features'], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  'expected, variant, options',
  [
    (86_569_960, 'B/16', dict(registers=4, prefix_positions=False)),
    (87_338_192, 'B/16', dict(distilled=True)),  # DeiT-B distilled
    (22_436_432, 'S/16', dict(distilled=True)),
    (86_585_320, 'B/16', dict(layer_scale=1e-4, prefix_positions=False)),
    # DINOv2's largest at 518 px, without a head and its mask token
    (
      1_136_480_768 - 1536,
      'B/14',
      dict(width=1536, depth=40, num_heads=24, mlp_dim=4096)
      | dict(gated=True, layer_scale=1e-5),
    ),
  ],
)
def test_parameter_counts(expected, variant, options):
  """Counts are those of the public models."""
  dinov2 = 'gated' in options
  model = Model(0 if dinov2 else 1000, variant=variant, **options)
  side = 518 if dinov2 else 224
  assert tree.size(abstract(model, (side, side))) == expected


def test_the_architecture_builds_the_same_model():
  """`architecture` contains every option that fine-tuning reads."""
  options = dict(registers=2, layer_scale=0.1, qk_norm=True, norm_eps=1e-5)
  options |= dict(gated=True, distilled=True, gelu='exact')
  options |= dict(position='2d', position_at='layers')
  model = Model(5, **SIZES, **options)
  assert model.architecture.items() >= options.items()
  again = Model(5, **model.architecture, dtype='float32')
  assert again == model
