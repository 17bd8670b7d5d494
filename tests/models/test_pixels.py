"""Units of pixels: `model.pixels='imagenet'` normalizes in the model."""

import jax
import numpy as np
import pytest
import tiny_vit

from tests.faults.counts import further
from vit_jax.errors import UserError
from vit_jax.models.swin import Model as Swin
from vit_jax.models.vit import Model as ViT

VIT = dict(tiny_vit.SIZES, dtype='float32')
SWIN = dict(width=8, depths=(2, 2), num_heads=2, window_size=2, dtype='float32')


@pytest.mark.slow
@pytest.mark.parametrize(
  'make, sizes, method',
  [
    (ViT, VIT, None),
    *further([ViT, VIT, 'embed'], [Swin, SWIN, None], [Swin, SWIN, 'stages']),
  ],
)
def test_imagenet_equals_normalized_input(make, sizes, method):
  """Equals a model without the key whose input is normalized outside."""
  rng = np.random.default_rng(0)
  pixels = rng.uniform(0, 1, (2, 16, 16, 3))
  normalized = (pixels - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
  plain, scaled = make(5, **sizes), make(5, **sizes, pixels='imagenet')
  params = tiny_vit.noise_params(plain, (16, 16))

  def run(model, images):
    images = np.float32(images)
    return model.apply({'params': params}, images, method=method)

  jax.tree.map(
    lambda ours, expected: np.testing.assert_allclose(
      ours, expected, rtol=1e-4, atol=1e-5
    ),
    run(scaled, 2 * pixels - 1),
    run(plain, normalized),
  )
  with pytest.raises(
    UserError, match=r"model\.pixels.*'imagenet_'.*'imagenet'"
  ):
    make(5, **sizes, pixels='imagenet_')


@pytest.mark.parametrize('make, sizes', [(ViT, VIT), (Swin, SWIN)])
@pytest.mark.parametrize('channels', [5, *further(1)])
def test_mean_and_std_of_any_channels(make, sizes, channels):
  """Equals a model without them whose input is normalized outside."""
  rng = np.random.default_rng(0)
  pixels = rng.uniform(0, 1, (2, 16, 16, channels))
  mean, std = rng.uniform(0.1, 0.5, (2, channels))
  keys = dict(mean=tuple(mean.tolist()), std=tuple(std.tolist()))
  plain = make(5, **sizes, channels=channels)
  scaled = make(5, **sizes, channels=channels, **keys)
  params = tiny_vit.noise_params(plain, (16, 16))
  np.testing.assert_allclose(
    scaled.apply({'params': params}, np.float32(2 * pixels - 1)),
    plain.apply({'params': params}, np.float32((pixels - mean) / std)),
    rtol=1e-4,
    atol=1e-5,
  )
  with pytest.raises(UserError, match=rf'{channels}\].*channels'):
    plain.apply({'params': params}, np.zeros((1, 16, 16, 3), np.float32))
