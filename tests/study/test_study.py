"""Tests of the chains of runs, tables and figures of studies."""

import csv
import io
import json
import math
import pathlib
import re
import shlex
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds
from finished_runs import finish

from vit_jax.config import loading
from vit_jax.config.completion import flatten
from vit_jax.errors import UserError
from vit_jax.study import __main__ as command
from vit_jax.study import chains, contents, picture, tables
from vit_jax.study.chains import ExtraFlags
from vit_jax.study.contents import (
  Derived,
  Evaluation,
  Figure,
  Number,
  OtherMetric,
  Published,
  Row,
  Study,
)
from vit_jax.sweeps import grid, jobs
from vit_jax.sweeps.grid import Stage, Task

CONFIG, TUNING = 'configs/quickstart.py', 'configs/finetune_quickstart.py'
FEW = Evaluation(
  'fewshot',
  '5shot',
  'test[50%:]',
  'digits',
  flags={'evals.fewshot.shots': '(5,10)'},
)
TUNED = Task(
  command='finetune',
  dev=Stage(TUNING, 'test/accuracy', {'total': '3 steps'}),
  final=Stage(TUNING, 'test/accuracy', seeds=(0, 1)),
  grid={'schedule.base_lr': (0.01, 0.03)},
)


def row(seeds=(0,), **more):
  """Returns a row with an evaluation of two columns and a fine-tuning."""
  return Row(
    pretrain=Stage(CONFIG, 'test/accuracy', seeds=seeds),
    transfers={
      '5-shot': FEW,
      '10-shot': FEW._replace(metric='10shot'),
      'tuned': TUNED,
    },
    **more,
  )


def study(**rows):
  return Study(title='s', rows=rows)


def all_ready(chain):
  """Returns the runs that can start; shared evaluations occur once."""
  ready = [run for each in chain.progress for run in each.ready]
  return list({run.workdir: run for run in ready}.values())


def test_transfers_follow_their_pretraining(tmp_path, capsys):
  """Pre-training, its transfers, the chosen setting, then nothing."""
  given = ExtraFlags(['--config.total=2 steps'], ['--config.source.data_dir=d'])
  one = study(r=row(seeds=(0, 1), paper={'tuned': Number(84.15)}))

  def step():
    found = command.run(one, str(tmp_path), given, print_jobs=True)
    lines = capsys.readouterr().out.splitlines()
    ready = all_ready(found['r'])
    assert lines == list(map(jobs.line, ready)) and len(set(lines)) == len(
      lines
    )
    return found['r'], ready

  _, ready = step()
  assert [run.command for run in ready] == ['train', 'train']
  for run in ready:
    assert run.flags[-2:] == [*given.all, *given.pretrain]
  first, second = ready
  finish(first, 0.5)
  _, ready = step()
  assert ready[0] == second and len(ready) == 4
  evaluation, *tunings = ready[1:]
  assert shlex.split(jobs.line(evaluation)) == [
    'python',
    '-m',
    'vit_jax.evaluate',
    f'--checkpoint={first.workdir}',
    '--evaluator=fewshot',
    '--dataset=digits',
    '--split=test[50%:]',
    f'--out={evaluation.workdir}/result.json',
    '--config.evals.fewshot.shots=(5,10)',
    '--config.source.data_dir=d',
  ]
  for run in tunings:
    assert run.flags[-2:] == [
      given.all[0],
      f'--config.init_from={first.workdir}',
    ]
  found = {'5shot': 0.25, '10shot': 0.375}
  pathlib.Path(evaluation.workdir).mkdir(parents=True)
  result = pathlib.Path(evaluation.workdir) / 'result.json'
  result.write_text(json.dumps(found))
  for run, value in zip(tunings, (0.1, 0.9), strict=True):
    finish(run, value)
  chain, ready = step()
  assert (
    ready[0] == second and [run.stage for run in ready[1:]] == ['final'] * 2
  )
  assert all('--config.schedule.base_lr=0.03' in run.flags for run in ready[1:])
  for run, value in zip(ready[1:], (0.7, 0.8), strict=True):
    finish(run, value, steps=5)
  chain, ready = step()
  assert ready == [second] and chain.spread('tuned') is None
  assert '| – | – | – | – (84.15) |' in (tmp_path / 'results.md').read_text()
  finish(second, None)  # it diverged, so nothing starts from it
  chain, ready = step()
  assert ready == []
  text = (tmp_path / 'results.md').read_text()
  line = '| r | diverged | 25.00 | 37.50 | 75.00 ± 7.07 (84.15) |'
  assert line in text and 'Not finished' not in text
  with open(tmp_path / 'results.csv', newline='') as file:
    rows = list(csv.DictReader(file))
  listed = [(r['column'], r['stage'], float(r['value'])) for r in rows]
  assert listed == [
    ('pre-training', 'final', 0.5),
    ('pre-training', 'final', -math.inf),
    ('5-shot', 'final', 0.25),
    ('10-shot', 'final', 0.375),
    ('tuned', 'dev', 0.1),
    ('tuned', 'dev', 0.9),
    ('tuned', 'final', 0.7),
    ('tuned', 'final', 0.8),
    ('tuned', 'paper', 0.8415),
  ]
  with pytest.raises(UserError, match='--config'):
    command.run(one, str(tmp_path), ExtraFlags(), print_jobs=True)


def test_given_weights_replace_a_pretraining(tmp_path):
  """Nothing is trained for the row; weights of an unknown row are refused."""
  two = study(a=row(), b=row())
  found = command.run(
    two, str(tmp_path), None, {'a': 'x/B_16.npz'}, print_jobs=True
  )
  assert found['a'].pretrain.runs == []
  assert len(all_ready(found['a'])) == 3  # few-shot, and two rates
  for run in all_ready(found['a']):
    assert {'--checkpoint=x/B_16.npz', '--config.init_from=x/B_16.npz'} & {
      *run.flags
    }
  assert [run.command for run in all_ready(found['b'])] == ['train']
  with pytest.raises(UserError, match='--weights.*(allowed|mean)'):
    command.run(two, str(tmp_path), None, {'c': 'x'}, print_jobs=True)
  for text in ('a', 'a='):
    with pytest.raises(UserError, match='ROW=PATH'):
      command._weights([text])
  assert command._weights(['L/16 i21k=x=y']) == {'L/16 i21k': 'x=y'}
  argv = ['study', '--pretrain.total=3 steps', '--pretrain', '--workdir=w']
  assert command._extract_pretrain(argv) == ['--config.total=3 steps']
  assert argv == ['study', '--pretrain', '--workdir=w']


def test_progress_counts_the_whole_study(tmp_path, monkeypatch, caplog):
  """Runs that are not known yet count, and shared evaluations count once."""

  def execute(run):
    if run.command != 'evaluate':
      return finish(run, 0.5)
    workdir = pathlib.Path(run.workdir)
    workdir.mkdir(parents=True)
    (workdir / 'result.json').write_text('{"5shot": 0.2, "10shot": 0.3}')

  monkeypatch.setattr(jobs, '_execute', execute)
  caplog.set_level('INFO', 'vit_jax')
  two = study(a=row(seeds=(0, 1)), b=row())
  command.run(two, str(tmp_path), None, {'b': 'x/B_16.npz'})
  # One evaluation, two settings and two final runs for each of three starts.
  progress = re.findall(r'^(\d+ of \d+): ', '\n'.join(caplog.messages), re.M)
  assert progress == [f'{number} of 17' for number in range(1, 18)]


def test_a_column_is_the_mean_over_its_tasks(tmp_path):
  """It appears when all tasks are finished; they have equal weights."""
  final = Stage(TUNING, 'test/accuracy', seeds=(0, 1))
  task = Task(command='finetune', final=final)
  several = Row(
    pretrain=Stage(CONFIG, 'test/accuracy'),
    transfers={'V/a': task, 'V/b': task},
  )
  assert several.columns == ['pre-training', 'V']

  def now():
    return chains.of_row('r', several, str(tmp_path), ExtraFlags(), 'w')

  *first, last = all_ready(now())
  for run, value in zip(first, (0.5, 0.7, 0.1), strict=True):
    finish(run, value)
  assert now().spread('V') is None
  finish(last, 0.3)
  assert str(now().spread('V')) == '40.00'  # of .6 and .2
  chain = {'r': now()}
  text = tables.markdown(Study(title='s', rows={'r': several}), chain)
  assert '| row | V |' in text  # without a pre-training, it has no column


def test_another_metric_of_the_same_runs(tmp_path, capsys):
  """It needs no runs of its own, and its column appears with theirs."""
  rows = {
    'r': Row(
      pretrain=Stage(CONFIG, 'test/accuracy'),
      transfers={'A': TUNED, 'B': OtherMetric('A', 'real/accuracy')},
      paper={'B': Number(90.72, 0.05)},
    )
  }
  published = {'other': Published({'A': Number(87.5)}, place=3.0)}
  one = Study(title='s', rows=rows, published=published)

  def ready():
    found = command.run(one, str(tmp_path), None, {'r': 'w'}, print_jobs=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(all_ready(found['r']))
    return all_ready(found['r'])

  for run, value in zip(ready(), (0.1, 0.9), strict=True):
    finish(run, value)
  final = ready()
  assert [run.stage for run in final] == ['final'] * 2
  for run, value in zip(final, (0.5, 0.7), strict=True):
    finish(run, value, metric='test/accuracy')
    with open(f'{run.workdir}/metrics.jsonl', 'a') as file:
      file.write(json.dumps({'step': 3, 'real/accuracy': value / 2}) + '\n')
  assert ready() == []
  text = (tmp_path / 'results.md').read_text()
  assert '| r | 60.00 ± 14.14 | 30.00 ± 7.07 (90.72 ± 0.05) |' in text
  assert '| other | (87.5) |  |' in text
  with open(tmp_path / 'results.csv', newline='') as file:
    lines = [(r['row'], r['column'], r['stage']) for r in csv.DictReader(file)]
  assert lines.count(('r', 'B', 'final')) == 2
  assert ('r', 'B', 'dev') not in lines
  assert ('other', 'A', 'paper') in lines


def test_a_row_that_needs_weights(tmp_path, capsys, caplog):
  """Without weights nothing can start, and the log names the flag."""
  rows = {'r': Row(pretrain=None, transfers={'5-shot': FEW})}
  one = Study(title='s', rows=rows)
  command.run(one, str(tmp_path), print_jobs=True)
  assert capsys.readouterr().out == ''
  assert '--weights=ROW=PATH for r' in caplog.text
  command.run(one, str(tmp_path), None, {'r': 'w'}, print_jobs=True)
  [line] = capsys.readouterr().out.splitlines()
  assert '--checkpoint=w' in line


def test_variants_of_imagenet_have_its_classes(tmp_path):
  """Labels are matched by name, so all names must be those of ImageNet."""
  [row] = contents.load('configs/studies/robustness.py').rows.values()
  assert len(row.transfers) == 5 + 2 + 75 and len(row.columns) == 1 + 9
  datasets = {each.dataset for each in row.transfers.values()}
  assert len(datasets) == 81
  datasets.remove('objectnet')  # it is a source of its own
  names = {}
  for dataset in datasets:
    kind = dataset.partition('/')[0]
    if kind not in names:  # the configs of a data set have the same labels
      builder = tfds.builder(dataset, data_dir=str(tmp_path))
      names[kind] = builder.info.features['label'].names
    assert dataset.partition('/')[2] in (
      '',
      *tfds.builder_cls(kind).builder_configs,
    )
  expected = names['imagenet2012']
  assert len(expected) == 1_000
  assert all(each == expected for each in names.values())


def test_a_column_derived_from_others(tmp_path):
  """It is computed from means over runs, when all of them are finished."""
  final = Stage(TUNING, 'test/accuracy', seeds=(0, 1))
  task = Task(command='finetune', final=final)
  ratio = Derived(['B', 'V/a'], lambda values: values['B'] / values['V/a'])
  derived = Row(
    pretrain=Stage(CONFIG, 'test/accuracy'),
    transfers={'V/a': task, 'V/b': task, 'B': FEW},
    derived={'ratio': ratio},
    paper={'ratio': Number(50)},
  )
  assert derived.columns == ['pre-training', 'V', 'B', 'ratio']
  shown = Study(
    title='s', rows={'r': derived}, figure=Figure('images', ('ratio',))
  )

  def now():
    return chains.of_row('r', derived, str(tmp_path), ExtraFlags(), 'w')

  *first, last = all_ready(now())
  for run, value in zip(first, (0.75, 0.85, 0.1, 0.1), strict=True):
    finish(run, value)
  assert now().spread('ratio') is None
  assert '| – (50) |' in tables.markdown(shown, {'r': now()})
  finish(last, 0.5)
  assert str(now().spread('ratio')) == '62.50'  # .5 / .8
  assert tables.points('ratio', now()) == (62.5, 0)
  assert '| 62.50 (50) |' in tables.markdown(shown, {'r': now()})
  found = list(csv.DictReader(io.StringIO(tables.rows(shown, {'r': now()}))))
  assert [
    (line['stage'], float(line['value']))
    for line in found
    if line['column'] == 'ratio'
  ] == [('derived', 0.625), ('paper', 0.5)]
  (pathlib.Path(first[0].workdir) / 'diverged.json').write_text('{}')  # V/a
  assert str(now().spread('ratio')) == 'diverged'
  assert tables.points('ratio', now()) is None


# Errors of AlexNet in %, typed in again in another order.
ALEXNET = dict(
  brightness=56.4592,
  contrast=85.3204,
  defocus_blur=81.9880,
  elastic_transform=64.6056,
  fog=81.9324,
  frost=82.6572,
  gaussian_noise=88.6428,
  glass_blur=82.6268,
  impulse_noise=92.2640,
  jpeg_compression=60.6500,
  motion_blur=78.5948,
  pixelate=71.7840,
  shot_noise=89.4468,
  snow=86.6816,
  zoom_blur=79.8360,
)


def test_mean_corruption_error(tmp_path):
  """AlexNet has 100 %; the other columns do not need ImageNet-C."""
  found = contents.load('configs/studies/robustness.py:columns=mCE')
  [row] = found.rows.values()
  assert len(row.transfers) == 75 and len(ALEXNET) == 15

  def table(accuracy):
    folder = str(tmp_path / str(len(list(tmp_path.iterdir()))))
    for run in all_ready(chains.of_row('r', row, folder, ExtraFlags(), 'w')):
      [flag] = [f for f in run.flags if f.startswith('--dataset=')]
      name, _, severity = flag.partition('/')[2].rpartition('_')
      finish(run, accuracy(name, int(severity)))
    chain = chains.of_row('r', row, folder, ExtraFlags(), 'w')
    [line] = [
      line.split(' | ')
      for line in tables.markdown(found, {'weights': chain}).splitlines()
      if line.startswith('| weights')
    ]
    return [float(cell.strip(' |')) for cell in line[1:]]

  # An error of 10, 20, 30, 40 and 50 % for each corruption has the mean 30 %.
  by_hand = sum(30 / error for error in ALEXNET.values()) / 15
  accuracy, mce = table(lambda name, severity: 1 - severity / 10)
  assert accuracy == 70 and mce == pytest.approx(100 * by_hand, abs=0.005)
  spread = {1: -0.02, 2: 0.02, 3: 0, 4: 0.01, 5: -0.01}
  itself = table(lambda name, s: 1 - ALEXNET[name] / 100 + spread[s])
  assert itself[1] == 100
  rest = contents.load('configs/studies/robustness.py:columns=Object')
  assert rest.rows['weights'].columns == [
    'pre-training',
    'ObjectNet',
    'ObjectNet top-5',
  ]
  assert rest.published['ViT-H/14'].paper == {
    'ObjectNet': Number(61.7),
    'ObjectNet top-5': Number(82.1),
  }
  assert set(found.published) == {'MAE B', 'MAE L', 'MAE H'}
  assert found.published['MAE H'].paper == {'ImageNet-C mCE': Number(33.8)}


def test_early_stopping_transfers_from_the_best_step(tmp_path):
  """Transfers start from the best checkpoint that exists."""
  early = row(early_stopping=True)

  def now():
    return chains.of_row('r', early, str(tmp_path), ExtraFlags())

  (run,) = all_ready(now())
  finish(run, 0.5, steps=9)
  workdir = pathlib.Path(run.workdir)
  for step in (3, 6):
    (workdir / f'checkpoints/{step}/about').mkdir(parents=True)
    (workdir / f'checkpoints/{step}/params').mkdir()
  with open(workdir / 'metrics.jsonl', 'a') as file:
    for step, value in ((1, 0.9), (3, 0.8), (6, 0.8)):
      file.write(json.dumps({'step': step, run.metric: value}) + '\n')
  ready = all_ready(now())
  assert ready[0].flags[0] == f'--checkpoint={workdir}/checkpoints/3'


def test_a_failing_row_does_not_stop_the_others(tmp_path, monkeypatch):
  """The final message lists the errors."""
  script = tmp_path / 'python'
  script.write_text(f'#!/bin/sh\necho "$4" >> {tmp_path}/all\necho why\nexit 2')
  script.chmod(0o755)
  monkeypatch.setattr(sys, 'executable', str(script))
  two = study(a=row(seeds=(0, 1)), b=row())
  with pytest.raises(UserError, match=r'(?s)a: .*why.*b: .*why') as e:
    command.run(two, str(tmp_path / 'w'))
  assert str(e.value).count('exit code 2') == 2
  tried = (tmp_path / 'all').read_text().splitlines()
  assert [re.findall(r'w/(\w)/', line) for line in tried] == [['a'], ['b']]


def _trained(run, value, flops):
  """Writes a finished pre-training with its cost."""
  finish(run, value)
  workdir = pathlib.Path(run.workdir)
  run_record = {'train_flops_per_image': flops, 'num_devices': 1}
  (workdir / 'run.json').write_text(json.dumps(run_record))


def test_figure_orders_points_by_x(tmp_path):
  """Published points are in separate arrays."""
  pretrain = Stage(CONFIG, 'test/accuracy')
  rows = {
    'big': Row(
      pretrain=pretrain._replace(seeds=(0, 1)), lines=('L',), place=300
    ),
    'small': Row(
      pretrain=pretrain,
      lines=('L', 'M'),
      place=20,
      paper={'pre-training': Number(60)},
    ),
    'later': Row(pretrain=pretrain, place=20),
  }
  published = {
    'given': Published({'pre-training': Number(65)}, ('L',), place=400)
  }
  shown = Study(
    title='s', rows=rows, published=published, figure=Figure('images')
  )

  def now(workdir=tmp_path):
    return {
      name: chains.of_row(name, each, str(workdir), ExtraFlags())
      for name, each in rows.items()
    }

  first = now()
  for run, value in zip(first['big'].pretrain.runs, (0.7, 0.8), strict=True):
    _trained(run, value, 10**16)
  _trained(first['small'].pretrain.runs[0], 0.5, 10**15)
  found = picture.arrays(shown, now())
  deviation = 100 * np.std([0.7, 0.8], ddof=1)
  expected = [[20, 300], [50, 75], [0, deviation]]
  np.testing.assert_allclose(found['pre-training/L'], expected)
  np.testing.assert_allclose(found['pre-training/M'], [[20], [50], [0]])
  np.testing.assert_allclose(found['pre-training/M/paper'], [[20], [60], [0]])
  paper = found['pre-training/L/paper']
  np.testing.assert_allclose(paper, [[20, 400], [60, 65], [0, 0]])
  assert len(found) == 4
  over = Study(title='s', rows=rows, figure=Figure('exaflops'))
  costs = picture.arrays(over, now())['pre-training/L'][0]
  np.testing.assert_allclose(costs, [3 * 2 * 1e-3, 3 * 2 * 1e-2])
  speed = Study(title='s', rows=rows, figure=Figure('images_per_second'))
  points = picture.arrays(speed, now())['pre-training/L']
  np.testing.assert_allclose(points, expected)
  course = Study(
    title='s', rows=rows, figure=Figure('epochs', ('test/accuracy',))
  )
  arrays = picture.arrays(course, now())
  np.testing.assert_allclose(
    arrays['test/accuracy/big'], [[3 * 2 / 8], [75], [deviation]]
  )
  for each in (shown, over, speed, course):
    png = picture.figure(each, picture.arrays(each, now()))
    assert png[:4] == b'\x89PNG' and len(png) > 5_000
  command.run(shown, str(tmp_path), print_jobs=True)
  saved = np.load(io.BytesIO((tmp_path / 'figure.npz').read_bytes()))
  assert set(saved) == set(found) and (tmp_path / 'figure.png').exists()


def test_messages_of_wrong_studies():
  for make, message in [
    (lambda: row(paper={'tund': Number(1)}), "did you mean 'tuned'"),
    (lambda: Study(title='s', rows={}), 'has no rows'),
    (
      lambda: Row(
        pretrain=Stage(CONFIG, 'm'), transfers={'B': OtherMetric('A', 'x/y')}
      ),
      "'x/y'.*'A'",
    ),
    (
      lambda: Study(title='s', rows={'a': row()}, figure=Figure('x')),
      "'x'; allowed",
    ),
    (
      lambda: Row(
        pretrain=None, transfers={'B': FEW}, derived={'d': Derived('A', max)}
      ),
      "'d'.*'A'",
    ),
    (
      lambda: contents.load('configs/studies/robustness.py:columns=D'),
      'columns=D.*ObjectNet',
    ),
    (lambda: contents.load(CONFIG), r'get_study\(\)'),
    (lambda: contents.load('configs/studies/finetuned.py:table=4'), '2, 5, 6'),
    (lambda: contents.load('configs/studies/finetuned.py:rows=Q'), 'rows=Q'),
    (lambda: contents.load('configs/studies/fewshot.py:figure=5'), 'not here'),
    (
      lambda: contents.load('configs/studies/fewshot.py:figure=8,data=i21k'),
      "data='i21k'.*figure=8",
    ),
    (
      lambda: contents.load('configs/studies/fewshot.py:figure=4,x=speed'),
      "x='speed'.*figure=4",
    ),
  ]:
    with pytest.raises(UserError, match=message):
      make()


# (study, number of rows, published numbers of some rows), typed in again.
SHIPPED = [
  ('cifar10.py', 9, {}),
  ('finetuned.py:table=2', 3, {'L/16 i21k': {'VTAB-1k': 72.72}}),
  ('finetuned.py:table=2', 3, {'H/14 jft': {'ReaL': 90.72}}),
  ('finetuned.py:table=2,real=0', 3, {'L/16 jft': {'CIFAR-10': 99.42}}),
  ('finetuned.py:table=5', 14, {'L/32 i1k': {'Flowers': 86.36}}),
  ('finetuned.py:table=7', 4, {'R152x2 sgd': {'Flowers': 99.32}}),
  ('finetuned.py:table=5', 14, {'H/14 i21k': {'CIFAR-100': 93.82}}),
  ('finetuned.py:table=5', 14, {'B/32 i1k': {'Flowers': 85.43}}),
  ('finetuned.py:table=5', 14, {'B/16 jft': {'ImageNet': 84.15}}),
  ('finetuned.py:table=6', 18, {'R50+L/16 14 epochs': {'Flowers': 99.11}}),
  ('robustness.py', 1, {}),
  ('fewshot.py:table=8', 8, {'2d shared': {'5-shot': 64.022}}),
  ('fewshot.py:figure=4', 24, {}),
  ('fewshot.py:figure=4,data=i21k', 16, {}),
  ('fewshot.py:figure=8', 15, {}),
  ('fewshot.py:figure=9', 3, {}),
  ('fewshot.py:figure=13', 6, {}),
  ('fewshot.py:figure=13,x=speed', 6, {}),
  ('position_similarity.py', 3, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize('name, count, numbers', SHIPPED, ids=lambda x: str(x))
def test_shipped_studies_are_complete(name, count, numbers, tmp_path):
  """All configs exist, with the keys that are set and the metric."""
  found = contents.load(f'configs/studies/{name}')
  assert len(found.rows) == count
  for each, columns in numbers.items():
    for column, number in columns.items():
      assert found.rows[each].paper[column].mean == number
  known = {}
  for each in found.rows.values():
    for what in [each.pretrain, *each.transfers.values()]:
      if what is None or isinstance(what, Evaluation):
        continue
      if isinstance(what, OtherMetric):
        final = each.transfers[what.of].final
        what = final._replace(metric=what.metric)
      stages = [what] if isinstance(what, Stage) else [what.dev, what.final]
      for stage in filter(None, stages):
        if stage.config not in known:
          known[stage.config] = loading.load(stage.config)
        config = known[stage.config]
        assert set(stage.flags) <= {*flatten(config), 'model.patch_size'}
        evaluator = stage.metric.partition('/')[0].removesuffix('_ema')
        assert evaluator in config.evals
  with_weights = {name: 'weights.npz' for name in list(found.rows)[:1]}
  command.run(found, str(tmp_path), None, with_weights, print_jobs=True)
  lines = (tmp_path / 'results.md').read_text().splitlines()
  count += len(found.published) + 1  # and the head of the table
  assert sum(line.startswith('| ') for line in lines) == count


def test_rows_have_different_directories():
  for name in dict.fromkeys(name for name, *_ in SHIPPED):
    rows = contents.load(f'configs/studies/{name}').rows
    assert len({grid.directory(row) for row in rows}) == len(rows)


def test_figure_8_scales_all_dimensions_by_one_factor():
  """Patches and heads are whole, and the base is on every line."""
  rows = contents.load('configs/studies/fewshot.py:figure=8').rows
  base = rows['base'].pretrain.flags
  assert {*rows['base'].lines} == {
    n for row in rows.values() for n in row.lines
  }
  together = [row for row in rows.values() if row.lines == ('all',)]
  assert len(together) == 3
  for flags in (row.pretrain.flags for row in together):
    patch, width = flags['model.patch_size'], flags['model.width']
    factor = base['model.patch_size'] / patch
    for key in ('model.depth', 'model.width', 'model.mlp_dim'):
      assert flags[key] / base[key] == pytest.approx(factor, rel=0.1)
    assert 224 % patch == 0 and width == 64 * flags['model.num_heads']


def test_figure_13_has_the_speeds_of_the_table():
  """They are those of benchmarks/inference.csv for a core of TPU v3."""
  with open('benchmarks/inference.csv', newline='') as file:
    table = {
      line['model']: float(line['images_per_second'])
      for line in csv.DictReader(file)
      if (line['topology'], line['pixels']) == ('v3:1x1', '224')
    }
  name = 'configs/studies/fewshot.py:figure=13'
  rows = contents.load(f'{name},x=speed').rows
  for row, each in rows.items():
    assert each.place == table[row.replace('ResNet50x1', 'R50x1')]
  same = contents.load(name).rows
  assert [r.pretrain for r in same.values()] == [
    r.pretrain for r in rows.values()
  ]


def test_figure_10_draws_position_embeddings():
  """All rows are the L/16 of Table 3, and draw figures at their end."""
  name = 'configs/studies/position_similarity.py'
  rows = contents.load(name).rows.values()
  assert {row.pretrain.config for row in rows} == {name}
  values = loading.load(name).to_dict()
  assert values['evals'].pop('figures')['name'] == 'figures'
  plain = loading.load('configs/vit.py:variant=L/16,data=jft')
  assert values == plain.to_dict()
