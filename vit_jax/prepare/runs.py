"""External sorting: shuffles more images than fit into memory.

Each image has a key, the hash of its name. Parts of the data set that fit into
memory are sorted by key and written as *runs*. A shard of the result is an
interval of keys, and therefore one contiguous piece of every run. The order
depends only on the names, not on parts, workers or interruptions.

A run consists of three files: NNNNN.data (names and images, concatenated),
NNNNN.npy (one entry per image) and, when these are complete, NNNNN.json (a
description of the content).
"""

import hashlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from etils import epath
from jaxtyping import Int

from vit_jax.files import atomic

_ENTRY = np.dtype(
  [
    ('key', '<u8'),
    ('offset', '<u8'),
    ('image_size', '<u4'),
    ('code', '<u4'),
    ('name_size', '<u2'),
  ]
)


class Record(NamedTuple):
  """An image: sort key, number of its class, name and bytes of its file."""

  key: int
  code: int
  name: bytes
  image: bytes


def key(name: str) -> int:
  """Returns a pseudo-random sort key of a name, from 0 to 2^64 - 1."""
  encoded = name.encode('utf-8', 'surrogateescape')
  digest = hashlib.blake2b(encoded, digest_size=8, person=b'vit_jax order')
  return int.from_bytes(digest.digest(), 'big')


def write(
  folder: pathlib.Path,
  number: int,
  records: list[Record],
  about: dict[str, Any],
) -> None:
  """Writes a run.

  Args:
    folder: folder of the runs.
    number: number of the run.
    records: records in any order.
    about: description of the run, which the function `about` returns when the
      run is complete.
  """
  records.sort(key=lambda record: record.key)  # stable: equal keys keep order
  entries = np.zeros(len(records), _ENTRY)
  offset = 0
  with open(_path(folder, number, 'data'), 'wb') as file:
    for i, record in enumerate(records):
      sizes = (len(record.image), record.code, len(record.name))
      entries[i] = (record.key, offset, *sizes)
      offset += file.write(record.name) + file.write(record.image)
    file.flush()
    os.fsync(file.fileno())
  with open(_path(folder, number, 'npy'), 'wb') as file:
    np.save(file, entries, allow_pickle=False)
    os.fsync(file.fileno())
  write_json(_path(folder, number, 'json'), about)


def about(folder: pathlib.Path, number: int) -> dict[str, Any] | None:
  """Returns the description of a run; None if the run is incomplete."""
  return read_json(_path(folder, number, 'json'))


def forget(folder: pathlib.Path, number: int) -> None:
  """Marks a run as incomplete by removing its description."""
  _path(folder, number, 'json').unlink(missing_ok=True)


def cut(
  folder: pathlib.Path, count: int, shards: int
) -> Int[np.ndarray, 'runs bounds']:
  """Divides runs, in order of keys, into shards with about equally many images.

  Args:
    folder: folder of the runs.
    count: number of the runs, numbered from 0.
    shards: number of shards, at most the number of images.

  Returns:
    Bounds such that shard s has the entries [bounds[r, s], bounds[r, s + 1]) of
    run r.
  """
  keys = [np.load(_path(folder, n, 'npy'))['key'].copy() for n in range(count)]
  ordered = np.sort(np.concatenate(keys))
  cuts = ordered[np.arange(1, shards) * len(ordered) // shards]
  return np.array(
    [[0, *np.searchsorted(run, cuts), len(run)] for run in keys], np.int32
  )


def read(
  folder: pathlib.Path, pieces: Int[np.ndarray, 'runs 2']
) -> Iterator[tuple[int, str, bytes]]:
  """Yields (code, name, image) of a piece of each run, in order of keys.

  All pieces are read into memory.

  Args:
    folder: folder of the runs.
    pieces: for each run, the first entry and the end (exclusive).
  """
  items = []  # entry, offset of its piece, bytes of its piece
  for number, (start, stop) in enumerate(pieces.tolist()):
    if start == stop:
      continue
    index = np.load(_path(folder, number, 'npy'), mmap_mode='r')
    entries = np.array(index[start:stop])
    base, last = int(entries[0]['offset']), entries[-1]
    end = last['offset'] + last['name_size'] + last['image_size']
    with open(_path(folder, number, 'data'), 'rb') as file:
      file.seek(base)
      data = file.read(int(end) - base)
    items += [(entry, base, data) for entry in entries]
  items.sort(key=lambda item: item[0]['key'])
  for entry, base, data in items:
    begin = int(entry['offset']) - base
    middle = begin + int(entry['name_size'])
    name = data[begin:middle].decode('utf-8', 'replace')
    image = data[middle : middle + int(entry['image_size'])]
    yield int(entry['code']), name, image


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes a JSON file atomically."""
  atomic.write(epath.Path(path), json.dumps(value))


def read_json(path: pathlib.Path) -> Any:
  """Reads a file that `write_json` wrote; None if it does not exist."""
  try:
    return json.loads(path.read_text())
  except FileNotFoundError:
    return None


def _path(folder: pathlib.Path, number: int, kind: str) -> pathlib.Path:
  return folder / f'{number:05d}.{kind}'
