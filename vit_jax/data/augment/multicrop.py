"""Several crops of one image, large and small, for self-supervision."""

import dataclasses

import cv2
import numpy as np
from jaxtyping import UInt8

from vit_jax.data.augment import ops, policies
from vit_jax.data.augment.cutting import random_box
from vit_jax.data.augment.transforms import square
from vit_jax.data.contract import Example, Spec
from vit_jax.data.images.decode import Image, decode
from vit_jax.data.images.resampling import resize
from vit_jax.errors import UserError, check_range

_GLOBAL = 2  # crops that a teacher sees
_JITTER = 0.8  # how often colours are changed
_GREY = 0.2


@dataclasses.dataclass(frozen=True)
class TrainTransform:
  """Two global crops and some local ones, each flipped and recoloured.

  Each view is a random part, resized (bicubic, antialiased: Pillow's), mirrored
  half of the time; then in this order: brightness, contrast, saturation and hue
  changed (.8 of the time), greyscale (.2), blur, and for the second global crop
  solarisation.

  Attributes:
    image_size: (height, width) of a global crop, pixels.
    global_area: smallest and largest share of the image's area.
    local_crops: number of local crops; 0 for none.
    local_size: (height, width) of them, or one number for both, pixels.
    local_area: as `global_area`.
    color_jitter: strengths, see `policies.jitter`.
    blur: probability that the first global crop, the second and a local one are
      blurred, with a deviation uniform in .1 to 2 pixels.
    solarize: probability that the second global crop is inverted from the value
      128 on.

  Reference: DINO (arXiv 2104.14294), section 3.2 and appendix; multi-crop is
  that of SwAV (arXiv 2006.09882), colours are those of BYOL (arXiv 2006.07733).
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
    square(self.local_size)
    for key in ('global_area', 'local_area'):
      area = getattr(self, key)
      if len(area) != 2 or not 0 < area[0] <= area[1] <= 1:
        raise UserError(
          f'augment.{key} is {area}: give the smallest and the largest share '
          'of the image, 0 < smallest <= largest <= 1.'
        )
    for key, count in (('color_jitter', 4), ('blur', 3)):
      values = getattr(self, key)
      if len(values) != count:
        raise UserError(f'augment.{key} is {values}: give {count} numbers.')
      for value in values:
        check_range(f'augment.{key}', value, at_least=0)
    for value in self.blur:
      check_range('augment.blur', value, at_most=1)
    check_range(
      'the hue of augment.color_jitter', self.color_jitter[3], at_most=0.5
    )

  @property
  def spec(self) -> Spec:
    """`global` uint8 `[2, y, x, 3]` and, if any, `local` `[n, y', x', 3]`."""
    views = {
      'global': (_GLOBAL, *self.image_size, 3),
      'local': (self.local_crops, *square(self.local_size), 3),
    }
    return {
      name: (shape, np.dtype(np.uint8))
      for name, shape in views.items()
      if shape[0]
    }

  def __call__(
    self, example: Example, rng: np.random.Generator
  ) -> dict[str, np.ndarray]:
    """Returns the crops; raises DecodeError."""
    # The boxes of all views together leave out next to nothing of the image.
    pixels = decode(example['image'])
    count = _GLOBAL + self.local_crops
    views = [self.view(pixels, index, rng) for index in range(count)]
    crops = {'global': views[:_GLOBAL], 'local': views[_GLOBAL:]}
    return {name: np.stack(each) for name, each in crops.items() if each}

  def view(
    self, pixels: Image, index: int, rng: np.random.Generator
  ) -> UInt8[np.ndarray, 'height width 3']:
    """Makes one view of an image.

    Args:
      pixels: pixels of the whole image.
      index: 0 and 1 for the global crops, then the local ones.
      rng: generator of the example; views are drawn one after another.
    """
    is_global = index < _GLOBAL
    area = self.global_area if is_global else self.local_area
    size = self.image_size if is_global else square(self.local_size)
    rows, columns = pixels.shape[:2]
    y, x, height, width = random_box(rows, columns, area, rng)
    view = resize(pixels[y : y + height, x : x + width], *size, 'bicubic')
    if rng.random() < 0.5:
      view = cv2.flip(view, 1)
    view = np.ascontiguousarray(view)
    if rng.random() < _JITTER:
      view = policies.jitter(view, self.color_jitter, rng)
    if rng.random() < _GREY:
      view = ops.greyscale(view)
    if rng.random() < self.blur[min(index, _GLOBAL)]:
      view = ops.soften(view, rng.uniform(0.1, 2.0))
    if index == 1 and rng.random() < self.solarize:
      view = ops.solarize(view)
    return view
