"""Dataset fingerprints, which are compared when a run is resumed.

A fingerprint is cheap to compute, because only a few images are read. It
depends on the examples of a dataset and their order, but not on its path, so
that a dataset can be moved or copied.
"""

import hashlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from vit_jax.data.images.headers import DecodeError
from vit_jax.files.paths import is_remote

_SAMPLES = 8  # number of examples that are read
_SIZES = 256  # number of files whose sizes are compared


def sampled(source: Any, *listing: np.ndarray, **more: Any) -> dict[str, Any]:
  """Computes a fingerprint from the listing and a few records of a source.

  Args:
    source: any source.
    *listing: arrays that identify the examples in the source's order without
      reading them, for example names of files, or offsets and sizes.
    **more: additional entries of the fingerprint.

  Returns:
    `size` (number of examples), `class_names`, `listing` (checksum in hex, or
    None), `records` ([bytes of the image, label] of evenly spaced examples
    including the first and the last, or None for bad records), `contents`
    (checksum of their images) and `more`.
  """
  records, images = [], []
  for index in spaced(len(source), _SAMPLES):
    example = _example(source, index)
    record, image = None, np.asarray([])  # of a bad record
    if example is not None:
      image = _image_array(example)
      label = example.get('label')  # None for a source without labels
      record = [image.nbytes, None if label is None else int(label)]
    records.append(record)
    images.append(image)
  return {
    'size': len(source),
    'class_names': list(source.class_names),
    'listing': checksum(*listing) if listing else None,
    'records': records,
    'contents': checksum(*images),
    **more,
  }


def image_checksum(source: Any, index: int) -> str | None:
  """Computes a checksum of an encoded image; None for a bad record."""
  example = _example(source, index)
  return None if example is None else checksum(_image_array(example))


def file_sizes(count: int, path: Callable[[int], str]) -> str:
  """Computes a checksum of the sizes of evenly spaced files.

  The size of a remote or missing file counts as -1. Times of modification are
  not used, because copying data changes them.

  Args:
    count: number of files.
    path: function that returns the path of the file with an index.
  """
  sizes = []
  for index in spaced(count, _SIZES):
    try:
      file = path(index)
      sizes.append(-1 if is_remote(file) else os.stat(file).st_size)
    except (OSError, ValueError):  # a bad record
      sizes.append(-1)
  return checksum(np.array(sizes, np.int64))


def comparable(current: Any, saved: Any) -> Any:
  """Returns a fingerprint without the entries that an older version lacked.

  Args:
    current: fingerprint of the current data, or a value in it.
    saved: fingerprint with which it will be compared, or the same value in it.
  """
  if isinstance(current, dict) and isinstance(saved, dict):
    return {
      key: comparable(value, saved[key])
      for key, value in current.items()
      if key in saved
    }
  if isinstance(current, list) and isinstance(saved, list):
    if len(current) == len(saved):
      return [comparable(*pair) for pair in zip(current, saved, strict=True)]
  return current


def checksum(*arrays: np.ndarray) -> str:
  """Computes a checksum of the shapes, dtypes and content of arrays, in hex."""
  digest = hashlib.blake2b(digest_size=16)
  for array in arrays:
    digest.update(f'{array.dtype.str} {array.shape}\n'.encode())
    digest.update(np.ascontiguousarray(array).view(np.uint8).data)
  return digest.hexdigest()


def spaced(count: int, limit: int) -> list[int]:
  """Returns evenly spaced indices, including the first and the last.

  Args:
    count: number of examples; indices are 0 to count - 1.
    limit: maximum number of indices.
  """
  indices = np.linspace(0, count - 1, min(count, limit))
  return indices.round().astype(int).tolist()


def _example(source: Any, index: int) -> dict[str, Any] | None:
  """Returns an example; None for a bad record."""
  try:
    return source[index]
  except DecodeError:
    return None


def _image_array(example: dict[str, Any]) -> np.ndarray:
  """Returns the pixels of an image, or the bytes of an encoded image."""
  image = example['image']
  if isinstance(image, np.ndarray):
    return image
  return np.frombuffer(image, np.uint8)
