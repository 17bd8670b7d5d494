"""The layers of a Transformer encoder, with explicit keys and shardings.

Precision (deliberate): parameters are float32; matrix products and the
residual stream run in `dtype` (bfloat16 on accelerators), accumulating in
float32 inside the unit; LayerNorm statistics and the soft-max are float32.

Every random decision takes its key as an argument: a layer's key comes in with
the scanned inputs, so values do not depend on unrolling or rematerialisation.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Key, Shaped, UInt32

from vit_jax.arrays import sharding
from vit_jax.models.attention import multi_head
from vit_jax.models.layers.linear import Linear

LN_EPSILON = 1e-6
_FIRST, _SECOND = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)


def dropout(
  x: Float[Array, '...'], rate: float, key: Key[Array, ''] | None
) -> Float[Array, '...']:
  """Zeroes a share `rate` of the entries and scales the others up.

  Args:
    x: activations.
    rate: share to drop, in [0, 1).
    key: None at evaluation, when nothing is dropped.
  """
  if key is None or rate == 0:
    return x
  threshold = min(round(rate * 2**32), 2**32 - 1)
  keep = random_words(key, x.shape) >= jnp.uint32(threshold)
  return jnp.where(keep, _scaled(x, 1 / (1 - rate)), 0)


def random_words(
  key: Key[Array, ''], shape: tuple[int, ...]
) -> UInt32[Array, '...']:
  """32 random bits for each entry: a hash of its place and the key.

  Good enough for dropout, which uses the high bits, but not for more: there are
  only 2^32 different rows of words. Keys have to come from `split` or
  `fold_in`, which hash them: two keys with the same last word, whose first
  words differ by d (xor), give the same rows in another order: row i of one is
  row i ^ d of the other.

  XLA fuses it with what uses it: no mask is stored, every device computes its
  own part, and it costs a fraction of JAX's generators, which would take longer
  than the layer itself.

  Reference: the multipliers and shifts are those of lowbias32, found by C.
  Wellons' search for integer hashes of low bias; the last round for a column
  leaves out what the high bits do not need.
  """
  words = jax.random.key_data(key).astype(jnp.uint32)
  rows = jnp.zeros(shape[:-1], jnp.uint32)
  for axis, size in enumerate(shape[:-1]):
    index = jax.lax.broadcasted_iota(jnp.uint32, shape[:-1], axis)
    rows = rows * jnp.uint32(size) + index
  rows = _mix(_mix(rows ^ words[0]) + words[-1])
  columns = jnp.arange(shape[-1], dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
  x = (rows[..., None] ^ columns) * _FIRST
  return (x ^ (x >> 16)) * _SECOND


def _mix(x: UInt32[Array, '...']) -> UInt32[Array, '...']:
  """A bijection in which every bit depends on every other."""
  x = (x ^ (x >> 16)) * _FIRST
  x = (x ^ (x >> 15)) * _SECOND
  return x ^ (x >> 16)


def _scaled(x: Array, factor: Any) -> Array:
  """x · factor; rounded to x's dtype after, not before, or it is biased."""
  return (x.astype(jnp.float32) * factor).astype(x.dtype)


def drop_path(
  x: Float[Array, 'n t d'],
  rate: Float[Array, ''],
  key: Key[Array, ''] | None,
) -> Float[Array, 'n t d']:
  """Zeroes the whole branch for a share `rate` of the examples.

  Reference: stochastic depth, Huang et al., arXiv 1603.09382.
  """
  if key is None:
    return x
  keep = 1 - rate
  kept = jax.random.uniform(key, (x.shape[0], 1, 1)) < keep
  return jnp.where(kept, _scaled(x, 1 / keep), 0)


class LayerNorm(nn.Module):
  """Normalisation of the last axis, statistics in float32, ε = 1e-6.

  The variance of float32 inputs is taken in two passes. For bfloat16 it is
  E[x²] − E[x]², one pass: that loses half of float32's 24 bits only where the
  mean is 64 times the deviation, and there the inputs' own 8 bits leave nothing
  to lose. The statistics are kept for the backward pass (`SAVED`).
  """

  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x: Float[Array, '... d']) -> Float[Array, '... d']:
    size = (x.shape[-1],)
    scale = self.param('scale', nn.initializers.ones_init(), size)
    bias = self.param('bias', nn.initializers.zeros_init(), size)
    wide = x.astype(jnp.float32)
    mean = checkpoint_name(wide.mean(axis=-1, keepdims=True), 'statistics')
    if x.dtype == jnp.float32:
      variance = jnp.square(wide - mean).mean(axis=-1, keepdims=True)
    else:
      variance = jnp.square(wide).mean(axis=-1, keepdims=True)
      variance -= jnp.square(mean)
    factor = _inverse_deviation(variance)
    return ((wide - mean) * (factor * scale) + bias).astype(self.dtype)


@jax.custom_jvp
def _inverse_deviation(variance: Float[Array, '...']) -> Float[Array, '...']:
  """1 / √(variance + ε); its derivative is computed from the result alone."""
  factor = jax.lax.rsqrt(jnp.maximum(variance, 0) + LN_EPSILON)
  return checkpoint_name(factor, 'statistics')


@_inverse_deviation.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
  factor = _inverse_deviation(*primals)
  return factor, -0.5 * factor**3 * tangents[0]


class Mlp(nn.Module):
  """Dense, GELU, dropout, dense."""

  mlp_dim: int
  dropout: float
  gelu: str
  dtype: jnp.dtype

  @nn.compact
  def __call__(
    self, x: Float[Array, 'n t d'], key: Key[Array, ''] | None
  ) -> Float[Array, 'n t d']:
    dense = functools.partial(
      Linear, bias_init=nn.initializers.normal(1e-6), dtype=self.dtype
    )
    y = dense(features=(self.mlp_dim,), model_dim=-1, name='fc1')(x)
    y = checkpoint_name(y, 'hidden')
    y = jax.nn.gelu(y, approximate=self.gelu == 'tanh')
    y = dropout(y, self.dropout, key)
    return dense(features=(x.shape[-1],), model_dim=-2, name='fc2')(y)


class Block(nn.Module):
  """One pre-norm encoder layer (equations 2 and 3), in the form of a scan.

  `per_layer` holds what differs between layers: {} at evaluation, else `key`
  and the drop-path `rate`. Besides the tokens it returns what `want` names.
  """

  num_heads: int
  mlp_dim: int
  dropout: float
  gelu: str
  dtype: jnp.dtype
  attention: str
  want: tuple[str, ...] = ()  # of 'layers' and 'attention'

  @nn.compact
  def __call__(
    self, x: Float[Array, 'n t d'], per_layer: dict[str, Shaped[Array, '']]
  ) -> tuple[Float[Array, 'n t d'], dict[str, Array]]:
    keys = [None] * 5
    rate = per_layer.get('rate')
    if 'key' in per_layer:
      keys = list(jax.random.split(per_layer['key'], 5))

    def branch(y: Array, drop_key: Array | None, path_key: Array | None):
      y = dropout(y, self.dropout, drop_key)
      return y if rate is None else drop_path(y, rate, path_key)

    x = sharding.constrain(x, sharding.BATCH, None, None)
    y = LayerNorm(self.dtype, name='norm1')(x)
    attend = multi_head.Attention(
      self.num_heads, self.dtype, self.attention, name='attention'
    )
    y, weights = attend(y, want_weights='attention' in self.want)
    wanted = {} if weights is None else {'attention': weights}
    x = checkpoint_name(x + branch(y, keys[0], keys[1]), 'middle')
    y = LayerNorm(self.dtype, name='norm2')(x)
    mlp = Mlp(self.mlp_dim, self.dropout, self.gelu, self.dtype, name='mlp')
    x = x + branch(mlp(y, keys[2]), keys[3], keys[4])
    x = sharding.constrain(x, sharding.BATCH, None, None)
    if 'layers' in self.want:
      wanted['layers'] = x
    return x, wanted


SAVED = (*multi_head.SAVED, 'statistics', 'middle', 'hidden')
REMAT_POLICIES = {
  'none': None,
  'full': jax.checkpoint_policies.nothing_saveable,
  'dots': jax.checkpoint_policies.save_only_these_names(*SAVED),
}


class Encoder(nn.Module):
  """`depth` blocks under one scan, then a LayerNorm (`norm`).

  Parameters are stacked: `layers/mlp/fc1/kernel` is `[depth, d, mlp_dim]`.
  """

  depth: int
  num_heads: int
  mlp_dim: int
  dropout: float
  drop_path: float
  gelu: str
  dtype: jnp.dtype
  attention: str
  remat: str
  unroll: int

  @nn.compact
  def __call__(
    self,
    x: Float[Array, 'n t d'],
    key: Key[Array, ''] | None,
    want: tuple[str, ...] = (),
  ) -> tuple[Float[Array, 'n t d'], dict[str, Array]]:
    """The tokens, and of each layer what is wanted, `[n, depth, …]`."""
    block = Block
    if self.remat != 'none':
      block = nn.remat(
        Block, prevent_cse=False, policy=REMAT_POLICIES[self.remat]
      )
    layers = nn.scan(
      block,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      in_axes=0,
      length=self.depth,
      unroll=self.unroll,
    )(
      num_heads=self.num_heads,
      mlp_dim=self.mlp_dim,
      dropout=self.dropout,
      gelu=self.gelu,
      dtype=self.dtype,
      attention=self.attention,
      want=want,
      name='layers',
    )
    per_layer = {}
    if key is not None:
      per_layer['key'] = jax.random.split(key, self.depth)
      if self.drop_path:  # grows linearly with depth, from 0
        per_layer['rate'] = jnp.linspace(0.0, self.drop_path, self.depth)
    x, wanted = layers(x, per_layer)
    wanted = {name: leaf.swapaxes(0, 1) for name, leaf in wanted.items()}
    return LayerNorm(self.dtype, name='norm')(x), wanted
