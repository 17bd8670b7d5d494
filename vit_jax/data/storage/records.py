"""Reads the records of a TFDS split, without TensorFlow.

They are array_record or TFRecord files of tf.train.Example. A TFRecord consists
of: uint64 length, uint32 checksum of the length, payload, uint32 checksum of
the payload, all little-endian. The checksum of the length is verified when a
file is indexed, because a wrong length leads to wrong offsets. Both checksums
are verified when a record is read (about .01 ms for 100 kB).
"""

import array
import contextlib
import logging
import os
import struct
import types
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import google_crc32c
import numpy as np
from array_record.python import array_record_data_source
from etils import epath
from google.protobuf.message import DecodeError as ProtoError
from jaxtyping import Int
from tensorflow_datasets.proto import tf_example_pb2

from vit_jax.data import progress
from vit_jax.data.images.headers import DecodeError
from vit_jax.data.storage import files, index
from vit_jax.data.storage.splits import Concatenation
from vit_jax.errors import UserError

_PROTO: Any = tf_example_pb2  # generated; type checkers cannot read it
_HEADER = struct.Struct('<QI')  # length of the payload, and its checksum
_FOOTER = struct.Struct('<I')  # checksum of the payload
_AROUND = _HEADER.size + _FOOTER.size  # bytes of a record around its payload
# Type checkers cannot read this compiled module.
_Reader: Any = array_record_data_source.array_record_module.ArrayRecordReader
log = logging.getLogger('vit_jax')
_THREADS = 32  # opening mostly waits for the disk


def scan(path: str) -> index.Scan:
  """Finds the payloads of a file by reading only the headers of records.

  Args:
    path: path of the file, local or remote.

  Returns:
    Columns `offset` (int64) and `size` (uint32) of the payloads, bytes.
  """
  offsets, sizes = array.array('q'), array.array('q')
  start, cut = 0, index.WHOLE
  with epath.Path(path).open('rb') as file:
    file_size = file.seek(0, os.SEEK_END)
    while start < file_size:
      file.seek(start)
      size = _size(file.read(_HEADER.size))
      payload = start + _HEADER.size
      stop = payload + (size or 0) + _FOOTER.size
      if size is None or size >= 2**32 or stop > file_size:
        cut = start
        break
      offsets.append(payload)
      sizes.append(size)
      start = stop
      progress.made()
  columns = {
    'offset': np.array(offsets, np.int64),
    'size': np.array(sizes, np.uint32),
  }
  return index.Scan(columns, cut)


def _size(header: bytes) -> int | None:
  """Returns the length in a header; None if the header is damaged."""
  if len(header) < _HEADER.size:
    return None
  size, checksum = _HEADER.unpack(header)
  return size if checksum == _masked_crc(header[:8]) else None


def _masked_crc(data: bytes) -> int:
  """Computes a CRC-32C, rotated and increased as TFRecord requires.

  The rotation by 15 bits and the constant are those of `mask` in TensorFlow's
  tsl/lib/hash/crc32c.h.
  """
  crc = google_crc32c.value(data)
  return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def features(record: bytes) -> Mapping[str, Any]:
  """Parses the features of a tf.train.Example, by name.

  Raises:
    DecodeError: the record is not an Example.
  """
  try:
    return _PROTO.Example.FromString(record).features.feature
  except ProtoError as error:
    raise DecodeError(f'not a tf.train.Example: {error}') from error


def example(
  record: bytes,
  image_key: str,
  label_key: str | None,
  others: Mapping[str, bool] = types.MappingProxyType({}),
) -> dict[str, Any]:
  """Parses image and label of a tf.train.Example.

  Args:
    record: payload of a record.
    image_key: name of the image feature.
    label_key: name of the label feature; None to use 0, for images without
      labels.
    others: names of further features, and whether each is a single value.

  Returns:
    `image`, encoded bytes; `label`, int; and the other features by name, bytes
    or numbers, or lists of them.

  Raises:
    DecodeError: the record is not an Example, or does not have one image and
      one label.
  """
  values = features(record)
  # `values[key]` would create a missing feature, hence the tests with `in`.
  images, labels = [], []
  if image_key in values:
    images = values[image_key].bytes_list.value
  if label_key is None:
    labels = [0]
  elif label_key in values:
    labels = values[label_key].int64_list.value
  if len(images) != 1 or len(labels) != 1:
    raise DecodeError(
      f'has {len(images)} images ({image_key!r}) and {len(labels)} labels '
      f'({label_key!r}), not one of each'
    )
  parsed = {'image': images[0], 'label': labels[0]}
  for key, is_single in others.items():
    # 'bytes_list', 'float_list' or 'int64_list'
    kind = values[key].WhichOneof('kind') if key in values else None
    found = list(getattr(values[key], kind).value) if kind else []
    if is_single and len(found) != 1:
      raise DecodeError(f'has {len(found)} values of {key!r}, not one')
    parsed[key] = found[0] if is_single else found
  return parsed


class ArrayRecords:
  """Records of array_record files, which contain an index and checksums."""

  def __init__(self, instructions: list[Any], on_bad_shard: str):
    """Opens every file once, to check that it is complete.

    Args:
      instructions: read instructions of TFDS, which contain a file name, the
        numbers of records to skip and to take, and the total in the file.
      on_bad_shard: treatment of files that were cut short, 'error' or 'skip'.

    Raises:
      UserError: a file is missing, or was cut short and the policy is 'error';
        numbers of records differ from those of TFDS; or no file can be read.
    """
    index.check_policy(on_bad_shard)
    # Raises an error if a file does not exist.
    index.stamps([part.filename for part in instructions])
    with ThreadPoolExecutor(_THREADS) as pool:
      faults = list(pool.map(_fault, instructions))
    kept = []
    for part, fault in zip(instructions, faults, strict=True):
      if fault and (on_bad_shard == 'error' or all(faults)):
        raise UserError(
          f'{part.filename} cannot be read ({fault}). Copy or prepare it '
          'again, or set --config.source.on_bad_shard=skip to leave it out.'
        )
      if fault:
        log.warning('%s is left out (%s)', part.filename, fault)
      else:
        kept.append(part)
    self._source = array_record_data_source.ArrayRecordDataSource(kept)
    self._parts = kept
    self._index = Concatenation(part.take for part in kept)

  def __len__(self) -> int:
    return len(self._source)

  def read(self, index: int) -> bytes:
    """Reads one record; array_record checks its hash.

    Raises:
      DecodeError: the record cannot be read.
    """
    self._index.find(index)  # raises IndexError, also for negative indices
    try:
      return self._source[index]
    except RuntimeError as error:
      raise DecodeError(f'the record cannot be read: {error}') from error

  def where(self, index: int) -> str:
    """Returns the file of a record, and its index in the file."""
    number, position = self._index.find(index)
    part = self._parts[number]
    return f'{part.filename}, record {part.skip + position}'

  def rows(self) -> Iterator[tuple[str, Int[np.ndarray, ' n']]]:
    """Yields (path of a file, indices in it) of the records, in order."""
    for part in self._parts:
      yield _rows(part, part.take)


def _fault(part: Any) -> str:
  """Returns the reason why an array_record file cannot be opened; '' if it can.

  Raises:
    UserError: the number of records differs from TFDS's metadata.
  """
  reader = _Reader(part.filename)
  try:
    if not reader.ok():
      reader.read([0])  # raises a RuntimeError with the reason
    _check_count(part, reader.num_records(), index.WHOLE)
    return ''
  except RuntimeError as error:
    return str(error)
  finally:
    with contextlib.suppress(RuntimeError):  # close raises the same error
      reader.close()


class TFRecords:
  """Records of tfrecord files, read through an index of their offsets."""

  def __init__(
    self, instructions: list[Any], shards: list[list[str]], on_bad_shard: str
  ):
    """Loads or builds the index of each split that the instructions use.

    Args:
      instructions: read instructions of TFDS, which contain a file name, the
        numbers of records to skip and to take, and the total in the file.
      shards: paths of the files of each split.
      on_bad_shard: see `index.load`.

    Raises:
      UserError: see `index.load`; or numbers of records differ from those of
        TFDS.
    """
    used = {part.filename for part in instructions}
    columns = {}  # {path: (offsets, sizes, offset of the first cut record)}
    for paths in shards:
      if not used.isdisjoint(paths):
        split = index.load(paths, 'tfrecord', scan, on_bad_shard=on_bad_shard)
        for path, offsets, sizes, cut in zip(
          paths,
          split.split('offset'),
          split.split('size'),
          split.cuts.tolist(),
          strict=True,
        ):
          columns[path] = offsets, sizes, cut
    self._files = files.Files([part.filename for part in instructions])
    self._parts = instructions
    self._columns = []  # offsets and sizes of the records of each part
    for part in instructions:
      offsets, sizes, cut = columns[part.filename]
      _check_count(part, len(offsets), cut)
      rows = slice(part.skip, part.skip + part.take)
      self._columns.append((offsets[rows], sizes[rows]))
    self._index = Concatenation(len(offsets) for offsets, _ in self._columns)

  def __len__(self) -> int:
    return len(self._index)

  def read(self, index: int) -> bytes:
    """Reads one record and checks its checksums.

    Raises:
      DecodeError: a checksum does not match.
    """
    number, offset, size = self._find(index)
    start = offset - _HEADER.size
    record = self._files.read(number, start, size + _AROUND)
    header, payload = (
      record[: _HEADER.size],
      record[_HEADER.size : -_FOOTER.size],
    )
    [checksum] = _FOOTER.unpack(record[-_FOOTER.size :])
    if _size(header) != size or checksum != _masked_crc(payload):
      raise DecodeError('damaged: its CRC-32C does not match')
    return payload

  def where(self, index: int) -> str:
    """Returns the file of a record, and its offset in the file."""
    number, offset, _ = self._find(index)
    return f'{self._files.paths[number]} @ {offset}'

  def rows(self) -> Iterator[tuple[str, Int[np.ndarray, ' n']]]:
    """Yields (path of a file, indices in it) of the records, in order."""
    for part, (offsets, _) in zip(self._parts, self._columns, strict=True):
      yield _rows(part, len(offsets))

  def _find(self, index: int) -> tuple[int, int, int]:
    """Returns (index of the file, offset, size) of a record."""
    number, row = self._index.find(index)
    offsets, sizes = self._columns[number]
    return number, int(offsets[row]), int(sizes[row])


def _rows(part: Any, count: int) -> tuple[str, Int[np.ndarray, ' n']]:
  """Returns the path of a file, and the indices of the records read from it.

  Args:
    part: read instruction of TFDS.
    count: number of records that are read.
  """
  return part.filename, np.arange(part.skip, part.skip + count)


def _check_count(part: Any, actual: int, cut: int) -> None:
  """Checks the number of records; a file that was cut short may have fewer."""
  expected = part.examples_in_shard
  if actual > expected or (actual < expected and cut == index.WHOLE):
    raise UserError(
      f'{part.filename} contains {actual} records, but dataset_info.json '
      f'specifies {expected}: prepare or copy the data set again.'
    )
