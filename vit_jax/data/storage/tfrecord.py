"""Reads TFRecord files of tf.train.Example, without TensorFlow.

A record consists of: uint64 length, uint32 checksum of the length, payload,
uint32 checksum of the payload, all little-endian. The checksum of the length is
verified when a file is indexed, because a wrong length leads to wrong offsets.
Both checksums are verified when a record is read (about .01 ms for 100 kB).
"""

import array
import os
import struct
from collections.abc import Mapping
from typing import Any

import google_crc32c
import numpy as np
from etils import epath
from google.protobuf.message import DecodeError as ProtoError
from tensorflow_datasets.proto import tf_example_pb2

from vit_jax.data import progress
from vit_jax.data.images.headers import DecodeError
from vit_jax.data.storage import index

_PROTO: Any = tf_example_pb2  # generated; type checkers cannot read it
_HEADER = struct.Struct('<QI')
_FOOTER = struct.Struct('<I')
BEFORE = _HEADER.size  # bytes of a record before its payload
AROUND = BEFORE + _FOOTER.size  # bytes of a record before and after its payload


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
  return size if checksum == _masked(header[:8]) else None


def _masked(data: bytes) -> int:
  """Computes a CRC-32C, rotated and shifted as the format requires."""
  crc = google_crc32c.value(data)
  return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def payload(record: bytes) -> bytes:
  """Returns the payload of a whole record.

  Args:
    record: bytes of the record, including lengths and checksums.

  Raises:
    DecodeError: a checksum does not match.
  """
  size, data = _size(record[:BEFORE]), record[BEFORE : -_FOOTER.size]
  [checksum] = _FOOTER.unpack(record[-_FOOTER.size :])
  if size != len(data) or checksum != _masked(data):
    raise DecodeError('damaged: its CRC-32C does not match')
  return data


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
  record: bytes, image_key: str, label_key: str | None, several_key: str = ''
) -> dict[str, Any]:
  """Parses image and label of a tf.train.Example.

  Args:
    record: payload of a record.
    image_key: name of the image feature.
    label_key: name of the label feature; None to use 0, for images without
      labels.
    several_key: name of a feature with several labels; '' for none.

  Returns:
    `image`, encoded bytes; `label`, int; and, unless `several_key` is '', the
    list of labels under this key.

  Raises:
    DecodeError: the record is not an Example, or does not have one image and
      one label.
  """
  values = features(record)
  keys = [key for key in (image_key, label_key) if key is not None]
  if not values.keys() >= {*keys}:
    raise DecodeError(f'features {sorted(values)}, not {" and ".join(keys)}')
  images = values[image_key].bytes_list.value
  labels = [0]
  if label_key is not None:
    labels = values[label_key].int64_list.value
  if len(images) != 1 or len(labels) != 1:
    raise DecodeError(f'{len(images)} images and {len(labels)} labels, not one')
  parsed = {'image': images[0], 'label': labels[0]}
  if several_key:
    parsed[several_key] = list(values[several_key].int64_list.value)
  return parsed
