"""The ResNet of "Big Transfer" (BiT, arXiv 1912.11370, section 3.1)."""

import dataclasses
import re
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from vit_jax.config import schema
from vit_jax.errors import UserError
from vit_jax.models import backbone
from vit_jax.models.backbone import (
  Backbone,
  BackboneConfig,
  Images,
  UncheckedImages,
)
from vit_jax.models.layers import residual
from vit_jax.models.layers.convolution import max_pool

# Units in each stage ("Deep Residual Learning", arXiv 1512.03385, Table 1).
DEPTHS = {
  50: (3, 4, 6, 3),
  101: (3, 4, 23, 3),
  152: (3, 8, 36, 3),
  200: (3, 24, 36, 3),  # "Identity Mappings", arXiv 1603.05027, appendix
}
SIZES = ('depths', 'width_factor')
WIDTH = 64  # inner channels of the units of the first stage at width factor 1
_MAX_WIDTH_FACTOR = 1024


@schema.operational('remat', 'unroll')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(BackboneConfig):
  """Keys of the config's `model` section for a ResNet.

  `remat='dots'` recomputes everything but convolutions and statistics.

  Attributes:
    variant: name such as 'R50x1': R50, R101, R152 or R200, and a width factor
      of 1 to 4 (Table 3). Sizes that are set explicitly take precedence.
    depths: number of units in each stage.
    width_factor: factor of the number of channels of every layer; with 1, the
      units of the first stage have 64 inner channels.

  Raises:
    UserError: a variant or choice is unknown, a size is missing, or a number is
      out of range.
  """

  variant: str | None = None
  depths: backbone.Sizes = backbone.OF_VARIANT
  width_factor: backbone.Size = backbone.OF_VARIANT

  def __post_init__(self):
    super().__post_init__()
    self.complete(SIZES, _of_variant(self.variant), 'R50x1')
    object.__setattr__(self, 'depths', tuple(self.depths))
    residual.check_depths('model.depths', self.depths, at_least=1)
    self.check_range('width_factor', at_least=1, at_most=_MAX_WIDTH_FACTOR)


class ResNet(Backbone):
  """A ResNet v2 (arXiv 1603.05027), with the activation first in each unit.

  It has GroupNorm instead of BatchNorm, and weight standardization, but no
  dropout or drop path. Images may have any size. Parameters:
  `conv_root/kernel`, `block{1…}/unit1/…`, `block{1…}/layers/…` (stacked; see
  `residual`), `norm/{scale,bias}`, `head/{kernel,bias}`.
  """

  config: Config

  stages_method = 'maps'
  title = 'A ResNet'
  determined = SIZES
  sharding_rules = (*residual.SHARDING_RULES, (r'head/(kernel|bias)', -1))

  def setup(self):
    config, dtype = self.config, self.config.compute_dtype
    layers = residual.code('before', dtype)
    width = WIDTH * config.width_factor
    self.conv_root = layers.conv(width, size=7, stride=2)
    self.stages = residual.stages(
      config.depths,
      width,
      residual.Unit,
      'before',
      dtype=dtype,
      remat=config.remat,
      unroll=config.unroll,
    )
    self.norm = layers.norm()
    self.head = self._new_head()

  def _predict(
    self, images: Images, key: Key[Array, ''] | None, want: tuple[str, ...]
  ) -> dict[str, Array]:
    del key, want
    x = nn.relu(self.norm(self._maps(images)[-1])).astype(jnp.float32)
    return self._results(x.mean((1, 2)), x.reshape(x.shape[0], -1, x.shape[-1]))

  def maps(self, images: UncheckedImages) -> list[Float[Array, 'n _ _ _']]:
    """Computes the map of each stage, `[n, rows, columns, channels]`.

    Args:
      images: float images in [-1, 1], `[n, height, width, channels]`.
    """
    return self._maps(self._input(images))

  def _maps(self, images: Images) -> list[Float[Array, 'n _ _ _']]:
    # No ReLU: with activation first, each unit begins with one.
    x, maps = max_pool(self.conv_root(images), 'fixed'), []
    for stage in self.stages:
      x = stage(x)
      maps.append(x)
    return maps


Model = backbone.constructor(ResNet, Config)


def _of_variant(variant: str | None) -> dict[str, Any]:
  """Returns depths and width factor of a variant, or {} for None."""
  if variant is None:
    return {}
  match = re.fullmatch(r'R(\d+)x([1-4])', variant)
  if match is None or int(match[1]) not in DEPTHS:
    raise UserError(
      f'model.variant is {variant!r}; allowed: one of '
      f'{"|".join(f"R{depth}" for depth in DEPTHS)}, x and a width factor of 1 '
      'to 4, such as R50x1.'
    )
  return dict(depths=DEPTHS[int(match[1])], width_factor=int(match[2]))
