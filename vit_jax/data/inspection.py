"""Inspection of a dataset: sizes, duplicates and similar images.

`inspect` decodes every example once. The results of each chunk of examples are
appended to a file as one line, so that an interrupted inspection can be
resumed. `duplicates`, `copies` and `count` compare examples.

The perceptual hash of an image (Zauner's pHash, computed by the package
imagehash) has 64 bits: the signs, relative to their median, of the 64 lowest
frequencies of the grey image at 32x32 pixels. It hardly changes if an image is
compressed again or resized, even with another aspect ratio; it changes if an
image is mirrored or cropped by more than a few percent. `MAX_DISTANCE` has
measurements.
"""

import collections
import hashlib
import itertools
import json
import types
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NamedTuple

import cv2
import numpy as np
import PIL.Image
from etils import epath
from jaxtyping import Float, Int, UInt8, UInt64

from vit_jax.data import contract, fingerprint, progress
from vit_jax.data.contract import Source
from vit_jax.data.images import decode
from vit_jax.data.pipeline.loader import BadRecord
from vit_jax.errors import UserError, required
from vit_jax.files import jsonl, paths

_CHUNK = 64  # examples per chunk, which is one line of the file
_AHEAD = 4  # chunks per thread that are submitted in advance
_BAD = -1  # label of a bad record
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


class Found(NamedTuple):
  """Results of inspecting a split.

  Attributes:
    labels: labels; -1 for bad records.
    heights: heights of the upright images, pixels.
    widths: widths of the upright images, pixels.
    contents: checksums of the decoded pixels.
    hashes: perceptual hashes (see `near_duplicates`); 0 if they were not
      requested, and for bad records.
    moments: sums, over all images that can be used, of the mean and the mean
      square of each channel, for pixels in [0, 1].
    bad: records that cannot be used.
  """

  labels: Int[np.ndarray, ' n']
  heights: Int[np.ndarray, ' n']
  widths: Int[np.ndarray, ' n']
  contents: UInt64[np.ndarray, ' n']
  hashes: UInt64[np.ndarray, ' n']
  moments: Float[np.ndarray, '2 c']
  bad: list[BadRecord]

  def mean_and_std(self) -> tuple[list[float], list[float]]:
    """Returns mean and standard deviation of each channel, with six digits.

    They are those of pixels in [0, 1]. Every image has the same weight, because
    all have the same size in training. There must be an image.
    """
    mean, square = self.moments / np.count_nonzero(self.labels != _BAD)
    std = np.sqrt(np.maximum(square - mean**2, 0))
    first, second = (
      [float(f'{value:.6g}') for value in values] for values in (mean, std)
    )
    return first, second


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
  split: str,
  path: epath.Path,
  threads: int,
  kind: tuple[int, int] = (3, 8),
  hashed: bool = False,
) -> Found:
  """Inspects the examples of a split for which the file has no results yet.

  Args:
    source: source of the split.
    split: name of the split in the file.
    path: path of the file of results, to which lines are appended.
    threads: number of decoding threads.
    kind: channels and bits of the images, see `decode.decode`.
    hashed: whether to compute perceptual hashes, which takes 2 ms per image.

  Returns:
    Results of all examples of the split, in order.

  Raises:
    UserError: the split is empty, or the file contains results of other data
      or cannot be written.
  """
  if not len(source):
    raise UserError(f'{source.name} has no examples: give another split.')
  known = _known(source, split, path, kind, hashed)
  starts = [i for i in range(0, len(source), _CHUNK) if i not in known]
  cv2.setNumThreads(1)  # images are decoded in parallel, one per thread
  with futures.ThreadPoolExecutor(threads) as pool:
    tasks = _ahead(
      lambda start: pool.submit(_chunk, source, split, start, kind, hashed),
      iter(starts),
      threads * _AHEAD,
    )
    try:
      for task in progress.shown(tasks, len(starts), source.name):
        line = task.result()
        _append(path, line)
        known[line['start']] = _found(line)
    except BaseException:
      pool.shutdown(wait=False, cancel_futures=True)
      raise
  parts = [known[start] for start in sorted(known)]
  *columns, moments, bad_records = zip(*parts, strict=True)
  last = (
    sum(moments, np.zeros((2, kind[0]))),
    list(itertools.chain(*bad_records)),
  )
  return Found._make([*map(np.concatenate, columns), *last])


def _ahead(
  submit: Callable[[int], Any], starts: Iterator[int], limit: int
) -> Iterator[Any]:
  """Yields tasks in order, while up to `limit` of them are in progress."""
  pending = collections.deque(map(submit, itertools.islice(starts, limit)))
  while pending:
    yield pending.popleft()
    pending.extend(map(submit, itertools.islice(starts, 1)))


def _known(
  source: Source,
  split: str,
  path: epath.Path,
  kind: tuple[int, int],
  hashed: bool,
) -> dict[int, Found]:
  """Reads the results so far: {index of a chunk's first example: results}.

  If there are none, the split's first line, which contains the fingerprint, is
  written. A last line that is incomplete because the process was killed is
  moved to another file. If hashes are requested, lines without them are
  ignored.
  """
  jsonl.keep(path, lambda line: True)
  lines = [
    line for _, line in jsonl.read(path) if line and line.get('split') == split
  ]
  current = {'source': fingerprint.of(source), 'kind': list(kind)}
  if not lines:
    path.parent.mkdir(parents=True, exist_ok=True)
    _append(path, {'split': split, 'fingerprint': current})
  elif lines[0].get('fingerprint') != current:
    raise UserError(
      f'{path} belongs to an unfinished inspection of {split} with other data, '
      'channels or bits: remove it.'
    )
  return {
    line['start']: _found(line)
    for line in lines[1:]
    if 'hashes' in line or not hashed
  }


def _append(path: epath.Path, line: dict[str, Any]) -> None:
  with paths.access(path, 'written'), path.open('a') as file:
    file.write(json.dumps(line) + '\n')


def _chunk(
  source: Source, split: str, start: int, kind: tuple[int, int], hashed: bool
) -> dict[str, Any]:
  """Inspects a chunk of examples and returns its line of the file."""
  rows, bad, moments = [], [], np.zeros((2, kind[0]))
  for index in range(start, min(start + _CHUNK, len(source))):
    try:
      row, found = _measure(source, index, kind, hashed)
      rows.append(row)
      moments += found
    except decode.DecodeError as error:
      where = contract.where(source, index)
      rows.append((_BAD, 0, 0, 0, 0))
      bad.append(BadRecord(index, where, str(error)))
  labels, heights, widths, contents, hashes = zip(*rows, strict=True)
  line = {
    'split': split,
    'start': start,
    'labels': labels,
    'heights': heights,
    'widths': widths,
    'contents': contents,
    'moments': moments.tolist(),
    'bad': bad,
  }
  return line | {'hashes': hashes} if hashed else line


def _measure(
  source: Source, index: int, kind: tuple[int, int], hashed: bool
) -> tuple[tuple[int, int, int, int, int], Float[np.ndarray, '2 c']]:
  """Inspects an example.

  Returns:
    (label, height, width, checksum of the pixels, perceptual hash), and the
    mean and the mean square of each channel.

  Raises:
    DecodeError: the record cannot be used.
  """
  example = source[index]
  label = int(example['label'])
  if not 0 <= label < source.num_classes:
    raise decode.DecodeError(f'label {label} of {source.num_classes} classes')
  pixels = np.ascontiguousarray(decode.decode(example['image'], *kind))
  height, width, _ = pixels.shape
  digest = hashlib.blake2b(f'{height} {width}'.encode(), digest_size=8)
  digest.update(pixels.data)
  mean, std = (x[:, 0] for x in cv2.meanStdDev(pixels))  # float64
  mean, std = (x / np.iinfo(pixels.dtype).max for x in (mean, std))
  checksum = int.from_bytes(digest.digest(), 'big')
  perceptual = perceptual_hash(pixels) if hashed else 0
  row = label, height, width, checksum, perceptual
  return row, np.stack([mean, mean**2 + std**2])


def _found(line: dict[str, Any]) -> Found:
  return Found(
    np.array(line['labels'], np.int32),
    np.array(line['heights'], np.int32),
    np.array(line['widths'], np.int32),
    np.array(line['contents'], np.uint64),
    np.array(line.get('hashes', [0] * len(line['labels'])), np.uint64),
    np.array(line['moments']),
    [BadRecord(*record) for record in line['bad']],
  )


def duplicates(found: dict[str, Found]) -> Iterator[list[tuple[str, int]]]:
  """Yields groups of examples with equal pixels, as lists of (split, index).

  Args:
    found: {name of a split: its results}.
  """
  names = list(found)
  usable = [np.flatnonzero(found[name].labels != _BAD) for name in names]
  contents = np.concatenate(
    [found[n].contents[rows] for n, rows in zip(names, usable, strict=True)]
  )
  splits = np.repeat(np.arange(len(names)), [len(rows) for rows in usable])
  rows = np.concatenate(usable)
  order = np.argsort(contents, kind='stable')
  ranked = contents[order]
  bounds = np.flatnonzero(np.diff(ranked, prepend=~ranked[:1]))
  ends = np.append(bounds[1:], len(ranked))
  for start, end in zip(bounds, ends, strict=True):
    if end - start > 1:
      yield [(names[splits[i]], int(rows[i])) for i in order[start:end]]


def copies(
  found: dict[str, Found], split: str, other_split: str, max_distance: int
) -> Iterator[Copy]:
  """Yields the examples of a split that are also in another one.

  Args:
    found: {name of a split: its results, with hashes}.
    split: name of the split.
    other_split: name of the other split.
    max_distance: maximum number of different bits, see `near_duplicates`.
  """
  own, other = found[split], found[other_split]
  rows, others = (np.flatnonzero(x.labels != _BAD) for x in (own, other))
  if not len(others):
    return
  near, distances = nearest(
    own.hashes[rows], other.hashes[others], max_distance
  )
  contents, first = np.unique(other.contents[others], return_index=True)
  at = np.searchsorted(contents, own.contents[rows])
  at = np.minimum(at, len(contents) - 1)
  same = contents[at] == own.contents[rows]
  near = np.where(same, first[at], near)
  distances = np.where(same, 0, distances)
  for i in np.flatnonzero(near >= 0):
    yield Copy(
      int(rows[i]), int(others[near[i]]), int(distances[i]), bool(same[i])
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
  # Blocks of similar size: first bit, and bit after the last.
  ends = [_BITS * i // (max_distance + 1) for i in range(max_distance + 2)]
  for low, high in itertools.pairwise(ends):
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


def count(first: Source, second: Source) -> int:
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
  """Returns the positions of a source's examples in each part of the data."""
  by_part: dict[str, list[np.ndarray]] = {}
  for part, rows in getattr(source, 'rows', tuple)():
    by_part.setdefault(part, []).append(rows)
  return {part: np.concatenate(rows) for part, rows in by_part.items()}
