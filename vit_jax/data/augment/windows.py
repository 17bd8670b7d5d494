"""Sliding windows of an image, and its mask at its own size."""

import dataclasses
import itertools
from typing import Any

import numpy as np

from vit_jax.data.augment import segments, transforms
from vit_jax.data.contract import Example, Spec
from vit_jax.data.images.channels import Pixels
from vit_jax.data.images.decode import INTERPOLATIONS, Size, decode, resize
from vit_jax.data.images.headers import DecodeError
from vit_jax.errors import check_choice, check_range


@dataclasses.dataclass(frozen=True)
class EvalTransform(segments.Masks):
  """Resizes an image to cover a window, and cuts it into overlapping windows.

  All shapes are fixed: missing windows are 0 and have the corner (-1, -1), and
  the mask is padded with `maps.IGNORED`.

  Attributes:
    image_size: (height, width) of a window, pixels.
    stride: distance of windows, as a fraction of their side; 2/3 is 341 pixels
      for windows of 512.
    windows: largest number of windows of an image.
    label_size: largest side of an image, pixels.
    interpolation: filter, see `decode.resize`.
    channels: number of channels of the images; it must equal `model.channels`.
    bits: number of bits per channel, 8 or 16.
  """

  image_size: tuple[int, int]
  _: dataclasses.KW_ONLY
  stride: float = 2 / 3
  windows: int = 6
  label_size: int = 1024
  interpolation: str = 'bilinear'
  channels: int = 3
  bits: int = 8

  def __post_init__(self):
    check_choice('preprocess.interpolation', self.interpolation, INTERPOLATIONS)
    check_range('preprocess.stride', self.stride, above=0, at_most=1)
    check_range('preprocess.windows', self.windows, at_least=1, at_most=1000)
    check_range('preprocess.label_size', self.label_size, at_least=1)

  def fitting(self, height: int, width: int) -> 'EvalTransform':
    """Returns a transform for images of this size, pixels, and similar ones.

    Its number of windows and its `label_size` are rounded up to powers of 2, so
    that there are few different ones.
    """
    _, corners = self._corners(height, width)
    needed = len(corners), max(height, width)
    windows, label_size = (1 << (n - 1).bit_length() for n in needed)
    return dataclasses.replace(self, windows=windows, label_size=label_size)

  @property
  def spec(self) -> Spec:
    """Spec of the windows, their corners, the sizes of the image and its mask.

    `image` `[windows, y, x, channels]` are the windows, and `corners`
    `[windows, 2]` their (y, x) in the resized image. `resized` and `native`
    `[2]` are the (height, width) of the image after and before resizing. All
    are in pixels.
    """
    shape = (self.windows, *self.image_size, self.channels)
    integers = np.dtype(np.int32)
    return {
      'image': (shape, np.dtype(f'uint{self.bits}')),
      'label': ((), integers),
      'corners': ((self.windows, 2), integers),
      'resized': ((2,), integers),
      'native': ((2,), integers),
      **self.entry((self.label_size, self.label_size)),
    }

  def pixels(self, image: Any, rng: Any = None) -> Pixels:
    """Returns the windows, `[windows, height, width, channels]`."""
    return self.views(image)['image']

  def views(self, image: bytes | np.ndarray) -> dict[str, Any]:
    """Returns all values of a batch except for `segments` and `label`."""
    pixels = decode(image, self.channels, self.bits)
    (height, width), window = pixels.shape[:2], self.image_size
    size, corners = self._corners(height, width)
    if len(corners) > self.windows or max(height, width) > self.label_size:
      raise DecodeError(
        f'{height} x {width} pixels need preprocess.windows={len(corners)} '
        f'and preprocess.label_size={max(height, width)}, which are '
        f'{self.windows} and {self.label_size}'
      )
    pixels = resize(pixels, size[0], size[1], self.interpolation)
    shape, dtype = self.spec['image']
    images = np.zeros(shape, dtype)
    for i, (y, x) in enumerate(corners):
      images[i] = pixels[y : y + window[0], x : x + window[1]]
    missing = [(-1, -1)] * (self.windows - len(corners))
    return {
      'image': images,
      'corners': np.array(corners + missing, np.int32),
      'resized': np.array(size, np.int32),
      'native': np.array([height, width], np.int32),
    }

  def _corners(self, height: int, width: int) -> tuple[Size, list[Any]]:
    """Returns the size of a resized image, and the corners of its windows.

    Args:
      height: height of the image, pixels.
      width: width of the image, pixels.
    """
    size = transforms.covering_size(height, width, self.image_size)
    starts = []  # of the windows along each axis
    for side, window in zip(size, self.image_size, strict=True):
      last, step = side - window, max(int(window * self.stride), 1)
      # The last window ends with the image, so it may overlap more.
      starts.append([*range(0, last, step), last])
    return size, [*itertools.product(*starts)]

  def __call__(self, example: Example, rng: Any = None) -> dict[str, Any]:
    """Returns the values of `spec`; raises DecodeError for a bad record."""
    views = self.views(example['image'])
    native = tuple(views['native'].tolist())
    integers = self.integers(example, self.key, native)
    whole = transforms.Geometry((0, 0, *native), native)
    size = self.label_size, self.label_size
    mask = self.cut(integers, whole, size, self.classes)
    return views | {'label': example.get('label', 0), 'segments': mask}
