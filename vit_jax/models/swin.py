"""The Swin Transformer (arXiv 2103.14030)."""

import dataclasses
import functools
import itertools
import math
import re
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Key, Shaped

from vit_jax.arrays import sharding
from vit_jax.config import schema
from vit_jax.errors import UserError
from vit_jax.models import backbone, layers, positions, vit, xla
from vit_jax.models.attention import attention, cudnn
from vit_jax.models.backbone import Backbone, Images, UncheckedImages
from vit_jax.models.contract import Leaves
from vit_jax.models.init import INIT
from vit_jax.models.layers import Linear, Mlp

Grid = tuple[int, int]
Tokens = Float[Array, 'n t d']
PerLayer = dict[str, Shaped[Array, '...']]
PATCH_SIZE = 4  # pixels, in all variants
MLP_RATIO = 4  # hidden units of an MLP per input channel
# Width and heads of the first stage. Each further stage has twice as many, so
# all heads have 32 channels.
SIZES = {
  'T': dict(width=96, depths=(2, 2, 6, 2), num_heads=3),
  'S': dict(width=96, depths=(2, 2, 18, 2), num_heads=3),
  'B': dict(width=128, depths=(2, 2, 18, 2), num_heads=4),
  'L': dict(width=192, depths=(2, 2, 18, 2), num_heads=6),
}
SIZE_KEYS = ('width', 'depths', 'num_heads')
RULES = ('authors', 'timm')  # values of `window_rule`
LN_EPSILON = 1e-5  # the default of PyTorch; 1e-6 in a ViT
LayerNorm = functools.partial(layers.LayerNorm, epsilon=LN_EPSILON)
NORMAL = INIT['trunc_normal'].matrix
_TABLE = 'attention/bias_table'  # end of the path of each bias table
_MASKED = -100.0  # added to logits of tokens from opposite edges of the map


@schema.operational('remat', 'unroll', 'attention')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(backbone.BackboneConfig):
  """Keys of the config's `model` section for a Swin Transformer.

  `unroll` applies to pairs of blocks.

  Attributes:
    variant: 'T', 'S', 'B' or 'L' (section 3.3). Sizes that are set explicitly
      take precedence.
    width: channels of the first stage; they double from stage to stage.
    depths: number of blocks of each stage, even numbers: blocks with plain and
      with shifted windows alternate.
    num_heads: attention heads of the first stage; they double from stage to
      stage.
    window_size: side of a window in tokens; reduced to the shorter side of a
      map that is smaller.
    window_rule: treatment of maps that windows do not fill. 'authors': the map
      is padded and then shifted, and is not shifted at all if one of its sides
      is at most `window_size` (the authors' detection code, Hugging Face).
      'timm': the map is shifted and then padded, and it is shifted along each
      side that is larger than `window_size`. Weights need the rule that they
      were trained with.
    gelu: activation of the MLPs, see `vit.Config`.
    pixels: units of the pixels that are cut into patches, 'symmetric' or
      'imagenet', see `vit.Config`.
    attention: implementation of attention within windows: 'auto' (kernels on
      TPUs, if windows have at most 384 tokens; cuDNN on GPUs), 'kernel' (the
      same, and interpreted on a CPU, for tests) or 'xla'.
    drop_path: drop-path rate of the last block; it grows linearly from 0 at the
      first block.

  Raises:
    UserError: a variant or choice is unknown, a size is missing, or a number is
      out of range.
  """

  variant: str | None = None
  width: backbone.Size = backbone.OF_VARIANT
  depths: backbone.Sizes = backbone.OF_VARIANT
  num_heads: backbone.Size = backbone.OF_VARIANT
  window_size: int = 7
  window_rule: str = 'authors'
  gelu: str = 'exact'
  pixels: str = 'symmetric'
  attention: str = 'auto'
  drop_path: float = 0.0

  def __post_init__(self):
    super().__post_init__()
    self.complete(SIZE_KEYS, SIZES)
    object.__setattr__(self, 'depths', tuple(self.depths))
    sizes = 'width', 'num_heads', 'window_size'
    self.check_range(*sizes, at_least=1, at_most=backbone.MAX_SIZE)
    self.check_choices(
      window_rule=RULES,
      gelu=layers.ACTIVATIONS,
      pixels=backbone.STATISTICS,
      attention=attention.IMPLEMENTATIONS,
    )
    self.check_range('drop_path', at_least=0, below=1)
    fits = self.width % self.num_heads == 0
    advice = 'num_heads must divide width'
    self.check_together(fits, advice, 'width', 'num_heads')
    fits = self.depths and all(d >= 2 and d % 2 == 0 for d in self.depths)
    advice = 'each stage needs an even number of blocks, 2 or more'
    self.check_together(fits, advice, 'depths')

  @property
  def probe(self) -> dict[str, Any]:
    """Keys of a model with few layers, for the comparison of kernels."""
    return dict(depths=(2,) * len(self.depths), drop_path=0.0)

  def attention_by(self, stage: int, side: int) -> str:
    """Returns the implementation of attention; see `attention.choose`.

    Args:
      stage: index of the stage, from 0.
      side: side of a window in tokens.
    """
    return attention.choose(
      self.attention,
      side**2,
      self.num_heads * 2**stage,
      self.width // self.num_heads,
      self.compute_dtype,
      ['bias'],
    )


# Windows


class Windows(NamedTuple):
  """The windows of a block: their size and shift, cutting and joining.

  A map that windows do not fill is padded with zeros below and on the right.
  The padding takes part in attention, as in the authors' code for detection
  (their code for classification rejects such maps).

  Attributes:
    rows: rows of the map of tokens.
    columns: columns of the map.
    size: side of a window in tokens.
    shift: (down, right), numbers of tokens by which the windows are moved.
    pad_after_shift: whether the map is padded after it is shifted.
  """

  rows: int
  columns: int
  size: int
  shift: tuple[int, int]
  pad_after_shift: bool = False

  @classmethod
  def of(
    cls,
    grid: tuple[int, int],
    size: int,
    shifted: bool,
    rule: str = 'authors',
  ) -> 'Windows':
    """Returns the windows of a block.

    Windows are not larger than the map. Windows that fill a side of the map are
    not shifted.

    Args:
      grid: rows and columns of tokens.
      size: side of a window in tokens.
      shifted: whether windows are shifted, by ⌊size / 2⌋.
      rule: 'authors' or 'timm', see `Config.window_rule`.

    Raises:
      UserError: timm would use windows that are not square.
    """
    rows, columns = grid
    if rule == 'timm' and min(grid) < size and rows != columns:
      raise UserError(
        f"model.window_rule='timm' does not support a feature map of {rows}x"
        f'{columns} tokens with model.window_size={size}: timm uses windows of '
        f'{min(rows, size)}x{min(columns, size)} tokens for it, and only '
        'square windows are supported. Use square or larger images.'
      )
    larger = [side > size for side in grid]
    if rule == 'authors':  # they shift both sides or none
      larger = [all(larger)] * 2
    down, right = (size // 2 if shifted and each else 0 for each in larger)
    size = min(size, *grid)
    return cls(rows, columns, size, (down, right), rule == 'timm')

  @property
  def padded(self) -> tuple[int, int]:
    """Rows and columns including the padding: multiples of the window size."""
    rows, columns = (
      math.ceil(side / self.size) * self.size
      for side in (self.rows, self.columns)
    )
    return rows, columns

  def cut(self, x: Float[Array, 'n t d']) -> Float[Array, 'n w s d']:
    """Cuts a map into windows.

    Args:
      x: tokens of the map, row by row.

    Returns:
      Tokens of each window; windows and their tokens are ordered row by row.
    """
    n, _, width = x.shape
    x = x.reshape(n, self.rows, self.columns, width)
    # Rolling the map up and left moves the windows down and right.
    if self.pad_after_shift:
      x = self._pad(self._roll(x, -1))
    else:
      x = self._roll(self._pad(x), -1)
    rows, columns = (side // self.size for side in self.padded)
    x = layers.cut_patches(x, (rows, columns), (self.size, self.size))
    # x: [n, windows, size, size, d]
    return x.reshape(n, -1, self.size**2, width)

  def _pad(self, x: Float[Array, 'n y x d']) -> Float[Array, 'n py px d']:
    below, right = (
      padded - side
      for padded, side in zip(self.padded, x.shape[1:3], strict=True)
    )
    if not below and not right:
      return x
    return jnp.pad(x, ((0, 0), (0, below), (0, right), (0, 0)))

  def _roll(
    self, x: Float[Array, 'n y x d'], sign: int
  ) -> Float[Array, 'n y x d']:
    if not any(self.shift):
      return x
    down, right = self.shift
    return jnp.roll(x, (sign * down, sign * right), axis=(1, 2))

  def join(self, windows: Float[Array, 'n w s d']) -> Float[Array, 'n t d']:
    """Joins windows to a map; the inverse of `cut`.

    Args:
      windows: tokens of each window.
    """
    n, _, _, width = windows.shape
    rows, columns = self.padded
    x = windows.reshape(
      n, rows // self.size, columns // self.size, self.size, self.size, width
    )
    x = x.swapaxes(2, 3).reshape(n, rows, columns, width)
    # The steps of `cut` are undone in reverse order.
    if self.pad_after_shift:
      x = self._roll(x[:, : self.rows, : self.columns], 1)
    else:
      x = self._roll(x, 1)[:, : self.rows, : self.columns]
    return x.reshape(n, -1, width)

  def mask(self) -> Float[np.ndarray, 'w s s'] | None:
    """Returns the mask that is added to the logits; None without a shift.

    A shift brings opposite edges of the map together. The mask keeps tokens
    from attending to tokens of the opposite edge. For a map that is padded
    after the shift ('timm'), the mask is the same, so that part of the tokens
    of the opposite edge are not masked; timm's weights are trained with it.

    Reference: section 3.2, "Efficient batch computation for shifted
    configuration".
    """
    if not any(self.shift):
      return None
    sides = []
    for length, shift in zip(self.padded, self.shift, strict=True):
      position = np.arange(length)
      # After the shift, the last `shift` tokens are those of the opposite edge.
      # The window with these tokens is the last one, from `length - size`.
      edges = length - self.size, length - shift
      sides.append(sum((position >= edge).astype(np.int32) for edge in edges))
    # Each of 3 x 3 regions has a number; only within a region are tokens
    # neighbors in the original map.
    regions = 3 * sides[0][:, None] + sides[1][None, :]
    rows, columns = (length // self.size for length in self.padded)
    regions = regions.reshape(rows, self.size, columns, self.size)
    regions = regions.swapaxes(1, 2).reshape(rows * columns, self.size**2)
    differ = regions[:, :, None] != regions[:, None, :]
    return np.where(differ, np.float32(_MASKED), np.float32(0))


# Relative position biases


def bias_index(size: int) -> Int[np.ndarray, 's s']:
  """Returns the row of the table for each pair (query, key) of a window.

  The row is (Δrow + W − 1)·(2W − 1) + Δcolumn + W − 1, with Δ = query − key.

  Args:
    size: side W of the window in tokens; a window has W² tokens.

  Reference: section 3.2, equation 4, in the order of the authors' code.
  """
  tokens = np.arange(size**2)
  rows, columns = tokens // size, tokens % size
  rows = rows[:, None] - rows[None, :] + size - 1
  columns = columns[:, None] - columns[None, :] + size - 1
  return rows * (2 * size - 1) + columns


def window_of(rows: int) -> int:
  """Returns the side W of the windows of a table with (2W − 1)² rows.

  Args:
    rows: number of rows of the table.
  """
  return (round(rows**0.5) + 1) // 2


def resize_bias(
  table: Float[Array | np.ndarray, 'l rows heads'], size: int
) -> Float[np.ndarray, 'l _ heads']:
  """Returns tables for other windows, by bicubic interpolation of each head.

  Args:
    table: tables of several layers, for windows of any size.
    size: side of the new windows in tokens.

  Reference: section 3.2, "Relative position bias", and the authors' code:
  half-pixel centers, no antialiasing, edges repeated.
  """
  depth, rows, heads = table.shape
  old, new = 2 * window_of(rows) - 1, 2 * size - 1
  if old == new:
    return np.asarray(table, np.float32)
  maps = np.asarray(table, np.float64).reshape(depth, old, old, heads)
  weights = positions.cubic(old, new)
  maps = np.einsum('yi,xj,lijh->lyxh', weights, weights, maps)
  return maps.reshape(depth, new**2, heads).astype(np.float32)


# Layers


class WindowAttention(nn.Module):
  """Multi-head attention of each token to the tokens of its window.

  Parameters: `{query,key,value,out}/{kernel,bias}` and `bias_table`
  `[(2W − 1)², heads]` for windows of W × W tokens; `bias_index` selects its
  rows.

  Reference: section 3.2, equations 3 and 4.

  Attributes:
    config: config of the model.
    stage: index of the stage, from 0.
    windows: windows of the block.
  """

  config: Config
  stage: int
  windows: Windows

  @nn.compact
  def __call__(self, x: Float[Array, 'n t d']) -> Float[Array, 'n t d']:
    config, width, side = self.config, x.shape[-1], self.windows.size
    num_heads = config.num_heads * 2**self.stage
    heads = (num_heads, width // num_heads)
    x = self.windows.cut(x)  # [n, w, s, d]
    by = config.attention_by(self.stage, side)
    if by == 'cuDNN':
      # Its bias has no axis for windows, so each window has heads of its own:
      # [n, s, w, h, c]. It needs an even s; XLA pads while it cuts the windows.
      x = cudnn.even(x.swapaxes(1, 2))  # [n, s, w, d]
    dense = functools.partial(
      Linear, kernel_init=NORMAL, dtype=config.compute_dtype
    )
    dense_layers = [
      dense(heads, model_dim=-2, flat=by != 'XLA', name=part)
      for part in ('query', 'key', 'value')
    ]
    shape = (2 * side - 1) ** 2, num_heads
    table = jnp.asarray(
      layers.sized_parameter(self, 'bias_table', NORMAL, shape)
    )
    bias = table[bias_index(side)].transpose(2, 0, 1)  # [h, s, s]
    mask = self.windows.mask()
    if by == 'kernels':
      y = attention.attend_by_kernels(dense_layers, x, num_heads, bias, mask)
    else:
      bias = bias[None]
      if mask is not None:
        bias = bias + mask[:, None]  # [w, h, s, s]
      query, key, value = (layer(x) for layer in dense_layers)
      if by == 'cuDNN':
        query, key, value = (
          y.reshape(*y.shape[:-1], *heads) for y in (query, key, value)
        )
        y = cudnn.attend(query, key, value, bias=bias)
      else:
        y = attention.relative_attention(query, key, value, None, bias)
    y = dense((width,), inputs=heads, model_dim=-3, name='out')(y)
    if by == 'cuDNN':
      y = y[:, : side**2].swapaxes(1, 2)
    return self.windows.join(y)


class Block(nn.Module):
  """Attention in windows and an MLP, both pre-norm (equation 3).

  `per_layer` contains `key` and the drop-path `rate`, or nothing for
  evaluation.

  Attributes:
    config: config of the model.
    stage: index of the stage, from 0.
    windows: windows of the block.
  """

  config: Config
  stage: int
  windows: Windows

  @nn.compact
  def __call__(self, x: Tokens, per_layer: PerLayer) -> Tokens:
    dtype = self.config.compute_dtype
    rate, keys = per_layer.get('rate'), [None, None]
    if rate is not None:
      keys = list(jax.random.split(per_layer['key'], 2))

    def branch(y: Array, key: Array | None):
      return y if rate is None else layers.drop_path(y, rate, key)

    x = xla.stored(sharding.constrain(x, sharding.BATCH, None, None))
    y = LayerNorm(dtype, name='norm1')(x)
    attend = WindowAttention(
      self.config, self.stage, self.windows, name='attention'
    )
    x = checkpoint_name(x + branch(attend(y), keys[0]), 'middle')
    x = xla.stored(x)
    y = LayerNorm(dtype, name='norm2')(x)
    mlp = Mlp(
      mlp_dim=MLP_RATIO * x.shape[-1],
      dropout=0.0,
      activation=self.config.gelu,
      dtype=dtype,
      kernel_init=NORMAL,
      bias_init=INIT['trunc_normal'].mlp_bias,
      name='mlp',
    )
    x = x + branch(mlp(y, None), keys[1])
    return sharding.constrain(x, sharding.BATCH, None, None)


class Pair(nn.Module):
  """A block with plain windows and one with shifted windows, to be scanned.

  Attributes:
    config: config of the model.
    stage: index of the stage, from 0.
    grid: rows and columns of tokens.
    want_layers: whether to also return the tokens after each block.
  """

  config: Config
  stage: int
  grid: Grid
  want_layers: bool

  @nn.compact
  def __call__(
    self, x: Tokens, per_layer: PerLayer
  ) -> tuple[Tokens, Float[Array, '2 n t d'] | None]:
    after, config = [], self.config
    for i, name in enumerate(('plain', 'shifted')):
      windows = Windows.of(
        self.grid, config.window_size, i == 1, config.window_rule
      )
      block = Block(config, self.stage, windows, name=name)
      x = block(x, jax.tree.map(lambda leaf, i=i: leaf[i], per_layer))
      after.append(x)
    return x, jnp.stack(after) if self.want_layers else None


class Stage(nn.Module):
  """An even number of blocks, all on maps of the same size.

  Parameters are stacked by pairs: `layers/{plain,shifted}/mlp/fc1/kernel` is
  `[depth / 2, d, 4 d]`.

  Attributes:
    config: config of the model.
    index: index of the stage, from 0.
    grid: rows and columns of tokens.
  """

  config: Config
  index: int
  grid: Grid

  @nn.compact
  def __call__(
    self, x: Tokens, per_layer: PerLayer, want_layers: bool
  ) -> tuple[Tokens, Float[Array, 'depth n t d'] | None]:
    """Applies all blocks.

    Args:
      x: tokens of the map, row by row.
      per_layer: keys and drop-path rates of the blocks; {} for evaluation.
      want_layers: whether to return the tokens after every block.

    Returns:
      Tokens after the stage, and tokens after every block (None without
      `want_layers`).
    """
    config, depth = self.config, self.config.depths[self.index]
    pairs = depth // 2
    scan = layers.scanned(
      Pair, pairs, remat=config.remat, saved=vit.SAVED, unroll=config.unroll
    )(config, self.index, self.grid, want_layers, name='layers')
    # The scan steps over pairs, so keys and rates are grouped in twos.
    by_pairs = jax.tree.map(
      lambda leaf: leaf.reshape(pairs, 2, *leaf.shape[1:]), per_layer
    )
    x, after = scan(x, by_pairs)
    return x, after if after is None else after.reshape(depth, *x.shape)


class Merge(nn.Module):
  """Patch merging: four neighbors become one token of twice the width.

  The order of the neighbors is (row, column) = (0, 0), (1, 0), (0, 1), (1, 1).
  A side of odd length is padded with zeros below and on the right.

  Reference: section 3.1.

  Attributes:
    grid: rows and columns of tokens before merging.
    dtype: dtype of the computation.
  """

  grid: Grid
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x: Tokens) -> Float[Array, 'n s e']:
    n, _, d = x.shape
    rows, columns = self.grid
    x = x.reshape(n, rows, columns, d)
    x = jnp.pad(x, ((0, 0), (0, rows % 2), (0, columns % 2), (0, 0)))
    rows, columns = halved(self.grid)
    x = x.reshape(n, rows, 2, columns, 2, d)
    x = x.transpose(0, 1, 3, 4, 2, 5)  # [n, rows, columns, 2 (x), 2 (y), d]
    x = LayerNorm(self.dtype, name='norm')(x.reshape(n, rows * columns, 4 * d))
    kernel = jnp.asarray(self.param('kernel', NORMAL, (4 * d, 2 * d)))
    kernel = sharding.constrain(kernel.astype(self.dtype), None, None)
    return sharding.constrain(jnp.dot(x, kernel), sharding.BATCH, None, None)


def halved(grid: Grid) -> Grid:
  """Returns rows and columns after patch merging.

  Args:
    grid: rows and columns before patch merging.
  """
  rows, columns = np.add(grid, 1) // 2
  return int(rows), int(columns)


class Swin(Backbone):
  """A Swin Transformer.

  There are no methods `embed` and `encode`, because tokens of a map cannot be
  left out. Parameters: `embedding/{kernel,bias}`, `embedding_norm/…`,
  `stage{1…}/layers/{plain,shifted}/…` (pairs of blocks stacked),
  `merge{1…}/{norm/…,kernel}`, `norm/…`, `head/{kernel,bias}`.
  """

  config: Config

  determined = (*SIZE_KEYS, 'window_rule', 'gelu')
  adopted = ('window_size',)  # fine-tuning may enlarge it
  norm_eps = LN_EPSILON  # as published; not an option
  outputs = ('tokens', 'patches')
  sharding_rules = (
    *vit.SHARDING_RULES,
    (r'attention/bias_table', -1),
    (r'head/(kernel|bias)', -1),
  )

  def setup(self):
    dtype = self.config.compute_dtype
    init = INIT['trunc_normal']  # as in the authors' code
    self.embedding = Linear(
      (self.config.width,),
      input_axes=3,
      kernel_init=init.embedding,
      bias_init=init.embedding_bias(self.config.channels * PATCH_SIZE**2),
      dtype=dtype,
    )
    self.embedding_norm = LayerNorm(dtype)
    self.norm = LayerNorm(dtype)
    self.head = self._new_head(init.head)

  def _predict(
    self, images: Images, key: Key[Array, ''] | None, want: tuple[str, ...]
  ) -> dict[str, Array]:
    tokens, _ = self._transform(images, key, want_layers=False)
    n, height, width, _ = images.shape
    grid = self.grids((height, width))[-1]
    patches = tokens.reshape(n, *grid, tokens.shape[-1])
    return self._results(tokens.mean(axis=1), tokens) | {'patches': patches}

  def stages(
    self, images: UncheckedImages, key: Key[Array, ''] | None = None
  ) -> list[Float[Array, 'n _ _ _']]:
    """Computes the tokens after every block, grouped by stage.

    Args:
      images: float images in [-1, 1], `[n, height, width, channels]`.
      key: random key of drop path; None for evaluation.

    Returns:
      Array `[n, blocks, tokens, channels]` for each stage, float32.
    """
    _, after = self._transform(self._input(images), key, want_layers=True)
    # [blocks, n, tokens, channels] → [n, blocks, tokens, channels]
    return [
      x.swapaxes(0, 1).astype(jnp.float32) for x in after if x is not None
    ]

  @nn.compact
  def _transform(
    self, images: Images, key: Key[Array, ''] | None, want_layers: bool
  ) -> tuple[Tokens, list[Array | None]]:
    """Applies all stages.

    Returns:
      Normalized tokens of the last map, and tokens after every block for each
      stage, or None for each stage without `want_layers`.
    """
    config = self.config
    _, height, width, _ = images.shape
    grids = self.grids((height, width))
    x = layers.cut_patches(images, grids[0], (PATCH_SIZE, PATCH_SIZE))
    x, after, first = self.embedding_norm(self.embedding(x)), [], 0
    per_layer = {}  # keys and drop-path rates of all blocks
    if key is not None and config.drop_path:
      count = sum(config.depths)
      # Rates grow over the blocks of all stages, not within each stage.
      rates = jnp.linspace(0.0, config.drop_path, count)
      per_layer = {'key': jax.random.split(key, count), 'rate': rates}
    for i, (depth, grid) in enumerate(zip(config.depths, grids, strict=True)):
      stage = Stage(config, i, grid, name=f'stage{i + 1}')
      # Keys and rates of the blocks of this stage.
      own = {k: leaf[first : first + depth] for k, leaf in per_layer.items()}
      x, per_block = stage(x, own, want_layers)
      after.append(per_block)
      first += depth
      if i + 1 < len(grids):
        x = Merge(grid, config.compute_dtype, name=f'merge{i + 1}')(x)
    return self.norm(x), after

  @nn.nowrap
  def grids(self, image_size: Grid) -> list[Grid]:
    """Returns rows and columns of the map of each stage.

    Args:
      image_size: (height, width), pixels.

    Raises:
      UserError: the patch size does not divide the image.
    """
    grids = [backbone.whole_patches(image_size, PATCH_SIZE)]
    for _ in self.config.depths[1:]:
      grids.append(halved(grids[-1]))
    return grids

  @nn.nowrap
  def check(self, image_size: Grid) -> None:
    """Checks that images can have this size.

    Raises:
      UserError: see `grids` and `Windows.of`.
    """
    for grid in self.grids(image_size):
      Windows.of(grid, self.config.window_size, True, self.config.window_rule)

  @nn.nowrap
  def attention_by(self, image_size: Grid | None = None) -> dict[str, str]:
    """Returns the implementation of attention in each stage."""
    config = self.config
    # Without a size, the smallest window, to which kernels apply most often.
    sides = [1] * len(config.depths)
    if image_size is not None:
      sides = [min(config.window_size, *g) for g in self.grids(image_size)]
    return {
      f'{i + 1}': config.attention_by(i, side) for i, side in enumerate(sides)
    }

  @nn.nowrap
  def layers_above(self, path: str) -> int | tuple[int, ...]:
    """Returns the number of blocks above a parameter, as the authors do.

    A merging of patches belongs to the last block before it. See
    `models.contract.Model`.
    """
    top, module = sum(self.config.depths) + 1, path.partition('/')[0]
    stage = re.fullmatch(r'(?:stage|merge)(\d+)', module)
    if stage is None:
      return top if module.startswith('embedding') else 0
    blocks = np.cumsum((0, *self.config.depths)).tolist()
    start, end = blocks[int(stage[1]) - 1 :][:2]
    if module.startswith('merge'):
      return top - end
    # Block b has top − 1 − b blocks above it; pair p consists of the plain
    # block start + 2p and the shifted block start + 2p + 1.
    first = 1 if path.split('/')[2] == 'plain' else 2
    return tuple(range(top - start - first, top - end - 1, -2))

  @property
  def sized(self) -> tuple[str, ...]:
    """Path prefixes of the bias tables.

    A window is never larger than its map, so the shapes of the tables depend on
    the image size.
    """
    kinds = itertools.product(
      range(len(self.config.depths)), ('plain', 'shifted')
    )
    return tuple(f'stage{i + 1}/layers/{kind}/{_TABLE}' for i, kind in kinds)

  @nn.nowrap
  def adapt(
    self,
    leaves: Leaves,
    old_size: Grid,
    new_size: Grid,
    method: str | None,
  ) -> Leaves:
    """Interpolates bias tables to this model's windows; see `resize_bias`.

    Raises:
      UserError: a table changes, and the method is 'aligned' or 'dino'.
    """
    del old_size  # the shape of a table determines its windows
    grids, adapted = self.grids(new_size), {}
    for path, table in leaves.items():
      grid = grids[int(path[len('stage') : path.index('/')]) - 1]
      size = min(self.config.window_size, *grid)
      refused = method in ('aligned', 'dino')
      if refused and window_of(table.shape[1]) != size:
        raise UserError(
          f'position_resize is {method!r}, and the relative position biases of '
          'this Swin have to be resized from windows of '
          f'{window_of(table.shape[1])} to {size} tokens: leave '
          "position_resize out, or set it to 'bicubic', the method for Swin."
        )
      adapted[path] = resize_bias(table, size)
    return adapted


Model = backbone.constructor(Swin, Config)
