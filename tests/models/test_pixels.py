"""Units of pixels: `model.pixels='imagenet'` normalizes in the model."""

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
@pytest.mark.parametrize('make, sizes', [(ViT, VIT), (Swin, SWIN)])
@pytest.mark.parametrize('channels', [5, *further(1, 3)])
def test_pixels_are_normalized_by_mean_and_std(make, sizes, channels):
  """Equals a model without them whose input is normalized outside."""
  rng = np.random.default_rng(0)
  pixels = rng.uniform(0, 1, (2, 16, 16, channels))
  mean, std = rng.uniform(0.1, 0.5, (2, channels))
  keys = dict(mean=tuple(mean.tolist()), std=tuple(std.tolist()))
  if channels == 3:
    keys = dict(pixels='imagenet')
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
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
    plain.apply({'params': params}, np.zeros((1, 16, 16, 2), np.float32))
