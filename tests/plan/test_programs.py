"""Tests of the cache of compiled programs of plans."""

import gzip
import types
from unittest import mock

import pytest
from etils import epath

from vit_jax.plan import compile
from vit_jax.training import compiling
from vit_jax.training.experiment import Experiment

BYTES = {'arguments': 3, 'peak': 7}


@pytest.fixture
def is_compiled(tmp_path, monkeypatch):
  """Returns a function: whether a step is compiled, and not from the cache."""
  compiled, experiment = [], mock.Mock(spec=Experiment)
  monkeypatch.setattr(compile.memory, 'program_bytes', lambda _: dict(BYTES))
  monkeypatch.setattr(compiling, 'step_options', lambda _, options: options)

  def run(traced='step', options=None, target='v3:4x4'):
    def make():
      compiled.append(traced)
      return types.SimpleNamespace(as_text=lambda: f'HLO of {traced}')

    lowered = types.SimpleNamespace(as_text=lambda: traced, compile=make)
    monkeypatch.setattr(compiling, 'lower_step', lambda *_: lowered)
    folder, before = epath.Path(tmp_path) / 'plans', len(compiled)
    found = compile.compile_step(experiment, options or {}, target, folder)
    assert found.text == f'HLO of {traced}' and found.bytes == BYTES
    return len(compiled) > before

  return run


def test_only_what_changes_the_program_is_compiled(is_compiled, monkeypatch):
  """Programs, options, devices and flags of the compiler are distinguished."""
  assert is_compiled() and not is_compiled()
  assert is_compiled('another')
  assert is_compiled(options={'xla_option': 1})
  assert is_compiled(target='v4:2x2x2')
  monkeypatch.setenv('LIBTPU_INIT_ARGS', '--xla_tpu_flag=1')
  assert is_compiled()


def flipped(whole):
  return whole[:20] + bytes([whole[20] ^ 255]) + whole[21:]


@pytest.mark.parametrize(
  'damage',
  [
    lambda whole: b'',
    lambda whole: b'no gzip',
    lambda whole: whole[: len(whole) // 2],
    flipped,
    # Contents that another version may have written.
    lambda whole: gzip.compress(b'[1]'),
    lambda whole: gzip.compress(b'3'),
    lambda whole: gzip.compress(b'{"text": "", "seconds": 1}'),
  ],
)
def test_damaged_programs_are_compiled_again(is_compiled, tmp_path, damage):
  """The file is replaced."""
  assert is_compiled()
  (file,) = (tmp_path / 'plans').iterdir()
  file.write_bytes(damage(file.read_bytes()))
  assert is_compiled() and not is_compiled()
