"""The ResNet with axial attention (the ViT paper's appendix D.6)."""

import itertools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from vit_jax.models.axial_resnet.unit import SAVED, Unit
from vit_jax.models.contract import Defaults, refuse_others
from vit_jax.models.layers import axial, residual
from vit_jax.models.layers.convolution import StdConv, by_deviation, max_pool
from vit_jax.models.layers.group_norm import GroupNorm
from vit_jax.models.layers.head import head
from vit_jax.models.layers.positions import resize

Images = Float[Array | np.ndarray, 'n y x c']
Size = tuple[int, int]
WIDTH = 64  # channels inside the first stage's units


class AxialResNet(nn.Module, Defaults):
  """An AxialResNet; build it with `Model`, which knows the sizes.

  It keeps `models.contract.Model`. Nothing in it is random. Parameters:
  `conv_root/kernel`, `gn_root/…`, `block{1…}/{unit1,layers}/…`,
  `head/{kernel,bias}`.
  """

  num_classes: int
  depths: tuple[int, ...]
  num_heads: int
  head_bias: float
  dtype: jnp.dtype
  remat: str
  unroll: int

  sharding_rules = ((r'head/(kernel|bias)', -1),)

  @nn.compact
  def _maps(self, images: Images) -> list[Float[Array, 'n _ _ _']]:
    x = StdConv(
      WIDTH,
      by_deviation,
      size=7,
      stride=2,
      dtype=self.dtype,
      name='conv_root',
    )(jnp.asarray(images, self.dtype))
    x = nn.relu(GroupNorm(axial.EPSILON, self.dtype, name='gn_root')(x))
    x, maps = max_pool(x, 'same'), []
    for i, depth in enumerate(self.depths):
      stage = residual.Stage(
        Unit,
        (WIDTH * 2**i, self.num_heads),
        depth=depth,
        stride=min(i + 1, 2),
        dtype=self.dtype,
        remat=self.remat,
        saved=SAVED,
        unroll=self.unroll,
        name=f'block{i + 1}',
      )
      x = stage(x)
      maps.append(x)
    return maps

  def setup(self):
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
      want: may name `tokens`: the last map, `[n, places, c]` in rows.

    Raises:
      UserError: something else is wanted.
    """
    del key
    refuse_others(want, ('tokens',), 'an AxialResNet', 'maps')
    x = self._maps(images)[-1].astype(jnp.float32)
    features = x.mean((1, 2))
    found = {'features': features, 'logits': features}
    if self.num_classes:
      found['logits'] = self.head(features)
    tokens = x.reshape(len(x), -1, x.shape[-1])
    return found | {name: tokens for name in want}

  def maps(self, images: Images) -> list[Float[Array, 'n _ _ _']]:
    """What each stage returns, `[n, rows, columns, channels]`, float32."""
    return [x.astype(jnp.float32) for x in self._maps(images)]

  @property
  def sized(self) -> tuple[str, ...]:
    """The embeddings of offsets along a row or a column."""
    parts = itertools.product(
      range(1, len(self.depths) + 1), ('unit1', 'layers'), ('row', 'column')
    )
    return tuple(f'block{i}/{unit}/{a}/relative' for i, unit, a in parts)

  @nn.nowrap
  def adapt(
    self,
    leaves: dict[str, np.ndarray],
    old_size: Size,
    new_size: Size,
    method: str,
  ) -> dict[str, np.ndarray]:
    """Interpolates the embeddings of offsets; see `positions.resize`."""
    del old_size  # a leaf shows it
    adapted = {}
    for path, leaf in leaves.items():
      block, unit, axis, _ = path.split('/')
      # The root and its pooling halve twice; a first unit sees the map of the
      # stage before it.
      halvings = int(block.removeprefix('block')) + 1
      halvings -= unit == 'unit1' and halvings > 2
      side = -(-new_size[axis == 'row'] // 2**halvings)
      flat = leaf.reshape(-1, leaf.shape[-1]).T[None]  # [1, offsets, others]
      flat = resize(flat, (leaf.shape[-1], 1), (2 * side - 1, 1), method)
      adapted[path] = flat[0].T.reshape(*leaf.shape[:-1], -1)
    return adapted

  @property
  def architecture(self) -> dict[str, Any]:
    """The sizes."""
    return {'depths': self.depths, 'num_heads': self.num_heads}

  @property
  def reference(self) -> 'AxialResNet':
    """Without rematerialisation or unrolling."""
    return self.clone(remat='none', unroll=1)
