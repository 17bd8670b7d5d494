"""Flags and bodies of commands, which run in the test's process."""

import contextlib
import importlib
import sys

import pytest
from absl import flags

from vit_jax.cli import process
from vit_jax.config import overrides
from vit_jax.data.storage import records
from vit_jax.errors import UserError


@contextlib.contextmanager
def own_flags():
  """Removes the flags that are defined in the block."""
  assert records.ArrayRecords  # its import defines flags, which stay
  before = set(flags.FLAGS)
  try:
    yield
  finally:
    flags.FLAGS.unparse_flags()
    flags.FLAGS.remove_flag_values([f for f in flags.FLAGS if f not in before])


@pytest.fixture
def command_line(monkeypatch):
  """Returns a function: arguments → config; flags are removed afterwards."""
  stack = contextlib.ExitStack()

  def parse(*arguments):
    stack.close()
    stack.enter_context(own_flags())
    argv = ['program', *arguments]
    monkeypatch.setattr(sys, 'argv', argv)  # ml_collections reads it
    overrides.define_flag(argv)
    try:
      flags.FLAGS(argv)
    except flags.Error as error:
      raise UserError(overrides.unknown_flag_message(error)) from error
    return flags.FLAGS.config

  with stack:
    yield parse


def message_of(monkeypatch, command, *arguments):
  """Runs a command without its exit code.

  Args:
    monkeypatch: fixture of pytest.
    command: module of the command, such as 'plan.main'.
    *arguments: flags and other arguments.

  Returns:
    The message about a user's error; '' if there is none.
  """
  argv = ['program', *arguments]
  monkeypatch.setattr(sys, 'argv', argv)
  module = importlib.import_module(f'vit_jax.{command}')
  with own_flags():
    try:
      getattr(module, 'define_flags', process.define_flags)()
      try:
        rest = flags.FLAGS(argv)
      except flags.Error as error:
        raise UserError(overrides.unknown_flag_message(error)) from error
      process.refuse_empty(flags.FLAGS)
      module.main(rest[1:])
    except UserError as error:
      return str(error)
  return ''
