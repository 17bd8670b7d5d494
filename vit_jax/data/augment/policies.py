"""Random augmentation: RandAugment, 3-Augment and colour jitter.

The policies draw the arguments of deterministic colour and geometry operations
on uint8 images. Colour operations give the results of Pillow's ImageOps and
ImageEnhance, except for differences of up to two grey levels where OpenCV
rounds differently.
"""

import functools
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import PIL.Image
from jaxtyping import Int, UInt8
from PIL import ImageFilter

Image = UInt8[np.ndarray, 'y x 3']
GREY = (128, 128, 128)
_VALUES = np.arange(256)  # of a channel
# A function of image, level (magnitude / 10; 0 to 1, or 0 to 3 in the authors'
# policy) and random generator.
Op = Callable[[Image, float, np.random.Generator], Image]
_MAGNITUDE_OF_LEVEL_1 = 10.0
_MAGNITUDE_STD = 0.5  # of timm's magnitudes
_AUTHORS_SIDE = 224  # image size of the authors' RandAugment code, pixels
IMAGENET_MEAN = (124, 116, 104)  # RGB fill colour of timm's policy
MAX_MAGNITUDE = {'timm': 10.0, 'authors': 30.0}


def _look_up(image: Image, table: np.ndarray) -> Image:
  """Maps values by a table `[256]`, or `[256, 3]` with a column per channel."""
  table = np.clip(table, 0, 255).astype(np.uint8)
  if table.ndim == 2:
    table = table[None]  # OpenCV expects an image of one row
  return cv2.LUT(image, table)


def _histogram(image: Image) -> Int[np.ndarray, '256 3']:
  """Counts the pixels of each value in each channel."""
  channels = image.reshape(-1, 3).T
  return np.stack([np.bincount(c, minlength=256) for c in channels], axis=1)


def invert(image: Image) -> Image:
  """Inverts the image: 255 − v."""
  return 255 - image


def posterize(image: Image, bits: int) -> Image:
  """Keeps the given number of upper bits, 0 to 8."""
  lower_bits = 2 ** (8 - bits) - 1
  return _look_up(image, _VALUES & ~lower_bits)


def solarize(image: Image, threshold: int = 128) -> Image:
  """Inverts values that are at least the threshold, 0 to 256."""
  return _look_up(image, np.where(_VALUES < threshold, _VALUES, 255 - _VALUES))


def solarize_add(image: Image, amount: int) -> Image:
  """Adds an amount to values below 128."""
  return _look_up(image, np.where(_VALUES < 128, _VALUES + amount, _VALUES))


def brightness(image: Image, factor: float) -> Image:
  """Changes the brightness: factor 0 gives black, 1 the unchanged image."""
  return _look_up(image, factor * _VALUES)


def contrast(image: Image, factor: float) -> Image:
  """Changes the contrast: factor 0 gives the mean grey, 1 no change."""
  # Rounded to a whole grey level, as in Pillow.
  mean = int(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY).mean() + 0.5)
  return _look_up(image, mean + factor * (_VALUES - mean))


def greyscale(image: Image) -> Image:
  """Converts to greyscale: luma (ITU-R 601) in all three channels."""
  return cv2.merge([cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)] * 3)


def color(image: Image, factor: float) -> Image:
  """Changes the saturation: factor 0 gives greyscale, 1 no change."""
  return cv2.addWeighted(image, factor, greyscale(image), 1 - factor, 0)


def sharpness(image: Image, factor: float) -> Image:
  """Changes the sharpness: factor 0 smooths, 1 has no effect, 2 sharpens.

  Pixels at the border do not change.
  """
  kernel = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13
  smooth = image.copy()
  smooth[1:-1, 1:-1] = cv2.filter2D(image, -1, kernel)[1:-1, 1:-1]
  return cv2.addWeighted(image, factor, smooth, 1 - factor, 0)


def auto_contrast(image: Image) -> Image:
  """Stretches each channel to the range 0 to 255."""
  low = image.min(axis=(0, 1)).astype(float)
  high = image.max(axis=(0, 1)).astype(float)
  # A channel with a single value is not changed.
  scale = np.where(high > low, 255 / np.maximum(high - low, 1), 1)
  shift = np.where(high > low, -low * scale, 0)
  return _look_up(image, _VALUES[:, None] * scale + shift)


def equalize(image: Image) -> Image:
  """Equalizes the histogram of each channel, as Pillow does.

  A value becomes the number of pixels below it, divided by a step. The step is
  1/255 of the pixels without those of the largest value.
  """
  counts = _histogram(image)
  largest = 255 - np.argmax(counts[::-1] > 0, axis=0)
  step = (counts.sum(axis=0) - counts[largest, np.arange(3)]) // 255
  below = np.cumsum(counts, axis=0) - counts
  table = (below + step // 2) // np.maximum(step, 1)
  # A channel with a step of 0 is not changed.
  return _look_up(image, np.where(step > 0, table, _VALUES[:, None]))


def blur(image: Image, sigma: float) -> Image:
  """Applies a Gaussian blur.

  Args:
    image: the image.
    sigma: standard deviation, pixels.
  """
  return cv2.GaussianBlur(image, (0, 0), sigma)


def hue(image: Image, turn: float) -> Image:
  """Rotates the hue in Pillow's HSV representation of 8 bits per channel.

  Args:
    image: the image.
    turn: fraction of the full circle, -1/2 to 1/2; truncated to a multiple of
      1/255, as in torchvision.
  """
  hsv = np.array(PIL.Image.fromarray(image).convert('HSV'))
  hsv[..., 0] += np.uint8(int(turn * 255) % 256)  # wraps around at 256
  turned = PIL.Image.frombytes('HSV', image.shape[1::-1], hsv.tobytes())
  return np.array(turned.convert('RGB'))


def soften(image: Image, sigma: float) -> Image:
  """Applies Pillow's approximate Gaussian blur, three successive box means.

  Args:
    image: the image.
    sigma: standard deviation, pixels; Pillow's `radius`.
  """
  softened = PIL.Image.fromarray(image).filter(ImageFilter.GaussianBlur(sigma))
  return np.array(softened)


def affine(
  image: Image,
  matrix: list[list[float]],
  bicubic: bool = False,
  fill: tuple[int, ...] = GREY,
) -> Image:
  """Applies an affine transformation of the coordinates.

  Args:
    image: RGB, `[y, x, 3]`.
    matrix: matrix `[2, 3]` that maps (x, y, 1) of the result to (x, y) of the
      image, in pixels. The origin is the upper left corner of the image, not
      the centre of a pixel.
    bicubic: use Pillow's bicubic filter in place of bilinear interpolation.
    fill: colour of pixels that are mapped from outside the image.
  """
  (a, b, c), (d, e, f) = matrix
  if bicubic:
    changed = PIL.Image.fromarray(image).transform(
      image.shape[1::-1],
      PIL.Image.Transform.AFFINE,
      (a, b, c, d, e, f),
      resample=PIL.Image.Resampling.BICUBIC,
      fillcolor=fill,
    )
    return np.array(changed)
  # OpenCV's origin is the centre of the first pixel, half a pixel further.
  centred = np.array([[a, b, c + (a + b - 1) / 2], [d, e, f + (d + e - 1) / 2]])
  return cv2.warpAffine(
    image,
    centred,
    (image.shape[1], image.shape[0]),
    flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
    borderValue=fill,
  )


def rotate(image: Image, degrees: float, **options: Any) -> Image:
  """Rotates counter-clockwise about the centre; options as in `affine`."""
  cos, sin = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
  y, x = image.shape[0] / 2, image.shape[1] / 2
  matrix = [
    [cos, -sin, x - cos * x + sin * y],
    [sin, cos, y - sin * x - cos * y],
  ]
  return affine(image, matrix, **options)


def shear_x(image: Image, slope: float, **options: Any) -> Image:
  """Moves row y to the left by `slope` · y; options as in `affine`."""
  return affine(image, [[1, slope, 0], [0, 1, 0]], **options)


def shear_y(image: Image, slope: float, **options: Any) -> Image:
  """Moves column x up by `slope` · x; options as in `affine`."""
  return affine(image, [[1, 0, 0], [slope, 1, 0]], **options)


def translate_x(image: Image, pixels: float, **options: Any) -> Image:
  """Moves the image left by `pixels`; options as in `affine`."""
  return affine(image, [[1, 0, pixels], [0, 1, 0]], **options)


def translate_y(image: Image, pixels: float, **options: Any) -> Image:
  """Moves the image up by `pixels`; options as in `affine`."""
  return affine(image, [[1, 0, 0], [0, 1, pixels]], **options)


_JITTER = (brightness, contrast, color)  # in the order of the strengths


def _sign(rng: np.random.Generator) -> int:
  return 1 if rng.random() < 0.5 else -1


def _plain(op: Callable[[Image], Image]) -> Op:
  """Returns an operation that does not depend on the level."""
  return lambda image, level, rng: op(image)


def _signed(
  op: Callable[[Image, float], Image], largest: float, axis: int | None = None
) -> Op:
  """Returns an operation with the argument ± level · `largest`.

  Args:
    op: function of an image and the argument.
    largest: argument at level 1; with an axis, as a fraction of that side.
    axis: axis of the image, for arguments in pixels.
  """

  def apply(image: Image, level: float, rng: np.random.Generator) -> Image:
    side = 1 if axis is None else image.shape[axis]
    return op(image, _sign(rng) * level * largest * side)

  return apply


def _around_one(op: Callable[[Image, float], Image]) -> Op:
  """Returns an operation with the factor 1 ± .9 · level, at least .1."""
  return lambda image, level, rng: op(
    image, max(0.1, 1 + _sign(rng) * 0.9 * level)
  )


def _by_level(
  op: Callable[[Image, Any], Image], argument: Callable[[float], float]
) -> Op:
  """Returns an operation whose argument is a function of the level."""
  return lambda image, level, rng: op(image, argument(level))


def _cut_out(image: Image, level: float, rng: np.random.Generator) -> Image:
  """Draws a grey square at a random position, clipped at the border."""
  y, x = int(rng.integers(image.shape[0])), int(rng.integers(image.shape[1]))
  radius = int(40 * level * min(image.shape[:2]) / _AUTHORS_SIDE)
  image = image.copy()
  top, left = max(y - radius, 0), max(x - radius, 0)
  image[top : y + radius, left : x + radius] = GREY
  return image


# Operations that both policies have.
_COLOURS: dict[str, Op] = {
  'auto_contrast': _plain(auto_contrast),
  'equalize': _plain(equalize),
  'invert': _plain(invert),
  'solarize_add': _by_level(solarize_add, lambda level: int(110 * level)),
}


def _geometry(shift: float, **options: Any) -> dict[str, Op]:
  """Returns the geometric operations.

  Args:
    shift: translation at level 1, as a fraction of the image's side.
    **options: keyword arguments of `affine`.
  """
  ops: dict[str, tuple[Callable[..., Image], float, int | None]] = {
    'rotate': (rotate, 30.0, None),  # degrees
    'shear_x': (shear_x, 0.3, None),
    'shear_y': (shear_y, 0.3, None),
    'translate_x': (translate_x, shift, 1),
    'translate_y': (translate_y, shift, 0),
  }
  return {
    name: _signed(functools.partial(op, **options), largest, axis)
    for name, (op, largest, axis) in ops.items()
  }


_ENHANCE = {
  'color': color,
  'contrast': contrast,
  'brightness': brightness,
  'sharpness': sharpness,
}
# 15 operations, which all become stronger with the magnitude. This is timm's
# policy `rand-mM-mstd0.5-inc1` with bicubic interpolation and ImageNet's mean
# as fill colour, used by DeiT, DeiT-III, Swin and the fine-tuning of MAE.
TIMM: dict[str, Op] = {
  **_COLOURS,
  **_geometry(0.45, bicubic=True, fill=IMAGENET_MEAN),
  **{name: _around_one(op) for name, op in _ENHANCE.items()},
  'posterize': _by_level(posterize, lambda level: 4 - int(4 * level)),
  'solarize': _by_level(solarize, lambda level: 256 - int(256 * level)),
}
# 16 operations of the RandAugment authors' code. As in that code, higher
# magnitudes make posterize and solarize weaker, and enhancement factors rise
# from below 1 to above 1. Difference: at magnitude 10, that code translates by
# up to 100 pixels and cuts out up to 80 at every image size, so that images of
# 32 pixels often become entirely grey. Here both are proportional to the image
# size and equal to the authors' values at 224 pixels.
AUTHORS: dict[str, Op] = {
  **_COLOURS,
  **_geometry(100 / _AUTHORS_SIDE),
  **{
    name: _by_level(op, lambda level: 0.1 + 1.8 * level)
    for name, op in _ENHANCE.items()
  },
  'posterize': _by_level(posterize, lambda level: min(8, int(4 * level))),
  'solarize': _by_level(solarize, lambda level: min(256, int(256 * level))),
  'cut_out': _cut_out,
}


POLICIES: dict[str, dict[str, Op]] = {'timm': TIMM, 'authors': AUTHORS}


def rand_augment(
  image: Image,
  layers: int,
  magnitude: float,
  policy: str,
  rng: np.random.Generator,
) -> Image:
  """Applies several random operations at the same magnitude.

  Args:
    image: the image.
    layers: number of operations per image, drawn with replacement (N in the
      paper).
    magnitude: strength of the operations (M in the paper), 0 to 10, or 0 to 30
      with the authors' policy; `TIMM` and `AUTHORS` define its meaning. With
      the authors' policy, posterize and solarize become weaker as the magnitude
      increases: solarize has no effect from 10 on, posterize from 20 on.
    policy: 'timm' or 'authors'. 'timm' applies each operation with probability
      .5 and adds noise of standard deviation .5 to the magnitude. 'authors'
      always applies each operation at exactly this magnitude.
    rng: random generator.

  Differences from the authors' code: geometric operations interpolate
  bilinearly in place of taking the nearest pixel. Contrast blends with the mean
  grey; the authors' code blends with a constant that, by mistake, depends on
  the number of pixels. Translations and cut-outs are fractions of the image
  size in place of pixels.

  Reference: Cubuk et al., arXiv 1909.13719.
  """
  ops = list(POLICIES[policy].values())
  for _ in range(layers):
    op, strength = ops[rng.integers(len(ops))], magnitude
    if policy == 'timm':
      strength = rng.normal(magnitude, _MAGNITUDE_STD)
      if rng.random() < 0.5:
        continue
    strength = np.clip(strength, 0, MAX_MAGNITUDE[policy])
    image = op(image, strength / _MAGNITUDE_OF_LEVEL_1, rng)
  return image


def three_augment(image: Image, rng: np.random.Generator) -> Image:
  """Applies one of greyscale, solarization and blur (σ of .1 to 2 pixels).

  Reference: Touvron et al., arXiv 2204.07118, section 3.2.
  """
  choice = rng.integers(3)
  if choice == 0:
    return greyscale(image)
  if choice == 1:
    return solarize(image)
  return blur(image, rng.uniform(0.1, 2.0))


def jitter(
  image: Image, strengths: tuple[float, ...], rng: np.random.Generator
) -> Image:
  """Changes brightness, contrast, saturation and hue in random order.

  Args:
    image: the image.
    strengths: strengths of these operations, at least 0; without a fourth, the
      hue is not changed. The first three factors are uniform in 1 ± strength,
      with a lower limit of 0. The hue is rotated by up to ± strength of the
      full circle; this strength is at most 1/2.
    rng: random generator.

  Reference: torchvision's `ColorJitter`.
  """
  for index in rng.permutation(len(strengths)):
    strength = strengths[index]
    if index < len(_JITTER):
      factor = rng.uniform(max(0.0, 1 - strength), 1 + strength)
      image = _JITTER[index](image, factor)
    else:
      image = hue(image, rng.uniform(-strength, strength))
  return image


def photometric_distortion(image: Image, rng: np.random.Generator) -> Image:
  """Changes brightness, contrast, saturation and hue, each with probability .5.

  Brightness changes by up to 32 of 255, contrast and saturation by factors of
  .5 to 1.5, and the hue by up to 36 degrees. The contrast changes before or
  after saturation and hue.

  Reference: mmsegmentation's `PhotoMetricDistortion`.
  """

  def maybe_scaled(pixels: np.ndarray) -> np.ndarray:
    if rng.random() < 0.5:
      return pixels
    table = np.clip(rng.uniform(0.5, 1.5) * _VALUES, 0, 255)
    return table.astype(np.uint8)[pixels]

  if rng.random() < 0.5:
    image = _look_up(image, _VALUES + rng.uniform(-32, 32))
  contrast_first = rng.random() < 0.5
  if contrast_first:
    image = maybe_scaled(image)
  hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV)
  hsv[..., 1] = maybe_scaled(hsv[..., 1])
  if rng.random() < 0.5:
    turn = rng.integers(-18, 18)  # of OpenCV's 180 steps of two degrees
    hsv[..., 0] = (hsv[..., 0].astype(int) + turn) % 180
  image = cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)
  return image if contrast_first else maybe_scaled(image)
