"""Tests that bad records are counted over all processes."""

import json

import pytest
import tiny_vit

from tests import cli
from vit_jax.models.vit import Model
from vit_jax.weights.formats import npz

CLASSES, EXAMPLES = 4, 50  # every fifth example is bad


def _evaluate(path, share, processes):
  """Starts an evaluation with a limit for the fraction of bad records."""
  source = dict(num_examples=EXAMPLES, num_classes=CLASSES, height=8)
  return cli.start_group(
    cli.command(
      'evaluate',
      f'--checkpoint={path}',
      '--dataset=tests.multiprocess.damaged',
      '--split=train',
      '--batch_size=8',
      '--json',
      *(f'--config.source.{key}={value}' for key, value in source.items()),
      '--config.reader.on_bad_record=skip',
      f'--config.reader.max_bad_share={share}',
    ),
    processes,
  )


@pytest.mark.long
def test_bad_records_of_all_processes_are_summed(tmp_path):
  """A fifth is bad, a tenth in each process; both exceed a limit of 15 %."""
  model, path = Model(CLASSES, **tiny_vit.SIZES), tmp_path / 'plain.npz'
  npz.save(str(path), tiny_vit.noise_params(model, (8, 8)), None)
  for process in _evaluate(path, 0.15, 2):
    _, err = cli.finish(process, code=2)
    assert f'of the {EXAMPLES} records of' in err and 'Traceback' not in err
  results = []
  for number in (1, 2):
    outputs = [cli.finish(each)[0] for each in _evaluate(path, 0.2, number)]
    results.append(json.loads(outputs[0].splitlines()[-1]))  # after Gloo's
  one, two = results
  assert one['count'] == two['count'] == EXAMPLES * 4 // 5
  assert one['accuracy'] == two['accuracy']
  assert one['loss'] == pytest.approx(two['loss'], rel=1e-6)
