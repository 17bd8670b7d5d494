"""Tests of the objectives with the real commands, on small models."""

import functools
import json
import math
import shutil

import numpy as np
import pytest

from tests import cli


def under(path, **values):
  """Returns flags of the keys of a section."""
  return {f'{path}.{key}': value for key, value in values.items()}


SMALL = cli.QUIET | {
  **under('source', name='synthetic', num_examples=64, num_classes=10),
  'train.num_examples': 64,
  'image_size': 16,
  'batch_size': 16,
  'micro_batches': 2,
  'total': '40 steps',
  'schedule.warmup': '2 steps',
  'checkpoint.every': '5 steps',
}
SIZES = dict(width=16, mlp_dim=24, num_heads=2, dtype='float32', unroll=1)
MODEL = under('model', **SIZES)
MASKED = MODEL | {
  'model.depth': 12,  # the depth of B, for the rules of its fine-tuning
  'evals.test.every': '20 steps',
}
DECODER = dict(width=16, depth=1, num_heads=2, mlp_dim=16)
MAE = MASKED | {'model.pool': 'token', **under('objective.decoder', **DECODER)}
HEAD = dict(hidden=24, bottleneck=8, dtype='float32')
DINO = MODEL | {
  **under('augment', local_crops=2, local_size=8),
  **under('model', patch_size=4, depth=2),
  **under('objective.head', outputs=32, **HEAD),
  'objective.temperature_warmup': '2 epochs',
  **under('evals.knn', every='20 steps', ks='5'),
  'checkpoint.best': 'knn_teacher/5nn',
}
DINOV2 = DINO | {
  **under('augment', patch_size=4, group=4),
  # With the recipe's 1e-5, the class tokens of all images are at first so
  # similar that rounding determines the nearest neighbours of KoLeo.
  'model.layer_scale': 1.0,
  'optimizer.rules': "(('.*head/last/.*', {'lr_after': '8 steps'}),)",
}
# Steps of three sizes; the Gram teacher is replaced before and after the kill.
GRAM = DINOV2 | {
  'augment.sizes': '((0.4, 16, 8, 32), (0.3, 24, 8, 32), (0.3, 24, 16, 48))',
  **under('objective.patch_head', outputs=24, **HEAD),
  'objective.gram_warmup': '4 steps',
  'objective.gram_replace': "('4 steps', '12 steps')",
  'optimizer.rules': '()',
}
# Config, its changes, and the metric of the nearest neighbours.
RUNS = {
  'mae': ('cifar10.py:objective=mae', MAE, 'test/20nn'),
  'masked_patch': ('cifar10.py:objective=masked_patch', MASKED, 'test/20nn'),
  'dino': ('dino.py', DINO, 'knn/5nn'),
  'dinov2': ('dinov2.py:recipe=short,model=S,patch=16', DINOV2, 'knn/5nn'),
  'dinov3': ('dinov3.py:recipe=gram,model=S,stage=highres', GRAM, 'knn/5nn'),
}


def command_of(name, workdir):
  config, changes, _ = RUNS[name]
  flags = cli.flags(f'configs/{config}', workdir, SMALL | changes)
  return cli.command('train', *flags)


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """Returns a function from an objective to the workdir of a whole run."""

  @functools.cache
  def run(name):
    workdir = tmp_path_factory.mktemp(name) / 'run'
    cli.run(command_of(name, workdir))
    return workdir

  return run


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize('name', RUNS)
def test_a_killed_run_equals_an_uninterrupted_one(name, trained, tmp_path):
  """`evaluate` gives the results of the run, for all of its weights."""
  again = command_of(name, tmp_path)
  process = cli.start(again)
  cli.wait_for_step(tmp_path, 7, [process])
  process.kill()
  process.communicate()
  _, log = cli.run(again)
  sizes = 3 if name == 'dinov3' else 1
  assert log.count('compiling the training step') == sizes
  straight, (_, _, metric) = trained(name), RUNS[name]
  assert cli.lines(tmp_path) == cli.lines(straight)
  cli.assert_same_params(tmp_path, straight)
  losses = [line for line in cli.lines(straight) if 'loss' in line]
  assert [line['step'] for line in losses] == list(range(1, 41))
  for line in losses:
    if name in ('dino', 'dinov3'):
      entropy = line['entropy_share'] * math.log(32)
      assert line['teacher_entropy'] == pytest.approx(entropy, rel=1e-5)
    if name == 'dinov2':
      total = line['crop_loss'] + line['patch_loss'] + 0.1 * line['koleo']
      assert line['loss'] == pytest.approx(total, rel=1e-5)
  if name == 'dinov3':
    # The run starts from its Gram teacher, at another resolution.
    assert all(0 < line['gram'] < 0.5 for line in losses)
  *_, last = (line for line in cli.lines(straight) if metric in line)
  key = metric.partition('/')[2]
  out, _ = cli.run(
    cli.command(
      'evaluate',
      f'--checkpoint={tmp_path}',
      '--evaluator=neighbours',
      f'--split={"validation" if name.startswith("dino") else "test"}',
      f'--config.evals.neighbours.ks={key.removesuffix("nn")}',
      '--json',
    )
  )
  scores = json.loads(out)
  assert scores[key] == last[metric]
  if name.startswith('dino'):
    assert scores[f'teacher/{key}'] == last[metric.replace('/', '_teacher/')]


@pytest.mark.long
def test_two_processes_draw_the_same_sizes(trained, tmp_path):
  for process in cli.start_group(command_of('dinov3', tmp_path)):
    cli.finish(process)
  ours, theirs = cli.losses(tmp_path), cli.losses(trained('dinov3'))
  for step in range(1, 9):
    assert ours[step] == pytest.approx(theirs[step], rel=1e-4), step


TUNED = SMALL | {
  'num_classes': 10,
  'micro_batches': 1,
  'total': '2 steps',
  'schedule.warmup': '1 steps',
  'schedule.base_lr': 0.0,
  'model.dtype': 'float32',
}


@pytest.mark.long
@pytest.mark.parametrize(
  'name, config',
  [
    ('mae', 'configs/finetune_mae.py:model=B'),
    ('masked_patch', 'configs/finetune.py:data=cifar10'),
  ],
)
def test_finetuning_keeps_the_encoder(name, config, trained, tmp_path):
  """Head and, after MAE, the norm of the mean are new."""
  values = TUNED | {
    'init_from': trained(name),
    'model.pixels': 'symmetric',  # other units change the embedding
    'model.unroll': 1,
  }
  cli.run(cli.command('finetune', *cli.flags(config, tmp_path, values)))
  after = cli.final_params(tmp_path)
  body = {
    path.removeprefix('model/'): leaf
    for path, leaf in cli.final_params(trained(name)).items()
    if path.startswith('model/')
  }
  new = {'head/kernel', 'head/bias'}
  if name == 'mae':
    new |= {'fc_norm/scale', 'fc_norm/bias'}
    assert {'encoder/norm/scale', 'encoder/norm/bias'} == body.keys() - after
  assert after.keys() - body == new
  for path in body.keys() & after.keys():
    np.testing.assert_array_equal(after[path], body[path], err_msg=path)


@pytest.mark.long
@pytest.mark.parametrize('kind', ['dino', 'mae'])
def test_a_probe_is_resumed_and_evaluated(kind, trained, tmp_path):
  """The backbone stays that of the pre-training; the head learns."""
  pretrained, workdir = trained('mae'), tmp_path / 'probe'
  values = TUNED | {
    'init_from': pretrained,
    'num_classes': 0,
    'objective.num_classes': 10,
    **under('evals.val', split='test', every='2 steps'),
    'checkpoint.every': '2 steps',
    'total': '4 steps',
    'schedule.base_lr': 0.5,
    'model.unroll': 1,
  }
  flags = cli.flags(f'configs/linear_{kind}.py:model=B', workdir, values)
  cli.run(cli.command('finetune', *flags))
  losses, params = cli.losses(workdir), cli.final_params(workdir)
  accuracy = cli.records(workdir)[-1]['val/accuracy']
  assert list(losses) == [1, 2, 3, 4]
  shutil.rmtree(workdir / 'checkpoints' / '4')
  cli.run(cli.command('finetune', *flags))
  assert cli.losses(workdir) == losses
  cli.assert_same_params(workdir, params)
  for path, array in cli.final_params(pretrained).items():
    if path.startswith('model/'):
      np.testing.assert_array_equal(params[path], array, err_msg=path)
  assert params['head/kernel'].shape[1] == 10 and params['head/bias'].any()
  out, _ = cli.run(
    cli.command('evaluate', f'--checkpoint={workdir}', '--split=test', '--json')
  )
  assert json.loads(out)['accuracy'] == accuracy
  # The backbone of a probe is loaded without the linear layer.
  arguments = '--dataset=synthetic', '--split=test', f'--out={tmp_path}/f.npz'
  cli.run(cli.command('features', f'--checkpoint={workdir}', *arguments))
  width = np.load(tmp_path / 'f.npz')['features'].shape[1]
  assert width == params['head/kernel'].shape[0]


@pytest.mark.long
def test_a_teacher_is_not_part_of_checkpoints(tmp_path):
  """It is opened by its path, and evaluations do not need it."""
  teacher, workdir = tmp_path / 'teacher', tmp_path / 'run'
  cli.train(teacher, total='2 steps', schedule__warmup='1 steps')
  config = f'configs/deit.py:model=Ti,teacher={teacher}'
  size = {'image_size': 32, 'num_classes': 20, 'source.num_classes': 20}
  values = SMALL | MODEL | size | {'model.depth': 2, 'total': '4 steps'}
  values |= {'micro_batches': 1, 'checkpoint.best': 'None'}
  cli.run(cli.command('train', *cli.flags(config, workdir, values)))
  for line in cli.lines(workdir):
    if 'loss' in line:
      half = (line['label_loss'] + line['teacher_loss']) / 2
      assert line['loss'] == pytest.approx(half, rel=1e-5)
      assert 0 <= line['agreement'] <= 1
  params = cli.final_params(workdir)
  assert 'distillation' in params and not any('teacher' in p for p in params)
  teacher.rename(tmp_path / 'elsewhere')
  out, _ = cli.run(cli.command('evaluate', f'--checkpoint={workdir}', '--json'))
  assert json.loads(out)['count'] == 64
  new = cli.flags(config, tmp_path / 'new', values)
  _, err = cli.run(cli.command('train', *new), code=2)
  assert str(teacher) in err and 'Traceback' not in err


CONTRASTIVE = {
  'total': '12 steps',
  'batch_size': 32,
  'micro_batches': 2,
  **under('log', every='1 steps', report='false', curves='false'),
  'checkpoint.every': '3 steps',
  'evals.zero.every': '6 steps',
  'model.depth': 1,
  'objective.text.depth': 1,
}


@pytest.mark.long
def test_a_killed_run_with_texts_is_exact_and_two_processes_equal_one(tmp_path):
  """Losses, accuracies and parameters, with micro-batches."""

  def train(name):
    flags = cli.flags('configs/lit_toy.py', tmp_path / name, CONTRASTIVE)
    return cli.command('train', *flags)

  straight, killed, two = (tmp_path / n for n in ('straight', 'killed', 'two'))
  cli.run(train('straight'))
  file = killed / 'metrics.jsonl'
  cli.kill_when(
    train('killed'),
    lambda: file.exists() and '"step": 5,' in file.read_text(),
    'a run with images and texts',
    timeout_s=240,
  )
  cli.run(train('killed'))
  assert cli.lines(killed) == cli.lines(straight)
  cli.assert_same_params(killed, straight)

  for process in cli.start_group(train('two')):
    cli.finish(process)
  one = cli.losses(straight)
  assert [*one] == [*range(1, 13)]
  assert cli.losses(two) == pytest.approx(one, rel=1e-5)
  accuracies = [
    [r['zero/accuracy'] for r in cli.records(w) if 'zero/accuracy' in r]
    for w in (straight, two)
  ]
  assert accuracies[0] == pytest.approx(accuracies[1], abs=0.01)
  assert len(accuracies[0]) == 2
