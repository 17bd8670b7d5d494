"""Orders in which splits of sorted examples are cut into parts.

Listings are mostly sorted by class, so that `train[:90%]` of a listing would
lack whole classes. Splits are therefore cut in a random but fixed order: the
order of the hashes of the examples' names, which does not depend on the order
of the listing. (TFDS shuffles when it prepares a dataset, so its splits are cut
in the order in which they are stored.)
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
    names: bytes `[n]`, without NUL.

  Returns:
    A permutation of 0 to n - 1.
  """
  return np.argsort(hashes(names), kind='stable')


def by_class(
  names: np.ndarray, classes: Int[np.ndarray, ' n']
) -> Int[np.ndarray, ' n']:
  """Returns an order in which every part has the same fraction of each class.

  The r-th of the n images of a class (r from 0, in the order of their hashes)
  is at the fraction r / n of the split. `[:90%]` and `[90%:]` therefore divide
  each class in this proportion, up to one image. A part that starts at 0 gets
  an image of every class before it gets a second one of any class, so that it
  contains the classes that are too small to be divided.

  Args:
    names: bytes `[n]`, without NUL.
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
  fraction = np.empty(len(names))
  fraction[order] = rank / np.repeat(counts, counts)
  return np.lexsort((hashed, fraction))


def by_place(
  paths: Sequence[str],
  file: Int[np.ndarray, ' n'],
  place: Int[np.ndarray, ' n'],
) -> Int[np.ndarray, ' n']:
  """Returns the order of examples without names, by hashes of their positions.

  Args:
    paths: paths of the files; only the last part of each is used.
    file: index of the file of each example.
    place: position of each example in its file, a row or an offset.

  Returns:
    A permutation of 0 to n - 1.
  """
  files = hashes(base_names(paths))[file]
  places = mix(place.astype(np.uint64) + np.uint64(1))
  return np.argsort(mix(files ^ places), kind='stable')


def base_names(paths: Sequence[str]) -> np.ndarray:
  """Returns the last part of each path, as bytes `[n]`."""
  return np.array([os.fsencode(p.rpartition('/')[2]) for p in paths], np.bytes_)


def hashes(names: np.ndarray) -> UInt64[np.ndarray, ' n']:
  """Computes a hash of each name.

  The hash depends only on the bytes of the name, not on the array's width.

  Args:
    names: bytes `[n]`, without NUL.
  """
  if len(names) > _CHUNK:
    parts = np.array_split(names, -(-len(names) // _CHUNK))
    return np.concatenate([hashes(part) for part in parts])
  words = names.astype(f'S{-(-names.itemsize // 8) * 8}').view('<u8')
  hashed = np.zeros(len(names), np.uint64)
  for column in words.reshape(len(names), -1).T:
    # A word of zeros is padding after the name, and must not change the hash.
    hashed = np.where(column == 0, hashed, mix(hashed ^ column))
  return hashed
