"""Tests of linear probing with the real commands."""

import json
import shutil

import numpy as np
import pytest

from tests import cli
from tests.objectives.test_masked_runs import FINETUNE, SMALL_MAE, TINY, train


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
  'config',
  [
    'configs/linear_dino.py:model=B',
    'configs/linear_mae.py:model=B',
  ],
)
def test_a_probe_is_resumed_and_evaluated(config, tmp_path):
  """The backbone stays that of the pre-training; the head learns."""
  pretrained = tmp_path / 'pretrained'
  few = {
    'total': '1 steps',
    'schedule.warmup': '0 steps',
    'model.pool': 'token',
  }
  train(
    'train',
    'configs/cifar10.py:objective=mae',
    pretrained,
    TINY | SMALL_MAE | few,
  )
  values = {
    k.replace('evals.test', 'evals.val'): v for k, v in FINETUNE.items()
  }
  values |= {
    'init_from': pretrained,
    'num_classes': 0,
    'objective.num_classes': 10,
    'evals.val.split': 'test',
    'evals.val.every': '2 steps',
    'total': '4 steps',
    'schedule.warmup': '1 steps',
    'schedule.base_lr': 0.5,
  }
  workdir = tmp_path / 'probe'
  train('finetune', config, workdir, values)
  losses, params = cli.losses(workdir), cli.final_params(workdir)
  accuracy = cli.records(workdir)[-1]['val/accuracy']
  assert list(losses) == [1, 2, 3, 4]
  shutil.rmtree(workdir / 'checkpoints' / '4')
  train('finetune', config, workdir, values)
  assert cli.losses(workdir) == losses
  again = cli.final_params(workdir)
  for path, array in params.items():
    np.testing.assert_array_equal(again[path], array, err_msg=path)
  for path, array in cli.final_params(pretrained).items():
    if path.startswith('model/'):
      np.testing.assert_array_equal(params[path], array, err_msg=path)
  assert params['head/kernel'].shape[1] == 10 and params['head/bias'].any()
  out, _ = cli.run(
    cli.command('evaluate', f'--checkpoint={workdir}', '--split=test', '--json')
  )
  assert json.loads(out)['accuracy'] == accuracy
  # The backbone of a probe is loaded without the linear layer.
  features = tmp_path / 'features.npz'
  cli.run(
    cli.command(
      'features',
      f'--checkpoint={workdir}',
      '--dataset=synthetic',
      '--split=test',
      f'--out={features}',
    )
  )
  width = np.load(features)['features'].shape[1]
  assert width == params['head/kernel'].shape[0]
