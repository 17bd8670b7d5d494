"""Order of the examples in training, computed by index arithmetic.

With n examples, position p of a run is example number p mod n of epoch p // n,
and each epoch has a different order. The order is not stored: a Feistel network
permutes [0, 4^b) for the smallest 4^b ≥ n, and indices ≥ n are permuted again
until they are below n ("cycle walking"), which gives a permutation of [0, n).
Every host can therefore compute the example at any position, in a time that
does not depend on the position.

References: Luby and Rackoff, "How to construct pseudorandom permutations"
(1988); Black and Rogaway, "Ciphers with arbitrary finite domains" (2002).
"""

import math

import numpy as np
from jaxtyping import Int, UInt64

# Four rounds give a strong pseudorandom permutation; two more are a margin.
_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, the increment of SplitMix64


def mix(x: UInt64[np.ndarray, ' n']) -> UInt64[np.ndarray, ' n']:
  """Applies the finalizer of SplitMix64.

  Each input bit changes about half of the output bits.
  """
  x = (x ^ (x >> 30)) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> 27)) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> 31)


def shuffled(
  positions: Int[np.ndarray, ' n'],
  num_examples: int | Int[np.ndarray, ' n'],
  seed: int | UInt64[np.ndarray, ' n'],
) -> Int[np.ndarray, ' n']:
  """Returns the indices of the examples at positions in training.

  Args:
    positions: int64 positions ≥ 0, counted from the start of training, over any
      number of epochs.
    num_examples: number of examples in the dataset, ≥ 1; or a number for each
      position, if the positions belong to several datasets.
    seed: seed of the run, or a seed for each position.

  Returns:
    int64 indices in [0, num_examples). Each index occurs once per epoch.
  """
  with np.errstate(over='ignore'):
    positions = positions.astype(np.uint64)
    sizes = np.broadcast_to(np.uint64(num_examples), positions.shape)
    epoch, index = np.divmod(positions, sizes)
    key = mix(mix(epoch * np.uint64(_GOLDEN)) + np.uint64(seed))
    half = np.broadcast_to(_half_bits(num_examples), positions.shape)
    index = _permute(index, key, half)
    while (outside := index >= sizes).any():  # cycle walking, see above
      index[outside] = _permute(index[outside], key[outside], half[outside])
  return index.astype(np.int64)


def _half_bits(
  sizes: int | Int[np.ndarray, ' n'],
) -> UInt64[np.ndarray, ' n']:
  """Returns half the number of bits of size − 1, rounded up; at least 1."""
  bits = [(size - 1).bit_length() for size in np.atleast_1d(sizes).tolist()]
  return np.array([max(1, (each + 1) // 2) for each in bits], np.uint64)


def _permute(
  index: UInt64[np.ndarray, ' n'],
  key: UInt64[np.ndarray, ' n'],
  half: UInt64[np.ndarray, ' n'],
) -> UInt64[np.ndarray, ' n']:
  """Applies a keyed permutation of [0, 4^half), a Feistel network."""
  mask = (np.uint64(1) << half) - np.uint64(1)
  left, right = index >> half, index & mask
  for number in range(1, _ROUNDS + 1):
    round_key = mix(key + np.uint64(number * _GOLDEN % 2**64))
    left, right = right, left ^ (mix(right + round_key) & mask)
  return (left << half) | right


def balanced(
  positions: Int[np.ndarray, ' n'], counts: Int[np.ndarray, ' k'], seed: int
) -> tuple[Int[np.ndarray, ' n'], Int[np.ndarray, ' n']]:
  """Returns groups and examples such that groups occur equally often.

  k positions that start at a multiple of k contain each group once, in a new
  random order. Each group is read in whole epochs, each in a new random order.

  Args:
    positions: int64 positions ≥ 0, counted from the start of training.
    counts: number of examples of each group, ≥ 1.
    seed: seed of the run.

  Returns:
    Group at each position, int64 in [0, k), and index of the example in its
    group.
  """
  group = shuffled(positions, len(counts), seed)
  # The order of each group must be independent of the others.
  with np.errstate(over='ignore'):
    salt = (group.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    seeds = mix(salt ^ np.uint64(seed))
  return group, shuffled(positions // len(counts), counts[group], seeds)


def repeated(
  positions: Int[np.ndarray, ' n'], batch_size: int, repeats: int
) -> Int[np.ndarray, ' n']:
  """Maps positions so that each drawn example occurs `repeats` times.

  Copies of an example are in the same batch or, if the batch size is not
  divisible by `repeats`, in two consecutive batches. They are not in adjacent
  rows, because adjacent rows are mixed with each other and may be on the same
  device, except in batches of hardly more rows than `repeats`.

  Args:
    positions: int64 positions, counted from the start of training.
    batch_size: size of the global batch.
    repeats: number of copies of each example, ≥ 1.

  Returns:
    int64 positions, from which `shuffled` computes the examples.

  Reference: repeated augmentation, Hoffer et al., arXiv 1901.09335. DeiT's
  sampler draws a third of the examples in each epoch; with this function, all
  examples are drawn within `repeats` epochs.
  """
  if repeats == 1:
    return positions
  # Rows of a stride that is coprime to the batch size are a permutation of all
  # rows. With a stride from `repeats` to `batch_size - repeats`, copies are not
  # in adjacent rows.
  stride = repeats
  while math.gcd(stride, batch_size) > 1:
    stride += 1
  batch, row = np.divmod(positions, batch_size)
  return (batch * batch_size + row * stride % batch_size) // repeats


def replacement(
  position: int, attempt: int, num_examples: int, seed: int
) -> int:
  """Returns the index that replaces a bad record at a position.

  The index is uniform over the dataset. It depends only on the arguments, so
  that every host and every resumed run uses the same replacement.

  Args:
    position: position counted from the start of training.
    attempt: 1 for the first replacement, 2 if the first is also bad, …
    num_examples: number of examples in the dataset.
    seed: seed of the run.
  """
  hashed = np.zeros(1, np.uint64)
  with np.errstate(over='ignore'):
    for word in (seed, position, attempt):
      hashed = mix((hashed + np.uint64(_GOLDEN)) ^ np.uint64(word))
  return int(hashed[0] % np.uint64(num_examples))


def batch_index(step: int, skipped: tuple[int, ...] = ()) -> int:
  """Returns the index of the batch that follows `step` updates.

  It is number `step`, counted from 0, of the indices that are not in `skipped`.
  """
  for index in sorted(set(skipped)):
    if index <= step:
      step += 1
  return step
