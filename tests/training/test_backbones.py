"""Tests of every kind of model with the real command, killed and resumed."""

import signal

import numpy as np
import pytest

from tests import cli
from tests.faults.counts import further, injected

COMMON = cli.QUIET | {
  'source.name': 'synthetic',
  'source.num_examples': 64,
  'train.num_examples': 64,
  'batch_size': 16,
  'total': '8 steps',
  'schedule.warmup': '2 steps',
  # If gradients are near ε, Adam's steps are signs, which rounding may flip.
  'optimizer.eps': 1e-2,
  'evals.test.every': '3 steps',
  'checkpoint.every': '3 steps',
  'checkpoint.best': 'None',
}
SHARDED = {'mesh.data': 2, 'mesh.fsdp': 2, 'mesh.model': 2}
ZERO1 = {'mesh.data': 4, 'mesh.model': 2, 'mesh.zero1': 'true'}
SMALL = {'model.depth': 2, 'model.width': 32, 'model.mlp_dim': 64}
OPTIONS = SMALL | {
  'model.position': 'rope2d',
  'model.layer_scale': 0.1,
  'model.registers': 2,
  'model.qk_norm': 'true',
  'model.gated': 'true',
  'model.drop_path': 0.2,
  'model.dropout': 0.1,
  'model.pool': 'token',
}
KINDS = {
  'resnet': ('resnet', SHARDED, {}),
  'hybrid': ('hybrid', ZERO1, SMALL),
  'swin': ('swin', SHARDED, {'model.width': 24, 'model.drop_path': 0.2}),
  'axial_vit': ('axial_vit', ZERO1, SMALL | {'model.depth': 1}),
  'axial_resnet': ('axial_resnet', SHARDED, {}),
}


def train(workdir, kind, changes, devices, code=0):
  config = f'configs/cifar10.py:model={kind}'
  arguments = cli.flags(config, workdir, COMMON | changes)
  return cli.run(cli.command('train', *arguments), devices, code)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize('name', further('options', *KINDS))
def test_killed_runs_and_other_meshes_give_the_same(tmp_path, name):
  """SIGKILL changes no bit; one device gives the same up to rounding."""
  kind, mesh, sizes = KINDS.get(name, ('vit', ZERO1, OPTIONS))
  whole, killed, alone = (tmp_path / each for each in ('whole', 'cut', 'alone'))
  train(whole, kind, mesh | sizes, 8)
  killing = {
    'evals.test.name': 'tests.training.killing_evaluator',
    'evals.test.split': 'test',
    'evals.test.after': f'{killed}/checkpoints/3',
  }
  injected('SIGKILL after the first checkpoint')
  train(killed, kind, mesh | sizes | killing, 8, -signal.SIGKILL)
  assert [line['step'] for line in cli.lines(killed)][-1] < 8
  train(killed, kind, mesh | sizes | killing, 8)
  assert cli.lines(killed) == cli.lines(whole)
  params = cli.final_params(whole)
  cli.assert_same_params(killed, params)

  train(alone, kind, sizes, 1)
  for ours, others in zip(cli.lines(whole), cli.lines(alone), strict=True):
    for key in ('loss', 'test/loss'):
      if key in ours:
        assert ours[key] == pytest.approx(others[key], rel=1e-5)
  moved = cli.final_params(alone)
  way = max(np.abs(leaf).max() for leaf in params.values())
  for path, leaf in params.items():
    np.testing.assert_allclose(leaf, moved[path], atol=1e-5 * way, err_msg=path)
