"""Tests of text tables."""

from vit_jax.plan.report import align


def test_align_pads_columns():
  """Numbers are right-aligned, text is left-aligned."""
  rows = [('name', 'count', ''), ('a', '1,000', 'note'), ('long name', '5', '')]
  assert align(rows, right=(1,)).splitlines() == [
    'name       count',
    'a          1,000  note',
    'long name      5',
  ]
