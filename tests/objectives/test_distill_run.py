"""Tests of DeiT with a teacher from a file, with the real commands."""

import json
import signal

import numpy as np
import pytest

from tests import cli

SMALL = {
  'source.name': 'synthetic',
  'source.num_examples': 48,
  'source.num_classes': 20,
  'train.num_examples': 48,
  'num_classes': 20,
  'image_size': 32,
  'batch_size': 16,
  'total': '8 steps',
  'schedule.warmup': '2 steps',
  'model.width': 32,
  'model.depth': 2,
  'model.mlp_dim': 32,
  'model.num_heads': 2,
  'model.dtype': 'float32',
  'model.unroll': 1,
  'log.every': '1 steps',
  'log.tensorboard': 'false',
  'log.curves': 'false',
  'log.report': 'false',
  'checkpoint.every': '3 steps',
  'checkpoint.best': 'None',
}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_teacher_is_not_part_of_checkpoints(tmp_path):
  """It is opened by its path, and evaluations do not need it."""
  teacher, whole, cut = (
    tmp_path / name for name in ('teacher', 'whole', 'cut')
  )
  cli.train(teacher, total='2 steps', schedule__warmup='1 steps')
  killing = {
    'evals.val.name': 'tests.training.killing_evaluator',
    'evals.val.split': 'validation',
    'evals.val.every': '3 steps',
    'evals.val.after': f'{cut}/checkpoints/3',
  }

  def train(workdir, code=0):
    config = f'configs/deit.py:model=Ti,teacher={teacher}'
    flags = cli.flags(config, workdir, SMALL | killing)
    return cli.run(cli.command('train', *flags), 4, code)

  train(whole)
  train(cut, -signal.SIGKILL)
  train(cut)
  assert cli.lines(cut) == cli.lines(whole)
  steps = [line for line in cli.lines(whole) if 'loss' in line]
  assert len(steps) == 8
  for line in steps:
    half = (line['label_loss'] + line['teacher_loss']) / 2
    assert line['loss'] == pytest.approx(half, rel=1e-5)
    assert 0 <= line['agreement'] <= 1
  params = cli.final_params(whole)
  assert 'distillation' in params and not any('teacher' in p for p in params)
  for path, leaf in cli.final_params(cut).items():
    np.testing.assert_array_equal(leaf, params[path], err_msg=path)

  teacher.rename(tmp_path / 'elsewhere')
  out, _ = cli.run(cli.command('evaluate', f'--checkpoint={cut}', '--json'))
  assert json.loads(out)['count'] == 48
  _, err = cli.run(
    cli.command(
      'train',
      *cli.flags(
        f'configs/deit.py:model=Ti,teacher={teacher}', tmp_path / 'new', SMALL
      ),
    ),
    code=2,
  )
  assert str(teacher) in err and 'Traceback' not in err
