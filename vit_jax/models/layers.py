"""The layers of a Transformer encoder, with explicit keys and shardings.

Precision (deliberate): parameters are float32; matrix products and the
residual stream run in `dtype` (bfloat16 on accelerators), accumulating in
float32 inside the unit; LayerNorm statistics and the soft-max are float32.

Every random decision takes its key as an argument: a layer's key comes in with
the scanned inputs, so values do not depend on unrolling or rematerialisation.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, Shaped, UInt32

from vit_jax import sharding

LN_EPSILON = 1e-6
Initializer = Callable[..., Array]


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

  Good enough to drop by, and no more. It fuses with what uses it, so no mask
  is ever stored, every device makes its own part alone, and it costs a
  fraction of JAX's generators, whose bits would be dearer than the layer.

  Reference: the multipliers and shifts of `_mix` are those of lowbias32, found
  by C. Wellons' search for integer hashes of low bias.
  """
  words = jax.random.key_data(key).astype(jnp.uint32)
  rows = jnp.zeros(shape[:-1], jnp.uint32)
  for axis, size in enumerate(shape[:-1]):
    index = jax.lax.broadcasted_iota(jnp.uint32, shape[:-1], axis)
    rows = rows * jnp.uint32(size) + index
  rows = _mix(_mix(rows ^ words[0]) + words[-1])
  columns = jnp.arange(shape[-1], dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
  return _mix(rows[..., None] ^ columns)


def _mix(x: UInt32[Array, '...']) -> UInt32[Array, '...']:
  """A bijection in which every bit depends on every other."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
  x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
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


class Linear(nn.Module):
  """A dense layer over the last `in_dims` axes, making `features` new ones.

  Kernel `[*in, *features]`, initialised as the flattened matrix would be. The
  kernel is gathered over `fsdp` at its use; axis `model_dim` of it (negative)
  stays split over the mesh's `model` axis.
  """

  features: tuple[int, ...]
  in_dims: int = 1
  model_dim: int | None = None
  kernel_init: Initializer = nn.initializers.xavier_uniform()
  bias_init: Initializer = nn.initializers.zeros_init()
  dtype: jnp.dtype = jnp.float32
  out_dtype: jnp.dtype | None = None  # of the result, `dtype` if None

  @nn.compact
  def __call__(self, x: Float[Array, '...']) -> Float[Array, '...']:
    inputs = x.shape[-self.in_dims :]
    flat = (functools.reduce(lambda a, b: a * b, inputs), _size(self.features))

    def init(key: Array) -> Array:
      return self.kernel_init(key, flat).reshape(*inputs, *self.features)

    kernel = self.param('kernel', init)
    bias = self.param('bias', self.bias_init, self.features)
    spec: list[str | None] = [None] * kernel.ndim
    if self.model_dim is not None:
      spec[self.model_dim] = 'model'
    kernel = sharding.constrain(kernel.astype(self.dtype), *spec)
    out_spec = spec[self.in_dims :]
    out_dtype = self.out_dtype or self.dtype
    bias = sharding.constrain(bias.astype(out_dtype), *out_spec)
    last = tuple(range(x.ndim - self.in_dims, x.ndim))
    first = tuple(range(self.in_dims))
    y = jax.lax.dot_general(
      x.astype(self.dtype),
      kernel,
      ((last, first), ((), ())),
      preferred_element_type=out_dtype,
    )
    batch = [sharding.BATCH] + [None] * (y.ndim - len(out_spec) - 1)
    return sharding.constrain(y + bias, *batch, *out_spec)


def _size(shape: tuple[int, ...]) -> int:
  return functools.reduce(lambda a, b: a * b, shape, 1)


def layer_norm(name: str | None, dtype: jnp.dtype) -> nn.LayerNorm:
  """LayerNorm with float32 statistics (two-pass variance) and ε = 1e-6."""
  return nn.LayerNorm(
    epsilon=LN_EPSILON, dtype=dtype, use_fast_variance=False, name=name
  )


def dot_product_attention(
  query: Float[Array, 'n q h c'],
  key: Float[Array, 'n k h c'],
  value: Float[Array, 'n k h c'],
) -> Float[Array, 'n q h c']:
  """softmax(q·k / √c) v, with logits and soft-max in float32.

  Reference: equations 5–7 of the paper's appendix A.
  """
  scale = query.shape[-1] ** -0.5
  logits = jnp.einsum(
    'nqhc,nkhc->nhqk',
    query * jnp.asarray(scale, query.dtype),
    key,
    preferred_element_type=jnp.float32,
  )
  weights = jax.nn.softmax(logits, axis=-1).astype(value.dtype)
  return jnp.einsum('nhqk,nkhc->nqhc', weights, value)


class Attention(nn.Module):
  """Multi-head attention from `x` to `context` (itself by default)."""

  num_heads: int
  dtype: jnp.dtype

  @nn.compact
  def __call__(
    self,
    x: Float[Array, 'n t d'],
    context: Float[Array, 'n s d'] | None = None,
  ) -> Float[Array, 'n t d']:
    width = x.shape[-1]
    context = x if context is None else context
    heads = (self.num_heads, width // self.num_heads)
    project = functools.partial(
      Linear, features=heads, model_dim=-2, dtype=self.dtype
    )
    y = dot_product_attention(
      project(name='query')(x),
      project(name='key')(context),
      project(name='value')(context),
    )
    return Linear(
      (width,), in_dims=2, model_dim=-3, dtype=self.dtype, name='out'
    )(y)


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
    y = jax.nn.gelu(y, approximate=self.gelu == 'tanh')
    y = dropout(y, self.dropout, key)
    return dense(features=(x.shape[-1],), model_dim=-2, name='fc2')(y)


class Block(nn.Module):
  """One pre-norm encoder layer (equations 2 and 3), in the form of a scan.

  `per_layer` holds what differs between layers: {} at evaluation, else `key`
  and the drop-path `rate`.
  """

  num_heads: int
  mlp_dim: int
  dropout: float
  gelu: str
  dtype: jnp.dtype

  @nn.compact
  def __call__(
    self, x: Float[Array, 'n t d'], per_layer: dict[str, Shaped[Array, '']]
  ) -> tuple[Float[Array, 'n t d'], None]:
    keys = [None] * 5
    rate = per_layer.get('rate')
    if 'key' in per_layer:
      keys = list(jax.random.split(per_layer['key'], 5))

    def branch(y: Array, drop_key: Array | None, path_key: Array | None):
      y = dropout(y, self.dropout, drop_key)
      return y if rate is None else drop_path(y, rate, path_key)

    x = sharding.constrain(x, sharding.BATCH, None, None)
    y = layer_norm('norm1', self.dtype)(x)
    y = Attention(self.num_heads, self.dtype, name='attention')(y)
    x = x + branch(y, keys[0], keys[1])
    y = layer_norm('norm2', self.dtype)(x)
    mlp = Mlp(self.mlp_dim, self.dropout, self.gelu, self.dtype, name='mlp')
    x = x + branch(mlp(y, keys[2]), keys[3], keys[4])
    return sharding.constrain(x, sharding.BATCH, None, None), None


REMAT_POLICIES = {
  'none': None,
  'full': jax.checkpoint_policies.nothing_saveable,
  'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
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
  remat: str
  unroll: int

  @nn.compact
  def __call__(
    self, x: Float[Array, 'n t d'], key: Key[Array, ''] | None
  ) -> Float[Array, 'n t d']:
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
      name='layers',
    )
    per_layer = {}
    if key is not None:
      per_layer['key'] = jax.random.split(key, self.depth)
      if self.drop_path:  # grows linearly with depth, from 0
        per_layer['rate'] = jnp.linspace(0.0, self.drop_path, self.depth)
    x, _ = layers(x, per_layer)
    return layer_norm('norm', self.dtype)(x)
