"""Transforms from encoded images to pixels of a given size, on the host.

`TrainTransform` and `EvalTransform` implement `data.contract.Transform`; both
return `image` and `label`.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import cv2
import numpy as np
from jaxtyping import Integer

from vit_jax.arrays.pixels import MAX_CHANNELS
from vit_jax.config.keys import MAX_PIXELS
from vit_jax.data.augment import policies
from vit_jax.data.contract import Example, Spec, check_fields
from vit_jax.data.images.channels import BITS, Pixels
from vit_jax.data.images.decode import (
  INTERPOLATIONS,
  Box,
  Size,
  decode_to_resize,
  resize,
)
from vit_jax.data.images.headers import DecodeError
from vit_jax.errors import UserError, check_choice, check_range

_CROP_ATTEMPTS = 10
_ASPECT = (3 / 4, 4 / 3)  # width / height of a random box
_CROPS = ('inception', 'torchvision', 'squash', 'pad', 'none')
_RESIZES = ('squash', 'central', 'squash_central', 'torchvision')


def covering_size(
  height: int, width: int, box: Size, fraction: float = 1.0
) -> Size:
  """Returns the size of an image resized to cover a box, aspect ratio kept.

  Args:
    height: height of the whole image, pixels.
    width: width of the whole image, pixels.
    box: (height, width) of the box, pixels.
    fraction: ratio of the box's side to the result's, in (0, 1], along the axis
      where this ratio is larger.

  Raises:
    DecodeError: the resized image would be too large.
  """
  scale = max(box[0] / height, box[1] / width) / fraction
  resized = round(height * scale), round(width * scale)
  check_resized(height, width, resized)
  # Rounding must not make it smaller than the box.
  return max(resized[0], box[0]), max(resized[1], box[1])


def shorter_side_size(
  height: int, width: int, centre: Size, fraction: float
) -> Size:
  """Returns the size of an image resized by its shorter side.

  The aspect ratio is kept. As in torchvision's Resize, the longer side is
  rounded down.

  Args:
    height: height of the whole image, pixels.
    width: width of the whole image, pixels.
    centre: (height, width) of the centre that is cut out afterwards, pixels.
    fraction: ratio of the centre's longer side to the resized shorter side.

  Raises:
    DecodeError: the resized image would be too large.
  """
  short = round(max(centre) / fraction)
  long = short * max(height, width) // min(height, width)
  resized = (short, long) if height <= width else (long, short)
  check_resized(height, width, resized)
  return resized


def check_resized(height: int, width: int, resized: Size) -> None:
  """Checks that an image does not become too large by resizing.

  Args:
    height: height of the image, pixels.
    width: width of the image, pixels.
    resized: (height, width) after resizing, pixels.

  Raises:
    DecodeError: the resized image would have more than `MAX_PIXELS` pixels.
  """
  if math.prod(resized) > MAX_PIXELS:
    raise DecodeError(
      f'{width} x {height} pixels: the aspect ratio is too extreme to resize '
      'the image'
    )


def random_box(
  height: int,
  width: int,
  area: tuple[float, ...],
  rng: np.random.Generator,
  aspect_range: tuple[float, float] = _ASPECT,
) -> Box:
  """Draws a random part of an image as torchvision's `RandomResizedCrop` does.

  The fraction of the area is uniform, and the aspect ratio is log-uniform. If
  ten draws do not fit, the result is the largest centred box of an allowed
  aspect ratio.

  Args:
    height: height of the image, pixels.
    width: width of the image, pixels.
    area: smallest and largest fraction of the image's area.
    rng: random generator.
    aspect_range: smallest and largest width / height of the box.
  """
  low, high = aspect_range
  for _ in range(_CROP_ATTEMPTS):
    target = height * width * rng.uniform(area[0], area[1])
    aspect = math.exp(rng.uniform(math.log(low), math.log(high)))
    h, w = round(math.sqrt(target / aspect)), round(math.sqrt(target * aspect))
    if 0 < h <= height and 0 < w <= width:
      y = int(rng.integers(0, height - h, endpoint=True))
      x = int(rng.integers(0, width - w, endpoint=True))
      return y, x, h, w
  aspect = min(max(width / height, low), high)
  h = min(height, max(round(width / aspect), 1))
  w = min(width, max(round(height * aspect), 1))
  return (height - h) // 2, (width - w) // 2, h, w


class Geometry(NamedTuple):
  """A part of an image that becomes the whole result.

  It also applies to everything that has the same pixels as the image, such as a
  map of classes.

  Attributes:
    box: part of the image, (y, x, height, width), pixels.
    size: (height, width) to which the box is resized.
    pad: pixels that are then added on each side by reflection.
    corner: (top, left) of the result in the resized box.
    flip: whether the result is flipped horizontally.
  """

  box: Box
  size: Size
  pad: int = 0
  corner: tuple[int, int] = (0, 0)
  flip: bool = False

  def cut(self, pixels: Any, image_size: Size) -> Any:
    """Pads, cuts out and flips the resized box.

    Args:
      pixels: resized box, `[y, x, channels]`.
      image_size: (height, width) of the result, pixels.
    """
    # OpenCV drops the axis of a single channel, which is added again.
    if self.pad:
      pad = self.pad
      pixels = cv2.copyMakeBorder(
        pixels, pad, pad, pad, pad, cv2.BORDER_REFLECT_101
      )
      pixels = np.atleast_3d(pixels)
    (y, x), (height, width) = self.corner, image_size
    pixels = pixels[y : y + height, x : x + width]
    if self.flip:
      # Ten times as fast as NumPy.
      pixels = cv2.flip(pixels, 1).reshape(pixels.shape)
    return pixels

  def of(self, pixels: Any, image_size: Size, interpolation: str) -> Any:
    """Returns the result for a whole image, or for a map of the same size.

    Args:
      pixels: pixels of the whole image, `[y, x, channels]`.
      image_size: (height, width) of the result, pixels.
      interpolation: filter, see `decode.resize`.
    """
    y, x, height, width = self.box
    box = resize(
      pixels[y : y + height, x : x + width], *self.size, interpolation
    )
    return self.cut(box, image_size)

  def of_map(
    self, integers: Integer[np.ndarray, '_ _'], image_size: Size
  ) -> Integer[np.ndarray, '_ _']:
    """Returns the nearest integers of a map of the same size as the image."""
    return self.of(integers[..., None], image_size, 'nearest')[..., 0]


class View(NamedTuple):
  """A transformed image.

  Attributes:
    pixels: result.
    geometry: part of the image that it shows.
    size: (height, width) of the whole image, pixels.
  """

  pixels: Pixels
  geometry: Geometry
  size: Size


@dataclasses.dataclass(frozen=True)
class ImageAndLabel(abc.ABC):
  """Base class of transforms that return an image and its label.

  Subclasses document the attributes.
  """

  image_size: tuple[int, int]
  _: dataclasses.KW_ONLY
  interpolation: str = 'bilinear'
  scaled_decoding: bool = False
  channels: int = 3
  bits: int = 8

  @abc.abstractmethod
  def geometry(
    self, height: int, width: int, rng: np.random.Generator | None
  ) -> Geometry:
    """Returns the part of an image of this size, pixels, that is used."""

  def pixels(
    self, image: bytes | np.ndarray, rng: np.random.Generator | None = None
  ) -> Pixels:
    """Returns the transformed image, `[height, width, channels]`.

    Raises:
      DecodeError: the image cannot be decoded, or is too narrow to resize.
    """
    return self._transformed(image, self.geometry, rng).pixels

  def geometry_for(
    self,
    example: Example,
    height: int,
    width: int,
    rng: np.random.Generator | None,
  ) -> Geometry:
    """Returns the part of an example's image; see `geometry`.

    Args:
      example: example of the source.
      height: height of the image, pixels.
      width: width of the image, pixels.
      rng: random generator.
    """
    return self.geometry(height, width, rng)

  def _transformed(
    self,
    image: bytes | np.ndarray,
    geometry: Callable[..., Geometry],
    rng: np.random.Generator | None,
  ) -> View:
    """Transforms an image.

    Args:
      image: encoded file, or pixels.
      geometry: function of the image's height and width, and `rng`.
      rng: random generator.
    """
    planned: list[tuple[Geometry, Size]] = []

    # Decoding calls this function once, when it has read the image's size.
    def plan(height: int, width: int) -> tuple[Box, Size]:
      part = geometry(height, width, rng)
      planned.append((part, (height, width)))
      return part.box, part.size

    box, size = decode_to_resize(
      image, plan, self.channels, self.bits, self.scaled_decoding
    )
    [(part, whole)] = planned
    resized = resize(box, *size, self.interpolation)
    cut = part.cut(resized, self.image_size)
    return View(self.colours(cut, rng), part, whole)

  def colours(self, pixels: Pixels, rng: np.random.Generator | None) -> Pixels:
    """Changes the colours of the result; by default, not at all."""
    return pixels

  @property
  def spec(self) -> Spec:
    """Spec of `image`, `[height, width, channels]`, and `label`, int32.

    Images are uint8, or uint16 for 16 bits.
    """
    shape = (*self.image_size, self.channels)
    return {
      'image': (shape, np.dtype(f'uint{self.bits}')),
      'label': ((), np.dtype(np.int32)),
    }

  def __call__(
    self, example: Example, rng: np.random.Generator | None = None
  ) -> dict[str, np.ndarray | int]:
    """Returns `image` and `label`; raises DecodeError for a bad record."""
    check_fields(example, 'label')
    geometry = functools.partial(self.geometry_for, example)
    view = self._transformed(example['image'], geometry, rng)
    values = {'image': view.pixels, 'label': int(example['label'])}
    return values | self.arrays(example, view)

  def arrays(self, example: Example, view: View) -> dict[str, np.ndarray]:
    """Returns further arrays, which a subclass adds to `spec`.

    Args:
      example: example of the source.
      view: transformed image, and the part of the image that it shows.
    """
    return {}

  def _check_common_keys(self, section: str) -> None:
    """Checks the keys of this class.

    Args:
      section: name of the config's section, for messages.
    """
    check_choice(f'{section}.interpolation', self.interpolation, INTERPOLATIONS)
    check_range(
      f'{section}.channels', self.channels, at_least=1, at_most=MAX_CHANNELS
    )
    if self.bits not in BITS:
      raise UserError(f'{section}.bits is {self.bits}; allowed: 8 or 16.')


@dataclasses.dataclass(frozen=True)
class TrainTransform(ImageAndLabel):
  """Random crop, flip and colour operations for training.

  All random numbers come from the generator of the example.

  Attributes:
    image_size: (height, width) of the result, pixels.
    crop: method that selects the part of the image. 'inception' and
      'torchvision' resize a part of random area and aspect ratio, drawn as in
      TensorFlow's `sample_distorted_bounding_box` or as in torchvision's
      `RandomResizedCrop` (uniform area, log-uniform aspect ratio). 'squash'
      resizes the image to `enlarge` times the result without keeping the aspect
      ratio, and cuts out a random part, as in BiT (arXiv 1912.11370). 'pad'
      resizes the image to cover the result with its aspect ratio kept, pads it
      by reflection and cuts out a random part. 'none' resizes the whole image
      without keeping the aspect ratio.
    min_area: smallest fraction of the image's area that a crop covers.
    max_area: largest fraction of the image's area that a crop covers.
    min_aspect: smallest width / height of a crop.
    max_aspect: largest width / height of a crop.
    enlarge: ratio of the resized image's side to the result's, for crop
      'squash'; with 7/6, 384 pixels are cut out of 448.
    pad: number of pixels added on each side, for crop 'pad'.
    interpolation: filter, see `decode.resize`.
    scaled_decoding: whether JPEGs are decoded at 1/2, 1/4 or 1/8 of their size
      where the crop then still is at least as large as the result. This is
      faster for photographs much larger than the result, and changes pixels,
      see docs/performance.md. Crops and all other random choices are the same.
    flip: whether to flip images horizontally with probability .5.
    randaugment_layers: number of RandAugment operations per image; 0 for none.
    randaugment_magnitude: magnitude of RandAugment, 0 to 10, or 0 to 30 with
      the authors' policy.
    randaugment_policy: 'timm' or 'authors', see `policies.rand_augment`.
    three_augment: whether to apply one of greyscale, solarization and blur.
    color_jitter: strength of random changes of brightness, contrast and
      saturation, see `policies.jitter`; 0 for none.
    channels: number of channels of the images, 1 to 16; it must equal
      `model.channels`. RandAugment, `three_augment` and `color_jitter` require
      three channels of 8 bits, RGB.
    bits: number of bits per channel, 8 or 16.
  """

  _: dataclasses.KW_ONLY
  crop: str = 'inception'
  min_area: float = 0.05
  max_area: float = 1.0
  min_aspect: float = 3 / 4
  max_aspect: float = 4 / 3
  enlarge: float = 7 / 6
  pad: int = 4
  flip: bool = True
  randaugment_layers: int = 0
  randaugment_magnitude: float = 9.0
  randaugment_policy: str = 'timm'
  three_augment: bool = False
  color_jitter: float = 0.0

  def __post_init__(self):
    self._check_common_keys('augment')
    check_choice('augment.crop', self.crop, _CROPS)
    check_choice(
      'augment.randaugment_policy',
      self.randaugment_policy,
      policies.POLICIES,
    )
    for key in ('pad', 'randaugment_layers', 'color_jitter'):
      check_range(f'augment.{key}', getattr(self, key), at_least=0)
    check_range(
      'augment.randaugment_magnitude',
      self.randaugment_magnitude,
      at_least=0,
      at_most=policies.MAX_MAGNITUDE[self.randaugment_policy],
    )
    check_range('augment.enlarge', self.enlarge, at_least=1, at_most=4)
    for key, limit in (('area', 1), ('aspect', math.inf)):
      low, high = getattr(self, f'min_{key}'), getattr(self, f'max_{key}')
      check_range(f'augment.max_{key}', high, above=0, at_most=limit)
      check_range(f'augment.min_{key}', low, above=0, at_most=high)
    keys = ('randaugment_layers', 'three_augment', 'color_jitter')
    used = [f'augment.{key}' for key in keys if getattr(self, key)]
    if used and (self.channels, self.bits) != (3, 8):
      raise UserError(
        f'{" and ".join(used)} must be 0 unless images are RGB of 8 bits, but '
        f'augment.channels is {self.channels} and augment.bits is {self.bits}.'
      )

  def colours(self, pixels: Pixels, rng: Any) -> Pixels:
    """Applies the operations on colours."""
    # They require contiguous memory, which a cut or flipped image may not have.
    if self.randaugment_layers:
      pixels = policies.rand_augment(
        np.ascontiguousarray(pixels),
        self.randaugment_layers,
        self.randaugment_magnitude,
        self.randaugment_policy,
        rng,
      )
    if self.three_augment:
      pixels = policies.three_augment(np.ascontiguousarray(pixels), rng)
    if self.color_jitter:
      strengths = (self.color_jitter,) * 3
      pixels = policies.jitter(np.ascontiguousarray(pixels), strengths, rng)
    return pixels

  def geometry(self, height: int, width: int, rng: Any) -> Geometry:
    """Draws a part of an image of this size, pixels."""
    rows, columns = self.image_size
    if self.crop not in ('squash', 'pad'):
      box = self._random_box(height, width, rng)
      return Geometry(box, self.image_size, flip=self._random_flip(rng))
    size, pad = (round(rows * self.enlarge), round(columns * self.enlarge)), 0
    if self.crop == 'pad':
      size, pad = covering_size(height, width, self.image_size), self.pad
    # The result is a random part of the resized and padded image.
    y = int(rng.integers(0, size[0] + 2 * pad - rows, endpoint=True))
    x = int(rng.integers(0, size[1] + 2 * pad - columns, endpoint=True))
    flip = self._random_flip(rng)
    return Geometry((0, 0, height, width), size, pad, (y, x), flip)

  def _random_flip(self, rng: np.random.Generator) -> bool:
    return self.flip and rng.random() < 0.5

  def _random_box(
    self, height: int, width: int, rng: np.random.Generator
  ) -> Box:
    """Returns the box of an image that is resized to the result."""
    if self.crop == 'none':
      return 0, 0, height, width
    if self.crop == 'inception':
      return self._inception_box(height, width, rng)
    area = self.min_area, self.max_area
    aspect = self.min_aspect, self.max_aspect
    return random_box(height, width, area, rng, aspect)

  def _inception_box(
    self, height: int, width: int, rng: np.random.Generator
  ) -> Box:
    """Draws a crop as TensorFlow's `sample_distorted_bounding_box` does.

    The aspect ratio is uniform in its range. The height is uniform among the
    heights for which the box fits and its area is in range. If ten draws fail,
    the result is the whole image. In contrast to TensorFlow's function, the box
    may touch the lower and the right edge.

    Returns:
      (y, x, height, width), pixels.

    Reference: Szegedy et al., arXiv 1409.4842, section 6.
    """
    area = height * width
    smallest, largest = self.min_area * area, self.max_area * area
    for _ in range(_CROP_ATTEMPTS):
      aspect = rng.uniform(self.min_aspect, self.max_aspect)
      low = round(math.sqrt(smallest / aspect))
      high = round(math.sqrt(largest / aspect))
      # The last value is the largest height whose rounded width fits.
      high = min(high, height, int((width + 0.5 - 1e-7) / aspect))
      h = int(rng.integers(low, high, endpoint=True)) if low < high else high
      # Rounding can move the area out of its range.
      if h * round(h * aspect) < smallest:
        h += 1
      if h * round(h * aspect) > largest:
        h -= 1
      w = round(h * aspect)
      fits = 0 < h <= height and 0 < w <= width
      if fits and smallest <= h * w <= largest:
        y = int(rng.integers(0, height - h, endpoint=True))
        x = int(rng.integers(0, width - w, endpoint=True))
        return y, x, h, w
    return 0, 0, height, width


@dataclasses.dataclass(frozen=True)
class EvalTransform(ImageAndLabel):
  """Deterministic resizing for evaluation, stored with every checkpoint.

  Official weights were trained with a slightly different decoding of images;
  see data/images/decode.py.

  Attributes:
    image_size: (height, width) of the result, pixels.
    resize: 'squash' resizes the whole image without keeping the aspect ratio
      (the authors' fine-tuning evaluation). 'central' resizes the smaller side
      with the aspect ratio kept, then cuts out the centre. 'squash_central'
      resizes without keeping the aspect ratio, then cuts out the centre
      (big_vision's few-shot evaluation). 'torchvision' is similar to 'central',
      with results that are bitwise equal to those of torchvision's Resize and
      CenterCrop, and hence of timm: the larger side is rounded down.
    central_fraction: ratio of the centre's side to the resized image's side:
      with 0.875, 224 pixels are cut out of 256. With 1, 'central' cuts out the
      largest possible centre.
    interpolation: filter, see `decode.resize`.
    scaled_decoding: whether JPEGs are decoded at 1/2, 1/4 or 1/8 of their size
      where they then still are at least as large as the resized image. This is
      faster for large photographs and changes pixels, see docs/performance.md.
    channels: number of channels of the images, 1 to 16; it must equal
      `model.channels`.
    bits: number of bits per channel, 8 or 16.
  """

  _: dataclasses.KW_ONLY
  resize: str = 'squash'
  central_fraction: float = 0.875

  def __post_init__(self):
    self._check_common_keys('preprocess')
    check_choice('preprocess.resize', self.resize, _RESIZES)
    height, width = self.image_size
    check_range(  # the resized image must not exceed MAX_PIXELS
      'preprocess.central_fraction',
      self.central_fraction,
      at_least=math.sqrt(height * width / MAX_PIXELS),
      at_most=1,
    )

  def geometry(self, height: int, width: int, rng: Any = None) -> Geometry:
    """Returns the part of an image of this size, pixels, that is used."""
    del rng
    size = self._resized_size(height, width)
    return Geometry((0, 0, height, width), size, corner=self._corner(size))

  def _resized_size(self, height: int, width: int) -> Size:
    """Returns the size to which an image of this size, pixels, is resized.

    Raises:
      DecodeError: the resized image would be too large.
    """
    fraction = self.central_fraction
    if self.resize == 'squash':
      return self.image_size
    if self.resize == 'torchvision':
      return shorter_side_size(height, width, self.image_size, fraction)
    if self.resize == 'central':
      return covering_size(height, width, self.image_size, fraction)
    rows, columns = self.image_size
    return round(rows / fraction), round(columns / fraction)

  def _corner(self, size: Size) -> tuple[int, int]:
    """Returns (top, left) of the result in a resized image of that size."""
    spare = size[0] - self.image_size[0], size[1] - self.image_size[1]
    if self.resize == 'torchvision':
      # torchvision's CenterCrop rounds half pixels to even.
      return round(spare[0] / 2), round(spare[1] / 2)
    return spare[0] // 2, spare[1] // 2
