"""Perceptual hashes of images, and the search for hashes that are similar.

The hash of an image (Zauner's pHash, computed by the package imagehash) has 64
bits: the signs, relative to their median, of the 64 lowest frequencies of the
grey image at 32x32 pixels. It hardly changes if an image is compressed again or
resized, even with another aspect ratio; it changes if an image is mirrored or
cropped by more than a few percent. `MAX_DISTANCE` has measurements.
"""

import types
from collections.abc import Iterator

import numpy as np
import PIL.Image
from jaxtyping import Int, UInt8, UInt64

from vit_jax.errors import UserError

# Maximum number of bits in which the hashes of near duplicates differ. It finds
# all of 200 ImageNet photographs in JPEG at quality 20, at half their size, and
# at 256x256 and 32x32 pixels; 97 % at a quarter of their size; 92 or 48 % after
# cropping to 98 or 95 % of each side. The hashes of two different photographs
# differ in at least 14 bits. Of random hashes, half of whose bits are 1, 1 pair
# in 7 · 10^12 differs in at most 4 bits, and 1 in 7 · 10^10 in at most 6.
MAX_DISTANCE = 4
_BITS = 64
_SIDE = 8  # the hash is a square of 8x8 bits
_NONE = -1
_PAIRS = 2**22  # number of pairs that are compared at once: 100 MB
_SHIFT = 32  # position of the distance in a combined value


def check_installed() -> None:
  """Checks that the package imagehash is installed.

  Raises:
    UserError: it is not installed.
  """
  _imagehash()


def perceptual_hash(pixels: UInt8[np.ndarray, 'y x 3']) -> int:
  """Returns the hash of an image, an integer of 64 bits.

  Args:
    pixels: RGB image of any size.

  Raises:
    UserError: the package imagehash is not installed.
  """
  image = PIL.Image.fromarray(pixels)
  bits = _imagehash().phash(image, hash_size=_SIDE).hash
  return int.from_bytes(np.packbits(bits).tobytes(), 'big')


def nearest(
  hashes: UInt64[np.ndarray, ' n'],
  references: UInt64[np.ndarray, ' m'],
  max_distance: int = MAX_DISTANCE,
) -> tuple[Int[np.ndarray, ' n'], Int[np.ndarray, ' n']]:
  """Finds the most similar reference of each hash.

  If two hashes differ in at most d bits, they are equal in at least one of d +
  1 blocks of bits. Only pairs with an equal block are compared: 0.07 % of all
  pairs for random hashes and d = 4.

  Args:
    hashes: hashes of images.
    references: hashes of the images to be found, fewer than 2^31.
    max_distance: maximum number of different bits, 0 to 63.

  Returns:
    Index of the reference with the fewest different bits, the first one if
    there are several, or -1 if all differ in more than `max_distance` bits; and
    the number of different bits, or -1.
  """
  # Many images can have the same hash, for example if they are blank.
  queries, inverse = np.unique(hashes, return_inverse=True)
  values, first = np.unique(references, return_index=True)
  none = (max_distance + 1) << _SHIFT
  best = np.full(len(queries), none, np.int64)  # distance and reference
  for low, high in _blocks(max_distance + 1):
    for rows, columns in _equal_in_block(queries, values, low, high):
      different = np.bitwise_count(queries[rows] ^ values[columns])
      near = np.flatnonzero(different <= max_distance)
      rows, columns = rows[near], columns[near]
      found = (different[near].astype(np.int64) << _SHIFT) | first[columns]
      np.minimum.at(best, rows, found)
  best = best[inverse]
  distances, indices = best >> _SHIFT, best & ((1 << _SHIFT) - 1)
  far = best == none
  return np.where(far, _NONE, indices), np.where(far, _NONE, distances)


def _blocks(count: int) -> Iterator[tuple[int, int]]:
  """Yields (first bit, bit after the last) of blocks of similar size."""
  ends = [_BITS * number // count for number in range(count + 1)]
  yield from zip(ends[:-1], ends[1:], strict=True)


def _equal_in_block(
  queries: UInt64[np.ndarray, ' n'],
  values: UInt64[np.ndarray, ' m'],
  low: int,
  high: int,
) -> Iterator[tuple[Int[np.ndarray, ' p'], Int[np.ndarray, ' p']]]:
  """Yields indices of all pairs of hashes that are equal in a block of bits.

  Args:
    queries: hashes of images.
    values: hashes of references.
    low: first bit of the block.
    high: bit after the last of the block.
  """
  mask = np.uint64((1 << (high - low)) - 1)
  block = (queries >> np.uint64(low)) & mask
  keys = (values >> np.uint64(low)) & mask
  order = np.argsort(keys, kind='stable')
  keys = keys[order]
  starts = np.searchsorted(keys, block, 'left')
  counts = np.searchsorted(keys, block, 'right') - starts
  step = max(1, _PAIRS // max(1, counts.max(initial=0)))
  for begin in range(0, len(queries), step):
    count = counts[begin : begin + step]
    rows = np.repeat(np.arange(begin, begin + len(count)), count)
    # Position of each pair among those of its row.
    within = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count)
    yield rows, order[starts[rows] + within]


def _imagehash() -> types.ModuleType:
  try:
    import imagehash
  except ModuleNotFoundError as error:
    raise UserError(
      'comparing images requires the package imagehash, which is not '
      "installed: pip install 'vit_jax[duplicates]'."
    ) from error
  return imagehash
