"""Tests of external sorting."""

import itertools

import numpy as np

from vit_jax.prepare import runs


def test_records_with_equal_names_are_kept(tmp_path):
  """They are two images, in the order of the archive."""
  runs.write(
    tmp_path,
    0,
    [
      runs.Record(7, 1, b'a', b'first'),
      runs.Record(7, 1, b'a', b'2nd'),
    ],
    {},
  )
  bounds = runs.cut(tmp_path, 1, 1)
  assert [image for *_, image in runs.read(tmp_path, bounds)] == [
    b'first',
    b'2nd',
  ]


def test_shards_have_equal_sizes(tmp_path):
  """Each image occurs once."""
  rng = np.random.default_rng(0)
  for number in range(3):
    keys = rng.integers(0, 2**63, 40)
    runs.write(
      tmp_path,
      number,
      [runs.Record(int(key), 0, b'', b'%d' % key) for key in keys],
      {},
    )
  bounds = runs.cut(tmp_path, 3, 7)
  shards = [
    [int(image) for *_, image in runs.read(tmp_path, bounds[:, i : i + 2])]
    for i in range(7)
  ]
  assert [len(shard) for shard in shards] == [17, 17, 17, 17, 17, 17, 18]
  everything = list(itertools.chain(*shards))
  assert everything == sorted(everything) and len(set(everything)) == 120
