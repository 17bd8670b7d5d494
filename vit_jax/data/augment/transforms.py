"""From an encoded image to uint8 pixels of the wanted size, on the host.

Two transforms as in `data.contract`; both make `image` and `label`.
"""

import abc
import dataclasses
import math
from typing import Any

import cv2
import numpy as np

from vit_jax.data.augment import policies
from vit_jax.data.augment.cutting import cover, random_box, shorter_side
from vit_jax.data.contract import Example, Spec
from vit_jax.data.images.decode import MAX_PIXELS, Image, decode, decode_box
from vit_jax.data.images.headers import (
  DecodeError as DecodeError,  # for callers
)
from vit_jax.data.images.resampling import INTERPOLATIONS, resize
from vit_jax.errors import UserError, check_choice, check_range

_CROP_ATTEMPTS = 10
_CROPS = ('inception', 'torchvision', 'squash', 'pad', 'none')
_RESIZES = ('squash', 'central', 'squash_central', 'torchvision')


def square(image_size: tuple[int, ...]) -> tuple[int, int]:
  """(s,) stands for (s, s), so that `--config.image_size=384` works."""
  if len(image_size) not in (1, 2) or min(image_size) < 1:
    raise UserError(
      f'image_size is {image_size}: give one number or (height, width), '
      'pixels, positive.'
    )
  height, width = image_size[0], image_size[-1]
  check_range(
    'height x width of image_size', height * width, at_most=MAX_PIXELS
  )
  return height, width


class _ImageAndLabel(abc.ABC):
  """A transform whose batches hold an image and its label."""

  image_size: tuple[int, int]

  @abc.abstractmethod
  def pixels(
    self, image: bytes | np.ndarray, rng: np.random.Generator | None
  ) -> Image:
    """Returns the pixels of the image only."""

  @property
  def spec(self) -> Spec:
    """`image`, uint8 `[height, width, 3]`, and `label`, int32."""
    return {
      'image': ((*self.image_size, 3), np.dtype(np.uint8)),
      'label': ((), np.dtype(np.int32)),
    }

  def __call__(
    self, example: Example, rng: np.random.Generator | None = None
  ) -> dict[str, np.ndarray | int]:
    """Returns image and label; raises DecodeError."""
    if 'label' not in example:
      raise UserError(
        f'the source gives no label with its images ({", ".join(example)}), '
        'and this transform makes batches of image and label: take a source '
        'with labels, or name a transform that declares none, as in '
        '--config.augment.name=my_lab.my_transform.'
      )
    pixels = self.pixels(example['image'], rng)
    return {'image': pixels, 'label': int(example['label'])}


@dataclasses.dataclass(frozen=True)
class TrainTransform(_ImageAndLabel):
  """Random crop, flip and colours, driven by the example's own generator.

  Attributes:
    image_size: (height, width) of the result, pixels.
    crop: which part of the image is used. 'inception' and 'torchvision' resize
      a part of random area and aspect ratio: 'inception' draws it as
      TensorFlow's `sample_distorted_bounding_box` does, 'torchvision' as
      torchvision's `RandomResizedCrop` does (area uniform, aspect ratio
      log-uniform). 'squash' resizes the image to `enlarge` times the result,
      without keeping the aspect ratio, and cuts out a random part, as BiT does
      (arXiv 1912.11370). 'pad' resizes the image to cover the result with its
      aspect ratio kept, pads it by reflection and cuts out a random part.
      'none' resizes the whole image without keeping the aspect ratio.
    min_area: smallest fraction of the image's area that a crop covers.
    max_area: largest fraction.
    min_aspect: smallest width / height of a crop.
    max_aspect: largest width / height of a crop.
    enlarge: with crop 'squash', side of the resized image as a multiple of the
      result's; 7/6 is 448 pixels for 384.
    pad: with crop 'pad', pixels added on each side.
    interpolation: see `resampling.resize`.
    flip: mirror left and right half of the time.
    randaugment_layers: operations of RandAugment for each image; 0 for none.
    randaugment_magnitude: 0 to 10; to 30 with the authors' policy.
    randaugment_policy: 'timm' or 'authors', see `policies.RandAugment`.
    three_augment: apply one of greyscale, solarisation and blur.
    color_jitter: brightness, contrast and saturation are changed by up to this
      share; 0 for none.
  """

  image_size: tuple[int, int]
  _: dataclasses.KW_ONLY
  crop: str = 'inception'
  min_area: float = 0.05
  max_area: float = 1.0
  min_aspect: float = 3 / 4
  max_aspect: float = 4 / 3
  enlarge: float = 7 / 6
  pad: int = 4
  interpolation: str = 'bilinear'
  flip: bool = True
  randaugment_layers: int = 0
  randaugment_magnitude: float = 9.0
  randaugment_policy: str = 'timm'
  three_augment: bool = False
  color_jitter: float = 0.0

  def __post_init__(self):
    check_choice('augment.crop', self.crop, _CROPS)
    check_choice('augment.interpolation', self.interpolation, INTERPOLATIONS)
    check_choice(
      'augment.randaugment_policy',
      self.randaugment_policy,
      tuple(policies.POLICIES),
    )
    for key in ('pad', 'randaugment_layers', 'color_jitter'):
      check_range(f'augment.{key}', getattr(self, key), at_least=0)
    check_range(
      'augment.randaugment_magnitude',
      self.randaugment_magnitude,
      at_least=0,
      at_most=policies.MAX_MAGNITUDE[self.randaugment_policy],
    )
    check_range('augment.max_aspect', self.max_aspect, above=0)
    check_range('augment.enlarge', self.enlarge, at_least=1, at_most=4)
    if not 0 < self.min_area <= self.max_area <= 1:
      raise UserError(
        f'augment.min_area {self.min_area} and max_area {self.max_area} must '
        'be shares: 0 < min_area <= max_area <= 1.'
      )
    if not 0 < self.min_aspect <= self.max_aspect:
      raise UserError(
        f'augment.min_aspect {self.min_aspect} and max_aspect '
        f'{self.max_aspect} must be positive and in this order.'
      )

  def pixels(
    self, image: bytes | np.ndarray, rng: np.random.Generator
  ) -> Image:
    """Returns uint8 `[height, width, 3]`; raises DecodeError."""
    pixels = self._crop(image, rng)
    if self.flip and rng.random() < 0.5:
      pixels = cv2.flip(pixels, 1)  # NumPy takes ten times as long
    if self.randaugment_layers or self.three_augment or self.color_jitter:
      pixels = self._recolor(np.ascontiguousarray(pixels), rng)
    return pixels

  def _crop(self, image: Any, rng: np.random.Generator) -> Image:
    """Returns the part of the image that is used, in the size of the result."""
    height, width = self.image_size
    if self.crop == 'inception':
      pixels = decode_box(image, lambda y, x: self._inception_box(y, x, rng))
      return resize(pixels, height, width, self.interpolation)
    if self.crop == 'torchvision':
      area = self.min_area, self.max_area
      aspect = self.min_aspect, self.max_aspect
      pixels = decode_box(
        image, lambda y, x: random_box(y, x, area, rng, aspect)
      )
      return resize(pixels, height, width, self.interpolation)
    if self.crop == 'none':
      return resize(decode(image), height, width, self.interpolation)
    if self.crop == 'squash':
      larger = round(height * self.enlarge), round(width * self.enlarge)
      pixels = resize(decode(image), *larger, self.interpolation)
    else:
      pixels = cover(decode(image), height, width, self.interpolation)
      pixels = cv2.copyMakeBorder(
        pixels, self.pad, self.pad, self.pad, self.pad, cv2.BORDER_REFLECT_101
      )
    y = int(rng.integers(0, pixels.shape[0] - height, endpoint=True))
    x = int(rng.integers(0, pixels.shape[1] - width, endpoint=True))
    return pixels[y : y + height, x : x + width]

  def _recolor(self, pixels: Image, rng: np.random.Generator) -> Image:
    if self.randaugment_layers:
      rand_augment = policies.RandAugment(
        self.randaugment_layers,
        self.randaugment_magnitude,
        self.randaugment_policy,
      )
      pixels = rand_augment(pixels, rng)
    if self.three_augment:
      pixels = policies.three_augment(pixels, rng)
    if self.color_jitter:
      pixels = policies.color_jitter(pixels, self.color_jitter, rng)
    return pixels

  def _inception_box(
    self, height: int, width: int, rng: np.random.Generator
  ) -> tuple[int, int, int, int]:
    """Draws a crop as TensorFlow's `sample_distorted_bounding_box` does.

    The aspect ratio is uniform in its range, then the height is uniform among
    those whose area is in its range and that fit. If ten draws fail, the box is
    the whole image. Unlike TensorFlow's, the box may touch the lower and the
    right edge.

    Returns:
      (y, x, height, width), pixels.

    Reference: Szegedy et al., arXiv 1409.4842, section 6.
    """
    area = height * width
    for _ in range(_CROP_ATTEMPTS):
      aspect = rng.uniform(self.min_aspect, self.max_aspect)
      low = round(math.sqrt(self.min_area * area / aspect))
      high = round(math.sqrt(self.max_area * area / aspect))
      high = min(high, height, int((width + 0.5 - 1e-7) / aspect))
      h = int(rng.integers(low, high, endpoint=True)) if low < high else high
      if h * round(h * aspect) < self.min_area * area:  # by rounding, perhaps
        h += 1
      if h * round(h * aspect) > self.max_area * area:
        h -= 1
      w = round(h * aspect)
      if (
        0 < h <= height
        and 0 < w <= width
        and self.min_area * area <= h * w <= self.max_area * area
      ):
        y = int(rng.integers(0, height - h, endpoint=True))
        x = int(rng.integers(0, width - w, endpoint=True))
        return y, x, h, w
    return 0, 0, height, width


@dataclasses.dataclass(frozen=True)
class EvalTransform(_ImageAndLabel):
  """Deterministic resizing for evaluation, stored with every checkpoint.

  Pixels differ slightly from those that the official weights were trained on;
  see data/images/decode.py.

  Attributes:
    image_size: (height, width) of the result, pixels.
    resize: 'squash' resizes the whole image without keeping the aspect ratio
      (the authors' fine-tuning evaluation). 'central' resizes the smaller side
      with the aspect ratio kept, then cuts out the centre. 'squash_central'
      resizes without keeping the aspect ratio, then cuts out the centre
      (big_vision's few-shot evaluation). 'torchvision' is like 'central' and
      equals torchvision's Resize and CenterCrop, and hence timm's, to the bit:
      the fraction of a pixel of the larger side is cut off.
    central_fraction: fraction of the resized image's side that the centre
      takes: 0.875 is 224 of 256. With 1, 'central' takes the largest centre
      there is.
    interpolation: filter, see `resampling.resize`.
  """

  image_size: tuple[int, int]
  _: dataclasses.KW_ONLY
  resize: str = 'squash'
  central_fraction: float = 0.875
  interpolation: str = 'bilinear'

  def __post_init__(self):
    check_choice('preprocess.resize', self.resize, _RESIZES)
    check_choice('preprocess.interpolation', self.interpolation, INTERPOLATIONS)
    height, width = self.image_size
    check_range(  # of the whole image, the pixels must be few enough
      'preprocess.central_fraction',
      self.central_fraction,
      at_least=math.sqrt(height * width / MAX_PIXELS),
      at_most=1,
    )

  def pixels(
    self, image: bytes | np.ndarray, rng: np.random.Generator | None = None
  ) -> Image:
    """Returns uint8 `[height, width, 3]`; raises DecodeError."""
    del rng
    pixels = decode(image)
    height, width = self.image_size
    if self.resize == 'squash':
      return resize(pixels, height, width, self.interpolation)
    share = self.central_fraction
    if self.resize == 'torchvision':
      return shorter_side(pixels, height, width, self.interpolation, share)
    if self.resize == 'central':
      pixels = cover(pixels, height, width, self.interpolation, share)
    else:
      larger = round(height / share), round(width / share)
      pixels = resize(pixels, *larger, self.interpolation)
    y = (pixels.shape[0] - height) // 2
    x = (pixels.shape[1] - width) // 2
    return pixels[y : y + height, x : x + width]
