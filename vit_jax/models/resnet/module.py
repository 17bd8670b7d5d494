"""The ResNet of "Big Transfer" (BiT, arXiv 1912.11370, section 3.1)."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from vit_jax.models.contract import Defaults, refuse_others
from vit_jax.models.layers import residual
from vit_jax.models.layers.convolution import max_pool
from vit_jax.models.layers.head import head
from vit_jax.models.resnet.sizes import WIDTH

Images = Float[Array | np.ndarray, 'n y x c']


class ResNet(nn.Module, Defaults):
  """A ResNet v2 (arXiv 1603.05027): activation first in each unit.

  GroupNorm in place of BatchNorm, standardised convolutions; build it with
  `Model`, which knows the sizes. It keeps `models.contract.Model`; images may
  have any size. Nothing in it is random. Parameters: `conv_root/kernel`,
  `block{1…}/unit1/…`, `block{1…}/layers/…` (stacked; see `residual`),
  `norm/{scale,bias}`, `head/{kernel,bias}`.
  """

  num_classes: int
  depths: tuple[int, ...]
  width_factor: int
  head_bias: float
  dtype: jnp.dtype
  remat: str
  unroll: int

  sharding_rules = (*residual.SHARDING_RULES, (r'head/(kernel|bias)', -1))

  def setup(self):
    layers = residual.code('before', self.dtype)
    width = WIDTH * self.width_factor
    self.conv_root = layers.conv(width, size=7, stride=2)
    stages = residual.stages(
      self.depths,
      width,
      activation='before',
      dtype=self.dtype,
      remat=self.remat,
      unroll=self.unroll,
    )
    for name, stage in stages.items():
      setattr(self, name, stage)
    self.norm = layers.norm()
    if self.num_classes:
      self.head = head(self.num_classes, self.dtype, bias=self.head_bias)

  def __call__(
    self, images: Images, key: Key[Array, ''] | None = None
  ) -> Float[Array, 'n k']:
    """Logits of images in [-1, 1]; float32. The key has no effect."""
    return self.predict(images, key)['logits']

  def predict(
    self,
    images: Images,
    key: Key[Array, ''] | None = None,
    want: tuple[str, ...] = (),
  ) -> dict[str, Float[Array, 'n ...']]:
    """Features (the mean over places) and logits of images.

    Args:
      images: `[n, height, width, 3]`, in [-1, 1].
      key: without effect: nothing is random.
      want: may name `tokens`: the last map after the norm, `[n, places, c]` in
        rows.

    Raises:
      UserError: something else is wanted; `maps` gives the result of each
        stage, whose shapes differ.
    """
    del key
    refuse_others(want, ('tokens',), 'a ResNet', 'maps')
    x = nn.relu(self.norm(self.maps(images)[-1])).astype(jnp.float32)
    features = x.mean((1, 2))
    out = {'features': features, 'logits': features}
    if self.num_classes:
      out['logits'] = self.head(features)
    if want:
      out['tokens'] = x.reshape(len(x), -1, x.shape[-1])
    return out

  def maps(self, images: Images) -> list[Float[Array, 'n _ _ _']]:
    """What each stage returns, `[n, rows, columns, channels]`."""
    x = jnp.asarray(images, self.dtype)
    x = max_pool(self.conv_root(x), 'fixed')
    maps = []
    for i in range(len(self.depths)):
      x = getattr(self, f'block{i + 1}')(x)
      maps.append(x)
    return maps

  @property
  def architecture(self) -> dict[str, Any]:
    """The sizes."""
    return {'depths': self.depths, 'width_factor': self.width_factor}

  @property
  def reference(self) -> 'ResNet':
    """Without rematerialisation or unrolling."""
    return self.clone(remat='none', unroll=1)
