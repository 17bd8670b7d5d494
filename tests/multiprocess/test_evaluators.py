"""Tests that evaluators and features agree in one process and in two."""

import json

import numpy as np
import pytest

from tests import cli
from vit_jax import read_features

CONFIG = 'tests/multiprocess/all_evaluators.py'


def _run(processes, *command):
  """Runs a command on four devices of one process or of several."""
  started = cli.start_group(cli.command(*command), processes, 4 // processes)
  for process in started:
    cli.finish(process)


def _figures(workdir, processes):
  """Returns the results of the evaluators at the end of a training."""
  _run(processes, 'train', *cli.flags(CONFIG, workdir, {}))
  found = {}
  for record in cli.records(workdir):
    found |= {k: v for k, v in record.items() if '/' in k}
  return found


def _features(workdir, processes):
  """Returns features of the same weights and examples, without a bad record."""
  out = workdir / f'features{processes}'
  flags = (f'--checkpoint={workdir}', f'--config={CONFIG}', f'--out={out}')
  _run(processes, 'features', *flags, '--batch_size=16', '--part_examples=20')
  return read_features(str(out))


@pytest.mark.long
def test_two_processes_evaluate_like_one(tmp_path):
  """Four evaluators; sizes are odd, and some records are bad."""
  one, two = (
    _figures(tmp_path / str(processes), processes) for processes in (1, 2)
  )
  names = {key.partition('/')[0] for key in one}
  assert names == {'fewshot', 'neighbours', 'calibration', 'regression'}
  assert one['calibration/count'] == 43
  assert one['regression/accuracy'] > 0.5
  # After two steps, weights differ by rounding; no decision depends on it.
  assert two == pytest.approx(one, rel=1e-4)
  _same_pictures(*(tmp_path / str(processes) for processes in (1, 2)))


@pytest.mark.long
def test_two_processes_compute_features_like_one(tmp_path):
  """The examples are in the same order."""
  _figures(tmp_path / '1', 1)
  written, again = (_features(tmp_path / '1', n) for n in (1, 2))
  assert again.keys() == written.keys()
  np.testing.assert_array_equal(again['index'], written['index'])
  np.testing.assert_array_equal(again['label'], written['label'])
  np.testing.assert_allclose(
    again['features'], written['features'], rtol=1e-4, atol=1e-5
  )
  assert len(set(again['index'])) == len(again['index']) > 30


def _same_pictures(one, two):
  """Compares figures, predictions, training images and the HTML report."""
  kept = [json.loads((at / 'report.json').read_text()) for at in (one, two)]
  assert kept[1]['training'] == kept[0]['training']
  assert len(kept[0]['training']) == 24
  predictions = [each['judged'] for each in kept]
  assert predictions[0]['count'] == predictions[1]['count'] > 0
  assert predictions[0]['matrix'] == predictions[1]['matrix']
  arrays = [np.load(at / 'figures' / 'figures.npz') for at in (one, two)]
  assert 'rollout' in arrays[0]
  for name in arrays[0].files:
    if name != 'filters':  # components of equal variance may be mixed
      np.testing.assert_allclose(
        arrays[1][name], arrays[0][name], rtol=1e-3, atol=1e-5, err_msg=name
      )
  assert 'Attention rollout' in (two / 'report.html').read_text()
