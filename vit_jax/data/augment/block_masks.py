"""Multi-crop augmentation with block masks of the global crops (DINOv2)."""

import dataclasses
import functools
import math

import numpy as np
from jaxtyping import Bool, Float

from vit_jax.data.augment import multicrop
from vit_jax.data.augment.transforms import View
from vit_jax.data.contract import Example, Spec
from vit_jax.data.images.decode import Image
from vit_jax.data.pipeline import order
from vit_jax.errors import UserError, check_range

_CROPS = 2  # number of global crops of an image
_MASKED = 0.5  # fraction of the global crops that are masked
_FRACTIONS = (0.1, 0.5)  # smallest and largest fraction of masked patches
_LARGEST = 0.5  # largest rectangle, as a fraction of all patches
_SMALLEST = 4  # smallest rectangle, in patches
_LOG_ASPECT = math.log(1 / 0.3)  # largest logarithm of height / width
_TRIES = 10  # draws of each rectangle
_SALT = 0x6D61736B  # separates the order of masks from that of the examples


@dataclasses.dataclass(frozen=True)
class TrainTransform(multicrop.TrainTransform):
  """The crops of `multicrop`, and masks of half of the global crops.

  Masks are drawn for groups of examples, which stand for the batch of one GPU
  in the authors' code. A group consists of examples that are adjacent in their
  micro-batch. The 2 n global crops of a group of n examples are put in a random
  order. The first n of them are masked: the fraction of masked patches of the
  i-th is uniform in the i-th of n equal intervals of [.1, .5]. All of this is a
  function of the seed of the run and the position of the example in training,
  so that hosts need no communication.

  Attributes:
    batches: size of the global batch, examples, and number of micro-batches.
      Not a key of the config: `in_batches` sets it.
    patch_size: side of a patch, pixels.
    group: number of examples in a group, which must divide a micro-batch; None
      for a whole micro-batch.
    exact: whether the fraction is the upper end of the interval, and random
      patches are added to a mask until it has exactly this fraction (DINOv3).
    gram_scale: size of `gram`, the global crops without changed colours for a
      Gram teacher (`objectives.gram`), as a multiple of `image_size`; 0 for no
      such crops.
    sizes: for training at several resolutions, one per batch: probability, and
      sides of global crops, local crops and crops for a Gram teacher (0 for
      none), pixels. () for `image_size`, `local_size` and `gram_scale`, which
      otherwise only have to be valid.

  Reference: DINOv2 (arXiv 2304.07193), and its code for the distribution of the
  fractions. The rectangles are those of BEiT (arXiv 2106.08254), Algorithm 1.
  """

  batches: tuple[int, int] | None = None
  _: dataclasses.KW_ONLY
  patch_size: int = 16
  group: int | None = None
  exact: bool = False
  gram_scale: float = 0.0
  sizes: tuple = ()

  def __post_init__(self):
    super().__post_init__()
    check_range('augment.patch_size', self.patch_size, at_least=1)
    check_range('augment.group', self.group, at_least=1)
    check_range('augment.gram_scale', self.gram_scale, at_least=0, at_most=4)
    if any(len(row) != 4 for row in self.sizes) or (
      self.sizes and abs(sum(row[0] for row in self.sizes) - 1) > 1e-6
    ):
      raise UserError(
        f'augment.sizes is {self.sizes}; each row has four numbers, a '
        'probability and the sides of global, local and Gram crops, and the '
        'probabilities have the sum 1.'
      )

  @property
  def variants(self) -> tuple[tuple[float, 'TrainTransform'], ...]:
    """Probability and transform of each of `sizes`; see `data.contract`."""
    return tuple(
      (
        probability,
        dataclasses.replace(
          self,
          sizes=(),
          image_size=(int(side), int(side)),
          local_size=(int(local),),
          gram_scale=gram / side,
        ),
      )
      for probability, side, local, gram in self.sizes
    )

  def variant(self, seed: int, batch: int) -> int:
    """Returns the index of the variant of a batch; see `data.contract`."""
    rng = np.random.default_rng((seed, _SALT, batch))
    return int(rng.choice(len(self.sizes), p=[row[0] for row in self.sizes]))

  def in_batches(self, size: int, parts: int) -> 'TrainTransform':
    """Returns the transform for batches of this size; see `data.contract`.

    Raises:
      UserError: groups do not divide a micro-batch.
    """
    group = self.group or size // parts
    if size // parts % group:
      raise UserError(
        f'augment.group is {group}; it must divide the {size // parts} '
        'examples of a micro-batch: set --config.augment.group=None for all.'
      )
    return dataclasses.replace(self, batches=(size, parts), group=group)

  @property
  def spec(self) -> Spec:
    """Spec of the crops, and of `masks`, bool `[2, patches]`."""
    masks = (_CROPS, math.prod(self.grid)), np.dtype(bool)
    sides = [round(side * self.gram_scale) for side in self.image_size]
    gram = {'gram': ((_CROPS, *sides, 3), np.dtype(np.uint8))}
    return super().spec | {'masks': masks} | (gram if self.gram_scale else {})

  @property
  def grid(self) -> tuple[int, int]:
    """Rows and columns of patches of a global crop."""
    height, width = self.image_size
    return height // self.patch_size, width // self.patch_size

  @functools.cached_property
  def interval_ends(self) -> Float[np.ndarray, ' k']:
    """Ends of the intervals of the masked crops of a group; see the class."""
    assert self.group is not None
    return np.linspace(*_FRACTIONS, int(_MASKED * _CROPS * self.group) + 1)

  @property
  def largest_count(self) -> int:
    """Largest number of masked patches of a group."""
    patches = math.prod(self.grid)
    return sum(int(patches * limit) for limit in self.interval_ends[1:])

  def __call__(
    self, example: Example, rng: np.random.Generator
  ) -> dict[str, np.ndarray]:
    """Returns crops and masks; raises DecodeError as `multicrop` does."""
    crops = super().__call__(example, rng)
    slots = self._slots(example['run_seed'], example['run_position'])
    masks = [
      block_mask(self.grid, self._count(slot, rng), rng, self.exact)
      for slot in slots
    ]
    return crops | {'masks': np.stack(masks).reshape(_CROPS, -1)}

  def arrays(self, pixels: Image, views: list[View]) -> dict[str, np.ndarray]:
    """Returns the arrays of an example except masks; see `spec`."""
    arrays = super().arrays(pixels, views)
    if not self.gram_scale:
      return arrays
    (_, height, width, _), _ = self.spec['gram']
    size = height, width
    crops = [
      view.geometry._replace(size=size).of(pixels, size, 'bicubic')
      for view in views[:_CROPS]
    ]
    return arrays | {'gram': np.stack(crops)}

  def _slots(self, seed: int, position: int) -> list[int]:
    """Returns the slot of each global crop, its place in the group's order.

    Args:
      seed: seed of the run.
      position: position of the example, counted from the start of training.
    """
    assert self.batches is not None and self.group is not None
    size, parts = self.batches
    batch, row = divmod(position, size)
    # Rows i, i + parts, … are micro-batch i. Examples are numbered by batch,
    # micro-batch and row in it, so that the numbers of a group are adjacent.
    row_in_part, part = divmod(row, parts)
    number = batch * size + part * (size // parts) + row_in_part
    crops = _CROPS * number + np.arange(_CROPS)
    # A group is one epoch of `shuffled`: each has an order of its own.
    return order.shuffled(crops, _CROPS * self.group, seed ^ _SALT).tolist()

  def _count(self, slot: int, rng: np.random.Generator) -> int:
    """Returns the number of patches to mask in the crop of a slot."""
    intervals = len(self.interval_ends) - 1
    if slot >= intervals:
      return 0  # half of the crops are not masked
    low, high = self.interval_ends[slot : slot + 2]
    fraction = high if self.exact else rng.uniform(low, high)
    return int(math.prod(self.grid) * fraction)


def block_mask(
  grid: tuple[int, int],
  count: int,
  rng: np.random.Generator,
  exact: bool = False,
) -> Bool[np.ndarray, 'rows columns']:
  """Draws a mask that is a union of rectangles.

  The area of each rectangle is uniform between 4 patches and the number that is
  missing, at most half of all patches, and the logarithm of its aspect ratio is
  uniform. A rectangle that adds no patch, or too many, is drawn again. If ten
  draws in a row do not fit, the mask has fewer patches than `count`, unless it
  must be exact.

  Args:
    grid: rows and columns of patches.
    count: number of patches to mask.
    rng: random generator.
    exact: whether missing patches are added, each with the same probability.
  """
  mask = np.zeros(grid, bool)
  tries = 0
  while (missing := count - int(mask.sum())) > 0 and tries < _TRIES:
    tries += 1
    largest = min(missing, int(_LARGEST * math.prod(grid)))
    # If fewer than 4 patches are missing, the area is between their number and
    # 4. As in the authors' code, a rectangle is smaller than the grid.
    area = _SMALLEST + (largest - _SMALLEST) * rng.random()
    aspect = math.exp(rng.uniform(-_LOG_ASPECT, _LOG_ASPECT))
    height = round(math.sqrt(area * aspect))
    width = round(math.sqrt(area / aspect))
    if height >= grid[0] or width >= grid[1]:
      continue
    y = rng.integers(grid[0] - height, endpoint=True)
    x = rng.integers(grid[1] - width, endpoint=True)
    box = mask[y : y + height, x : x + width]
    added = box.size - box.sum()
    if 0 < added <= largest:
      box[:] = True
      tries = 0
  if exact:
    missing = max(count - int(mask.sum()), 0)
    mask.flat[rng.choice(np.flatnonzero(~mask), missing, replace=False)] = True
  return mask
