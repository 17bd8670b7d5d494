"""A fixture that parses the flags of a command in the test's process."""

import sys

import pytest
from absl import flags

from vit_jax.config import overrides
from vit_jax.errors import UserError


@pytest.fixture
def command_line(monkeypatch):
  """Returns a function: arguments → config; flags are removed afterwards."""
  before = set(flags.FLAGS)

  def forget():
    flags.FLAGS.unparse_flags()
    flags.FLAGS.remove_flag_values([f for f in flags.FLAGS if f not in before])

  def parse(*arguments):
    forget()
    argv = ['program', *arguments]
    monkeypatch.setattr(sys, 'argv', argv)  # ml_collections reads it
    overrides.define_flag(argv)
    try:
      flags.FLAGS(argv)
    except flags.Error as error:
      raise UserError(overrides.unknown_flag_message(error)) from error
    return flags.FLAGS.config

  yield parse
  forget()
