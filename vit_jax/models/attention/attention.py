"""Multi-head attention with a backward pass that recomputes the weights.

The weights `[n, h, q, k]` are the largest arrays of a Vision Transformer. They
are not kept for the backward pass. It recomputes them from queries, keys and
the log-sum-exp of each row, in one fusion with the product of queries and keys.
It then stores the weights and the gradients of the logits only once, in the
dtype of the computation. With plain automatic differentiation, XLA keeps
float32 logits and reads them many times. The custom backward pass reduces the
time of a whole step on a TPU v3 by a tenth (benchmarks/history/tpu.md).
"""

import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from vit_jax.arrays import sharding
from vit_jax.errors import UserError
from vit_jax.models import xla
from vit_jax.models.attention import cudnn, tpu
from vit_jax.models.init import INIT, Init
from vit_jax.models.layers import LayerNorm, Linear, RmsNorm
from vit_jax.models.positions import NO_POSITION, Position, rotate

# Names of the arrays that the backward pass needs, for rematerialization.
SAVED = (*tpu.SAVED, 'log_sum_exp')
# 'auto' uses the kernels of the device where they apply: Pallas kernels on a
# TPU, cuDNN on a GPU. On a CPU, 'kernel' interprets the TPU kernels, for tests.
IMPLEMENTATIONS = ('auto', 'kernel', 'xla')
# What kernels support in addition to softmax(q·k / √c) v of a sequence. The TPU
# kernels normalize and rotate queries and keys; XLA does so before cuDNN.
_TPU_SUPPORTS = ('qk_norm', 'rotary positions', 'bias')
_GPU_SUPPORTS = (*_TPU_SUPPORTS, 'context', 'weights')
# Projections with a bias, by the value of `vit.Config.qkv_bias`.
BIASES = {
  'all': ('query', 'key', 'value'),
  'query_value': ('query', 'value'),
  'none': (),
}
_Residuals = tuple[Array, Array, Array, Array, Array]


def choose(
  requested: str,
  tokens: int,
  num_heads: int,
  channels: int,
  dtype: jnp.dtype,
  needs: Sequence[str] = (),
) -> str:
  """Returns the implementation of attention on the devices of the mesh.

  Args:
    requested: one of `IMPLEMENTATIONS`.
    tokens: number of tokens, or of tokens of a window.
    num_heads: number of heads.
    channels: channels of a head.
    dtype: dtype of queries, keys and values.
    needs: what is computed in addition to softmax(q·k / √c) v of a sequence;
      see `unsupported`.

  Returns:
    'kernels' (of `tpu`), 'cuDNN' or 'XLA'.

  Raises:
    UserError: `requested` is 'kernel', and the kernels do not apply. For
      windows, XLA is used instead, because the stages of a Swin differ.
  """
  on_gpu, missing = sharding.on_gpu(), unsupported(needs)
  # On a CPU, kernels are only used on request, and interpreted.
  has_kernels = requested == 'kernel' or on_gpu or sharding.on_tpu()
  if requested == 'xla' or not has_kernels:
    return 'XLA'
  if on_gpu:
    fits, limits = cudnn.fits(channels, dtype), cudnn.LIMITS
  else:
    fits = num_heads % sharding.axis_size('model') == 0 and tpu.fits(
      tokens,
      channels,
      dtype,
      one_tile='bias' in needs,
      transformed=not {'qk_norm', 'rotary positions'}.isdisjoint(needs),
    )
    limits = tpu.limits(channels, dtype)
  if fits and not missing:
    return 'cuDNN' if on_gpu else 'kernels'
  is_window = 'bias' in needs
  if requested == 'kernel' and not is_window:
    raise UserError(
      f"model.attention='kernel': kernels do not support "
      f'{" and ".join(missing) or "these sizes"}, with {tokens} tokens, width '
      f'{num_heads * channels} and {num_heads} heads of {channels} channels in '
      f'{jnp.dtype(dtype).name} on this mesh. They support {limits}. Set '
      "model.attention='auto' to use XLA where kernels do not apply."
    )
  return 'XLA'


def unsupported(needs: Sequence[str]) -> list[str]:
  """Returns the needs that the kernels of these devices do not support.

  Args:
    needs: any of 'qk_norm', 'rotary positions', 'relative positions',
      'context' (keys of another sequence), 'weights' (weights as a result) and
      'bias' (added to logits, in windows).
  """
  supported = _GPU_SUPPORTS if sharding.on_gpu() else _TPU_SUPPORTS
  return [need for need in needs if need not in supported]


def dot_product_attention(
  query: Float[Array, 'n q h c'],
  key: Float[Array, 'n k h c'],
  value: Float[Array, 'n k h c'],
) -> Float[Array, 'n q h c']:
  """Computes softmax(q·k / √c) v, with logits and softmax in float32.

  Weights are rounded to the dtype of the values before the product with the
  values. The function is differentiable once, in reverse mode.

  Args:
    query: queries of all heads.
    key: keys of all heads.
    value: values of all heads.

  Returns:
    Output for each query, in the dtype of the values.

  Reference: equations 5 to 7 of appendix A.
  """
  return _attend(_scaled(query), key, value)


def _scaled(query: Float[Array, '*n q h c']) -> Float[Array, '*n q h c']:
  return query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)


def _heads_axis() -> int:
  """Returns the axis of the heads of all arrays in training.

  It is 1 on a CPU, where XLA would otherwise transpose arrays for each of the
  seven products, and 2 on other devices.
  """
  return 2 if sharding.on_tpu() or sharding.on_gpu() else 1


def _einsum(
  equation: str, a: Array, b: Array, axis: int, dtype: Any = None
) -> Array:
  """Computes a product of arrays `[…, t, h, c]`, or `[…, h, t, c]` (axis 1)."""
  if axis == 1:
    equation = equation.replace('qhc', 'hqc').replace('khc', 'hkc')
  return jnp.einsum(equation, a, b, preferred_element_type=dtype)


def _logits(
  query: Array, key: Array, axis: int = 2
) -> Float[Array, '*n h q k']:
  return _einsum('...qhc,...khc->...hqk', query, key, axis, jnp.float32)


def _soft_max(
  query: Array, key: Array, value: Array, axis: int = 2
) -> tuple[Array, Float[Array, 'n h q']]:
  """Computes the output, and the log-sum-exp of each row of logits.

  Args:
    query: queries, `[n, q, h, c]` or, with axis 1, `[n, h, q, c]`.
    key: keys.
    value: values.
    axis: axis of the heads.
  """
  logits = _logits(query, key, axis)
  largest = logits.max(axis=-1)
  if value.dtype.itemsize < 4:
    # Computing the logits twice is cheaper than storing them in float32. The
    # barrier keeps XLA from merging the two computations.
    query, largest = xla.barrier((query, largest))
    logits = _logits(query, key, axis)
  weights = jnp.exp(logits - largest[..., None])
  total = weights.sum(axis=-1)
  weights = weights.astype(value.dtype)
  y = _einsum('nhqk,nkhc->nqhc', weights, value, axis, jnp.float32)
  # For axis 2, [n, q, h, c] / [n, q, h, 1]
  y = y / jnp.moveaxis(total, 1, axis)[..., None]
  y = y.astype(value.dtype)
  return y, largest + jnp.log(total)


@jax.custom_vjp
def _attend(query: Array, key: Array, value: Array) -> Array:
  """Computes attention with queries that are already scaled."""
  return _soft_max(query, key, value)[0]


def _attend_forward(
  query: Array, key: Array, value: Array
) -> tuple[Array, _Residuals]:
  axis = _heads_axis()
  inputs = (jnp.moveaxis(x, 2, axis) for x in (query, key, value))
  inputs = [*map(checkpoint_name, inputs, SAVED[:3])]
  y, log_sum_exp = map(
    checkpoint_name, _soft_max(*inputs, axis=axis), SAVED[3:]
  )
  return jnp.moveaxis(y, axis, 2), (*inputs, y, log_sum_exp)


def _attend_backward(
  residuals: _Residuals, dy: Float[Array, 'n q h c']
) -> tuple[Array, ...]:
  query, key, value, y, log_sum_exp = residuals
  dtype, wide, axis = value.dtype, jnp.float32, _heads_axis()
  dy = jnp.moveaxis(dy, 2, axis)
  # mean = Σ_k weight · d(weight). Since y = Σ_k weight · value, it is the dot
  # product of y and its gradient.
  mean = (dy.astype(wide) * y.astype(wide)).sum(axis=-1)
  mean = jnp.moveaxis(mean, axis, 1)  # [n, h, q]
  weights = jnp.exp(_logits(query, key, axis) - log_sum_exp[..., None])
  weights = weights.astype(dtype)
  d_weights = _logits(dy, value, axis)
  d_logits = weights.astype(wide) * (d_weights - mean[..., None])
  d_logits = d_logits.astype(dtype)
  d_query = _einsum('nhqk,nkhc->nqhc', d_logits, key, axis)
  d_key = _einsum('nhqk,nqhc->nkhc', d_logits, query, axis)
  d_value = _einsum('nhqk,nqhc->nkhc', weights, dy, axis)
  return tuple(jnp.moveaxis(x, axis, 2) for x in (d_query, d_key, d_value))


_attend.defvjp(_attend_forward, _attend_backward)


def relative_attention(
  query: Float[Array, '*n q h c'],
  key: Float[Array, '*n k h c'],
  value: Float[Array, '*n k h c'],
  relative: Float[Array, '... q k c'] | None,
  bias: Float[Array, '... h q k'] | None = None,
) -> Float[Array, '*n q h c']:
  """Computes softmax(q·(k + r) / √c + b) v with relative positions r and b.

  The backward pass recomputes everything except the inputs.

  Args:
    query: queries of all heads.
    key: keys of all heads.
    value: values of all heads.
    relative: embedding of each pair of query and key, `[q, k, c]` or
      `[n, q, k, c]`; None for none.
    bias: bias of each pair for each head, which can be broadcast to `[*n, h, q,
      k]`; None for none.

  Returns:
    Output for each query, in the dtype of the values.

  Reference: appendix D.4.
  """
  inputs = map(checkpoint_name, (query, key, value), SAVED[:3])
  y = _relative_attention(*inputs, relative, bias)
  return checkpoint_name(y, SAVED[3])


@jax.checkpoint
def _relative_attention(
  query: Array, key: Array, value: Array, relative: Any, bias: Any
) -> Array:
  weights = _weights(query, key, relative, bias).astype(value.dtype)
  y = jnp.einsum(
    '...hqk,...khc->...qhc', weights, value, preferred_element_type=jnp.float32
  )
  return y.astype(value.dtype)


def _weights(
  query: Float[Array, '*n q h c'],
  key: Float[Array, '*n k h c'],
  relative: Float[Array, '... q k c'] | None,
  bias: Float[Array, '... h q k'] | None = None,
) -> Float[Array, '*n h q k']:
  """Computes the attention weights, float32."""
  query = _scaled(query)
  logits = _logits(query, key)
  if relative is not None:
    logits += jnp.einsum(
      'nqhc,qkc->nhqk' if relative.ndim == 3 else 'nqhc,nqkc->nhqk',
      query,
      relative.astype(query.dtype),
      preferred_element_type=jnp.float32,
    )
  return jax.nn.softmax(logits if bias is None else logits + bias)


class Attention(nn.Module):
  """Multi-head attention from `x` to `context` (`x` itself by default).

  Attributes:
    num_heads: number of heads.
    dtype: dtype of the computation.
    implementation: one of `IMPLEMENTATIONS`.
    qk_norm: constructor of the norms of queries and of keys over the channels
      of a head, whose parameters all heads share (arXiv 2302.05442, section 2);
      None if there are no such norms.
    initializers: initializers of the matrices.
    tokens: number of tokens that are not padding; None if there is no padding.
    qkv_bias: names of the layers that have a bias, see `BIASES`.
    out_bias: whether the output layer has a bias.
    out_norm: constructor of a norm of the output of all heads, before the
      output layer; None if there is no such norm.
  """

  num_heads: int
  dtype: jnp.dtype
  implementation: str = 'auto'
  qk_norm: Any = None
  initializers: Init = INIT['authors']
  tokens: int | None = None
  qkv_bias: str = 'all'
  out_bias: bool = True
  out_norm: Any = None

  @nn.compact
  def __call__(
    self,
    x: Float[Array, 'n t d'],
    context: Float[Array, 'n s d'] | None = None,
    want_weights: bool = False,
    position: Position = NO_POSITION,
  ) -> tuple[Float[Array, 'n t d'], Float[Array, 'n h t s'] | None]:
    """Computes attention.

    Args:
      x: query tokens.
      context: key and value tokens; None for `x`.
      want_weights: whether to return the weights. TPU kernels are not used
        then, because they do not return them.
      position: positions of the tokens, of which `rotation`, `relative` and
        `bias` are used.

    Returns:
      Output tokens, and the weights or None.
    """
    width = x.shape[-1]
    heads = (self.num_heads, width // self.num_heads)
    relative, bias = position.relative, position.bias
    is_relative = relative is not None or bias is not None
    needs = {
      'qk_norm': self.qk_norm is not None,
      'rotary positions': position.rotation is not None,
      'relative positions': is_relative,
      'context': context is not None,
      'weights': want_weights,
    }
    by = choose(
      'auto' if want_weights else self.implementation,
      x.shape[1],
      *heads,
      self.dtype,
      [need for need, needed in needs.items() if needed],
    )
    context = x if context is None else context
    project = functools.partial(
      Linear,
      features=heads,
      model_dim=-2,
      flat=by == 'kernels',
      dtype=self.dtype,
      kernel_init=self.initializers.query_key_value,
    )
    layers = [
      project(name=name, use_bias=name in BIASES[self.qkv_bias])
      for name in BIASES['all']
    ]
    weights, norms = None, []
    if self.qk_norm is not None:
      norms = [self.qk_norm(name=f'{name}_norm') for name in ('query', 'key')]
    if by == 'kernels':
      y = attend_by_kernels(
        layers, x, self.num_heads, norms=norms, rotation=position.rotation
      )
    else:
      inputs = zip(layers, (x, context, context), strict=True)
      query, key, value = (layer(z) for layer, z in inputs)
      if norms:
        query, key = norms[0](query), norms[1](key)
      if position.rotation is not None:
        query, key = (rotate(z, *position.rotation) for z in (query, key))
      if by == 'cuDNN':
        y = cudnn.attend(query, key, value, tokens=self.tokens)
      elif is_relative:
        y = relative_attention(query, key, value, relative, bias)
      else:
        y = dot_product_attention(query, key, value)
      if want_weights:
        weights = _weights(query, key, relative, bias)
    if self.out_norm is not None:
      y = self.out_norm(name='norm')(y.reshape(x.shape))
    out = Linear(
      (width,),
      inputs=heads,
      model_dim=-3,
      dtype=self.dtype,
      kernel_init=self.initializers.matrix,
      use_bias=self.out_bias,
      name='out',
    )
    return out(y), weights


def attend_by_kernels(
  layers: Sequence[Linear],
  x: Float[Array, '*n t d'],
  num_heads: int,
  relative: Any = None,
  mask: Any = None,
  *,
  norms: Sequence[LayerNorm | RmsNorm] = (),
  rotation: Any = None,
) -> Float[Array, '*n t d']:
  """Computes self-attention by the TPU kernels.

  The kernels add the biases of the layers, and sum their gradients over blocks
  that are already in the memory of the core.

  Args:
    layers: flat layers that compute queries, keys and values.
    x: tokens.
    num_heads: number of heads.
    relative: offsets of the logits of each head, see `tpu.attend`.
    mask: offsets of the logits of each window, see `tpu.attend`.
    norms: norms of queries and of keys, which the kernels apply; () for none.
    rotation: sines and cosines, see `Position`; None for no rotation.
  """
  products = [layer.product(x) for layer in layers]
  projections, biases = zip(*products, strict=True)
  channels = projections[0].shape[-1] // num_heads
  return tpu.attend(
    projections,
    biases,
    num_heads,
    relative,
    mask,
    rotation=rotation,
    norms=[norm.vectors(channels) for norm in norms],
    epsilon=norms[0].epsilon if norms else 0.0,
  )
