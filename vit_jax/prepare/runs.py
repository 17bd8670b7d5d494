"""External sorting: images too many for memory, put into a random order.

Each image has a key, a hash of its name. Parts of the data set that fit into
memory are sorted by key and written as *runs*; then a shard of the result,
which is an interval of keys, is one contiguous piece of every run. So the order
depends on names alone, not on the parts, the workers or an interruption.

A run is three files: NNNNN.data (names and images, end to end), NNNNN.npy (an
entry for each) and, once they are whole, NNNNN.json (what went into it).
"""

import hashlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

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
  """One image: order, a number that stands for its class, name, content."""

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
  """Writes a run; `about` is what `about` gives back once it is whole."""
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
  """Declares a run to be not whole."""
  _path(folder, number, 'json').unlink(missing_ok=True)


def cut(
  folder: pathlib.Path, count: int, shards: int
) -> Int[np.ndarray, 'runs bounds']:
  """Divides runs into shards of equal numbers of images, in order of keys.

  Args:
    folder: folder of the runs.
    count: number of the runs, numbered from 0.
    shards: wanted, no more than there are images.

  Returns:
    Shard s has the entries [bounds[r, s], bounds[r, s + 1]) of run r.
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
  """(code, name, image) of a piece of each run, in order of keys.

  The pieces are held in memory.

  Args:
    folder: folder of the runs.
    pieces: first entry of each run, and the one after the last.
  """
  found = []
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
    found += [(entry, base, data) for entry in entries]
  found.sort(key=lambda item: item[0]['key'])
  for entry, base, data in found:
    begin = int(entry['offset']) - base
    middle = begin + int(entry['name_size'])
    name = data[begin:middle].decode('utf-8', 'replace')
    image = data[middle : middle + int(entry['image_size'])]
    yield int(entry['code']), name, image


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes a file at once or not at all."""
  temporary = path.with_name(f'{path.name}.tmp')
  with open(temporary, 'w') as file:
    json.dump(value, file)
    file.flush()
    os.fsync(file.fileno())
  os.replace(temporary, path)


def read_json(path: pathlib.Path) -> Any:
  """Reads a file that `write_json` wrote; None if it does not exist."""
  try:
    return json.loads(path.read_text())
  except FileNotFoundError:
    return None


def _path(folder: pathlib.Path, number: int, kind: str) -> pathlib.Path:
  return folder / f'{number:05d}.{kind}'
