"""Tests of masked pre-training with the real commands."""

import json
import shutil

import numpy as np
import pytest

from tests import cli
from tests.faults.counts import further

TINY = {
  'source.name': 'synthetic',
  'source.num_examples': 64,
  'source.num_classes': 10,
  'train.num_examples': 64,
  'image_size': 16,
  'batch_size': 16,
  'model.width': 16,
  'model.depth': 12,  # the depth of B, for its rules
  'model.unroll': 1,
  'model.mlp_dim': 24,
  'model.num_heads': 2,
  'total': '8 steps',
  'schedule.warmup': '2 steps',
  'evals.test.every': '4 steps',
  'checkpoint.every': '4 steps',
  'log.every': '1 steps',
  'log.tensorboard': 'false',
  'log.curves': 'false',
}
SMALL_MAE = {
  'objective.decoder.width': 16,
  'objective.decoder.depth': 1,
  'objective.decoder.num_heads': 2,
  'objective.decoder.mlp_dim': 16,
}
FINETUNE = {k: v for k, v in TINY.items() if not k.startswith('model.')}
FINETUNE |= {
  'num_classes': 10,
  'model.dtype': 'float32',
  'model.remat': 'none',
  'model.unroll': 1,
  'total': '2 steps',
  'schedule.warmup': '1 steps',
  'checkpoint.every': '2 steps',
}


def train(command, config, workdir, values):
  cli.run(cli.command(command, *cli.flags(config, workdir, values)))


@pytest.mark.slow
@pytest.mark.parametrize(
  'objective, changes, tune, evaluation',
  [
    ('mae', SMALL_MAE, 'configs/finetune_mae.py:model=B', 'val'),
    *further(
      ['masked_patch', {}, 'configs/finetune.py:data=cifar10', 'test'],
    ),
  ],
)
def test_a_masked_run_is_resumed_evaluated_and_finetuned(
  objective, changes, tune, evaluation, tmp_path
):
  """Resumed from its middle, it ends with the same bits."""
  workdir, config = (
    tmp_path / 'run',
    f'configs/cifar10.py:objective={objective}',
  )
  values = TINY | changes | {'micro_batches': 2}
  train('train', config, workdir, values)
  losses, params = cli.losses(workdir), cli.final_params(workdir)
  evaluated = [line for line in cli.records(workdir) if 'test/20nn' in line]
  assert list(losses) == list(range(1, 9))
  assert [line['step'] for line in evaluated] == [4, 8]
  # As if it had been stopped at step 4.
  shutil.rmtree(workdir / 'checkpoints' / '8')
  train('train', config, workdir, values)
  assert cli.losses(workdir) == losses
  for path, array in cli.final_params(workdir).items():
    np.testing.assert_array_equal(array, params[path], err_msg=path)
  # Evaluated from its checkpoint.
  out, _ = cli.run(
    cli.command(
      'evaluate',
      f'--checkpoint={workdir}',
      '--evaluator=neighbours',
      '--split=test',
      '--config.evals.neighbours.ks=20',
      '--json',
    )
  )
  assert json.loads(out)['20nn'] == evaluated[-1]['test/20nn']
  # Fine-tuning of its encoder, with a new head.
  tuned = tmp_path / 'tuned'
  moved = {
    k.replace('evals.test', f'evals.{evaluation}'): v
    for k, v in FINETUNE.items()
  }
  moved['model.pixels'] = 'symmetric'  # other units change the embedding
  train(
    'finetune',
    tune,
    tuned,
    moved | {'init_from': workdir, 'schedule.base_lr': 0.0},
  )
  after = cli.final_params(tuned)
  body = {
    k.removeprefix('model/'): v
    for k, v in params.items()
    if k.startswith('model/')
  }
  fresh = {path for path in after if path not in body}
  new = {'head/kernel', 'head/bias'}
  if objective == 'mae':
    new |= {'fc_norm/scale', 'fc_norm/bias'}
    assert {'encoder/norm/scale', 'encoder/norm/bias'} == body.keys() - after
  assert fresh == new
  for path in body.keys() & after.keys():
    np.testing.assert_array_equal(after[path], body[path], err_msg=path)
