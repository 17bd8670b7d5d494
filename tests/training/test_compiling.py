"""What a run says at its start."""

import logging

import jax
import pytest
from minimal_config import completed

from vit_jax.training import compiling
from vit_jax.training.experiment import Experiment


@pytest.mark.parametrize(
  'devices, changes, whole',
  [
    (1, {}, False),
    (8, {}, False),
    (1, {'log.parameters': True}, True),
    (8, {'mesh.fsdp': 8, 'model.mlp_dim': 512}, True),
  ],
)
def test_the_table_of_parameters_is_logged_where_it_tells_something(
  devices, changes, whole, caplog
):
  """Where one is split or the config asks for it; else one line, the total."""
  caplog.set_level(logging.INFO, 'vit_jax')
  experiment = Experiment.build(completed(**changes), jax.devices()[:devices])
  compiling.describe(experiment, experiment.abstract_state())
  first = caplog.records[0].message.splitlines()
  assert first[-1].startswith('total ') and first[-1].endswith(' parameters')
  assert ('encoder/layers/mlp/fc1/kernel' in caplog.text) == whole
  assert (len(first) == 1) != whole
