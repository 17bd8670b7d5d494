"""Tests that the tables in docs/weights.md list what the code reads."""

import collections
import re

from tests.cli import ROOT
from vit_jax.weights.formats import damage, huggingface, timm_models

PAGE = (ROOT / 'docs' / 'weights.md').read_text()
# Rows of timm's architectures, without those of single sets of weights
ROWS = [row for row in timm_models.table().values() if '.' not in row.name]
OPENED = [row for row in ROWS if row.block in timm_models.SUPPORTED]


def test_the_table_lists_types_architectures_and_endings():
  table = PAGE.partition('<!-- weights -->')[2]
  table = table.partition('<!-- end of weights -->')[0]
  types = re.findall(r'^\| Hugging Face `([\w-]+)`', table, re.MULTILINE)
  assert {*types} == {*huggingface.TYPES, 'timm_wrapper'}
  assert f'timm {timm_models.version()} ' in table
  assert f'timm, {len(OPENED)} of its {len(ROWS)} Vision' in table
  for ending in damage.PICKLES:
    assert f'`{ending}`' in table


def test_the_table_of_timm_lists_what_is_refused():
  """Every architecture is supported, or refused for a reason."""
  refused = collections.defaultdict(set)
  for row in ROWS:
    if row not in OPENED:
      refused[timm_models.REFUSED[row.block]].add(row.name)
  counts = collections.Counter()
  for names, number, state in re.findall(
    r'^\| (`.*) \| (\d+) \| (yes|no: .*) \|$', PAGE, re.MULTILINE
  ):
    counts[state == 'yes'] += int(number)
    if state != 'yes':
      listed = set(re.findall(r'`(\w+)`', names))
      assert listed <= refused[state.removeprefix('no: ')]
      assert len(listed) == int(number)
  assert counts == {True: len(OPENED), False: len(ROWS) - len(OPENED)}
