"""In which order a split is cut into parts, where its examples are sorted.

Listings are mostly sorted by class, so that `train[:90%]` of a listing would
lack whole classes. Here every example has a place of its own, at random but
fixed: a hash of its name. Names alone decide, not the order of the listing.
(TFDS shuffles when it prepares a data set; its splits are cut as they are.)
"""

import os
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, UInt64

from vit_jax.data.pipeline.order import mix

_CHUNK = 1 << 20  # names hashed at once


def by_name(names: np.ndarray) -> Int[np.ndarray, ' n']:
  """Returns the order of examples by the hashes of their names.

  Args:
    names: bytes `[n]`, without zeros in them.

  Returns:
    A permutation of 0 to n - 1.
  """
  return np.argsort(hashes(names), kind='stable')


def by_class(
  names: np.ndarray, classes: Int[np.ndarray, ' n']
) -> Int[np.ndarray, ' n']:
  """Returns an order in which every part has its fraction of each class.

  The r-th of the n images of a class (r from 0, in the order of their hashes)
  is at r / n of the whole. So `[:90%]` and `[90%:]` divide each class in this
  proportion, to within one image, and a part from the start takes one image of
  every class before a second of any: if a class is too small to be divided, the
  part from the start has it.

  Args:
    names: bytes `[n]`, without zeros in them.
    classes: class of each example, `[n]`.

  Returns:
    A permutation of 0 to n - 1.
  """
  hashed = hashes(names)
  order = np.lexsort((hashed, classes))
  _, starts, counts = np.unique(
    classes[order], return_index=True, return_counts=True
  )
  rank = np.arange(len(names)) - np.repeat(starts, counts)
  share = np.empty(len(names))
  share[order] = rank / np.repeat(counts, counts)
  return np.lexsort((hashed, share))


def by_place(
  paths: Sequence[str],
  file: Int[np.ndarray, ' n'],
  place: Int[np.ndarray, ' n'],
) -> Int[np.ndarray, ' n']:
  """Returns the order by the hashes of examples without names.

  Args:
    paths: paths of files; only the last part of each counts.
    file: index of the file of each example.
    place: position in that file, a row or an offset.

  Returns:
    A permutation of 0 to n - 1.
  """
  files = hashes(base_names(paths))[file]
  places = mix(place.astype(np.uint64) + np.uint64(1))
  return np.argsort(mix(files ^ places), kind='stable')


def base_names(paths: Sequence[str]) -> np.ndarray:
  """Returns the last part of each path, as bytes."""
  return np.array([os.fsencode(p.rpartition('/')[2]) for p in paths], np.bytes_)


def hashes(names: np.ndarray) -> UInt64[np.ndarray, ' n']:
  """Computes a hash of each name.

  It depends on the name's bytes, not on the width of the array.
  """
  if len(names) > _CHUNK:
    parts = np.array_split(names, -(-len(names) // _CHUNK))
    return np.concatenate([hashes(part) for part in parts])
  words = names.astype(f'S{-(-names.itemsize // 8) * 8}').view('<u8')
  found = np.zeros(len(names), np.uint64)
  for column in words.reshape(len(names), -1).T:
    # A word of zeros lies behind the name's end.
    found = np.where(column == 0, found, mix(found ^ column))
  return found
