"""Tests of the comparison with published speeds."""

import pytest

from benchmarks import published
from vit_jax.arrays.devices import GPUS, TPUS
from vit_jax.config import loading
from vit_jax.plan import compile

ROWS = published.read()


def test_rows_name_known_devices_and_their_sources():
  assert len(ROWS) >= 30
  assert len({published.key(row) for row in ROWS}) == len(ROWS)
  for row in ROWS:
    assert row['device'].partition(':')[0] in {**GPUS, **TPUS}, row
    assert row['source'] and float(row['images_per_s']) > 0, row


@pytest.mark.parametrize(
  'row', ROWS[::4], ids=[' '.join(published.key(row)) for row in ROWS[::4]]
)
def test_configs_of_rows_are_valid(row):
  config = compile.changed(
    loading.load(row['config']), **published.changes(row)
  )
  assert config.batch_size == int(row['batch'])
