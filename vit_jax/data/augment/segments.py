"""Transforms of images with a mask that contains the class of each pixel.

The masks become `segments`, int16 `[height, width]`, in which `maps.IGNORED`
marks pixels that losses and evaluators leave out.
"""

import dataclasses
from typing import Any

import numpy as np

from vit_jax.data.augment import maps, policies, transforms
from vit_jax.data.augment.transforms import Geometry, View
from vit_jax.data.contract import Example, Spec
from vit_jax.data.images.channels import Pixels
from vit_jax.errors import UserError, check_range

_ATTEMPTS = 10  # further crops if one class covers most of a crop
_RGB = (3, 8)  # channels and bits


@dataclasses.dataclass(frozen=True)
class Masks(maps.Classes):
  """Keys of transforms with masks.

  Attributes:
    classes: number of classes; any other integer makes a bad record.
    key: key of an example with the mask, see `decode.decode_map`.
  """

  _: dataclasses.KW_ONLY
  classes: int
  key: str = 'mask'

  dtype = np.int16

  def entry(self, size: tuple[int, int]) -> Spec:
    """Returns the spec of masks of a size, (height, width)."""
    # The ids of all classes must fit into int16.
    check_range('classes', self.classes, at_least=2, at_most=2**15 - 1)
    return {'segments': (size, np.dtype(self.dtype))}

  @property
  def spec(self) -> Spec:
    """Spec of `image` and `label`, and of `segments`, cut out like `image`."""
    base: Any = super()  # the transform, which follows in a subclass's bases
    return base.spec | self.entry(self.image_size)  # pyright: ignore

  def arrays(self, example: Example, view: View) -> dict[str, np.ndarray]:
    """Returns `segments`; raises DecodeError for a bad mask."""
    integers = self.integers(example, self.key, view.size)
    size = view.pixels.shape[:2]
    return {'segments': self.cut(integers, view.geometry, size, self.classes)}


@dataclasses.dataclass(frozen=True)
class EvalTransform(Masks, transforms.EvalTransform):
  """`transforms.EvalTransform` with masks."""


@dataclasses.dataclass(frozen=True)
class TrainTransform(Masks, transforms.ImageAndLabel):
  """Random scale, crop, flip and colours, as in mmsegmentation and DINOv3.

  The image is resized so that its shorter side is that of the result times a
  random scale. The result is a random part of it. Beyond a smaller image, the
  result has ImageNet's mean colour (0 after its normalization), and is ignored.

  Attributes:
    min_scale: smallest scale.
    max_scale: largest scale.
    max_share: largest fraction of a crop that one class should cover, for which
      up to ten further crops are tried; 1 for any crop.
    flip: whether to flip images horizontally with probability .5.
    distortion: whether to change the colours, see
      `policies.photometric_distortion`; for RGB images of 8 bits.
  """

  _: dataclasses.KW_ONLY
  min_scale: float = 0.5
  max_scale: float = 2.0
  max_share: float = 0.75
  flip: bool = True
  distortion: bool = True

  def __post_init__(self):
    self._check_common_keys('augment')
    low, high = self.min_scale, self.max_scale
    check_range('augment.max_scale', high, above=0, at_most=10)
    check_range('augment.min_scale', low, above=0, at_most=high)
    check_range('augment.max_share', self.max_share, above=0, at_most=1)
    if self.distortion and (self.channels, self.bits) != _RGB:
      raise UserError(
        'augment.distortion must be False unless images are RGB of 8 bits, but '
        f'augment.channels is {self.channels} and augment.bits is {self.bits}.'
      )

  def geometry(self, height: int, width: int, rng: Any) -> Geometry:
    """Draws a part of an image of this size, pixels."""
    scale = rng.uniform(self.min_scale, self.max_scale)
    scale *= min(self.image_size) / min(height, width)
    size = max(round(height * scale), 1), max(round(width * scale), 1)
    transforms.check_resized(height, width, size)
    flip = bool(self.flip and rng.random() < 0.5)
    corner = self._corner(size, rng)
    return Geometry((0, 0, height, width), size, corner=corner, flip=flip)

  def _corner(self, size: tuple[int, int], rng: Any) -> tuple[int, int]:
    """Draws (top, left) of the result in a resized image of that size."""
    spare_rows = max(size[0] - self.image_size[0], 0)
    spare_columns = max(size[1] - self.image_size[1], 0)
    y = int(rng.integers(0, spare_rows, endpoint=True))
    x = int(rng.integers(0, spare_columns, endpoint=True))
    return y, x

  def geometry_for(
    self, example: Example, height: int, width: int, rng: Any
  ) -> Geometry:
    """Draws a part in which no class covers almost everything."""
    integers = self.integers(example, self.key, (height, width))
    drawn = self.geometry(height, width, rng)
    if self.max_share == 1:
      return drawn
    for _ in range(_ATTEMPTS):
      segments = self.cut(integers, drawn, self.image_size, self.classes)
      counts = np.bincount(segments[segments != maps.IGNORED], minlength=1)
      if 0 < counts.max() <= self.max_share * counts.sum():
        break  # pixels of several classes, not only ignored ones
      drawn = drawn._replace(corner=self._corner(drawn.size, rng))
    return drawn

  def colours(self, pixels: Pixels, rng: Any) -> Pixels:
    """Changes the colours, and adds the pixels beyond a smaller image."""
    if self.distortion:
      pixels = np.ascontiguousarray(pixels)
      pixels = policies.photometric_distortion(pixels, rng)
    is_rgb = (self.channels, self.bits) == _RGB
    fill = policies.IMAGENET_MEAN if is_rgb else 2 ** (self.bits - 1)
    shape = (*self.image_size, self.channels)
    whole = np.full(shape, fill, pixels.dtype)
    whole[: len(pixels), : pixels.shape[1]] = pixels
    return whole
