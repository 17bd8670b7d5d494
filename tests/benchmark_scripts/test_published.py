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


@pytest.mark.parametrize('factor', [0.5, 2.0])
def test_a_wrong_published_value_is_flagged(factor):
  row = next(row for row in ROWS if published.key(row)[1] == 'B/16')
  rate = float(row['images_per_s'])
  result = dict(before=None, now=rate * 1.1, low=rate, high=2 * rate)
  assert 'check' not in published.line(row, result)
  wrong = row | {'images_per_s': str(rate * factor)}
  assert 'check this row' in published.line(wrong, result)


def test_summary_leaves_out_the_fitted_row_and_names_the_worst():
  rows = [row for row in ROWS if row['program'] == 'training'][:5]
  rates = [float(row['images_per_s']) for row in rows]
  results = [
    (row, {'now': rate * factor})
    for row, rate, factor in zip(
      rows, rates, (1.1, 0.8, 1.0, 1.05, 5.0), strict=True
    )
  ]
  assert published.key(rows[4]) in published.FITTED
  assert {*published.FITTED} <= {published.key(row) for row in ROWS}
  (sentence,) = published.summary(results)
  assert '4 rows' in sentence and 'worst 20 % (rtx3090:1x1 B/16)' in sentence
