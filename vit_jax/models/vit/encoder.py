"""Encoder of the Vision Transformer: its layers under one scan.

Parameters are float32. Matrix products and the residual stream have the dtype
of the config (bfloat16 on accelerators); products accumulate in float32.
LayerNorm statistics and softmax are float32.

Each layer gets its random key as a scanned input, so random values do not
depend on unrolling or rematerialization.
"""

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Key, Shaped

from vit_jax.arrays import sharding
from vit_jax.models.attention import multi_head
from vit_jax.models.contract import Places
from vit_jax.models.layers import initializers, mlp
from vit_jax.models.layers.mlp import Mlp
from vit_jax.models.layers.noise import drop_path, dropout, scaled
from vit_jax.models.layers.norm import LayerNorm
from vit_jax.models.layers.positions import Positions, Scheme
from vit_jax.models.layers.scan import scanned
from vit_jax.models.layers.stream import stored
from vit_jax.models.vit.config import Config

# Names of the arrays that `remat='dots'` keeps.
SAVED = (*multi_head.SAVED, 'statistics', 'middle', mlp.SAVED)
# Heads and hidden units are split over the mesh axis `model`.
SHARDING_RULES = (
  (r'attention/(query|key|value)/(kernel|bias)', -2),
  (r'attention/out/kernel', -3),
  (r'mlp/fc1/(kernel|bias)', -1),
  (r'mlp/fc2/kernel', -2),
)


class Block(nn.Module):
  """One pre-norm layer (equations 2 and 3), to be scanned.

  Attributes:
    config: config of the model.
    scheme: position embeddings with parameters in this layer; None if there are
      no such embeddings.
    grid: rows and columns of patches, for these embeddings.
    want: names of results to return, 'layers' and 'attention'.
    tokens: number of tokens that are not padding; None if there is no padding.
  """

  config: Config
  scheme: Scheme | None = None
  grid: tuple[int, int] | None = None
  want: tuple[str, ...] = ()
  tokens: int | None = None

  @nn.compact
  def __call__(
    self,
    x: Float[Array, 'n t d'],
    per_layer: dict[str, Shaped[Array, '']],
    common: dict[str, Any],
  ) -> tuple[Float[Array, 'n t d'], dict[str, Array]]:
    """Applies the layer.

    Args:
      x: tokens.
      per_layer: values that differ between layers: `key` and the drop-path
        `rate` in training; {} for evaluation.
      common: values that all layers share: the result of `Positions`, or `kept`
        (see `Places`) if every layer has its own positions.

    Returns:
      Tokens after the layer, and the results named in `want`.
    """
    config, dtype = self.config, self.config.compute_dtype
    keys, rate = [None] * 5, per_layer.get('rate')
    if 'key' in per_layer:
      keys = list(jax.random.split(per_layer['key'], 5))
    norm = functools.partial(LayerNorm, dtype, config.norm_eps)

    def branch(name: str, y: Array, drop_key: Any, path_key: Any) -> Array:
      y = dropout(y, config.dropout, drop_key)
      if config.layer_scale is not None:
        init = nn.initializers.constant(config.layer_scale)
        y = scaled(y, self.param(name, init, y.shape[-1:]))
      return y if rate is None else drop_path(y, rate, path_key)

    # Attention
    # The batch is split, but tokens and channels are not. Without this
    # constraint, XLA may choose another layout for the residual stream.
    x = stored(sharding.constrain(x, sharding.BATCH, None, None))
    positions = self._positions(common)
    if 'added' in positions:
      x = x + positions['added'].astype(x.dtype)
    y, weights = multi_head.Attention(
      config.num_heads,
      dtype,
      config.attention,
      config.norm_eps if config.qk_norm else None,
      config.start_values,
      self.tokens,
      name='attention',
    )(
      norm(name='norm1')(x),
      want_weights='attention' in self.want,
      positions=positions,
    )
    results = {} if weights is None else {'attention': weights}
    x = checkpoint_name(x + branch('scale1', y, *keys[:2]), 'middle')
    x = stored(x)

    # MLP
    y = Mlp(
      config.mlp_dim,
      config.dropout,
      config.activation,
      dtype,
      initializers.matrix(config.start_values),
      initializers.mlp_bias(config.start_values),
      name='mlp',
    )(norm(name='norm2')(x), keys[2])
    x = x + branch('scale2', y, keys[3], keys[4])
    x = sharding.constrain(x, sharding.BATCH, None, None)
    if 'layers' in self.want:
      results['layers'] = x
    return x, results

  def _positions(self, common: dict[str, Any]) -> dict[str, Any]:
    """Returns the positions that act in this layer."""
    if self.scheme is None:
      return common
    assert self.grid is not None
    places = Places(self.grid, common.get('kept'))
    return Positions(
      self.scheme, self.scheme.channels(self.config), name='position'
    )(places)


class Encoder(nn.Module):
  """Layers under one scan, then a LayerNorm (`norm`) unless `fc_norm` is set.

  Parameters are stacked: `layers/mlp/fc1/kernel` is `[depth, d, mlp_dim]`.

  Attributes:
    config: config of the model.
    scheme: position embeddings with parameters in every layer; None if there
      are no such embeddings.
  """

  config: Config
  scheme: Scheme | None = None

  def setup(self):
    config = self.config
    if not config.fc_norm:
      self.norm = LayerNorm(config.compute_dtype, config.norm_eps)

  def last_norm(self, x: Float[Array, '... d']) -> Float[Array, '... d']:
    """Applies the last LayerNorm; returns `x` if `fc_norm` is set."""
    return x if self.config.fc_norm else self.norm(x)

  @nn.compact
  def __call__(
    self,
    x: Float[Array, 'n t d'],
    key: Key[Array, ''] | None,
    want: tuple[str, ...] = (),
    positions: Mapping[str, Any] | None = None,
    places: Places | None = None,
  ) -> tuple[Float[Array, 'n t d'], dict[str, Array]]:
    """Applies all layers.

    Args:
      x: tokens.
      key: random key of dropout and drop path; None for evaluation.
      want: names of results of each layer to return, 'layers' and 'attention'.
      positions: result of `Positions` that all layers share.
      places: positions of the tokens in the image, if every layer has its own
        position embeddings.

    Returns:
      Tokens, and the results named in `want`, `[n, depth, …]`.
    """
    config = self.config
    common, grid = dict(positions or {}), None
    if self.scheme is not None:
      assert places is not None
      grid = places.grid
      common = {} if places.kept is None else {'kept': places.kept}

    tokens, unpadded = x.shape[1], None
    if self._needs_padding(x, want, common):
      # One padding for all layers: otherwise each layer would copy its queries,
      # keys, values and outputs to pad them.
      x, unpadded = jnp.pad(x, ((0, 0), (0, 1), (0, 0))), tokens

    layers = scanned(
      Block,
      config.depth,
      remat=config.remat,
      saved=SAVED,
      unroll=config.unroll,
      in_axes=(0, nn.broadcast),  # `per_layer`, `common`
    )(config, self.scheme, grid, want, unpadded, name='layers')
    per_layer = {}
    if key is not None:
      per_layer['key'] = jax.random.split(key, config.depth)
      if config.drop_path:  # changes linearly with depth
        rates = config.drop_path_first, config.drop_path
        per_layer['rate'] = jnp.linspace(*rates, config.depth)
    x, results = layers(x, per_layer, common)

    x = x[:, :tokens]
    # A scan stacks results along a new first axis.
    results = {name: leaf.swapaxes(0, 1) for name, leaf in results.items()}
    return self.last_norm(x), results

  def _needs_padding(
    self, x: Float[Array, 'n t d'], want: tuple[str, ...], common: dict
  ) -> bool:
    """Returns whether one token of padding is added before the first layer.

    The attention of cuDNN needs an even number of tokens. Positions in the
    layers and results of single layers do not allow for padding, so nothing is
    padded here if there are any.
    """
    config = self.config
    by_cudnn = multi_head.takes_cudnn(
      config.attention, config.head_dim, config.compute_dtype
    )
    possible = not want and not common and self.scheme is None
    return by_cudnn and possible and x.shape[1] % 2 == 1
