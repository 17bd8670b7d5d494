"""Which example stands at which position: pure index arithmetic.

Position p of a training is example `shuffled(p mod n)` of epoch `p // n`, with
another order in each epoch. Nothing is stored: a Feistel network permutes
[0, 4^b) for the smallest 4^b ≥ n, and indices ≥ n are permuted again until
they fall below n ("cycle walking"), which is a permutation of [0, n). So any
position of any epoch costs the same, on every host.

References: Luby and Rackoff, "How to construct pseudorandom permutations"
(1988); Black and Rogaway, "Ciphers with arbitrary finite domains" (2002).
"""

import math

import numpy as np
from jaxtyping import Int, UInt64

_ROUNDS = 6  # four make a strong pseudorandom permutation; two for good measure
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, the increment of SplitMix64


def mix(x: UInt64[np.ndarray, ' n']) -> UInt64[np.ndarray, ' n']:
  """SplitMix64's finaliser: every input bit changes half of the output's."""
  x = (x ^ (x >> 30)) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> 27)) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> 31)


def shuffled(
  positions: Int[np.ndarray, ' n'], num_examples: int, seed: int
) -> Int[np.ndarray, ' n']:
  """Example indices at positions counted from the start of the training.

  Args:
    positions: int64, ≥ 0; any number of epochs.
    num_examples: examples in the data set, ≥ 1.
    seed: seed of the run.

  Returns:
    int64 indices in [0, num_examples); over each epoch every index once.
  """
  with np.errstate(over='ignore'):
    positions = positions.astype(np.uint64)
    epoch = positions // np.uint64(num_examples)
    index = positions % np.uint64(num_examples)
    key = mix(mix(epoch * np.uint64(_GOLDEN)) + np.uint64(seed))
    index = _permute(index, key, num_examples)
    outside = index >= num_examples
    while outside.any():
      index[outside] = _permute(index[outside], key[outside], num_examples)
      outside = index >= num_examples
  return index.astype(np.int64)


def _permute(
  index: UInt64[np.ndarray, ' n'],
  key: UInt64[np.ndarray, ' n'],
  num_examples: int,
) -> UInt64[np.ndarray, ' n']:
  """Applies a keyed permutation of [0, 4^b), a Feistel network.

  Here b is half the number of bits of `num_examples` − 1, rounded up.
  """
  half = np.uint64(max(1, ((num_examples - 1).bit_length() + 1) // 2))
  mask = (np.uint64(1) << half) - np.uint64(1)
  left, right = index >> half, index & mask
  for number in range(1, _ROUNDS + 1):
    round_key = mix(key + np.uint64(number * _GOLDEN % 2**64))
    left, right = right, left ^ (mix(right + round_key) & mask)
  return (left << half) | right


def repeated(
  positions: Int[np.ndarray, ' n'], batch_size: int, repeats: int
) -> Int[np.ndarray, ' n']:
  """Returns which drawn example each position holds: each one `repeats` times.

  Copies of an example are in one batch (or, if it is not divisible, in two that
  follow each other), and never next to each other: neighbours are mixed, and
  may be on one device.

  Args:
    positions: int64 positions, counted from the start of the training.
    batch_size: size of the global batch.
    repeats: copies of each example, ≥ 1.

  Returns:
    int64 positions, to be given to `shuffled` in place of the others.

  Reference: repeated augmentation, Hoffer et al., arXiv 1901.09335. DeiT's
  sampler draws a third of the examples in each epoch; this function goes
  through all of them in `repeats` epochs.
  """
  if repeats == 1:
    return positions
  stride = repeats
  while math.gcd(stride, batch_size) > 1:
    stride += 1
  batch, row = np.divmod(positions, batch_size)
  return (batch * batch_size + row * stride % batch_size) // repeats


def replacement(
  position: int, attempt: int, num_examples: int, seed: int
) -> int:
  """Returns the index that replaces a bad record at a position.

  It depends on the arguments only, so every host and every resumed run uses the
  same one. It is uniform over the dataset.

  Args:
    position: position counted from the start of the training.
    attempt: 1 for the first replacement, 2 if that one is bad too, …
    num_examples: examples in the dataset.
    seed: seed of the run.
  """
  hashed = np.zeros(1, np.uint64)
  with np.errstate(over='ignore'):
    for word in (seed, position, attempt):
      hashed = mix((hashed + np.uint64(_GOLDEN)) ^ np.uint64(word))
  return int(hashed[0] % np.uint64(num_examples))


def batch_index(step: int, skipped: tuple[int, ...] = ()) -> int:
  """Returns the index of the batch that follows `step` updates.

  It is the `step`-th natural number that is not on the skip list.
  """
  for index in sorted(set(skipped)):
    if index <= step:
      step += 1
  return step
