"""Which directory a run takes, and whether it may go on there."""

import pytest
from minimal_config import completed

from vit_jax import config as config_lib
from vit_jax import workdir
from vit_jax.errors import UserError


@pytest.mark.parametrize(
  'config_path, expected',
  [
    ('configs/quickstart.py', 'runs/quickstart'),
    ('configs/vit.py:variant=B/16,data=i1k', 'runs/vit-variant_B16-data_i1k'),
    ('runs/x/config.json', 'runs/x'),
    ('gs://bucket/run/config.json', 'gs://bucket/run'),
    ('config.json', '.'),
    ('saved/other.json', 'runs/other'),
  ],
)
def test_default(config_path, expected):
  """The config's name; a run's own config.json means that run."""
  assert workdir.default(config_path) == expected


def test_another_length(tmp_path):
  """A longer total is refused with what it needs and what it does."""
  before = completed(total='20 steps')
  (tmp_path / 'config.json').write_text(config_lib.to_json(before))
  again = completed(total='20 step')
  workdir.check(str(tmp_path), again, allow_changes=False)
  longer = completed(total='30 steps')
  with pytest.raises(UserError) as error:
    workdir.check(str(tmp_path), longer, allow_changes=False)
  for words in (
    '--allow_config_change',
    'rate follows from the total',
  ):
    assert words in str(error.value)
  workdir.check(str(tmp_path), longer, allow_changes=True)
  with pytest.raises(UserError) as error:
    workdir.check(
      str(tmp_path), completed(seed=5, total='20 steps'), allow_changes=False
    )
  assert 'learning rate' not in str(error.value)
