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
def compile_step(tmp_path, monkeypatch):
  """Returns a function that compiles a fake step and counts compilations."""
  compiled, experiment = [], mock.Mock(spec=Experiment)
  monkeypatch.setattr(compile.memory, 'program_bytes', lambda _: dict(BYTES))
  monkeypatch.setattr(compiling, 'step_options', lambda _, options: options)

  def run(traced='step', options=None, target='v3:4x4', cache=True):
    def make():
      compiled.append(traced)
      return types.SimpleNamespace(as_text=lambda: f'HLO of {traced}')

    lowered = types.SimpleNamespace(as_text=lambda: traced, compile=make)
    monkeypatch.setattr(compiling, 'lower_step', lambda *_: lowered)
    folder = epath.Path(tmp_path) / 'plans' if cache else None
    before = len(compiled)
    found = compile.compile_step(experiment, options or {}, target, folder)
    assert found.text == f'HLO of {traced}' and found.bytes == BYTES
    return len(compiled) > before

  return run


def test_a_step_is_compiled_once(compile_step):
  assert compile_step()
  assert not compile_step()


def test_anything_that_changes_the_program_is_compiled(
  compile_step, monkeypatch
):
  """Programs, options, devices and flags of the compiler are distinguished."""
  assert compile_step()
  assert compile_step('another')
  assert compile_step(options={'xla_option': 1})
  assert compile_step(target='v4:2x2x2')
  monkeypatch.setenv('LIBTPU_INIT_ARGS', '--xla_tpu_flag=1')
  assert compile_step()


# Contents that another version may have written.
OTHERS = ['[1]', '3', '{"text": ""}', '{"text": "", "seconds": 1}']


@pytest.mark.parametrize('content', [b'', b'no gzip', None, b'half', *OTHERS])
def test_damaged_programs_are_compiled_again(compile_step, tmp_path, content):
  """The file is replaced."""
  assert compile_step()
  (file,) = (tmp_path / 'plans').iterdir()
  whole = file.read_bytes()
  flipped = whole[:20] + bytes([whole[20] ^ 255]) + whole[21:]
  damaged = {None: flipped, b'half': whole[: len(whole) // 2]}
  damaged |= {text: gzip.compress(text.encode()) for text in OTHERS}
  file.write_bytes(damaged.get(content, content))
  assert compile_step() and not compile_step()
