"""Dataset fingerprints, which are compared when a run is resumed.

A fingerprint is cheap to compute, because only a few images are read. It
depends on the examples of a dataset and their order, but not on its path, so
that a dataset can be moved or copied.
"""

import hashlib
from typing import Any

import numpy as np

from vit_jax.data.images.headers import DecodeError

_SAMPLES = 8  # number of examples that are read


def of(source: Any) -> dict[str, Any]:
  """Returns the fingerprint of any source.

  This is `source.fingerprint` if the source defines it, and otherwise a few
  values that can be computed for every source.

  Returns:
    Values that JSON preserves, including `size` (number of examples) and
    `class_names`. They are compared to find out whether two sources contain the
    same examples in the same order, as far as this can be determined.
  """
  own = getattr(source, 'fingerprint', None)
  return sampled(source) if own is None else own


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
    including the first and the last, or None for bad records) and `more`.
  """
  count = min(len(source), _SAMPLES)
  rows = np.linspace(0, len(source) - 1, count).round().astype(int).tolist()
  return {
    'size': len(source),
    'class_names': list(source.class_names),
    'listing': checksum(*listing) if listing else None,
    'records': [_record(source, row) for row in rows],
    **more,
  }


def checksum(*arrays: np.ndarray) -> str:
  """Computes a checksum of the shapes, dtypes and content of arrays, in hex."""
  digest = hashlib.blake2b(digest_size=16)
  for array in arrays:
    digest.update(f'{array.dtype.str} {array.shape}\n'.encode())
    digest.update(np.ascontiguousarray(array).view(np.uint8).data)
  return digest.hexdigest()


def _record(source: Any, row: int) -> list[int | None] | None:
  try:
    example = source[row]
  except DecodeError:
    return None
  image = example['image']
  size = image.nbytes if isinstance(image, np.ndarray) else len(image)
  label = example.get('label')  # None for a source without labels
  return [size, None if label is None else int(label)]
