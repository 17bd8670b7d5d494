"""Layers that all models use.

Parameters are float32. Matrix products and activations have the dtype of the
config (bfloat16 on accelerators); products accumulate in float32, and
statistics of norms are float32. Matrices are gathered over the mesh axis `fsdp`
where they are used.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Key, Num, UInt32

from vit_jax.arrays import sharding
from vit_jax.errors import UserError
from vit_jax.models import xla
from vit_jax.models.init import ZEROS, Initializer

EPSILON = 1e-6  # epsilon of the LayerNorms of the official JAX models
ACTIVATIONS = ('tanh', 'exact', 'quick', 'relu', 'silu')
REMAT = ('none', 'full', 'dots')
# Coefficients of the polynomial of x² in `_centered_cdf`, that of the highest
# power first.
_COEFFICIENTS = (8.656e-7, -3.99648e-4, 3.7281171e-2, 0.79713306)
_MIN_CHANNELS = 1_024  # with fewer, erf is faster (benchmarks/history/tpu.md)
# Multipliers of lowbias32 (see `random_words`), and 2^32 divided by the golden
# ratio, whose multiples modulo 2^32 are spread evenly.
_FIRST, _SECOND = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_GOLDEN = np.uint32(0x9E3779B9)

# Parameters


def sized_parameter(
  module: nn.Module, name: str, init: Initializer, shape: Any
) -> Any:
  """Checks the shape of a parameter of a module, and returns the parameter.

  Args:
    module: module that owns the parameter.
    name: name of the parameter.
    init: initializer.
    shape: shape of the parameter for the images of this call.

  Raises:
    UserError: the parameter is for images of another size.
  """
  shape = tuple(shape)
  # Flax also compares the shapes, but its error does not mention images.
  if module.has_variable('params', name) and not module.is_initializing():
    value: Any = module.get_variable('params', name)
    if tuple(value.shape) != shape:
      path = '/'.join((*module.path, name))
      raise UserError(
        f'the parameter {path} has the shape {list(value.shape)}, and these '
        f'images need {list(shape)}: the parameters are for images of another '
        'size. Resize the images to it, load the weights for this size '
        '(load_pretrained(path, image_size=…)), or use '
        'model.at_sizes(original_size).'
      )
  return module.param(name, init, shape)


class Linear(nn.Module):
  """A dense layer from the last axes of its input to the axes `features`.

  The kernel `[*inputs, *features]` is initialized like the flattened matrix. It
  is gathered over the mesh axis `fsdp` where it is used.

  Attributes:
    features: sizes of the new axes.
    inputs: sizes of the axes that are contracted; None for the last
      `input_axes` axes of the input.
    input_axes: number of axes that are contracted, if `inputs` is None.
    flat: whether the new axes are returned as one axis.
    model_dim: negative index of the kernel axis that stays split over the mesh
      axis `model`; None if there is no such axis.
    kernel_init: initializer of the flattened kernel.
    bias_init: initializer of the bias.
    use_bias: whether the layer has a bias.
    dtype: dtype of the computation.
    out_dtype: dtype of the result; None for `dtype`.
  """

  features: tuple[int, ...]
  inputs: tuple[int, ...] | None = None
  input_axes: int = 1
  flat: bool = False
  model_dim: int | None = None
  kernel_init: Initializer = nn.initializers.xavier_uniform()
  bias_init: Initializer = ZEROS
  use_bias: bool = True
  dtype: jax.typing.DTypeLike = 'float32'
  out_dtype: jax.typing.DTypeLike | None = None

  def __call__(self, x: Float[Array, '...']) -> Float[Array, '...']:
    """Applies the layer.

    Args:
      x: array whose last axes are `inputs`, or one axis of their product.
    """
    y, bias = self.product(x)
    return xla.plus_bias(y, bias) if self.use_bias else y

  @nn.compact
  def product(
    self, x: Float[Array, '...']
  ) -> tuple[Float[Array, '...'], Float[Array, '...']]:
    """Returns the product with the kernel and the bias, without adding them.

    Without a bias, its values are zeros.
    """
    inputs = self.inputs or x.shape[-self.input_axes :]
    matrix = math.prod(inputs), math.prod(self.features)

    def init(key: Array) -> Array:
      return self.kernel_init(key, matrix).reshape(*inputs, *self.features)

    kernel = self.param('kernel', init)
    bias = jnp.zeros(self.features)
    if self.use_bias:
      bias = self.param('bias', self.bias_init, self.features)
    spec: list[str | None] = [None] * kernel.ndim
    if self.model_dim is not None:
      spec[self.model_dim] = 'model'
    # The cast comes first, so that `fsdp` gathers half as many bytes.
    kernel = sharding.constrain(kernel.astype(self.dtype), *spec)
    out_spec = spec[len(inputs) :]
    out_dtype = self.out_dtype or self.dtype
    bias = sharding.constrain(bias.astype(out_dtype), *out_spec)
    if self.flat:
      kernel = xla.reshaped(kernel, *inputs, matrix[1])
      bias, out_spec = bias.reshape(-1), out_spec[:1]
    x, in_dims = x.astype(self.dtype), len(inputs)
    if x.shape[-in_dims:] != inputs:  # they are one axis of x, as after `flat`
      kernel = xla.reshaped(kernel, matrix[0], *kernel.shape[in_dims:])
      in_dims = 1
    y = xla.product(x, kernel, in_dims, out_dtype)
    others = [None] * (y.ndim - 1 - len(out_spec))  # such as tokens
    return sharding.constrain(y, sharding.BATCH, *others, *out_spec), bias


def head(
  num_classes: int,
  dtype: jnp.dtype,
  *,
  bias: float = 0.0,
  kernel_init: Initializer = ZEROS,
) -> Linear:
  """Returns the layer that computes logits from features.

  Operands of the product have `dtype`; the sum with the bias is float32,
  because adjacent bfloat16 numbers near a bias of -10 differ by 1/16.

  Args:
    num_classes: number of outputs, split over the mesh axis `model`.
    dtype: dtype of the operands.
    bias: initial value of the bias.
    kernel_init: initializer of the matrix.
  """
  return Linear(
    (num_classes,),
    model_dim=-1,
    kernel_init=kernel_init,
    bias_init=nn.initializers.constant(bias),
    dtype=dtype,
    out_dtype=jnp.dtype(jnp.float32),
  )


def low_rank(rate: float, scale: float) -> Any:
  """Returns a context in which linear layers add a product with dropout.

  A layer with the further parameters `a` `[inputs, rank]`, `b` `[rank,
  outputs]` and `key` adds scale · drop(x) a b to the product with its kernel.

  Args:
    rate: dropout rate of the inputs.
    scale: factor of the product.
  """

  def product(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    layer, result = context.module, call(*args, **kwargs)
    # Every method of every module is intercepted.
    if context.method_name != 'product' or not layer.has_variable(
      'params', 'a'
    ):
      return result
    [x], [y, bias] = args, result
    get = functools.partial(layer.get_variable, 'params')
    a, b = (sharding.constrain(get(name), None, None) for name in ('a', 'b'))
    leading = y.ndim - (1 if layer.flat else len(layer.features))
    x = x.reshape(*y.shape[:leading], -1)  # [..., inputs]
    x = dropout(x, rate, get('key'))
    x, a, b = (each.astype(layer.dtype) for each in (x, a, b))
    for matrix in (a, b):
      x = xla.product(x, matrix, 1, layer.dtype)
    return y + scaled(x, scale).reshape(y.shape), bias

  return nn.intercept_methods(product)


# Norms


class LayerNorm(nn.Module):
  """Normalization of the last axis with float32 statistics.

  The variance of float32 inputs is computed in two passes. For bfloat16 inputs
  it is E[x²] − E[x]², in one pass. This loses half of float32's 24 bits only if
  the mean is 64 times the standard deviation, and then the 8 bits of the inputs
  are too few anyway. The statistics are kept for the backward pass.

  Attributes:
    dtype: dtype of the result.
    epsilon: value added to the variance.
  """

  dtype: jnp.dtype
  epsilon: float = EPSILON

  def __call__(self, x: Float[Array, '... d']) -> Float[Array, '... d']:
    scale, bias = self.vectors(x.shape[-1])
    shape, x = x.shape, xla.as_rows(x)
    wide = x.astype(jnp.float32)
    mean = checkpoint_name(wide.mean(axis=-1, keepdims=True), 'statistics')
    if x.dtype == jnp.float32:
      variance = jnp.square(wide - mean).mean(axis=-1, keepdims=True)
    else:
      variance = jnp.square(wide).mean(axis=-1, keepdims=True)
      variance -= jnp.square(mean)
    factor = _inverse_std(variance, self.epsilon)
    y = ((wide - mean) * (factor * scale) + bias).astype(self.dtype)
    return y.reshape(shape)

  @nn.compact
  def vectors(self, channels: int) -> list[Float[Array, ' d']]:
    """Returns scale and bias, without computing the norm."""
    scale = self.param('scale', nn.initializers.ones_init(), (channels,))
    return [scale, self.param('bias', ZEROS, (channels,))]


class RmsNorm(nn.Module):
  """Division of the last axis by its root mean square, in float32.

  Attributes:
    dtype: dtype of the result.
    epsilon: value added to the mean square.

  Reference: arXiv 1910.07467.
  """

  dtype: jnp.dtype
  epsilon: float = EPSILON

  def __call__(self, x: Float[Array, '... d']) -> Float[Array, '... d']:
    [scale] = self.vectors(x.shape[-1])
    shape, x = x.shape, xla.as_rows(x)
    wide = x.astype(jnp.float32)
    square = jnp.square(wide).mean(axis=-1, keepdims=True)
    y = wide * (_inverse_std(square, self.epsilon) * scale)
    return y.astype(self.dtype).reshape(shape)

  @nn.compact
  def vectors(self, channels: int) -> list[Float[Array, ' d']]:
    """Returns the scale, without computing the norm."""
    return [self.param('scale', nn.initializers.ones_init(), (channels,))]


NORMS = {'layer': LayerNorm, 'rms': RmsNorm}


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _inverse_std(
  variance: Float[Array, '...'], epsilon: float
) -> Float[Array, '...']:
  """Computes 1 / √(variance + ε); its derivative needs only this result."""
  factor = jax.lax.rsqrt(jnp.maximum(variance, 0) + epsilon)
  return checkpoint_name(factor, 'statistics')


@_inverse_std.defjvp
def _(
  epsilon: float, primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
  factor = _inverse_std(*primals, epsilon)
  return factor, -0.5 * factor**3 * tangents[0]


# MLP


class Mlp(nn.Module):
  """Two dense layers with an activation and dropout between them.

  With 'swiglu' (arXiv 2002.05202) the first layer has two outputs for each
  hidden unit, `[d, 2, mlp_dim]`. The activation is the product of one output
  and the SiLU of the other.

  Attributes:
    mlp_dim: number of hidden units.
    dropout: dropout rate of the hidden units.
    activation: one of `ACTIVATIONS` or 'swiglu'.
    dtype: dtype of the computation.
    kernel_init: initializer of both matrices.
    bias_init: initializer of both biases.
    use_bias: whether both layers have a bias.
    norm: constructor of a norm of the hidden units; None for no norm.
  """

  mlp_dim: int
  dropout: float
  activation: str
  dtype: jnp.dtype
  kernel_init: Initializer = nn.initializers.xavier_uniform()
  bias_init: Initializer = nn.initializers.normal(1e-6)
  use_bias: bool = True
  norm: Any = None

  @nn.compact
  def __call__(
    self, x: Float[Array, 'n t d'], key: Key[Array, ''] | None
  ) -> Float[Array, 'n t d']:
    dense = functools.partial(
      Linear,
      kernel_init=self.kernel_init,
      bias_init=self.bias_init,
      use_bias=self.use_bias,
      dtype=self.dtype,
    )
    has_gate = self.activation == 'swiglu'
    units = (2, self.mlp_dim) if has_gate else (self.mlp_dim,)
    # The hidden units are split over the mesh axis `model`: only the second
    # product needs communication, for a single sum.
    y = dense(features=units, model_dim=-1, name='fc1')(x)
    y = checkpoint_name(y, 'hidden')
    if has_gate:
      y = jax.nn.silu(y[:, :, 0]) * y[:, :, 1]
    else:
      y = activate(y, self.activation)
    y = dropout(y, self.dropout, key)
    if self.norm is not None:
      y = self.norm(name='norm')(y)
    y = xla.stored_without_gradient(y)
    return dense(features=(x.shape[-1],), model_dim=-2, name='fc2')(y)


def activate(x: Float[Array, '...'], kind: str) -> Float[Array, '...']:
  """Computes one of `ACTIVATIONS`.

  These are GELU ('exact', or approximated by 'tanh' or a sigmoid: 'quick'),
  'relu' and 'silu'. In bfloat16 on TPUs, 'exact' is computed to the precision
  of bfloat16.
  """
  return xla.recomputed(functools.partial(_activation, kind=kind), x)


def _activation(x: Float[Array, '...'], kind: str) -> Float[Array, '...']:
  if kind == 'quick':
    return x * jax.nn.sigmoid(1.702 * x)
  if kind in ('relu', 'silu'):
    return getattr(jax.nn, kind)(x)
  if kind == 'exact' and x.dtype == jnp.bfloat16:
    # `jax.nn.gelu` rounds intermediate results, with errors of up to 5 % for
    # negative values, and uses erfc, which is slower than erf on a TPU.
    wide = x.astype(jnp.float32)
    return (wide * (0.5 + 0.5 * _centered_cdf(wide))).astype(x.dtype)
  return jax.nn.gelu(x, approximate=kind == 'tanh')


def _centered_cdf(x: Float[Array, '...']) -> Float[Array, '...']:
  """Computes 2 Φ(x) - 1 = erf(x / √2), where Φ is the normal distribution.

  On a TPU, fewer operations compute it to the precision of bfloat16: for
  |x| < 4, the error of Φ is less than 0.3 %, and that of the derivative of GELU
  less than 2e-4. The coefficients were fitted to both. XLA also keeps less for
  the backward pass than with erf. This is faster, except with few channels.
  """
  if not sharding.on_tpu() or x.shape[-1] < _MIN_CHANNELS:
    return jax.lax.erf(x * 0.5**0.5)
  square = jnp.minimum(x * x, 36)  # no overflow
  polynomial = functools.reduce(lambda y, c: y * square + c, _COEFFICIENTS)
  return jnp.tanh(x * polynomial)


# Dropout and drop path


def dropout(
  x: Float[Array, '...'], rate: float, key: Key[Array, ''] | None
) -> Float[Array, '...']:
  """Sets a fraction `rate` of the entries to 0 and scales up the others.

  Args:
    x: activations.
    rate: fraction of entries to drop, in [0, 1).
    key: random key; None for evaluation, when nothing is dropped.
  """
  if key is None or rate == 0:
    return x
  # Random words below the threshold are a fraction `rate` of all. Integers are
  # compared, without a conversion to floats.
  threshold = min(round(rate * 2**32), 2**32 - 1)
  shape = x.shape
  x = xla.as_rows(x)  # which does not change the random words
  keep = random_words(key, x.shape) >= jnp.uint32(threshold)
  return jnp.where(keep, scaled(x, 1 / (1 - rate)), 0).reshape(shape)


def random_words(
  key: Key[Array, ''], shape: tuple[int, ...]
) -> UInt32[Array, '...']:
  """Returns 32 random bits per entry: a hash of its indices and the key.

  They are suitable for dropout, which uses the high bits, but not for other
  purposes: there are only 2^32 different rows of words. Keys must be results of
  `split` or `fold_in`, which hash them. Two keys with the same last word, whose
  first words differ by d (xor), give the same rows in another order: row i for
  one key is row i ^ d for the other.

  XLA fuses this function with its user: no mask is stored, every device
  computes its own part, and the cost is a fraction of that of JAX's generators,
  which would take longer than the layer itself.

  Reference: `_mix` is lowbias32, from C. Wellons' search for integer hashes of
  low bias. The round for a column is a shorter form of it, with one shift
  instead of three: the first has little effect on a row that is mixed already,
  and the last only on the low bits.

  Args:
    key: random key.
    shape: shape of the result.
  """
  words = jax.random.key_data(key).astype(jnp.uint32)
  rows = jnp.zeros(shape[:-1], jnp.uint32)
  for axis, size in enumerate(shape[:-1]):
    index = jax.lax.broadcasted_iota(jnp.uint32, shape[:-1], axis)
    rows = rows * jnp.uint32(size) + index
  # The key is mixed in twice per row; each column then costs only one round.
  rows = _mix(_mix(rows ^ words[0]) + words[-1])
  columns = jnp.arange(shape[-1], dtype=jnp.uint32) * _GOLDEN
  x = (rows[..., None] ^ columns) * _FIRST
  return (x ^ (x >> 16)) * _SECOND


def _mix(x: UInt32[Array, '...']) -> UInt32[Array, '...']:
  """Applies a bijection in which every bit depends on every other bit."""
  x = (x ^ (x >> 16)) * _FIRST
  x = (x ^ (x >> 15)) * _SECOND
  return x ^ (x >> 16)


def scaled(x: Array, factor: Any) -> Array:
  """Returns x · factor in the dtype of x.

  The product is rounded, not the factor, because a rounded factor would change
  all entries in the same direction.
  """
  return (x.astype(jnp.float32) * factor).astype(x.dtype)


def drop_path(
  x: Float[Array, 'n t d'],
  rate: Float[Array, ''],
  key: Key[Array, ''] | None,
) -> Float[Array, 'n t d']:
  """Sets a residual branch to 0 for a fraction `rate` of the examples.

  Args:
    x: result of the branch.
    rate: fraction of examples, in [0, 1).
    key: random key; None for evaluation, when nothing is dropped.

  Reference: stochastic depth, Huang et al., arXiv 1603.09382.
  """
  if key is None:
    return x
  # One number per example: all its tokens are kept or dropped together.
  keep = 1 - rate
  kept = jax.random.uniform(key, (x.shape[0], 1, 1)) < keep
  return jnp.where(kept, scaled(x, 1 / keep), 0)


# Patches and stacks of layers


def cut_patches(
  x: Num[Array, 'n y x c'], grid: tuple[int, int], sides: tuple[int, int]
) -> Num[Array, 'n p h w c']:
  """Splits maps into patches, row by row.

  A convolution whose stride is its size is a matrix product with the values of
  each patch.

  Args:
    x: maps; values below and on the right of the last patches are dropped.
    grid: rows and columns of patches.
    sides: height and width of a patch.
  """
  (rows, columns), (height, width) = grid, sides
  n, *_, channels = x.shape
  x = x[:, : rows * height, : columns * width]
  x = x.reshape(n, rows, height, columns, width, channels)
  x = x.transpose(0, 1, 3, 2, 4, 5)  # [n, rows, columns, height, width, c]
  return x.reshape(n, rows * columns, height, width, channels)


def rematerialized(
  layer: type[nn.Module],
  remat: str,
  saved: Sequence[str],
  *,
  prevent_cse: bool = False,
) -> Any:
  """Returns a layer class whose backward pass recomputes activations.

  Args:
    layer: class of a layer.
    remat: 'none', 'full' (recompute everything) or 'dots' (keep the arrays
      that are named in `saved`).
    saved: names given by `checkpoint_name`.
    prevent_cse: whether to prevent XLA from merging the recomputation with the
      forward pass. This is not needed under a scan, whose forward and backward
      passes are separate loops.
  """
  if remat == 'none':
    return layer
  policy = jax.checkpoint_policies.nothing_saveable
  if remat == 'dots':
    policy = jax.checkpoint_policies.save_only_these_names(*saved)
  return nn.remat(layer, prevent_cse=prevent_cse, policy=policy)


def scanned(
  layer: type[nn.Module],
  length: int,
  *,
  remat: str,
  saved: Sequence[str],
  unroll: int,
  in_axes: Any = 0,
) -> Any:
  """Returns a class that applies several layers of the same kind.

  The parameters of the layers are stacked along a new first axis.

  Args:
    layer: class of a layer, whose first argument and first result are the
      activations.
    length: number of layers.
    remat: see `rematerialized`.
    saved: see `rematerialized`.
    unroll: number of layers that are unrolled in each step of the scan.
    in_axes: axes along which further arguments are split, see `nn.scan`.
  """
  return nn.scan(
    rematerialized(layer, remat, saved),
    variable_axes={'params': 0},
    split_rngs={'params': True},
    in_axes=in_axes,
    length=length,
    unroll=min(unroll, length),
  )
