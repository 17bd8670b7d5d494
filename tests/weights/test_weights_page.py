"""Tests that the table in docs/weights.md is that of the code."""

import write_weights_page as writer

from vit_jax.weights.formats import huggingface


def test_the_page_contains_the_current_table():
  """Otherwise, run write_weights_page.py."""
  current = writer.PAGE.read_text()
  assert writer.START in current and writer.END in current
  assert writer.page(current) == current


def test_every_type_is_in_the_table():
  text = writer.text()
  for kind in huggingface.TYPES:
    assert f'`{kind}`' in text
