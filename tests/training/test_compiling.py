"""Tests of the log at the start of a run, and of its memory check."""

import logging
import re
from unittest import mock

import jax
import pytest
from minimal_config import completed

from vit_jax.arrays import memory, tree
from vit_jax.errors import UserError
from vit_jax.processes import machine
from vit_jax.training import compiling
from vit_jax.training.experiment import Experiment


@pytest.mark.parametrize(
  'changes, is_split',
  [({}, False), ({'mesh.fsdp': 8, 'model.mlp_dim': 512}, True)],
)
def test_the_parameter_table_is_logged_if_parameters_are_split(
  changes, is_split, caplog
):
  """Otherwise, only their total is logged."""
  caplog.set_level(logging.INFO, 'vit_jax')
  experiment = Experiment.build(completed(**changes), jax.devices())
  compiling.describe(experiment)
  first = caplog.messages[0].splitlines()
  assert f'{tree.size(experiment.abstract_state.params):,}' in first[-1]
  rows = [line for line in first if 'encoder/layers/mlp/fc1/kernel' in line]
  assert len(rows) == is_split and all("'fsdp'" in row for row in rows)


@pytest.mark.slow
def test_a_step_too_large_for_memory_is_refused(monkeypatch):
  """The message has the memory that is needed and that there is."""
  chosen = jax.devices()[:2]
  sizes = {'batch_size': 64, 'model.mlp_dim': 256}

  def peak(parts):
    config = completed(**sizes, micro_batches=parts)
    experiment = Experiment.build(config, chosen)
    program = memory.program_bytes(compiling.compile_step(experiment))
    return program['peak']

  limit = 2 * peak(32)
  experiment = Experiment.build(completed(**sizes), chosen)
  monkeypatch.setattr(memory, 'of_device', lambda device: limit)
  words = f'{memory.text(peak(1))}.*{memory.text(limit)}.*micro_batches'
  with pytest.raises(UserError, match=words):
    compiling.compile_to_run(experiment)


def test_an_out_of_memory_error_of_the_compiler_is_reported(monkeypatch):
  """Other errors of the compiler are raised unchanged."""
  error_text = 'RESOURCE_EXHAUSTED: Used 17.21G of 15.48G hbm.'
  experiment = Experiment.build(completed(batch_size=64), jax.devices()[:1])
  failing = mock.Mock(side_effect=jax.errors.JaxRuntimeError(error_text))
  monkeypatch.setattr(compiling, 'compile_step', failing)
  monkeypatch.setattr(memory, 'of_device', lambda device: int(15.48 * 2**30))
  with pytest.raises(UserError, match='17.21 GiB.*15.48 GiB.*micro_batches'):
    compiling.compile_to_run(experiment)
  failing.side_effect = jax.errors.JaxRuntimeError('INTERNAL: something')
  with pytest.raises(jax.errors.JaxRuntimeError, match='something'):
    compiling.compile_to_run(experiment)


def test_memory_of_a_cpu_is_shared_by_its_devices():
  total = machine.memory_bytes()
  assert memory.of_device(jax.devices()[0]) == total // jax.local_device_count()


@pytest.mark.slow
def test_the_residual_stream_is_stored_on_a_cpu():
  """XLA fuses neither it nor its gradient across branches."""
  depth = 3
  sizes = {'model.depth': depth, 'model.unroll': depth}
  config = completed(**sizes, **{'model.dtype': 'float32'})
  step = compiling.compile_step(Experiment.build(config, jax.devices()[:1]))
  barriers = re.findall(r' opt-barrier\(', step.as_text() or '')
  assert len(barriers) == 2 * 2 * depth  # two branches, forward and backward
