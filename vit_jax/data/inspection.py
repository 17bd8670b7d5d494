"""Inspection of a dataset: sizes, duplicates and similar images.

`inspect` decodes every example once; `duplicates` and `copies` compare its
results. `num_common` compares two splits without reading their examples.

The perceptual hash of an image (Zauner's pHash, computed by the package
imagehash) has 64 bits: the signs, relative to their median, of the 64 lowest
frequencies of the grey image at 32x32 pixels. It hardly changes if an image is
compressed again or resized, even with another aspect ratio; it changes if an
image is mirrored or cropped by more than a few percent. `MAX_DISTANCE` has
measurements.
"""

import collections
import functools
import hashlib
import types
from collections.abc import Iterator
from concurrent import futures
from typing import NamedTuple

import cv2
import numpy as np
import PIL.Image
from jaxtyping import Bool, Float, Int, Shaped, UInt8, UInt64

from vit_jax.data import progress
from vit_jax.data.contract import Source, check_label
from vit_jax.data.images import decode
from vit_jax.data.pipeline.loader import BadRecord
from vit_jax.errors import required

_CHUNK = 256  # number of examples that a thread inspects at a time
_BAD = -1  # label of a bad record
# Maximum number of bits in which the hashes of near duplicates differ. It finds
# all of 200 ImageNet photographs in JPEG at quality 20, at half their size, and
# at 256x256 and 32x32 pixels; 97 % at a quarter of their size; 92 or 48 % after
# cropping to 98 or 95 % of each side. The hashes of two different photographs
# differ in at least 14 bits. Of random hashes, half of whose bits are 1, 1 pair
# in 7 · 10^12 differs in at most 4 bits, and 1 in 7 · 10^10 in at most 6.
MAX_DISTANCE = 4
_SIDE = 8  # the hash is a square of 8x8 bits
_NOT_FOUND = -1  # index and distance of a hash without a similar one
_PAIRS = 2**18  # pairs of hashes that are compared at once, for the cache
# Columns of the results, see `Found.rows`.
_ROW = np.dtype(
  [
    ('labels', np.int32),
    ('heights', np.int32),
    ('widths', np.int32),
    ('contents', np.uint64),
    ('hashes', np.uint64),
  ]
)


class Found(NamedTuple):
  """Results of inspecting a split.

  Attributes:
    rows: results for each example. `labels` are -1 for bad records. `heights`
      and `widths` are those of the upright images, pixels. `contents` are
      checksums of the decoded pixels, and `hashes` the perceptual hashes; 0 if
      they were not requested, and for bad records.
    moments: sums, over all images that can be used, of the mean and the mean
      square of each channel, for pixels in [0, 1].
    bad: records that cannot be used.
  """

  rows: Shaped[np.ndarray, ' n']
  moments: Float[np.ndarray, '2 c']
  bad: list[BadRecord]

  @property
  def usable(self) -> Bool[np.ndarray, ' n']:
    """True for each example that can be used."""
    return self.rows['labels'] != _BAD

  def mean_and_std(self) -> tuple[list[float], list[float]]:
    """Returns mean and standard deviation of each channel, with six digits.

    They are those of pixels in [0, 1]. Every image has the same weight, because
    all have the same size in training. There must be an image.
    """
    mean, square = self.moments / np.count_nonzero(self.usable)
    std = np.sqrt(np.maximum(square - mean**2, 0))
    return _rounded(mean), _rounded(std)


def _rounded(values: np.ndarray) -> list[float]:
  return [float(f'{value:.6g}') for value in values]


class Copy(NamedTuple):
  """An example that is also in another split.

  Attributes:
    index: index of the example.
    other: index of the same or the most similar image in the other split.
    distance: number of different bits of their perceptual hashes.
    same_pixels: whether their decoded pixels are equal.
  """

  index: int
  other: int
  distance: int
  same_pixels: bool


def inspect(
  source: Source,
  threads: int,
  kind: tuple[int, int] = (3, 8),
  hashed: bool = False,
) -> Found:
  """Inspects the examples of a split.

  Args:
    source: source of the split.
    threads: number of decoding threads.
    kind: number of channels of the images, and their bits, 8 or 16.
    hashed: whether to compute perceptual hashes, which takes 2 ms per image.
  """
  cv2.setNumThreads(1)  # images are decoded in parallel, one per thread
  inspect_chunk = functools.partial(_chunk, source, kind, hashed)
  starts = range(0, len(source), _CHUNK)
  with futures.ThreadPoolExecutor(threads) as pool:
    chunks = pool.map(inspect_chunk, starts)
    parts = [*progress.shown(chunks, len(starts), source.name)]
  return Found(
    np.concatenate([part.rows for part in parts]),
    sum((part.moments for part in parts), np.zeros((2, kind[0]))),
    [record for part in parts for record in part.bad],
  )


def _chunk(
  source: Source, kind: tuple[int, int], hashed: bool, start: int
) -> Found:
  """Inspects up to `_CHUNK` examples."""
  indices = range(start, min(start + _CHUNK, len(source)))
  rows = np.zeros(len(indices), _ROW)
  bad, moments = [], np.zeros((2, kind[0]))
  for i, index in enumerate(indices):
    try:
      rows[i], found = _measure(source, index, kind, hashed)
      moments += found
    except decode.DecodeError as error:
      rows[i]['labels'] = _BAD
      bad.append(BadRecord(index, source.where(index), str(error)))
  return Found(rows, moments, bad)


def _measure(
  source: Source, index: int, kind: tuple[int, int], hashed: bool
) -> tuple[tuple[int, int, int, int, int], Float[np.ndarray, '2 c']]:
  """Inspects an example.

  Returns:
    Values of `_ROW`, and the mean and the mean square of each channel.

  Raises:
    DecodeError: the record cannot be used.
  """
  example = source[index]
  label = 0  # for examples without a label, or with several
  if 'label' in source.label_keys:
    label = int(example.get('label', 0))
  check_label(label, max(source.num_classes, 1))
  pixels = np.ascontiguousarray(decode.decode(example['image'], *kind))
  height, width, _ = pixels.shape
  digest = hashlib.blake2b(f'{height} {width}'.encode(), digest_size=8)
  digest.update(pixels.data)
  checksum = int.from_bytes(digest.digest(), 'big')
  perceptual = perceptual_hash(pixels) if hashed else 0
  row = label, height, width, checksum, perceptual
  # Both are float64 [channels, 1], for pixels of 0 to 255 or 65,535.
  mean, std = cv2.meanStdDev(pixels)
  mean, std = (x[:, 0] / np.iinfo(pixels.dtype).max for x in (mean, std))
  mean_square = mean**2 + std**2
  return row, np.stack([mean, mean_square])


def duplicates(found: dict[str, Found]) -> Iterator[list[tuple[str, int]]]:
  """Yields groups of examples with equal pixels, as lists of (split, index).

  Args:
    found: {name of a split: its results}.
  """
  names = list(found)
  usable = [np.flatnonzero(result.usable) for result in found.values()]
  # Usable examples of all splits: number of the split, index in it, checksum.
  splits = np.repeat(np.arange(len(names)), [len(rows) for rows in usable])
  indices = np.concatenate(usable)
  contents = np.concatenate(
    [result.rows['contents'][result.usable] for result in found.values()]
  )
  # `ranks` are the numbers of the checksums in their sorted order.
  _, ranks, counts = np.unique(
    contents, return_inverse=True, return_counts=True
  )
  groups = collections.defaultdict(list)
  for i in np.flatnonzero(counts[ranks] > 1):
    groups[ranks[i]].append((names[splits[i]], int(indices[i])))
  for rank in sorted(groups):
    yield groups[rank]


def copies(
  found: dict[str, Found], split: str, other_split: str, max_distance: int
) -> Iterator[Copy]:
  """Yields the examples of a split that are also in another one.

  Args:
    found: {name of a split: its results, with hashes}.
    split: name of the split.
    other_split: name of the other split.
    max_distance: maximum number of different bits, see `MAX_DISTANCE`.
  """
  indices = np.flatnonzero(found[split].usable)
  others = np.flatnonzero(found[other_split].usable)
  if not len(others):
    return
  own, other = found[split].rows[indices], found[other_split].rows[others]
  near, distances = nearest(own['hashes'], other['hashes'], max_distance)
  # An example with the same pixels is preferred to others with the same hash.
  contents, first = np.unique(other['contents'], return_index=True)
  at = np.searchsorted(contents, own['contents'])
  at = np.minimum(at, len(contents) - 1)
  same_pixels = contents[at] == own['contents']
  near = np.where(same_pixels, first[at], near)
  distances = np.where(same_pixels, 0, distances)
  for i in np.flatnonzero(near != _NOT_FOUND):
    yield Copy(
      index=int(indices[i]),
      other=int(others[near[i]]),
      distance=int(distances[i]),
      same_pixels=bool(same_pixels[i]),
    )


def imagehash() -> types.ModuleType:
  """Returns the package imagehash, which computes perceptual hashes.

  Raises:
    UserError: it is not installed.
  """
  return required('imagehash', 'comparing images', 'vit_jax[duplicates]')


def perceptual_hash(pixels: UInt8[np.ndarray, 'y x 3']) -> int:
  """Returns the hash of an image, an integer of 64 bits.

  Args:
    pixels: RGB image of any size.

  Raises:
    UserError: the package imagehash is not installed.
  """
  image = PIL.Image.fromarray(pixels)
  bits = imagehash().phash(image, hash_size=_SIDE).hash
  return int.from_bytes(np.packbits(bits).tobytes(), 'big')


def nearest(
  hashes: UInt64[np.ndarray, ' n'],
  references: UInt64[np.ndarray, ' m'],
  max_distance: int = MAX_DISTANCE,
) -> tuple[Int[np.ndarray, ' n'], Int[np.ndarray, ' n']]:
  """Finds the most similar reference of each hash, by comparing all pairs.

  A core compares 10^9 pairs per second: the images of ImageNet-21k and of a
  test set of 10,000 images in two minutes.

  Args:
    hashes: hashes of images.
    references: hashes of the images to be found, at least one.
    max_distance: maximum number of different bits, 0 to 63.

  Returns:
    Index of the reference with the fewest different bits, the first one if
    there are several, or -1 if all differ in more than `max_distance` bits; and
    the number of different bits, or -1.
  """
  # Equal hashes are compared once, because many images can be blank.
  queries, inverse = np.unique(hashes, return_inverse=True)
  step = max(1, _PAIRS // len(references))
  indices = np.empty(len(queries), np.int64)
  distances = np.empty(len(queries), np.int64)
  for start in range(0, len(queries), step):
    block = slice(start, start + step)
    different = np.bitwise_count(queries[block, None] ^ references)
    indices[block] = different.argmin(axis=1)
    distances[block] = different.min(axis=1)
  far = distances > max_distance
  indices[far] = distances[far] = _NOT_FOUND
  return indices[inverse], distances[inverse]


def num_common(first: Source, second: Source) -> int:
  """Returns the number of examples that are in both splits.

  Args:
    first: one split.
    second: another split of the same data.

  Returns:
    Number of common examples; 0 if a source does not have the method `rows`,
    without which examples cannot be compared.
  """
  ours, theirs = _rows(first), _rows(second)
  return sum(
    len(np.intersect1d(rows, theirs[part]))
    for part, rows in ours.items()
    if part in theirs
  )


def _rows(source: Source) -> dict[str, np.ndarray]:
  """Returns {part of the data: positions of the source's examples in it}."""
  by_part: dict[str, list[np.ndarray]] = {}
  for part, rows in source.rows():
    by_part.setdefault(part, []).append(rows)
  return {part: np.concatenate(rows) for part, rows in by_part.items()}
