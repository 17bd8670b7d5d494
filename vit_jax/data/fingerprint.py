"""By what a data set is known again when a run is resumed.

A fingerprint is cheap: of the images only a few are read, for their sizes. It
depends on what a data set holds and in which order, not on where it lies, so
that a data set may be moved or copied.
"""

import hashlib
from typing import Any

import numpy as np

from vit_jax.data.images.headers import DecodeError

_SAMPLES = 8  # examples that are read


def of(source: Any) -> dict[str, Any]:
  """Returns the fingerprint of any source.

  It is the source's own (`source.fingerprint`), or values that every source
  has.

  Returns:
    Values that JSON preserves, among them `size` (number of examples) and
    `class_names`. Two fingerprints are equal if and only if, as far as this can
    be determined, the sources hold the same examples in the same order.
  """
  own = getattr(source, 'fingerprint', None)
  return sampled(source) if own is None else own


def sampled(source: Any, *listing: np.ndarray, **more: Any) -> dict[str, Any]:
  """Returns size, classes, a checksum of the listing, and a few records.

  Args:
    source: any source.
    *listing: arrays that identify the examples without reading them, in the
      source's order: names of files, for example, or offsets and sizes.
    **more: further values to keep.

  Returns:
    {size, class_names, listing: a checksum in hex or None, records: [bytes of
    the image, label] of evenly spread examples, the first and the last among
    them, None for those that cannot be used} and `more`.
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
  """Computes a checksum of shapes, dtypes and content, in hex."""
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
  label = example.get('label')  # None where a source has no labels
  return [size, None if label is None else int(label)]
