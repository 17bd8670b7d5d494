"""Inspection of a dataset: decodes every example once and records its size.

The results of each chunk of examples are appended to a file as one line, so
that an interrupted inspection can be resumed.
"""

import collections
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NamedTuple

import cv2
import numpy as np
from etils import epath
from jaxtyping import Float, Int, UInt64

from vit_jax.data import contract, fingerprint, near_duplicates
from vit_jax.data.images import decode
from vit_jax.data.pipeline.loader import BadRecord, Source
from vit_jax.errors import UserError
from vit_jax.files import jsonl, outages

_CHUNK = 64  # examples per chunk, which is one line of the file
_AHEAD = 4  # chunks per thread that are submitted in advance
_BAD = -1  # label of a bad record


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
  progress: Callable[[int, int], None],
  kind: tuple[int, int] = (3, 8),
  hashed: bool = False,
) -> Found:
  """Inspects the examples of a split for which the file has no results yet.

  Args:
    source: source of the split.
    split: name of the split in the file.
    path: path of the file of results, to which lines are appended.
    threads: number of decoding threads.
    progress: function that is called with the number of examples inspected so
      far and the number of bad records among them.
    kind: channels and bits of the images, see `decode.decode`.
    hashed: whether to compute perceptual hashes, which takes 2 ms per image.

  Returns:
    Results of all examples of the split, in order.

  Raises:
    UserError: the split is empty, or the file contains results of other data
      or cannot be written.
  """
  if not len(source):
    raise UserError(
      f'{source.name} has no examples to inspect: give another split or path.'
    )
  known = _known(source, split, path, kind, hashed)
  starts = [i for i in range(0, len(source), _CHUNK) if i not in known]
  bad = sum(len(found.bad) for found in known.values())
  done = sum(len(found.labels) for found in known.values())
  cv2.setNumThreads(1)  # images are decoded in parallel, one per thread
  with futures.ThreadPoolExecutor(threads) as pool:
    tasks = _ahead(
      lambda start: pool.submit(_chunk, source, split, start, kind, hashed),
      iter(starts),
      threads * _AHEAD,
    )
    try:
      for task in tasks:
        line = task.result()
        _append(path, line)
        found = known[line['start']] = _found(line)
        done, bad = done + len(found.labels), bad + len(found.bad)
        progress(done, bad)
    except BaseException:
      pool.shutdown(wait=False, cancel_futures=True)
      raise
  parts = [known[start] for start in sorted(known)]
  return Found(
    np.concatenate([part.labels for part in parts]),
    np.concatenate([part.heights for part in parts]),
    np.concatenate([part.widths for part in parts]),
    np.concatenate([part.contents for part in parts]),
    np.concatenate([part.hashes for part in parts]),
    sum((part.moments for part in parts), np.zeros((2, kind[0]))),
    [record for part in parts for record in part.bad],
  )


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
      f'{path} contains the results of an unfinished inspection of {split}, '
      'but the data, its channels or its bits have changed since then: remove '
      'the file to start again.'
    )
  return {
    line['start']: _found(line)
    for line in lines[1:]
    if 'hashes' in line or not hashed
  }


def _append(path: epath.Path, line: dict[str, Any]) -> None:
  with outages.access(path, 'written'), path.open('a') as file:
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
    raise decode.DecodeError(
      f'label {label}; allowed: 0 to {source.num_classes - 1}'
    )
  pixels = np.ascontiguousarray(decode.decode(example['image'], *kind))
  height, width, _ = pixels.shape
  digest = hashlib.blake2b(f'{height} {width}'.encode(), digest_size=8)
  digest.update(pixels.data)
  mean, std = (x[:, 0] for x in cv2.meanStdDev(pixels))  # float64
  mean, std = (x / np.iinfo(pixels.dtype).max for x in (mean, std))
  checksum = int.from_bytes(digest.digest(), 'big')
  perceptual = near_duplicates.perceptual_hash(pixels) if hashed else 0
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
  near, distances = near_duplicates.nearest(
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
