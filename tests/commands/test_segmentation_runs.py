"""Tests of runs of `configs/segment.py` with the real commands."""

import json
import shutil

import pytest

from tests import cli, shapes_folder

SMALL = {
  'total': '6 steps',
  'batch_size': 8,
  'schedule.warmup': '1 steps',
  'model.patch_size': 8,
  'model.width': 32,
  'model.depth': 2,
  'model.mlp_dim': 48,
  'model.num_heads': 2,
  'model.unroll': 1,
  'log.every': '1 steps',
  'log.tensorboard': 'false',
  'log.curves': 'false',
  'log.report': 'false',
  'evals.val.every': '3 steps',
  'evals.val.preprocess.label_size': 64,
  'checkpoint.every': '3 steps',
}


def command_of(data, workdir, **more):
  values = SMALL | {k.replace('__', '.'): v for k, v in more.items()}
  config = f'configs/segment.py:path={data},data=folder,classes=3,size=32'
  return cli.command('train', *cli.flags(config, workdir, values))


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  folder = tmp_path_factory.mktemp('shapes')
  shapes_folder.write(folder)
  return folder


@pytest.fixture(scope='module')
def trained(data, tmp_path_factory):
  workdir = tmp_path_factory.mktemp('segment') / 'run'
  cli.run(command_of(data, workdir))
  return workdir


@pytest.mark.slow
def test_a_killed_run_equals_an_uninterrupted_one(data, trained, tmp_path):
  """Also the running statistics, on which the mean IoU depends."""
  workdir = tmp_path / 'run'
  cli.kill_when(
    command_of(data, workdir, total='6 steps'),
    lambda: (workdir / 'checkpoints' / '3').exists(),
    'a run of segment',
    240,
  )
  cli.run(command_of(data, workdir))
  assert cli.lines(workdir) == cli.lines(trained)
  ours, theirs = cli.final_params(workdir), cli.final_params(trained)
  assert ours.keys() == theirs.keys()
  assert all((ours[path] == theirs[path]).all() for path in theirs)
  last = cli.lines(trained)[-1]
  assert last['val/pixels'] == 8 * 64 * 64 and last['val/classes'] == 3
  out, _ = cli.run(cli.command('evaluate', f'--checkpoint={workdir}', '--json'))
  assert json.loads(out)['miou'] == last['val/miou']


@pytest.mark.slow
def test_two_processes_measure_like_one(data, trained, tmp_path):
  """The same sums over 8 images in batches of 6."""
  workdir = tmp_path / 'run'
  shutil.copytree(trained, workdir)
  command = cli.command('evaluate', f'--checkpoint={workdir}', '--json')
  command.append('--batch_size=6')
  one = json.loads(cli.run(command, devices=2)[0])
  first, *others = cli.start_group(command, 2)
  two = json.loads(cli.finish(first)[0].splitlines()[-1])  # after Gloo's
  for process in others:
    cli.finish(process)
  assert two.keys() == one.keys()
  for name in ('miou', 'accuracy', 'mean_accuracy', 'classes', 'pixels'):
    # A few pixels have equal scores up to rounding.
    assert two[name] == pytest.approx(one[name], rel=1e-3), name
