"""The layers of a Transformer encoder, with explicit keys and shardings.

Precision (deliberate): parameters are float32; matrix products and the
residual stream run in `dtype` (bfloat16 on accelerators), accumulating in
float32 inside the unit; LayerNorm statistics and the soft-max are float32.

Every random decision takes its key as an argument: a layer's key comes in with
the scanned inputs, so values do not depend on unrolling or rematerialisation.
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
from vit_jax.models.layers.linear import Initializer, Linear
from vit_jax.models.layers.noise import drop_path, dropout, scaled
from vit_jax.models.layers.norm import EPSILON, LayerNorm
from vit_jax.models.layers.positions import Positions, Scheme


class Mlp(nn.Module):
  """Dense, GELU, dropout, dense.

  With `gated` (SwiGLU, arXiv 2002.05202) the first dense layer has two outputs
  for each hidden unit, `[d, 2, mlp_dim]`: SiLU of the one times the other takes
  the place of GELU.
  """

  mlp_dim: int
  dropout: float
  gelu: str
  dtype: jnp.dtype
  kernel_init: Initializer = nn.initializers.xavier_uniform()
  bias_init: Initializer = nn.initializers.normal(1e-6)
  gated: bool = False

  @nn.compact
  def __call__(
    self, x: Float[Array, 'n t d'], key: Key[Array, ''] | None
  ) -> Float[Array, 'n t d']:
    dense = functools.partial(
      Linear,
      kernel_init=self.kernel_init,
      bias_init=self.bias_init,
      dtype=self.dtype,
    )
    units = (2, self.mlp_dim) if self.gated else (self.mlp_dim,)
    y = dense(features=units, model_dim=-1, name='fc1')(x)
    y = checkpoint_name(y, 'hidden')
    if self.gated:
      y = jax.nn.silu(y[:, :, 0]) * y[:, :, 1]
    else:
      y = gelu(y, self.gelu)
    y = dropout(y, self.dropout, key)
    return dense(features=(x.shape[-1],), model_dim=-2, name='fc2')(y)


def gelu(x: Float[Array, '...'], kind: str) -> Float[Array, '...']:
  """Computes GELU: 'exact', or approximated by 'tanh' or a sigmoid ('quick').

  On a GPU the backward pass computes it again from `x`, which is kept in any
  case. Otherwise XLA writes a second array of this size to memory in the
  forward pass and reads it in the backward pass.
  """
  if sharding.on_gpu():
    return _gelu_of_input(x, kind)
  return _gelu(x, kind)


def _gelu(x: Float[Array, '...'], kind: str) -> Float[Array, '...']:
  if kind == 'quick':
    return x * jax.nn.sigmoid(1.702 * x)
  if kind == 'exact' and x.dtype == jnp.bfloat16:
    # `jax.nn.gelu` rounds on the way, up to 5 % off for negative values, and
    # takes erfc, which costs a TPU more than erf.
    wide = x.astype(jnp.float32)
    return (wide * (0.5 + 0.5 * jax.lax.erf(wide * 0.5**0.5))).astype(x.dtype)
  return jax.nn.gelu(x, approximate=kind == 'tanh')


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gelu_of_input(x: Float[Array, '...'], kind: str) -> Float[Array, '...']:
  return _gelu(x, kind)


def _gelu_forward(x: Array, kind: str) -> tuple[Array, Array]:
  return _gelu(x, kind), x


def _gelu_backward(kind: str, x: Array, dy: Array) -> tuple[Array]:
  # Without the barrier, XLA recognizes the same expression in both passes.
  wide = jax.lax.optimization_barrier(x).astype(jnp.float32)
  _, pull = jax.vjp(functools.partial(_gelu, kind=kind), wide)
  (dx,) = pull(dy.astype(jnp.float32))
  return (dx.astype(x.dtype),)


_gelu_of_input.defvjp(_gelu_forward, _gelu_backward)


class Block(nn.Module):
  """One pre-norm encoder layer (equations 2 and 3), in the form of a scan.

  `per_layer` holds what differs between layers: {} at evaluation, else `key`
  and the drop-path `rate`. `common` is the same for all: what positions give
  (see `positions.Positions`), or `kept` where each layer has its own. Besides
  the tokens it returns what `want` names.
  """

  num_heads: int
  mlp_dim: int
  dropout: float
  gelu: str
  dtype: jnp.dtype
  attention: str
  gated: bool = False
  qk_norm: bool = False
  layer_scale: float | None = None
  epsilon: float = EPSILON
  scheme: Scheme | None = None  # of its own positions
  grid: tuple[int, int] | None = None  # of patches, for these
  want: tuple[str, ...] = ()  # of 'layers' and 'attention'
  joint_start: bool = False  # see `multi_head.Attention`
  tokens: int | None = None  # see `multi_head.Attention`

  @nn.compact
  def __call__(
    self,
    x: Float[Array, 'n t d'],
    per_layer: dict[str, Shaped[Array, '']],
    common: dict[str, Any],
  ) -> tuple[Float[Array, 'n t d'], dict[str, Array]]:
    keys = [None] * 5
    rate = per_layer.get('rate')
    if 'key' in per_layer:
      keys = list(jax.random.split(per_layer['key'], 5))

    def branch(name: str, y: Array, drop_key: Any, path_key: Any) -> Array:
      y = dropout(y, self.dropout, drop_key)
      if self.layer_scale is not None:
        init = nn.initializers.constant(self.layer_scale)
        y = scaled(y, self.param(name, init, y.shape[-1:]))
      return y if rate is None else drop_path(y, rate, path_key)

    norm = functools.partial(LayerNorm, self.dtype, self.epsilon)
    x = sharding.constrain(x, sharding.BATCH, None, None)
    positions = self._positions(x.shape[-1], common)
    if 'added' in positions:
      x = x + positions['added'].astype(x.dtype)
    attend = multi_head.Attention(
      self.num_heads,
      self.dtype,
      self.attention,
      self.qk_norm,
      self.epsilon,
      self.joint_start,
      self.tokens,
      name='attention',
    )
    y, weights = attend(
      norm(name='norm1')(x),
      want_weights='attention' in self.want,
      positions=positions,
    )
    wanted = {} if weights is None else {'attention': weights}
    x = checkpoint_name(x + branch('scale1', y, *keys[:2]), 'middle')
    y = norm(name='norm2')(x)
    mlp = Mlp(
      self.mlp_dim,
      self.dropout,
      self.gelu,
      self.dtype,
      gated=self.gated,
      name='mlp',
    )
    x = x + branch('scale2', mlp(y, keys[2]), keys[3], keys[4])
    x = sharding.constrain(x, sharding.BATCH, None, None)
    if 'layers' in self.want:
      wanted['layers'] = x
    return x, wanted

  def _positions(self, width: int, common: dict[str, Any]) -> dict[str, Any]:
    """Those of this layer."""
    if self.scheme is None:
      return common
    if self.scheme.in_attention:
      width //= self.num_heads
    assert self.grid is not None
    places = Places(self.grid, common.get('kept'))
    return Positions(self.scheme, width, name='position')(places)


SAVED = (*multi_head.SAVED, 'statistics', 'middle', 'hidden')
REMAT_POLICIES = {
  'none': None,
  'full': jax.checkpoint_policies.nothing_saveable,
  'dots': jax.checkpoint_policies.save_only_these_names(*SAVED),
}


# What the encoder only hands on to its blocks.
_PASSED_ON = (
  *('num_heads', 'mlp_dim', 'dropout', 'gelu', 'dtype', 'attention', 'gated'),
  *('qk_norm', 'layer_scale', 'epsilon', 'scheme', 'joint_start'),
)


class Encoder(nn.Module):
  """`depth` blocks under one scan, then a LayerNorm (`norm`), if it is wanted.

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
  gated: bool = False
  qk_norm: bool = False
  layer_scale: float | None = None
  epsilon: float = EPSILON
  scheme: Scheme | None = None  # of positions that every layer has itself
  drop_path_first: float = 0.0
  joint_start: bool = False  # see `multi_head.Attention`
  last_norm: bool = True

  @nn.compact
  def __call__(
    self,
    x: Float[Array, 'n t d'],
    key: Key[Array, ''] | None,
    want: tuple[str, ...] = (),
    positions: Mapping[str, Any] | None = None,
    places: Places | None = None,
  ) -> tuple[Float[Array, 'n t d'], dict[str, Array]]:
    """The tokens, and of each layer what is wanted, `[n, depth, …]`.

    Args:
      x: tokens.
      key: for dropout and drop path.
      want: of 'layers' and 'attention'.
      positions: the same for all layers, see `positions.Positions`.
      places: of the tokens, for positions that every layer has itself.
    """
    block = Block
    if self.remat != 'none':
      block = nn.remat(
        Block, prevent_cse=False, policy=REMAT_POLICIES[self.remat]
      )
    common, grid = dict(positions or {}), None
    if self.scheme is not None:
      assert places is not None
      grid = places.grid
      common = {} if places.kept is None else {'kept': places.kept}
    options = {name: getattr(self, name) for name in _PASSED_ON}
    tokens = x.shape[1]
    if self._pads(x, want, common):
      # Once for all layers: each would otherwise copy its queries, keys, values
      # and outputs to pad them.
      x, options['tokens'] = jnp.pad(x, ((0, 0), (0, 1), (0, 0))), tokens
    per_layer_and_common: Any = (0, nn.broadcast)
    layers = nn.scan(
      block,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      in_axes=per_layer_and_common,
      length=self.depth,
      unroll=self.unroll,
    )(**options, grid=grid, want=want, name='layers')
    per_layer = {}
    if key is not None:
      per_layer['key'] = jax.random.split(key, self.depth)
      if self.drop_path:  # changes linearly with depth
        rates = self.drop_path_first, self.drop_path
        per_layer['rate'] = jnp.linspace(*rates, self.depth)
    x, wanted = layers(x, per_layer, common)
    x = x[:, :tokens]
    wanted = {name: leaf.swapaxes(0, 1) for name, leaf in wanted.items()}
    if self.last_norm:
      x = LayerNorm(self.dtype, self.epsilon, name='norm')(x)
    return x, wanted

  def _pads(
    self, x: Float[Array, 'n t d'], want: tuple[str, ...], common: dict
  ) -> bool:
    """Returns whether the layers compute one token of padding.

    cuDNN's attention needs an even number of tokens. Positions and outputs of
    single layers are of the tokens themselves, so with them nothing is padded
    here.
    """
    channels = x.shape[-1] // self.num_heads
    by_cudnn = multi_head.takes_cudnn(self.attention, channels, self.dtype)
    plain = not want and not common and self.scheme is None
    return by_cudnn and plain and x.shape[1] % 2 == 1
