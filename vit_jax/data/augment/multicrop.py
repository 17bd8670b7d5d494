"""Multi-crop augmentation for self-supervised training."""

import dataclasses
import math

import numpy as np

from vit_jax.config.keys import square
from vit_jax.data.augment import policies
from vit_jax.data.augment.transforms import Geometry, View, random_box
from vit_jax.data.contract import Example, Spec
from vit_jax.data.images.decode import Image, decode
from vit_jax.errors import UserError, check_range

_GLOBAL = 2  # number of global crops, the inputs of the teacher
_JITTER = 0.8  # probability of colour jitter
_GREY = 0.2  # probability of greyscale


@dataclasses.dataclass(frozen=True)
class TrainTransform:
  """Two global crops and several local crops, each flipped and recoloured.

  Each crop is a random part of the image, resized by Pillow's antialiased
  bicubic filter and flipped with probability .5. Then follow, in this order:
  jitter of brightness, contrast, saturation and hue (with probability .8),
  greyscale (.2), blur, and solarization of the second global crop.

  Attributes:
    image_size: (height, width) of a global crop, pixels.
    global_area: smallest and largest fraction of the image's area that a global
      crop covers.
    local_crops: number of local crops; 0 for none.
    local_size: (height, width) of a local crop, or one number for both, pixels.
    local_area: smallest and largest fraction of the image's area that a local
      crop covers.
    color_jitter: strengths, see `policies.jitter`.
    blur: probabilities of blurring the first global crop, the second global
      crop and each local crop. The standard deviation is uniform in .1 to 2
      pixels.
    solarize: probability that the second global crop is solarized, with
      threshold 128.

  Reference: DINO (arXiv 2104.14294), section 3.2 and appendix. Multi-crop was
  introduced by SwAV (arXiv 2006.09882), and the colour changes by BYOL (arXiv
  2006.07733).
  """

  image_size: tuple[int, int]
  _: dataclasses.KW_ONLY
  global_area: tuple[float, ...] = (0.4, 1.0)
  local_crops: int = 8
  local_size: tuple[int, ...] = (96,)
  local_area: tuple[float, ...] = (0.05, 0.4)
  color_jitter: tuple[float, ...] = (0.4, 0.4, 0.2, 0.1)
  blur: tuple[float, ...] = (1.0, 0.1, 0.5)
  solarize: float = 0.2

  def __post_init__(self):
    check_range('augment.local_crops', self.local_crops, at_least=0)
    check_range('augment.solarize', self.solarize, at_least=0, at_most=1)
    square(self.local_size, 'augment.local_size')  # raises if it is wrong
    for key in ('global_area', 'local_area'):
      area = getattr(self, key)
      if len(area) != 2 or not 0 < area[0] <= area[1] <= 1:
        raise UserError(
          f'augment.{key} is {area}; allowed: 0 < smallest <= largest <= 1.'
        )
    largest = {'color_jitter': (math.inf,) * 3 + (0.5,), 'blur': (1.0,) * 3}
    for key, limits in largest.items():
      values = getattr(self, key)
      if len(values) != len(limits) or not all(
        0 <= value <= limit for value, limit in zip(values, limits, strict=True)
      ):
        raise UserError(
          f'augment.{key} is {values}; give {len(limits)} numbers of at least '
          f'0 and at most {limits}.'
        )

  @property
  def spec(self) -> Spec:
    """Spec of uint8 `global` `[2, y, x, 3]` and `local` `[n, y', x', 3]`."""
    views = {
      'global': (_GLOBAL, *self.image_size, 3),
      'local': (self.local_crops, *square(self.local_size), 3),
    }
    return {
      name: (shape, np.dtype(np.uint8))
      for name, shape in views.items()
      if shape[0]  # without local crops, there is no `local`
    }

  def __call__(
    self, example: Example, rng: np.random.Generator
  ) -> dict[str, np.ndarray]:
    """Returns the crops; raises DecodeError if the image cannot be decoded."""
    # All of it is decoded, because the crops together cover most of the image.
    pixels = decode(example['image'])
    count = _GLOBAL + self.local_crops
    views = [self.view(pixels, index, rng) for index in range(count)]
    return self.arrays(pixels, views)

  def arrays(self, pixels: Image, views: list[View]) -> dict[str, np.ndarray]:
    """Returns the arrays of an example, given its views; see `spec`.

    Args:
      pixels: pixels of the whole image, from which a subclass may cut others.
      views: all views, the global ones first.
    """
    crops = {'global': views[:_GLOBAL], 'local': views[_GLOBAL:]}
    return {
      name: np.stack([view.pixels for view in views])
      for name, views in crops.items()
      if views
    }

  def view(self, pixels: Image, index: int, rng: np.random.Generator) -> View:
    """Makes one view of an image.

    Args:
      pixels: pixels of the whole image.
      index: index of the view; 0 and 1 are global crops, others local crops.
      rng: random generator of the example, used by all views one after another.
    """
    is_global = index < _GLOBAL
    area = self.global_area if is_global else self.local_area
    size = self.image_size if is_global else square(self.local_size)
    rows, columns = pixels.shape[:2]
    box = random_box(rows, columns, area, rng)
    geometry = Geometry(box, size, flip=rng.random() < 0.5)
    view = np.ascontiguousarray(geometry.of(pixels, size, 'bicubic'))
    if rng.random() < _JITTER:
      view = policies.jitter(view, self.color_jitter, rng)
    if rng.random() < _GREY:
      view = policies.greyscale(view)
    # The probability of local crops follows those of the global ones.
    if rng.random() < self.blur[min(index, _GLOBAL)]:
      view = policies.soften(view, rng.uniform(0.1, 2.0))
    if index == 1 and rng.random() < self.solarize:
      view = policies.solarize(view)
    return View(view, geometry, (rows, columns))
