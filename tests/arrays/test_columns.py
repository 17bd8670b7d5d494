"""Tables as text."""

from vit_jax.arrays.columns import align


def test_columns_line_up():
  """Numbers to the right, the rest to the left, nothing after the last cell."""
  rows = [('name', 'count', ''), ('a', '1,000', 'note'), ('long name', '5', '')]
  assert align(rows, right=(1,)).splitlines() == [
    'name       count',
    'a          1,000  note',
    'long name      5',
  ]
