"""Masked patch prediction of the ViT paper (arXiv 2010.11929, appendix B.1.2).

Half of the patches are corrupted: 80 % of these are replaced by a learnable
[mask] embedding, 10 % by another patch, and 10 % are unchanged. The outputs of
the model at the positions of corrupted patches predict the original patches.

The model does not have to be changed. The pixels of a masked patch are set to
0, and a learned vector v is added to its embedding. With the patch embedding x
E + b and the position p, the result is 0 E + b + p + v, which equals [mask] + p
with [mask] = b + v, for every kind of position embedding. The pixels of a
masked patch do not influence its own embedding, nor (through the overlapping
convolutions of a stem) the embeddings of other patches.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, Num, UInt8

from vit_jax.arrays import sharding
from vit_jax.data.contract import Spec, require
from vit_jax.errors import UserError, check_choice, check_range
from vit_jax.models.contract import Patches
from vit_jax.models.layers import head
from vit_jax.objectives import contract, patches
from vit_jax.objectives.health import token_metrics
from vit_jax.objectives.losses import softmax_cross_entropy
from vit_jax.objectives.mixing import normalize

PyTree = Any
_STREAM = 0x6D7070  # folded into the step's key, which dropout also uses
_BITS = 3  # bits of each channel of a predicted colour
_COLORS = 2 ** (3 * _BITS)
# Number of cells along each side of a patch, by target.
CELLS = {'mean_color': 1, 'small_patch': 4}
TARGETS = (*CELLS, 'pixels')
_HIDDEN, _REPLACED = 0.8, 0.1  # fractions of the corrupted patches


@dataclasses.dataclass(eq=False)
class Objective(contract.AroundModel):
  """Prediction of corrupted patches; an `objectives.contract.Objective`.

  Parameters: `model/…`, `mask` `[width]` (the vector that is added to the
  embeddings of masked patches), `head/{kernel,bias}`. A batch contains `image`,
  uint8 `[n, height, width, 3]`.

  The paper does not specify how the terms of a patch are combined, nor the
  units of the regression: here, terms are averaged, and pixels are in [-1, 1].

  Attributes:
    setting: setting of the run.
    target: 'mean_color' (3 bits per channel: 512 classes), 'small_patch' (mean
      colours of 4x4 cells of the patch: 16 times 512 classes) or 'pixels' (all
      pixels, with squared errors). According to the paper, all three work well,
      'pixels' slightly worse.
    corrupted: fraction of the patches that is corrupted, in (0, 1). The number
      of corrupted patches is rounded, and at least one; at least one patch must
      be left intact.

  Raises:
    UserError: the model has no tokens that can be masked, the target is
      unknown, a fraction is out of range, or patches cannot be divided into 4x4
      equal cells.
  """

  setting: contract.Setting
  _: dataclasses.KW_ONLY
  target: str = 'mean_color'
  corrupted: float = 0.5

  def __post_init__(self):
    check_range('objective.corrupted', self.corrupted, above=0, below=1)
    check_choice('objective.target', self.target, TARGETS)
    self.grid = patches.grid_of(self.setting, 'masked_patch')
    count = math.prod(self.grid)
    self.num_corrupted = max(round(count * self.corrupted), 1)
    patches.check_hidden('corrupted', self.corrupted, self.num_corrupted, count)
    side = self.setting.image_size[0] // self.grid[0]  # pixels of a patch
    cells = CELLS.get(self.target, 1)
    if side % cells:
      raise UserError(
        f'objective.target {self.target!r} requires a patch size divisible '
        f"by {cells}; patches have {side} pixels: use 'mean_color' or 'pixels'."
      )
    is_pixels = self.target == 'pixels'
    self._outputs = 3 * side**2 if is_pixels else cells**2 * _COLORS

  def check(self, spec: Spec) -> None:
    """Checks that batches have RGB images, and that the model has no head."""
    require(spec, 'image', who="the objective 'masked_patch'")
    shape, dtype = spec['image']
    if shape[-1] != 3 or dtype != np.uint8:
      raise UserError(
        'masked_patch predicts colours of RGB images of 8 bits, but augment '
        f"makes images {dtype} {list(shape)}: set objective.name='mae'."
      )
    patches.check_headless(self.setting, 'masked_patch')

  def init(self, key: Key[Array, ''], batch: Any) -> tuple[PyTree, PyTree]:
    """Returns initial parameters, and no extra state.

    The vector `mask` is drawn from N(0, .02), and the head is 0.
    """
    keys = jax.random.split(key, 3)
    model = self.setting.init_model(keys[0])
    images = self.setting.zero_images()
    embed = functools.partial(self.setting.model.apply, method='embed')
    tokens = jax.eval_shape(embed, {'params': model}, images)
    width = tokens.shape[-1]
    layer = head(self._outputs, tokens.dtype)
    params = {
      'model': model,
      'mask': 0.02 * jax.random.normal(keys[1], (width,)),
      'head': layer.init(keys[2], jnp.zeros((1, 1, width)))['params'],
    }
    return params, {}

  def loss(self, params: PyTree, inputs: contract.Inputs) -> contract.Loss:
    """Computes the mean of the loss terms of all corrupted patches.

    Metrics are `feature_deviation` and `effective_rank` of the means of the
    patches' tokens, see `health`.
    """
    images = inputs.batch['image']
    indices, hidden, corrupted = self._corrupt(images, inputs.key)
    tokens = self._tokens(params, hidden, corrupted, inputs.key)
    predicted = self._predict(params, patches.take(tokens, indices))
    loss = self._errors(predicted, images, indices).mean()
    return loss, (token_metrics(tokens), {})

  @property
  def reconstructs(self) -> str:
    """Description of the predictions, which depend on the target."""
    predicted = 'pixels, which are drawn unchanged'
    if self.target != 'pixels':
      cells = CELLS[self.target]
      part = 'the patch' if cells == 1 else f'each of its {cells}x{cells} cells'
      predicted = f'the mean colour of {part}, one of {_COLORS}'
    return (
      f'the model predicts {predicted}; of the corrupted patches, 10 % show '
      'another patch and 10 % are unchanged'
    )

  def reconstruct(
    self, params: PyTree, batch: contract.Batch, key: Key[Array, '']
  ) -> contract.Pictures:
    """Predicts all patches of images, corrupted as in a step with this key."""
    images = batch['image']
    indices, hidden, corrupted = self._corrupt(images, key)
    tokens = self._tokens(params, hidden, corrupted, None)
    predicted = self._draw(self._predict(params, tokens))
    rows = jnp.arange(len(images))[:, None]
    has_loss = jnp.zeros(hidden.shape, bool).at[rows, indices].set(True)
    has_loss = patches.spread(has_loss, self.grid, self.setting.image_size)
    shown = images.astype(jnp.float32) / 255
    completed = jnp.where(has_loss, predicted, shown)
    return contract.Pictures(shown, corrupted / 2 + 0.5, predicted, completed)

  def layers_above(self, path: str) -> int | tuple[int, ...]:
    """Returns the number of layers above; the mask token is below all."""
    return super().layers_above('model/cls' if path == 'mask' else path)

  def _tokens(
    self, params: PyTree, hidden: Any, images: Any, key: Any
  ) -> Float[Array, 'n p d']:
    """Returns the encoded tokens of the patches of corrupted images."""
    variables, model = {'params': params['model']}, self.setting.model
    tokens = model.apply(variables, images, method='embed')
    mask = params['mask'].astype(tokens.dtype)
    tokens = jnp.where(hidden[..., None], tokens + mask, tokens)
    tokens = model.apply(
      variables, tokens, key, Patches(self.grid), method='encode'
    )
    return tokens[:, -hidden.shape[1] :]

  def _predict(
    self, params: PyTree, tokens: Float[Array, 'n k d']
  ) -> Float[Array, 'n k outputs']:
    """Applies the head to tokens."""
    layer: Any = head(self._outputs, tokens.dtype)
    return layer.apply({'params': params['head']}, tokens)

  def _draw(
    self, predicted: Float[Array, 'n p outputs']
  ) -> Float[Array, 'n y x 3']:
    """Returns predictions as images: pixels, or the most likely colours."""
    size = self.setting.image_size
    if self.target == 'pixels':
      pixels = patches.join(predicted, self.grid, size)
      return jnp.clip(pixels / 2 + 0.5, 0, 1)
    n, count, _ = predicted.shape
    cells = CELLS[self.target]
    classes = predicted.reshape(n, count, cells**2, _COLORS).argmax(axis=-1)
    shifts = jnp.array([2 * _BITS, _BITS, 0])  # of red, green and blue
    levels = (classes[..., None] >> shifts) % 2**_BITS  # [n, p, cells², 3]
    colors = ((levels + 0.5) / 2**_BITS).reshape(n, count, -1)
    rows, columns = self.grid[0] * cells, self.grid[1] * cells
    image = patches.join(colors, self.grid, (rows, columns))  # a pixel per cell
    image = jnp.repeat(image, size[0] // rows, axis=1)
    return jnp.repeat(image, size[1] // columns, axis=2)

  def _corrupt(
    self, images: UInt8[Array, 'n y x 3'], key: Key[Array, '']
  ) -> tuple[Int[Array, 'n k'], Bool[Array, 'n p'], Float[Array, 'n y x 3']]:
    """Chooses patches of images and corrupts them.

    The paper does not state from which image a replacement patch is taken. Here
    it is an uncorrupted patch of the same image, so that masked patches are not
    visible elsewhere, and images do not depend on the rest of the batch.

    Returns:
      Indices of the corrupted patches, whether each patch is hidden, and the
      corrupted images in [-1, 1].
    """
    order_key, kind_key, other_key = jax.random.split(
      jax.random.fold_in(key, _STREAM), 3
    )
    n, count = len(images), math.prod(self.grid)
    order = patches.shuffled(order_key, n, self.grid)
    rank = jnp.argsort(order, axis=1)  # position of each patch in this order
    corrupted = rank < self.num_corrupted
    kind = jax.random.uniform(kind_key, (n, count))
    kind = sharding.constrain(kind, sharding.BATCH, None)
    hidden = corrupted & (kind < _HIDDEN)
    replaced = corrupted & ~hidden & (kind < _HIDDEN + _REPLACED)
    intact = jax.random.randint(
      other_key, (n, count), self.num_corrupted, count
    )
    others = jnp.take_along_axis(order, intact, axis=1)
    source = jnp.where(replaced, others, jnp.arange(count))
    changed = patches.take(patches.cut(images, self.grid), source)
    changed = patches.join(changed, self.grid, self.setting.image_size)
    masked = patches.spread(hidden, self.grid, self.setting.image_size)
    changed = jnp.where(masked, 0, normalize(changed))
    return order[:, : self.num_corrupted], hidden, changed

  def _errors(
    self,
    predicted: Any,  # [n, k, outputs]
    images: UInt8[Array, 'n y x 3'],
    indices: Int[Array, 'n k'],
  ) -> Float[Array, '...']:
    """Computes the terms of the loss, which all have the same weight."""
    if self.target == 'pixels':
      target = patches.take(patches.cut(normalize(images), self.grid), indices)
      return jnp.square(predicted - target)
    cells = CELLS[self.target]
    target = patches.take(colors(images, self.grid, cells), indices)
    logits = predicted.reshape(-1, _COLORS)
    return softmax_cross_entropy(logits, target.reshape(-1))


def colors(
  images: Num[Array, 'n y x 3'], grid: patches.Grid, cells: int
) -> Int[Array, 'n p cells']:
  """Returns mean colours of cells as 512 classes, 3 bits per channel.

  The mean of a channel, in [0, 256), is reduced to its 3 highest bits. The
  class is 64 · red + 8 · green + blue. Sums are integers, so that rounding
  never changes a class.

  Args:
    images: RGB images, uint8.
    grid: rows and columns of patches.
    cells: number of cells along each side of a patch.
  """
  rows, columns = grid[0] * cells, grid[1] * cells
  n, height, width, _ = images.shape
  size = height // rows * (width // columns)  # pixels of a cell
  pixels = patches.cut(images.astype(jnp.int32), (rows, columns))
  sums = pixels.reshape(n, rows * columns, size, 3).sum(axis=2)
  levels = sums // (size * 2 ** (8 - _BITS))  # [n, all cells, 3], 0 to 7
  classes = levels @ jnp.array([2 ** (2 * _BITS), 2**_BITS, 1])
  return patches.cut(classes.reshape(n, rows, columns, 1), grid)
