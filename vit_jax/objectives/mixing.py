"""Augmentation of batches on the device: mixup, cutmix and random erasing.

All functions depend only on the global batch and a key, so that results are the
same on every mesh. Random bits are numbered by their position in the global
array (JAX's partitionable threefry), and the partner of an example is its left
neighbour in the batch, so that mixing moves only one example from each device
to the next.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt8, UInt16
from scipy.special import betaincinv

from vit_jax.arrays.pixels import IMAGENET
from vit_jax.data.contract import target_key
from vit_jax.errors import check_range

Images = UInt8[Array, 'n y x c'] | UInt16[Array, 'n y x c']
# Indices of classes; or probabilities, several labels or numbers.
Labels = Int[Array, ' n'] | Float[Array, 'n k']
Batch = dict[str, Array]  # image: see `Images`; one of `TARGETS`: see above

# Folded into the step's key, which dropout also uses.
_STREAM = 0x6D6978
# λ is a multiple of 2^-16: products with 8-bit pixels and their sums are then
# exact in float32, however a compiler orders or fuses them. (Those with 16-bit
# pixels are rounded.)
_LAMBDA_STEPS = 2**16
_QUANTILES = 2**12  # number of possible values of λ
# Random erasing, as in timm.
_ERASED_AREA = (0.02, 1 / 3)
_ERASED_ASPECT = (0.3, 1 / 0.3)
_ERASE_ATTEMPTS = 10


def normalize(
  images: Images | Float[Array, 'n y x c'], dtype: Any = None
) -> Float[Array, 'n y x c']:
  """Maps [0, 255] to [-1, 1], float32: (x − 127.5) / 127.5.

  Args:
    images: pixels.
    dtype: dtype of the pixels before they were mixed; uint16 for the range [0,
      65535]. By default, that of `images`, where floating point means uint8.
  """
  half = largest(images.dtype if dtype is None else dtype) / 2
  return (images.astype(jnp.float32) - half) / half


def largest(dtype: Any) -> int:
  """Returns the largest value of pixels: 255, or 65,535 for uint16."""
  return np.iinfo(np.uint16 if dtype == np.uint16 else np.uint8).max


@dataclasses.dataclass(frozen=True)
class DeviceAugment:
  """Random erasing, then mixup or cutmix, then normalization.

  Mixing pairs each example with the one before it (the first with the last of
  its micro-batch) and draws λ for each pair. If both mixup and cutmix are used,
  each batch uses one of them, with probability 1/2.

  Attributes:
    num_classes: number of classes of mixed targets.
    mixup: α of λ ~ Beta(α, α), the weight of an example in the mixed image; 0
      for no mixup.
    cutmix: α of λ ~ Beta(α, α), the fraction of an example's pixels in the
      mixed image; 0 for no cutmix.
    erasing: probability that a rectangle of an image is replaced by noise,
      which has the statistics of RGB images of 8 bits; for such images only.

  References: mixup, Zhang et al., arXiv 1710.09412; cutmix, Yun et al., arXiv
  1905.04899; random erasing, Zhong et al., arXiv 1708.04896. The code of these
  papers draws one λ for a whole batch; here, each pair has its own. timm also
  chooses between mixup and cutmix once per batch.
  """

  num_classes: int
  _: dataclasses.KW_ONLY
  mixup: float = 0.0
  cutmix: float = 0.0
  erasing: float = 0.0

  def __post_init__(self):
    check_range('mix.mixup', self.mixup, at_least=0)
    check_range('mix.cutmix', self.cutmix, at_least=0)
    check_range('mix.erasing', self.erasing, at_least=0, at_most=1)

  def __call__(
    self, batch: Batch, key: Key[Array, '']
  ) -> tuple[Float[Array, 'n y x c'], Labels]:
    """Augments a batch.

    Args:
      batch: image: `[n, y, x, c]`, uint8 or uint16; label: int32 `[n]`, or
        float32 `[n, num_classes]` (soft labels); or, in place of it, labels or
        numbers, float32 `[n, num_classes]`.
      key: random key of the step.

    Returns:
      Images in [-1, 1], float32, and targets: the unchanged labels or numbers,
      or, if examples are mixed, their weighted means `[n, num_classes]`.
    """
    images, labels = batch['image'], batch[target_key(batch)]
    key = jax.random.fold_in(key, _STREAM)
    erase_key, mix_key = jax.random.split(key)
    if self.erasing:
      images = erase(images, self.erasing, erase_key)
    if not self.mixup and not self.cutmix:
      return normalize(images), labels
    weights, label_weight = self._weights(images.shape, mix_key)
    partners = jnp.roll(images, 1, axis=0)
    mixed = weights * images + (1 - weights) * partners
    own = labels
    if labels.ndim == 1:
      own = jax.nn.one_hot(labels, self.num_classes)
    targets = label_weight[:, None] * own
    targets += (1 - label_weight[:, None]) * jnp.roll(own, 1, axis=0)
    return normalize(mixed, images.dtype), targets

  def _weights(
    self, shape: tuple[int, ...], key: Key[Array, '']
  ) -> tuple[Float[Array, 'n _ _ 1'], Float[Array, ' n']]:
    """Draws the weight of each example in the mix with its partner.

    Returns:
      Weight of each pixel of the example, and weight of its label.
    """
    choice_key, mixup_key, cutmix_key = jax.random.split(key, 3)
    if not self.cutmix:
      return mixup_weights(shape, self.mixup, mixup_key)
    if not self.mixup:
      return cutmix_weights(shape, self.cutmix, cutmix_key)
    first = jax.random.bernoulli(choice_key)
    return jax.tree.map(
      lambda one, other: jnp.where(first, one, other),
      mixup_weights(shape, self.mixup, mixup_key),
      cutmix_weights(shape, self.cutmix, cutmix_key),
    )


def _beta(alpha: float, n: int, key: Key[Array, '']) -> Float[Array, ' n']:
  """Draws from Beta(α, α) with a table of its quantiles.

  JAX's sampler rejects draws in a loop, each iteration of which needs
  communication between the devices. A table of _QUANTILES values also gives the
  same draws on every kind of device.
  """
  ranks = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
  table = np.round(betaincinv(alpha, alpha, ranks) * _LAMBDA_STEPS)
  index = jax.random.randint(key, (n,), 0, _QUANTILES)
  return jnp.asarray(table / _LAMBDA_STEPS, jnp.float32)[index]


def mixup_weights(
  shape: tuple[int, ...], alpha: float, key: Key[Array, '']
) -> tuple[Float[Array, 'n 1 1 1'], Float[Array, ' n']]:
  """Draws λ ~ Beta(α, α) for each pair: the weight of all pixels and the label.

  Args:
    shape: shape of the images, `[n, y, x, c]`.
    alpha: α, above 0.
    key: random key.
  """
  weight = _beta(alpha, shape[0], key)
  return weight[:, None, None, None], weight


def cutmix_weights(
  shape: tuple[int, ...], alpha: float, key: Key[Array, '']
) -> tuple[Float[Array, 'n y x 1'], Float[Array, ' n']]:
  """Draws a box in each image; the weight of pixels is 0 inside and 1 outside.

  The box has the aspect ratio of the image and a random centre. It covers 1 − λ
  of the image, λ ~ Beta(α, α), before it is clipped at the border. The weight
  of the label is exactly the fraction of pixels outside the clipped box.

  Args:
    shape: shape of the images, `[n, y, x, c]`.
    alpha: α, above 0.
    key: random key.
  """
  n, *sides, _ = shape
  beta_key, *center_keys = jax.random.split(key, 3)
  scale = jnp.sqrt(1 - _beta(alpha, n, beta_key))
  boxes, area = [], jnp.ones((n,), jnp.int32)
  for length, center_key in zip(sides, center_keys, strict=True):
    half = (length * scale).astype(jnp.int32) // 2
    center = jax.random.randint(center_key, (n,), 0, length)
    start = jnp.maximum(center - half, 0)
    stop = jnp.minimum(center + half, length)
    boxes.append(_between(start, stop, length))
    area *= stop - start
  weights = 1 - _rectangle(*boxes).astype(jnp.float32)
  return weights, 1 - area / (sides[0] * sides[1])


def erase(images: Images, probability: float, key: Key[Array, '']) -> Images:
  """Fills a random rectangle of some images with noise.

  The area of the rectangle is uniform in 2 % to a third of the image, and its
  aspect ratio log-uniform in .3 to 1/.3; up to ten draws are made until it fits
  into the image. The noise is normal for each pixel and channel, with the mean
  and standard deviation of ImageNet, as in timm's mode 'pixel', but clipped to
  [0, 255].

  Args:
    images: images of a batch, RGB, uint8.
    probability: probability of a rectangle for each image.
    key: random key.
  """
  n, height, width, _ = images.shape
  keys = jax.random.split(key, 6)
  tries = (n, _ERASE_ATTEMPTS)
  low, high = _ERASED_AREA
  area = jax.random.uniform(keys[0], tries, minval=low, maxval=high)
  low, high = (math.log(aspect) for aspect in _ERASED_ASPECT)
  aspect = jnp.exp(jax.random.uniform(keys[1], tries, minval=low, maxval=high))
  area *= height * width
  sizes = jnp.stack([jnp.sqrt(area * aspect), jnp.sqrt(area / aspect)], axis=2)
  sizes = jnp.round(sizes).astype(jnp.int32)  # [n, tries, 2]
  fits = jnp.all(sizes < jnp.array([height, width]), axis=2)
  first = jnp.argmax(fits, axis=1)[:, None, None]
  sizes = jnp.take_along_axis(sizes, first, axis=1)[:, 0]  # [n, 2]
  boxes = []
  for axis, length in enumerate((height, width)):
    last_start = length - sizes[:, axis]
    start = jax.random.randint(keys[2 + axis], (n,), 0, last_start + 1)
    boxes.append(_between(start, start + sizes[:, axis], length))
  chosen = jax.random.bernoulli(keys[4], probability, (n,)) & fits.any(axis=1)
  erased = _rectangle(*boxes) & chosen[:, None, None, None]
  noise = jax.random.normal(keys[5], images.shape)
  mean, std = map(jnp.array, IMAGENET)
  noise = mean + std * noise
  noise = jnp.round(255 * jnp.clip(noise, 0, 1)).astype(jnp.uint8)
  return jnp.where(erased, noise, images)


def _between(
  start: Int[Array, ' n'], stop: Int[Array, ' n'], length: int
) -> Bool[Array, 'n length']:
  """Returns whether each position is in [start, stop)."""
  positions = jnp.arange(length)
  return (start[:, None] <= positions) & (positions < stop[:, None])


def _rectangle(
  rows: Bool[Array, 'n y'], columns: Bool[Array, 'n x']
) -> Bool[Array, 'n y x 1']:
  return rows[:, :, None, None] & columns[:, None, :, None]
