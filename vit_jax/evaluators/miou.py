"""Mean intersection over union of the classes of pixels."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from vit_jax.data.augment.maps import IGNORED
from vit_jax.data.contract import require
from vit_jax.errors import UserError
from vit_jax.evaluators import contract
from vit_jax.evaluators.confusion import to_csv
from vit_jax.evaluators.features import OnSplit

PyTree = Any
_ROWS = 64  # rows of pixels whose scores are in memory at once


@dataclasses.dataclass(eq=False, kw_only=True)
class Evaluator(OnSplit):
  """Compares predicted classes with masks, over all pixels of a split.

  By default, the scores of the classes are those of the trained head of the
  objective `segment`; a subclass computes them from another result. With the
  transform 'windows', scores of overlapping windows are averaged, and
  interpolated to the size of the original mask; with others, they are
  interpolated to the size of the image.

  Attributes:
    who: name of the evaluation, for messages.
    result: result of the objective that the scores are computed from, a map for
      each image.

  Raises:
    UserError: the split does not exist, the transform has no masks or masks of
      other classes than the objective, or the objective lacks the result.
  """

  higher_is_better = ('miou', 'accuracy', 'mean_accuracy')
  who, result = 'miou', 'classes'

  def __post_init__(self):
    super().__post_init__()
    transform: Any = self.setting.transform
    require(transform.spec, 'image', 'segments', who=self.who)
    contract.check_results(self.setting, self.result, who=self.who)
    self._classes: int = transform.classes
    trained = getattr(self.setting.objective, 'classes', self._classes)
    if self.result == 'classes' and trained != self._classes:
      raise UserError(
        f'preprocess.classes is {self._classes}, but objective.classes is '
        f'{trained}: both must be equal.'
      )
    self._count = self.setting.compiled(self._count_batch)
    self._pairs: np.ndarray | None = None

  def fit(self, weights: PyTree) -> PyTree:
    """Returns values for `scores`, by default none."""
    return {}

  def scores(
    self, fitted: PyTree, maps: Float[Array, 'n rows columns d']
  ) -> Float[Array, 'n rows columns k']:
    """Returns the scores of the classes, by default the result itself.

    Args:
      fitted: values that `fit` returned.
      maps: result of the objective.
    """
    return maps

  def _maps(self, weights: PyTree, images: Array) -> Array:
    """Computes the result of the objective, `[n, rows, columns, d]`."""
    batch = {'image': images}
    return self.setting.predict(weights, batch, (self.result,))[self.result]

  def _count_batch(self, state: PyTree, batch: contract.Batch) -> PyTree:
    """Counts pairs of class and prediction, and scores that are not finite."""
    weights, fitted = state
    predicted, finite = predicted_classes(
      lambda images: self.scores(fitted, self._maps(weights, images)), batch
    )
    target, k = batch['segments'].astype(jnp.int32), self._classes
    used = (target != IGNORED) & batch['mask'][:, None, None]
    # The number of a pair; pixels that are not used are counted as pair k·k.
    pairs = jnp.where(used, target * k + predicted, k * k)
    counts = jnp.bincount(pairs.ravel(), length=k * k + 1)[:-1]
    return {'pairs': counts, 'broken': (used & ~finite).sum()}

  def run(self, weights: PyTree) -> dict[str, float]:
    """Computes the metrics over all pixels that are not ignored.

    Returns:
      'miou' and 'mean_accuracy', means over classes of intersection over union
      and of accuracy, and 'accuracy', of all pixels, in [0, 1]. As in
      mmsegmentation, a class that is neither in a mask nor predicted is left
      out of 'miou', and a class that is in no mask of 'mean_accuracy'.
      'classes' and 'pixels' are the numbers of classes and pixels with a class.

    Raises:
      UserError: no pixel has a class, a score is not finite, or there is a bad
        record and the reader's policy is to stop.
    """
    state = weights, self.fit(weights)
    results = self.setting.sweep(state, self._source, self._count)
    sums = contract.total(results)
    if sums['broken']:
      raise contract.not_finite_error('the scores', self._source)
    self._pairs = pairs = sums['pairs'].reshape(self._classes, -1)
    if not pairs.any():
      raise contract.no_example_error(self._source)
    by_class = _by_class(pairs)
    return {
      'miou': float(np.nanmean(by_class['iou'])),
      'accuracy': float(np.trace(pairs) / pairs.sum()),
      'mean_accuracy': float(np.nanmean(by_class['accuracy'])),
      'classes': int((by_class['pixels'] > 0).sum()),
      'pixels': int(pairs.sum()),
    }

  def tables(self) -> dict[str, str]:
    """Returns the tables of the last `run`, as CSV by file name.

    `classes.csv` has a line for each class: the number of its pixels,
    intersection over union and accuracy, which are empty if they are not
    defined. `pairs.csv` has a line for each class with the number of pixels of
    each prediction.
    """
    assert self._pairs is not None, 'run() comes first'

    def text(fraction: float) -> str:
      return f'{fraction:.6f}' if np.isfinite(fraction) else ''

    of_class = _by_class(self._pairs)
    values = zip(
      map(text, of_class['iou']),
      map(text, of_class['accuracy']),
      of_class['pixels'].tolist(),
      strict=True,
    )
    head = ('class', 'iou', 'accuracy', 'pixels')
    lines = [(label, *each) for label, each in enumerate(values)]
    rows = [(label, *row) for label, row in enumerate(self._pairs.tolist())]
    return {
      'classes.csv': to_csv(head, lines),
      'pairs.csv': to_csv(('class', *range(self._classes)), rows),
    }


def _by_class(pairs: Int[np.ndarray, 'k k']) -> dict[str, np.ndarray]:
  """Returns intersection over union, accuracy and pixels of each class.

  Args:
    pairs: numbers of pixels; the rows are the classes of the masks, and the
      columns the predictions.
  """
  hits, true = pairs.diagonal(), pairs.sum(1)
  union = true + pairs.sum(0) - hits
  with np.errstate(invalid='ignore'):
    return {'iou': hits / union, 'accuracy': hits / true, 'pixels': true}


def predicted_classes(
  scores: Any, batch: contract.Batch
) -> tuple[Int[Array, 'n y x'], Any]:
  """Returns the class of each pixel, and whether its score is finite.

  The scores of each window are interpolated to the window, averaged where
  windows overlap, and interpolated to the size of the original image. Both
  interpolations are bilinear, so that all three steps are one linear map along
  each axis, in which sizes may differ between images.

  Args:
    scores: function from images `[n, y, x, c]` to scores of the classes
      `[n, rows, columns, k]`.
    batch: batch of the transform 'windows', or of one with a single `image` for
      each example. Only the shape of `segments` is used.
  """
  images, shape = batch['image'], batch['segments'].shape
  if images.ndim == 4:  # the whole image is the only window
    images = images[:, None]  # [n, windows, y, x, c]
    corners = jnp.zeros((len(images), 1, 2), jnp.int32)
    resized = jnp.broadcast_to(jnp.array(images.shape[2:4]), (len(images), 2))
    native = jnp.broadcast_to(jnp.array(shape[1:]), (len(images), 2))
  else:
    corners, resized = batch['corners'], batch['resized']
    native = batch['native']
  windows, used = jnp.moveaxis(images, 1, 0), (corners[..., 0] >= 0)
  shape_of_map = jax.eval_shape(scores, windows[0]).shape

  def of_window(window: Any) -> Any:
    pixels, is_used = window
    # Windows that no image of the batch has are not computed.
    return jax.lax.cond(
      is_used.any(), scores, lambda _: jnp.zeros(shape_of_map), pixels
    )

  # [windows, n, rows, columns, k]
  maps = jax.lax.map(of_window, (windows, used.T))
  # Weights `[n, windows, y, rows]` and `[n, windows, x, columns]`
  rows, columns = (
    _interpolation(
      corners[..., axis],
      resized[:, axis],
      native[:, axis],
      images.shape[2 + axis],
      shape_of_map[1 + axis],
      shape[1 + axis],
    )
    for axis in range(2)
  )

  def of_row(weights: Any) -> Any:  # [n, windows, rows]
    found = jnp.einsum('nwr,wnrck->nwck', weights, maps, precision='highest')
    found = jnp.einsum('nwxc,nwck->nxk', columns, found, precision='highest')
    return found.argmax(-1), jnp.isfinite(found.max(-1))

  of_pixels = jax.lax.map(of_row, jnp.moveaxis(rows, 2, 0), batch_size=_ROWS)
  # [y, n, x] → [n, y, x]
  return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), of_pixels)


def _interpolation(
  corners: Int[Array, 'n w'],
  resized: Int[Array, ' n'],
  native: Int[Array, ' n'],
  window: int,
  cells: int,
  length: int,
) -> Float[Array, 'n w l cells']:
  """Returns the weight of each cell of each window in each pixel, on one axis.

  Weights are divided by the number of windows whose range on this axis contains
  the pixel. Windows form a grid, so each range is counted once per row (or
  column) of windows. The product over both axes is therefore proportional to
  the mean over the windows, which has the same argmax.

  Args:
    corners: first pixel of each window in the resized image; -1 for no window.
    resized: side of the resized image, pixels.
    native: side of the original image, pixels.
    window: side of a window, pixels.
    cells: number of cells of a window, such as patches.
    length: number of pixels of the result, of which the first `native` count.
  """
  check_whole((window,), (cells,))
  pixels = jnp.arange(window * corners.shape[1])  # at least `resized`
  offsets = pixels - corners[..., None]  # [n, w, p]
  inside = (offsets >= 0) & (offsets < window) & (corners[..., None] >= 0)
  inside = inside / jnp.maximum(inside.sum(1, keepdims=True), 1)
  enlarged = _bilinear((offsets + 0.5) * cells / window, cells)
  enlarged = enlarged * inside[..., None]  # [n, w, p, cells]
  scale = (resized / native)[:, None]
  positions = (jnp.arange(length) + 0.5) * scale  # in the resized image, [n, l]
  positions = jnp.minimum(positions, resized[:, None] - 0.5)
  reduced = _bilinear(positions, len(pixels))  # [n, l, p]
  return jnp.einsum('nlp,nwpc->nwlc', reduced, enlarged, precision='highest')


def _bilinear(
  positions: Float[Array, '*n'], count: int
) -> Float[Array, '*n c']:
  """Returns the weights of `count` samples; sample i is at position i + 0.5."""
  indices = jnp.clip(positions - 0.5, 0, count - 1)
  distances = jnp.abs(indices[..., None] - jnp.arange(count))
  return jnp.maximum(1 - distances, 0)


def check_whole(size: tuple[int, ...], grid: tuple[int, ...]) -> None:
  """Checks that the patches of a grid cover all pixels.

  Args:
    size: size of an image along each axis, pixels.
    grid: number of patches along each axis.

  Raises:
    UserError: the size is not a multiple of the grid.
  """
  for pixels, patches in zip(size, grid, strict=True):
    if pixels % patches:
      raise UserError(
        f'{pixels} pixels are not whole patches, of which the model has '
        f'{patches}: set image_size (of the run, or of config.evals.NAME) to a '
        'multiple of the patch size.'
      )
