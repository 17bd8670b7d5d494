"""Decodes images, or rectangular parts of them (boxes), by default to RGB.

Supported formats are JPEG, PNG, GIF (first frame), BMP, WebP and TIFF (first
page). The size is read from the header before the image is decoded, so that a
small file cannot exhaust the memory (a decompression bomb). Pixels may also be
given as an array or a .npy file. Other formats are rejected, because their size
is not known before decoding.

For an upright JPEG, only the rows above the lower edge of the box are decoded
(`images/jpeg.py`); all others are decoded as a whole, GIF by Pillow and other
formats by OpenCV. The pixels are those of full decoding, not an approximation,
unless decoding at a smaller size is requested (see below). Damage within a BMP,
WebP or TIFF file is not always detected, because OpenCV does not report it.

There are two differences from TensorFlow's `decode_jpeg`, with which the
authors' weights were trained. This module applies the EXIF orientation, which
TensorFlow ignores. It decodes JPEG with the accurate integer DCT; TensorFlow
uses the fast one, which makes images about .7 of a grey level darker.

CPU time of decoding for inception crops to 224 pixels, measured on 250 ImageNet
photographs (most of 500x375 pixels): decoding the whole image by OpenCV takes
1.13 times as long as decoding the rows above the box's lower edge (simplejpeg).

Boxes that are at least 2, 4 or 8 times as large as the result may be decoded at
1/2, 1/4 or 1/8 of their size (`decode_to_resize`). docs/performance.md has
the speed and the effect on pixels. Images are resized on the host with the
filter given in a config.
"""

import io
from collections.abc import Callable

import cv2
import numpy as np
import PIL.Image
from jaxtyping import Shaped, UInt8

from vit_jax.config.keys import MAX_PIXELS
from vit_jax.data.images import channels as channels_lib
from vit_jax.data.images import headers, jpeg, tiff
from vit_jax.data.images.channels import Pixels
from vit_jax.data.images.headers import DecodeError
from vit_jax.data.images.jpeg import Box

_PILLOW = {
  'bilinear_antialias': PIL.Image.Resampling.BILINEAR,
  'bicubic': PIL.Image.Resampling.BICUBIC,
}
_OPENCV = {
  'bilinear': cv2.INTER_LINEAR,
  'area': cv2.INTER_AREA,
  'nearest': cv2.INTER_NEAREST_EXACT,
}
# For images. Only maps are resized by 'nearest'.
INTERPOLATIONS = ('bilinear', 'area', *_PILLOW)
_GROUP = 4  # OpenCV averages areas of at most four channels at once
Image = UInt8[np.ndarray, 'y x 3']
Size = tuple[int, int]  # height, width; pixels
Plan = Callable[[int, int], tuple[Box, Size]]  # see `decode_to_resize`


def resize(
  image: Pixels,
  height: int,
  width: int,
  interpolation: str = 'bilinear',
) -> Pixels:
  """Resizes an image, with pixel centres at half-integer coordinates.

  Args:
    image: image of at least one pixel; RGB, or any number of channels of 8 or
      16 bits, which are resized independently of each other.
    height: height of the result, pixels.
    width: width of the result, pixels.
    interpolation: 'bilinear' interpolates between the four nearest pixels, and
      aliases when shrinking (TensorFlow's `resize`, used in the authors' code).
      'area' averages over the area of each result pixel along axes that shrink,
      and is bilinear along axes that grow. 'bilinear_antialias' and 'bicubic'
      (a = -1/2) widen their filter when shrinking; their results are bitwise
      equal to Pillow's, and hence timm's. (Pillow 13 swaps its two passes if
      the height shrinks much more than the width; here the width is always
      resized first.)
  """
  if image.shape[:2] == (height, width):
    return image
  if image.shape[2] == 3 and image.dtype == np.uint8:
    return _resized(image, height, width, interpolation)
  step = _GROUP if interpolation in _OPENCV else 1  # Pillow: one channel
  groups = []
  for first in range(0, image.shape[2], step):
    group = np.ascontiguousarray(image[..., first : first + step])
    groups.append(_resized(group, height, width, interpolation))
  return np.concatenate([np.atleast_3d(group) for group in groups], axis=2)


def _resized(
  image: np.ndarray, height: int, width: int, interpolation: str
) -> np.ndarray:
  """Resizes RGB pixels or a group of channels; drops an axis of one channel."""
  if interpolation == 'area':
    return _by_area(image, height, width)
  if interpolation in _OPENCV:
    flag = _OPENCV[interpolation]
    return cv2.resize(image, (width, height), interpolation=flag)
  return _by_pillow(image, height, width, _PILLOW[interpolation])


def _by_pillow(
  image: np.ndarray, height: int, width: int, method: PIL.Image.Resampling
) -> np.ndarray:
  """Resizes RGB pixels or a channel, in which 16 bits are computed as floats.

  Resizing one axis at a time gives the same result in all Pillow versions.
  """
  if image.shape[2] == 1:
    image = image[..., 0]  # Pillow's images of one channel have no axis for it
  sizes = (width, len(image)), (width, height)  # Pillow's are (width, height)
  if image.dtype == np.uint8:
    columns = PIL.Image.fromarray(image).resize(sizes[0], method)
    return np.array(columns.resize(sizes[1], method))
  values, last = image.astype(np.float32), np.iinfo(image.dtype).max
  for size in sizes:
    resized = PIL.Image.fromarray(values).resize(size, method)
    # Clipped after each axis, as Pillow does with 8 bits.
    values = np.clip(np.asarray(resized), 0, last)
  return np.round(values).astype(image.dtype)


def _by_area(image: np.ndarray, height: int, width: int) -> np.ndarray:
  """Shrinks the axes that shrink by averaging areas, then enlarges bilinearly.

  OpenCV's INTER_AREA repeats pixels where it enlarges, so that a small crop
  would become a mosaic of blocks.
  """
  # OpenCV's sizes are (width, height).
  smaller = min(width, image.shape[1]), min(height, image.shape[0])
  if smaller != image.shape[1::-1]:
    image = cv2.resize(image, smaller, interpolation=cv2.INTER_AREA)
  if smaller != (width, height):
    image = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
  return image


def decode_map(data: bytes | np.ndarray) -> Shaped[np.ndarray, 'y x']:
  """Decodes a map with an integer for each pixel, such as a class.

  Args:
    data: integers `[y, x]` or `[y, x, 1]`, or a PNG file, grey (8 or 16 bits)
      or with a palette, whose indices are the integers.

  Raises:
    DecodeError: the format is not supported, or the file is damaged.
  """
  if isinstance(data, np.ndarray):
    pixels = data[..., 0] if data.shape[2:] == (1,) else data
  else:
    _check_size(*headers.stated_size(data))
    try:
      with PIL.Image.open(io.BytesIO(data), formats=('PNG',)) as file:
        pixels = np.array(file)
    except Exception as error:  # noqa: BLE001 (damaged files raise many kinds)
      raise DecodeError(f'the map cannot be decoded: {error}') from error
  if pixels.ndim != 2 or pixels.dtype.kind not in 'ui':
    kind = f'{pixels.dtype} {list(pixels.shape)}'
    raise DecodeError(f'a map is {kind}; allowed: integers [y, x]')
  return pixels


def decode(
  image: bytes | np.ndarray, channels: int = 3, bits: int = 8
) -> Pixels:
  """Decodes a whole image, by default to upright RGB pixels.

  For three channels of 8 bits, greyscale is converted to three equal channels;
  the upper 8 of 16 bits are kept; palettes are looked up; transparency is
  dropped, and the colours remain as stored; CMYK is converted without its
  profile; the EXIF orientation is applied.

  For other channels or bits, and for .npy files, nothing is converted: see
  `channels.decode`. For these, JPEG files are allowed only if they are grey,
  for one channel of 8 bits.

  Args:
    image: an encoded file, or pixels: uint8 `[y, x]`, `[y, x, 1]`, `[y, x, 3]`;
      see `channels.decode` for other channels and bits.
    channels: number of channels of the result.
    bits: number of bits per channel, 8 or 16.

  Returns:
    Pixels `[y, x, channels]`, uint8 for 8 bits and uint16 for 16 bits.

  Raises:
    DecodeError: the format is not supported, the file is damaged or truncated,
      the image has more than MAX_PIXELS pixels, or the dtype or shape of an
      array is not allowed.
  """

  def whole(height: int, width: int) -> tuple[Box, Size]:
    return (0, 0, height, width), (height, width)

  return decode_to_resize(image, whole, channels, bits)[0]


def decode_to_resize(
  image: bytes | np.ndarray,
  plan: Plan,
  channels: int = 3,
  bits: int = 8,
  scaled: bool = False,
) -> tuple[Pixels, Size]:
  """Decodes the part of an image that will be resized.

  Args:
    image: see `decode`.
    plan: function from the height and width of the upright image, pixels, to
      the box and the height and width that it will be resized to.
    channels: number of channels of the result.
    bits: number of bits per channel, 8 or 16.
    scaled: whether a JPEG is decoded at the smallest of 1, 1/2, 1/4 and 1/8 of
      its size at which the box is not smaller than it will be resized to. The
      edges of the box are rounded to whole pixels of the decoded image.

  Returns:
    Pixels of `decode(image, channels, bits)` in the box, or fewer pixels if
    `scaled`; and the size that they must be resized to.

  Raises:
    DecodeError: the image cannot be decoded, see `decode`.
  """
  if isinstance(image, bytes) and headers.is_jpeg(image):
    if (channels, bits) == (3, 8):
      return _jpeg_box(image, plan, scaled)
    if (channels, bits) == (1, 8) and headers.jpeg(image).colors == 1:
      pixels, target = _jpeg_box(image, plan, scaled)
      return pixels[..., :1], target  # the three channels are equal
  if (channels, bits) != (3, 8):
    pixels = channels_lib.decode(image, channels, bits)
  elif isinstance(image, np.ndarray):
    pixels = _rgb(image)
  elif channels_lib.is_npy(image):
    pixels = channels_lib.decode(image, channels, bits)
  elif tiff.is_tiff(image):
    pixels = tiff.rgb(image, _check_size)
  elif image[:4] == b'GIF8':
    pixels = _gif(image)
  else:
    _check_size(*headers.stated_size(image))
    pixels = jpeg.opencv(image, cv2.IMREAD_COLOR_RGB)
  box, target = plan(pixels.shape[0], pixels.shape[1])
  return _cut(pixels, box), target


def _cut(pixels: Pixels, box: Box) -> Pixels:
  y, x, height, width = box
  return pixels[y : y + height, x : x + width]


def _check_size(height: int, width: int) -> None:
  if min(height, width) < 1 or height * width > MAX_PIXELS:
    raise DecodeError(
      f'{width} x {height} pixels; allowed: 1 to {MAX_PIXELS} in total'
    )


def _rgb(pixels: np.ndarray) -> Image:
  """Checks given pixels, and repeats a single channel."""
  if pixels.ndim == 2:
    pixels = pixels[:, :, None]
  supported = pixels.ndim == 3 and pixels.shape[2] in (1, 3)
  if pixels.dtype != np.uint8 or not supported or not pixels.size:
    raise DecodeError(
      f'pixels are {pixels.dtype} {list(pixels.shape)}; allowed: uint8 '
      '[y, x], [y, x, 1] or [y, x, 3], not empty'
    )
  return np.broadcast_to(pixels, (*pixels.shape[:2], 3))


def _gif(data: bytes) -> Image:
  """Decodes the first frame; OpenCV composes transparent ones differently."""
  _check_size(*headers.stated_size(data))
  try:
    with PIL.Image.open(io.BytesIO(data), formats=('GIF',)) as frame:
      return np.array(frame.convert('RGB'))
  except Exception as error:  # noqa: BLE001 (damaged files raise many kinds)
    raise DecodeError(f'the GIF file cannot be decoded: {error}') from error


def _jpeg_box(data: bytes, plan: Plan, scaled: bool) -> tuple[Image, Size]:
  """Decodes a part of a JPEG file to RGB; see `decode_to_resize`."""
  header = headers.jpeg(data)
  stored = (header.height, header.width)
  _check_size(*stored)
  upright = stored[::-1] if header.orientation >= 5 else stored
  box, target = plan(*upright)
  shrink = _largest_shrink(box, target) if scaled else 1
  box = _shrunk_box(box, shrink)
  if header.orientation == 1:
    return jpeg.decode_box(data, header, box, shrink), target
  # The box is one of the upright image, so all of the stored one is decoded.
  whole = _shrunk_box((0, 0, *stored), shrink)
  pixels = jpeg.decode_box(data, header, whole, shrink)
  return _cut(_upright(pixels, header.orientation), box), target


def _largest_shrink(box: Box, least: Size) -> int:
  """Returns the largest ratio by which a box can shrink to a size or above."""
  height, width = box[2:]
  return max(
    shrink
    for shrink in jpeg.SHRINKS
    if shrink == 1
    or (height // shrink >= least[0] and width // shrink >= least[1])
  )


def _shrunk_box(box: Box, shrink: int) -> Box:
  """Returns a box in the shrunk image, its edges rounded to whole pixels.

  The last pixels of a shrunk image are incomplete if the size of the image is
  not a multiple of `shrink`. They are outside of all boxes if less than half of
  them is in the image: 498 pixels at 1/8 are 62.25, of which boxes contain 62;
  500 pixels are 62.5, of which boxes contain 63.
  """
  y, x, height, width = box
  half = shrink // 2
  top, left = (y + half) // shrink, (x + half) // shrink
  bottom = (y + height + half) // shrink
  right = (x + width + half) // shrink
  return top, left, bottom - top, right - left


def _upright(
  pixels: Image, orientation: int
) -> UInt8[np.ndarray, 'height width 3']:
  """Applies an EXIF orientation: transposes if it is at least 5, then flips."""
  if orientation >= 5:
    pixels = pixels.transpose(1, 0, 2)
  if orientation in (3, 4, 7, 8):
    pixels = pixels[::-1]
  if orientation in (2, 3, 6, 7):
    pixels = pixels[:, ::-1]
  return np.ascontiguousarray(pixels)
