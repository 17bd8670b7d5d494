"""Tests of the chains of runs, tables and figures of studies."""

import csv
import json
import math
import pathlib
import shlex

import numpy as np
import pytest
import tensorflow_datasets as tfds
from finished_runs import finish

from tests.faults.counts import further
from vit_jax import study as command
from vit_jax.config import loading
from vit_jax.config.schema import flatten
from vit_jax.errors import UserError
from vit_jax.sweeps import chart, execution, grid, jobs, tables
from vit_jax.sweeps.grid import (
  Branch,
  Derived,
  Evaluation,
  Figure,
  Number,
  OtherMetric,
  Published,
  Row,
  Stage,
  Study,
  Task,
)

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


TRANSFERS = {
  '5-shot': FEW,
  '10-shot': FEW._replace(metric='10shot'),
  'tuned': TUNED,
}


def row(seeds=(0,), **more):
  """Returns a row with an evaluation of two columns and a fine-tuning."""
  return Row(
    pretrain=Stage(CONFIG, 'test/accuracy', seeds=seeds),
    transfers=TRANSFERS,
    **more,
  )


def graph_of(study, workdir, weights=()):
  """Returns the jobs of a study; `weights` are names of rows."""
  given = dict.fromkeys(weights, 'w')
  return jobs.of_study(study, str(workdir), [], [], given)


def study_of(**rows):
  return Study(title='s', rows=rows)


def shipped(name):
  return grid.load(f'configs/studies/{name}', grid.Study)


def ready_jobs(graph):
  """Returns the jobs that can start; shared evaluations occur once."""
  found = {
    job.workdir: job
    for columns in graph.values()
    for column in columns.values()
    for job in column
    if job.is_ready
  }
  return list(found.values())


def spread(study, workdir, column):
  """Returns the value of a column of the row 'r', whose weights are given."""
  graph = graph_of(study, workdir, 'r')
  return tables.spread(study.rows['r'], graph['r'], column)


def test_transfers_follow_their_pretraining(tmp_path, capsys):
  """Pre-training, its transfers, the chosen setting, then nothing."""
  one = Study(
    title='s', rows={'r': row(seeds=(0, 1), paper={'tuned': Number(84.15)})}
  )
  flags = ['--config.source.data_dir=d'], ['--config.total=2 steps']

  def step():
    graph = command.run(one, str(tmp_path), *flags, print_jobs=True)
    ready = ready_jobs(graph)
    lines = capsys.readouterr().out.splitlines()
    assert lines == list(map(execution.line, ready))
    assert len({job.name for job in ready}) == len(ready)
    return ready

  first, second = step()
  for job in (first, second):
    assert job.command == 'train' and job.flags[-2:] == [*flags[0], *flags[1]]
  finish(first, 0.5)
  pretrain, evaluation, *tunings = step()
  assert pretrain.name == second.name and len(tunings) == 2
  assert shlex.split(execution.line(evaluation)) == [
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
  for job, value in zip(tunings, (0.1, 0.9), strict=True):
    expected = [flags[0][0], f'--config.init_from={first.workdir}']
    assert job.flags[-2:] == expected
    finish(job, value)
  finish(evaluation, None)
  result = pathlib.Path(evaluation.workdir) / 'result.json'
  result.write_text('{"5shot": 0.25, "10shot": 0.375}')
  _, *final = step()
  assert [job.stage for job in final] == ['final'] * 2
  for job, value in zip(final, (0.7, 0.8), strict=True):
    assert '--config.schedule.base_lr=0.03' in job.flags
    finish(job, value, steps=5)
  assert [job.name for job in step()] == [second.name]
  text = (tmp_path / 'results.md').read_text()
  assert '| – | – | – | – (84.15) |' in text
  assert 'Not finished: 1 runs' in text
  finish(second, None)  # it diverged, so nothing starts from it
  assert step() == []
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
    command.run(one, str(tmp_path), print_jobs=True)


def test_branches_start_from_steps_of_another_run(tmp_path):
  """Each seed branches from its own run, when that is finished."""
  seeds = (0, 1)
  rows = {'long': row(seeds), 'short': row(seeds, branch=Branch('long', 3))}
  study = Study(title='s', rows=rows)

  def ready():
    graph = graph_of(study, tmp_path)
    return [job for job in ready_jobs(graph) if job.command == 'train']

  trunks = ready()
  assert all(job.name.startswith('long/pretrain/') for job in trunks)
  for job in trunks:
    finish(job, 0.5)
  branches = ready()
  assert all(job.name.startswith('short/pretrain/') for job in branches)
  for trunk, job in zip(trunks, branches, strict=True):
    assert job.flags[-1] == f'--branch_from={trunk.workdir}@3'
    assert not any('init_from' in flag for flag in job.flags)
  given = graph_of(study, tmp_path / 'given', ['long'])['short']
  assert given[grid.UPSTREAM][0].flags[-1] == '--branch_from=w@3'


def test_lengths_branch_at_their_cooldowns():
  """Each branch begins where its cool-down does, at a step that is saved."""
  for model in ('digits', 'B/16'):
    rows = shipped(f'lengths.py:model={model}').rows
    keys = rows.pop('constant').pretrain.flags
    every = int(keys['checkpoint.every'].split()[0])
    assert keys['checkpoint.best'] is None  # whose steps count in `keep`
    for row_of_length in rows.values():
      flags, step = row_of_length.pretrain.flags, row_of_length.branch.step
      total = int(flags['total'].split()[0])
      assert step == total - round(flags['schedule.cooldown'] * total)
      assert step % every == 0 and step // every <= keys['checkpoint.keep']
      assert step <= int(keys['total'].split()[0])


def test_given_weights_replace_a_pretraining(tmp_path, caplog):
  """Nothing is trained for the row; rows without weights are left out."""
  rows = {'a': row(), 'b': row(), 'c': Row(pretrain=None, transfers=TRANSFERS)}
  study = Study(title='s', rows=rows)
  graph = command.run(
    study, str(tmp_path), weights={'a': 'x/B_16.npz'}, print_jobs=True
  )
  started = ready_jobs({'a': graph['a']})
  assert len(started) == 3  # few-shot, and two rates
  for job in started:
    given = {'--checkpoint=x/B_16.npz', '--config.init_from=x/B_16.npz'}
    assert given & {*job.flags}
  assert [job.command for job in ready_jobs({'b': graph['b']})] == ['train']
  assert ready_jobs({'c': graph['c']}) == []
  assert '--weights=c=PATH' in caplog.text
  for text, message in (('d=x', '--weights.*(allowed|mean)'), ('a', 'ROW=P')):
    with pytest.raises(UserError, match=message):
      command._weights(study, [text])
  assert command._weights(study, ['a=x=y']) == {'a': 'x=y'}
  argv = ['study', '--pretrain.total=3 steps', '--pretrain', '--workdir=w']
  assert command._extract_pretrain(argv) == ['--config.total=3 steps']
  assert argv == ['study', '--pretrain', '--workdir=w']


def test_the_predicted_cost(monkeypatch, capsys):
  """It is multiplied by the seeds; what does not fit is not in the total."""
  rows = {'a': row(seeds=(0, 1)), 'big': row(), 'given': row()}
  rows['short'] = row(branch=Branch('a', 3))
  planned = []

  def predict(flags):
    planned.append(flags)
    fits, days = [(True, 2), (False, 7), (True, 2)][len(planned) - 1]
    made = {'fits': fits, 'predicted_core_days': days, 'total_steps': 4}
    sizes = {'peak_bytes_per_device': 3 * 2**30, 'predicted_step_seconds': 0.5}
    return made | sizes

  monkeypatch.setattr(command.process, 'plan', predict)
  command._print_cost(study_of(**rows), 'v3:2x2', ['--x'], {'given': 'w'})
  flags = ['--config.seed=0', '--x', '--topology=v3:2x2']
  assert planned[0] == [f'--config={CONFIG}', *flags]
  lines = capsys.readouterr().out.splitlines()
  assert 'core-days' in lines[0]
  assert lines[2:] == [
    '| a | 2 | yes | 3.00 GiB | 0.5000 | 4.0 |',
    '| big | 1 | no | 3.00 GiB | 0.5000 | 7.0 |',
    '| short | 1 | yes | 3.00 GiB | 0.5000 | 0.5 |',
    '| total of what fits |  |  |  |  | 4.5 |',
  ]


def test_columns_computed_from_several_transfers(tmp_path):
  """Means and derived columns appear when all of their runs are finished."""
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
  study = Study(title='s', rows={'r': derived})
  *first, last = ready_jobs(graph_of(study, tmp_path, 'r'))
  for job, value in zip(first, (0.75, 0.85, 0.1), strict=False):
    finish(job, value)
  assert spread(study, tmp_path, 'V') is None
  finish(first[3], 0.3)
  assert str(spread(study, tmp_path, 'V')) == '50.00'  # of .8 and .2
  assert spread(study, tmp_path, 'ratio') is None
  finish(last, 0.5)
  assert str(spread(study, tmp_path, 'ratio')) == '62.50'  # .5 / .8
  graph = graph_of(study, tmp_path, 'r')
  files = tables.of_study(study, graph)
  text = files['results.md']
  assert '| row | V | B | ratio |' in text  # no column of pre-trainings
  assert '| 62.50 (50) |' in text
  found = csv.DictReader(files['results.csv'].splitlines())
  lines = [line for line in found if line['column'] == 'ratio']
  values = [(line['stage'], float(line['value'])) for line in lines]
  assert values == [('derived', 0.625), ('paper', 0.5)]
  (pathlib.Path(first[0].workdir) / 'diverged.json').write_text('{}')  # V/a
  assert str(spread(study, tmp_path, 'ratio')) == 'diverged'


def test_another_metric_of_the_same_runs(tmp_path):
  """It needs no runs of its own, and its column appears with theirs."""
  one = Row(
    pretrain=Stage(CONFIG, 'test/accuracy'),
    transfers={'B': OtherMetric('A', 'real/accuracy'), 'A': TUNED},
    paper={'B': Number(90.72, 0.05)},
  )
  published = {'other': Published({'A': Number(87.5)}, place=3.0)}
  study = Study(title='s', rows={'r': one}, published=published)
  for values in ((0.1, 0.9), (0.5, 0.7)):
    ready = ready_jobs(graph_of(study, tmp_path, 'r'))
    for job, value in zip(ready, values, strict=True):
      finish(job, value, metric='test/accuracy')
      with open(f'{job.workdir}/metrics.jsonl', 'a') as file:
        file.write(json.dumps({'step': 3, 'real/accuracy': value / 2}) + '\n')
  graph = graph_of(study, tmp_path, 'r')
  assert ready_jobs(graph) == []
  files = tables.of_study(study, graph)
  text = files['results.md']
  assert '| r | 30.00 ± 7.07 (90.72 ± 0.05) | 60.00 ± 14.14 |' in text
  assert '| other |  | (87.5) |' in text
  found = csv.DictReader(files['results.csv'].splitlines())
  lines = [(line['row'], line['column'], line['stage']) for line in found]
  assert lines.count(('r', 'B', 'final')) == 2
  assert ('r', 'B', 'dev') not in lines
  assert ('other', 'A', 'paper') in lines


def test_variants_of_imagenet_have_its_classes(tmp_path):
  """Labels are matched by name, so all names must be those of ImageNet."""
  [row] = shipped('robustness.py').rows.values()
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
  found = shipped('robustness.py:columns=mCE')
  [row] = found.rows.values()
  assert len(row.transfers) == 75 and len(ALEXNET) == 15

  def table(accuracy):
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    for job in ready_jobs(graph_of(found, folder, ['weights'])):
      [dataset] = [f for f in job.flags if f.startswith('--dataset=')]
      name, _, severity = dataset.partition('/')[2].rpartition('_')
      finish(job, accuracy(name, int(severity)))
    columns = graph_of(found, folder, ['weights'])['weights']
    return [
      float(str(tables.spread(row, columns, column)))
      for column in row.columns[1:]
    ]

  # An error of 10, 20, 30, 40 and 50 % for each corruption has the mean 30 %.
  by_hand = sum(30 / error for error in ALEXNET.values()) / 15
  accuracy, mce = table(lambda name, severity: 1 - severity / 10)
  assert accuracy == 70 and mce == pytest.approx(100 * by_hand, abs=0.005)
  spread = {1: -0.02, 2: 0.02, 3: 0, 4: 0.01, 5: -0.01}
  itself = table(lambda name, s: 1 - ALEXNET[name] / 100 + spread[s])
  assert itself[1] == 100
  rest = shipped('robustness.py:columns=Object')
  columns = ['ObjectNet', 'ObjectNet top-5']
  assert rest.rows['weights'].columns == ['pre-training', *columns]
  numbers = dict(zip(columns, (Number(61.7), Number(82.1)), strict=True))
  assert rest.published['ViT-H/14'].paper == numbers
  assert found.published['MAE H'].paper == {'ImageNet-C mCE': Number(33.8)}


def test_early_stopping_transfers_from_the_best_step(tmp_path):
  """Transfers start from the best checkpoint that exists."""
  study = study_of(r=row(early_stopping=True))
  (job,) = ready_jobs(graph_of(study, tmp_path))
  workdir = pathlib.Path(job.workdir)
  finish(job, 0.5, steps=9)
  for step in (3, 6):
    (workdir / f'checkpoints/{step}/about').mkdir(parents=True)
    (workdir / f'checkpoints/{step}/params').mkdir()
  with open(workdir / 'metrics.jsonl', 'a') as file:
    for step, value in ((1, 0.9), (3, 0.8), (6, 0.8)):
      file.write(json.dumps({'step': step, job.metric: value}) + '\n')
  first, *_ = ready_jobs(graph_of(study, tmp_path))
  assert first.flags[0] == f'--checkpoint={workdir}/checkpoints/3'


def test_figure_orders_points_by_x(tmp_path):
  """Published points are in separate arrays."""
  pretrain = Stage(CONFIG, 'test/accuracy')
  two = pretrain._replace(seeds=(0, 1))
  paper = {'pre-training': Number(60)}
  rows = {
    'big': Row(pretrain=two, lines=('L',), place=300),
    'small': Row(pretrain=pretrain, lines=('L', 'M'), place=20, paper=paper),
    'later': Row(pretrain=pretrain, place=20),
  }
  published = {'p': Published({'pre-training': Number(65)}, ('L',), place=400)}

  def drawn(figure):
    study = Study(title='s', rows=rows, published=published, figure=figure)
    arrays = chart.arrays(study, graph_of(study, tmp_path))
    command.run(study, str(tmp_path), print_jobs=True)
    assert {*np.load(tmp_path / 'figure.npz')} == {*arrays}
    assert (tmp_path / 'figure.png').stat().st_size > 5_000
    return arrays

  graph = graph_of(Study(title='s', rows=rows), tmp_path)
  first = [*graph['big']['pre-training'], *graph['small']['pre-training']]
  for job, value in zip(first, (0.7, 0.8, 0.5), strict=True):
    finish(job, value)
    flops = 1e15 if value == 0.5 else 1e16
    record = {'train_flops_per_image': flops, 'num_devices': 1}
    (pathlib.Path(job.workdir) / 'run.json').write_text(json.dumps(record))
  std = 100 * np.std([0.7, 0.8], ddof=1)
  expected = [[20, 300], [50, 75], [0, std]]
  arrays = drawn(Figure('images'))
  for key, points in {
    'L': expected,
    'M': [[20], [50], [0]],
    'M/paper': [[20], [60], [0]],
    'L/paper': [[20, 400], [60, 65], [0, 0]],
  }.items():
    np.testing.assert_allclose(arrays.pop(f'pre-training/{key}'), points)
  assert not arrays
  costs = drawn(Figure('exaflops'))['pre-training/L'][0]
  np.testing.assert_allclose(costs, [3 * 2 * 1e-3, 3 * 2 * 1e-2])
  speed = drawn(Figure('images_per_second'))['pre-training/L']
  np.testing.assert_allclose(speed, expected)
  curve = drawn(Figure('epochs', ('test/accuracy',)))['test/accuracy/big']
  np.testing.assert_allclose(curve, [[3 * 2 / 8], [75], [std]])


@pytest.mark.parametrize(
  'make, message',
  [
    (lambda: row(paper={'tund': Number(1)}), "did you mean 'tuned'"),
    (lambda: row(derived={'d': Derived('A', max)}), "'d' is 'A'"),
    (lambda: study_of(a=row(branch=Branch('b', 1))), "Row.branch of 'a'"),
    (
      lambda: study_of(a=row(), b=row((0, 1), branch=Branch('a', 1))),
      r"seeds of 'b' are \[0, 1\]",
    ),
    (
      lambda: Row(pretrain=None, transfers={'B': OtherMetric('A', 'x/y')}),
      "x/y is 'A'",
    ),
    (lambda: grid.load(CONFIG, grid.Study), r'get_study\(\)'),
    (lambda: shipped('robustness.py:columns=D'), 'columns=D.*ObjectNet'),
    (lambda: shipped('finetuned.py:table=4'), '2, 5, 6'),
    (lambda: shipped('fewshot.py:figure=4,x=speed'), "x='speed'.*figure=4"),
  ],
)
def test_messages_of_wrong_studies(make, message):
  with pytest.raises(UserError, match=message):
    make()


# (study, number of rows, published number of a row), typed in again.
SHIPPED = [
  ('cifar10.py', 9),
  ('finetuned.py:table=2', 3, 'L/16 i21k', 'VTAB-1k', 72.72),
  ('finetuned.py:table=2', 3, 'H/14 jft', 'ReaL', 90.72),
  ('finetuned.py:table=2,real=0', 3, 'L/16 jft', 'CIFAR-10', 99.42),
  ('finetuned.py:table=5', 14, 'L/32 i1k', 'Flowers', 86.36),
  ('finetuned.py:table=7', 4, 'R152x2 sgd', 'Flowers', 99.32),
  ('finetuned.py:table=5', 14, 'H/14 i21k', 'CIFAR-100', 93.82),
  ('finetuned.py:table=5', 14, 'B/16 jft', 'ImageNet', 84.15),
  ('finetuned.py:table=6', 18, 'R50+L/16 14 epochs', 'Flowers', 99.11),
  ('robustness.py', 1),
  ('fewshot.py:table=8', 8, '2d shared', '5-shot', 64.022),
  ('fewshot.py:figure=4', 24),
  ('fewshot.py:figure=4,data=i21k', 16),
  ('fewshot.py:figure=8', 15),
  ('fewshot.py:figure=9', 3),
  ('fewshot.py:figure=13', 6),
  ('fewshot.py:figure=13,x=speed', 6),
  ('position_similarity.py', 3),
  ('lengths.py', 4),
  ('lengths.py:model=L/16,separate=1', 2),
]


@pytest.mark.slow
@pytest.mark.parametrize('case', SHIPPED[:2] + further(*SHIPPED[2:]), ids=str)
def test_shipped_studies_are_complete(case, tmp_path):
  """All configs exist, with the keys that are set and the metric."""
  name, count, *published = case
  found = shipped(name)
  assert len(found.rows) == count
  assert len({jobs.directory(row) for row in found.rows}) == count
  if published:
    each, column, number = published
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
  command.run(found, str(tmp_path), weights=with_weights, print_jobs=True)
  lines = (tmp_path / 'results.md').read_text().splitlines()
  count += len(found.published) + 1  # and the head of the table
  assert sum(line.startswith('| ') for line in lines) == count


def test_figure_8_scales_all_dimensions_by_one_factor():
  """Patches and heads are whole, and the base is on every line."""
  rows = shipped('fewshot.py:figure=8').rows
  base = rows['base'].pretrain.flags
  lines = {n for row in rows.values() for n in row.lines}
  assert {*rows['base'].lines} == lines
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
  rows = grid.load(f'{name},x=speed', grid.Study).rows
  for row, each in rows.items():
    assert each.place == table[row.replace('ResNet50x1', 'R50x1')]


def test_rows_of_self_supervision_depend_on_the_arguments(tmp_path):
  """A teacher and a file of labels add a row each."""
  always = ['from scratch', 'from scratch, 10 %', 'masked patch', 'MAE', 'DINO']
  assert [*shipped('self_supervised.py').rows] == always
  path = tmp_path / 'labels.npz'
  about = json.dumps(dict(count=45_000))
  np.savez(path, soft=np.zeros((1, 10)), copies=[1], index=[0], about=about)
  changes = f'seeds=4,teacher=runs/big,labels={path}'
  rows = shipped(f'self_supervised.py:{changes}').rows
  assert [*rows] == [*always, 'DeiT', 'Noisy Student, 10 %']
  assert rows['DeiT'].pretrain.flags['objective.teacher'] == 'runs/big'
  expected = ['neighbours', 'linear probe', '10 % labels', '100 % labels']
  for name, row in rows.items():
    assert row.pretrain.seeds == (0, 1, 2, 3)
    assert [*row.transfers] == (expected if name in always[2:] else [])
    config = loading.load(row.pretrain.config)
    unknown = {*row.pretrain.flags} - {*flatten(config)}
    assert unknown <= {'objective.teacher'}  # known once the name is 'distill'
    evaluator = row.pretrain.metric.partition('/')[0]
    evaluator = evaluator.removesuffix('_ema').removesuffix('_teacher')
    assert evaluator in config.evals
