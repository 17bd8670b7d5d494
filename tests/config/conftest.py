"""Fixtures of the tests of configs."""

import pytest
from minimal_config import completed

from vit_jax.config import completion


@pytest.fixture
def parse(tmp_path, command_line):
  """Returns a function: (flags, config) → the config that a command gets."""

  def parse(*flags, base=None):
    file = tmp_path / 'config.json'
    file.write_text(completion.to_json(base or completed()))
    return command_line(f'--config={file}', *flags)

  return parse
