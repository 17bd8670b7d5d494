"""Tests of the chains of runs, and of the tables of studies."""

import csv
import json
import pathlib
import shlex

import numpy as np
import pytest
import tensorflow_datasets as tfds
from etils import epath
from finished_runs import finish, run

from tests.faults.counts import further
from vit_jax import study as command
from vit_jax.config import loading
from vit_jax.config.completion import flatten
from vit_jax.data.sources import pseudo_labels
from vit_jax.data.storage import parts
from vit_jax.errors import UserError
from vit_jax.sweeps import grid, jobs, tables
from vit_jax.sweeps.grid import (
  Branch,
  Evaluation,
  Number,
  Row,
  Stage,
  Study,
  Task,
)

CONFIG, TUNING = 'configs/quickstart.py', 'configs/finetune_quickstart.py'
SHOTS = {'evals.fewshot.shots': '(5,10)'}
FEW = Evaluation('fewshot', '5shot', 'test[50%:]', 'digits', flags=SHOTS)
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
  columns = [job for row in graph.values() for job in row.values()]
  found = {job.workdir: job for jobs in columns for job in jobs if job.is_ready}
  return list(found.values())


def test_transfers_wait_for_their_pretraining_and_their_choice(tmp_path):
  """Pre-training, then evaluation and choice of a rate, then the final runs.

  Evaluations get the flags of the data, and only pre-trainings their own.
  """
  flags = ['--config.source.data_dir=d', '--config.batch_size=8']
  given = study_of(r=row()), str(tmp_path), flags, ['--config.total=2'], {}

  def ready():
    return ready_jobs(jobs.of_study(*given))

  (pretrain,) = ready()
  assert pretrain.command == 'train'
  assert {*flags, '--config.total=2'} <= {*pretrain.flags}
  finish(pretrain, 0.5)
  few, *tunings = ready()  # one evaluation has the metrics of both columns
  assert {
    f'--checkpoint={pretrain.workdir}',
    '--config.evals.fewshot.shots=(5,10)',
    flags[0],
  } <= {*few.flags}
  assert flags[1] not in few.flags
  finish(few, 0.25)
  for job, value in zip(tunings, (0.1, 0.9), strict=True):
    start = f'--config.init_from={pretrain.workdir}'
    assert {*flags, start} <= {*job.flags} and job.stage == 'dev'
    assert '--config.total=2' not in job.flags
    finish(job, value)
  final = ready()
  assert [job.seed for job in final] == [0, 1]
  for job in final:
    assert job.stage == 'final'
    assert '--config.schedule.base_lr=0.03' in job.flags  # the better rate
    finish(job, 0.7)
  assert not ready()


def cells(table):
  """Returns a Markdown table: {first cell: {column: cell}}; a path or text."""
  text = table.read_text() if isinstance(table, pathlib.Path) else table
  lines = [line for line in text.splitlines() if line.startswith('|')]
  head, _, *rows = [[c.strip() for c in x.split('|')[1:-1]] for x in lines]
  return {each[0]: dict(zip(head, each, strict=True)) for each in rows}


def test_nothing_starts_from_a_run_that_diverged(tmp_path):
  """The other seed has its transfers, whose table is complete without it."""
  study = study_of(r=row(seeds=(0, 1)))
  first, second = ready_jobs(graph_of(study, tmp_path))
  finish(first, 0.5)
  finish(second, None)
  for _ in range(2):
    for job in ready_jobs(graph_of(study, tmp_path)):
      assert f'from-seed={first.seed}' in job.workdir
      finish(job, 0.5)
  graph = graph_of(study, tmp_path)
  assert ready_jobs(graph) == []
  assert str(tables.spread(graph['r'], grid.UPSTREAM)) == 'diverged'
  assert tables.spread(graph['r'], 'tuned').mean == 0.5


def test_tables_have_measured_and_published_values(tmp_path, capsys):
  """The value of each run is a line of the CSV file; the commands are printed.

  Unfinished columns have no value, and other flags are refused.
  """
  paper = {'tuned': Number(84.15), 'pre-training': Number(60, 0.5)}
  rows = {'r': row(seeds=(0, 1), paper=paper)}
  study = Study(title='s', rows=rows, published={'o': {'tuned': Number(87.5)}})

  def printed():
    run(command, study, tmp_path, overrides=['--x=1'], print_jobs=True)
    return [shlex.split(x)[2] for x in capsys.readouterr().out.splitlines()]

  assert printed() == ['vit_jax.train'] * 2
  first, second = ready_jobs(graph_of(study, tmp_path))
  finish(first, 0.7)
  finish(second, 0.8)
  assert printed().count('vit_jax.evaluate') == 2
  table = cells(tmp_path / 'results.md')
  assert table['r']['pre-training'] == '75.00 ± 7.07 (60 ± 0.5)'
  assert table['r']['tuned'] == '– (84.15)' and table['r']['5-shot'] == '–'
  assert table['o']['tuned'] == '(87.5)' and not table['o']['5-shot']
  with open(tmp_path / 'results.csv', newline='') as file:
    lines = {(r['row'], r['stage'], r['value']) for r in csv.DictReader(file)}
  assert lines == {
    *(('r', 'final', value) for value in ('0.7', '0.8')),
    *(('r', 'paper', value) for value in ('0.8415', '0.6')),
    ('o', 'paper', '0.875'),
  }
  with pytest.raises(UserError, match='--x=1'):
    run(command, study, tmp_path, overrides=['--x=2'], print_jobs=True)


def test_branches_start_from_steps_of_another_run(tmp_path):
  """Each seed branches from its own run, when that is finished."""
  branch = row((0, 1), branch=Branch('long', 3))
  study = study_of(long=row((0, 1)), short=branch)

  def ready():
    found = ready_jobs(graph_of(study, tmp_path))
    return [job for job in found if job.command == 'train']

  trunks = ready()
  assert all(job.name.startswith('long/pretrain/') for job in trunks)
  for job in trunks:
    finish(job, 0.5)
  for trunk, job in zip(trunks, ready(), strict=True):
    assert f'--branch_from={trunk.workdir}@3' in job.flags
    assert not any('init_from' in flag for flag in job.flags)
  given = graph_of(study, tmp_path / 'given', ['long'])['short']
  assert '--branch_from=w@3' in given[grid.UPSTREAM][0].flags


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
  run(command, study, tmp_path, weights=['a=w'], print_jobs=True)
  assert '--weights=c=PATH' in caplog.text
  *started, pretrain = ready_jobs(graph_of(study, tmp_path, ['a']))
  assert len(started) == 3  # few-shot, and two rates
  for job in started:
    assert {'--checkpoint=w', '--config.init_from=w'} & {*job.flags}
  assert pretrain.name.startswith('b/') and pretrain.command == 'train'
  for text, message in (('d=x', '--weights.*(allowed|mean)'), ('a', 'ROW=P')):
    with pytest.raises(UserError, match=message):
      command._weights(study, [text])
  assert command._weights(study, ['a=x=y']) == {'a': 'x=y'}


def test_the_predicted_cost(monkeypatch, capsys):
  """It is multiplied by the seeds; what does not fit is not in the total."""
  rows = {'a': row(seeds=(0, 1)), 'big': row(), 'given': row()}
  rows['short'] = row(branch=Branch('a', 3))
  planned = []
  answers = [(True, 2), (False, 7), (True, 2)]

  def predict(words):
    fits, days = answers[len(planned)]
    planned.append(words)
    made = {'fits': fits, 'predicted_core_days': days, 'total_steps': 4}
    sizes = {'peak_bytes_per_device': 3 * 2**30, 'predicted_step_seconds': 0.5}
    return made | sizes

  monkeypatch.setattr(command.process, 'plan', predict)
  command._print_cost(study_of(**rows), 'v3:2x2', ['--x'], {'given': 'w'})
  flags = f'--config={CONFIG}', '--config.seed=0', '--x', '--topology=v3:2x2'
  assert len(planned) == 3 and {*planned[0]} == {*flags}
  table = cells(capsys.readouterr().out)
  costs = {name: float(line['core-days']) for name, line in table.items()}
  assert [*costs.values()] == [4, 7, 0.5, 4.5] and len(costs) == 4
  assert [line['fits'] for line in table.values()] == ['yes', 'no', 'yes', '']
  assert table['a']['memory per device'] == '3.00 GiB'


@pytest.mark.parametrize(
  'metric, expected', [('accuracy', '50.00'), ('loss', '0.5000')]
)
def test_the_mean_over_several_transfers(tmp_path, metric, expected):
  """It appears when all of their runs are finished; losses are no fractions."""
  final = Stage(TUNING, f'test/{metric}', seeds=(0, 1))
  task = Task(command='finetune', final=final)
  study = study_of(r=Row(pretrain=None, transfers={'V/a': task, 'V/b': task}))
  assert study.rows['r'].columns == ['pre-training', 'V']

  def mean():
    return tables.spread(graph_of(study, tmp_path, 'r')['r'], 'V')

  first = ready_jobs(graph_of(study, tmp_path, 'r'))
  for job, value in zip(first, (0.75, 0.85, 0.1), strict=False):
    finish(job, value)
  assert mean() is None
  finish(first[3], 0.3)
  assert str(mean()) == expected  # of .8 and .2
  (pathlib.Path(first[0].workdir) / 'diverged.json').write_text('{}')
  assert str(mean()) == 'diverged'


def test_variants_of_imagenet_have_its_classes(tmp_path):
  """Labels are matched by name, so all names must be those of ImageNet."""
  [row] = shipped('robustness.py').rows.values()
  assert len(row.transfers) == 5 + 2 + 75 and len(row.columns) == 1 + 8
  datasets = {each.dataset for each in row.transfers.values()}
  assert len(datasets) == 81
  datasets.remove('objectnet')  # it is a source of its own
  names = {}
  for dataset in datasets:
    kind = dataset.partition('/')[0]
    if kind not in names:  # the configs of a data set have the same labels
      builder = tfds.builder(dataset, data_dir=str(tmp_path))
      names[kind] = builder.info.features['label'].names
    known = tfds.builder_cls(kind).builder_configs
    assert dataset.partition('/')[2] in ('', *known)
  expected = names['imagenet2012']
  assert len(expected) == 1_000
  assert all(each == expected for each in names.values())


def test_early_stopping_transfers_from_the_best_step(tmp_path):
  """Transfers start from the best checkpoint that exists."""
  study = study_of(r=row(early_stopping=True))
  (job,) = ready_jobs(graph_of(study, tmp_path))
  workdir = pathlib.Path(job.workdir)
  finish(job, 0.5, steps=9)
  for name in ('3/about', '3/params', '6/about', '6/params'):
    (workdir / 'checkpoints' / name).mkdir(parents=True)
  with open(workdir / 'metrics.jsonl', 'a') as file:
    for step, value in ((1, 0.9), (3, 0.8), (6, 0.8)):
      file.write(json.dumps({'step': step, job.metric: value}) + '\n')
  first, *_ = ready_jobs(graph_of(study, tmp_path))
  assert f'--checkpoint={workdir}/checkpoints/3' in first.flags


@pytest.mark.parametrize(
  'make, message',
  [
    (lambda: row(paper={'tund': Number(1)}), "did you mean 'tuned'"),
    (lambda: study_of(a=row(branch=Branch('b', 1))), "Row.branch of 'a'"),
    (
      lambda: study_of(a=row(), b=row((0, 1), branch=Branch('a', 1))),
      r"seeds of 'b' are \[0, 1\]",
    ),
    (lambda: grid.load(CONFIG, grid.Study), r'get_study\(\)'),
    (lambda: shipped('robustness.py:columns=D'), 'columns=D.*ObjectNet'),
    (lambda: shipped('finetuned.py:table=4'), '2, 5, 6'),
    (lambda: shipped('fewshot.py:figure=4,x=speed'), "x='speed'.*figure=4"),
    (lambda: shipped('fewshot.py'), 'choose a table .*py:table=8.*figure=13'),
    (lambda: shipped('fewshot.py:figure=5'), 'figure=5 is not .*figure=4'),
  ],
)
def test_messages_of_wrong_studies(make, message):
  with pytest.raises(UserError, match=message):
    make()


# (study, number of rows, published number of a row), typed in again.
SHIPPED = [
  ('cifar10.py', 9),
  ('finetuned.py:table=2', 3, 'L/16 i21k', 'VTAB-1k', 72.72),
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
@pytest.mark.parametrize('case', SHIPPED[:1] + further(*SHIPPED[1:]), ids=str)
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
      stages = [what] if isinstance(what, Stage) else [what.dev, what.final]
      for stage in filter(None, stages):
        if stage.config not in known:
          known[stage.config] = loading.load(stage.config)
        config = known[stage.config]
        assert set(stage.flags) <= {*flatten(config), 'model.patch_size'}
        evaluator = stage.metric.partition('/')[0].removesuffix('_ema')
        assert evaluator in config.evals
  with_weights = [f'{next(iter(found.rows))}=weights.npz']
  run(command, found, tmp_path, weights=with_weights, print_jobs=True)
  assert {*cells(tmp_path / 'results.md')} == {*found.rows, *found.published}


def test_figure_8_scales_all_dimensions_by_one_factor():
  """Patches and heads are whole, and the base is on every line."""
  rows = shipped('fewshot.py:figure=8').rows
  path = 'configs/studies/fewshot.py:figure=8'
  lines = loading.call(path, 'get_extras')['figure']['lines']
  base = rows['base'].pretrain.flags
  assert {*lines['base']} == {name for row in lines.values() for name in row}
  together = [rows[name] for name in rows if lines[name] == ('all',)]
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
  path = 'configs/studies/fewshot.py:figure=13,x=speed'
  places = loading.call(path, 'get_extras')['figure']['places']
  assert {*places} == {*grid.load(path, grid.Study).rows}
  for name, place in places.items():
    assert place == table[name.replace('ResNet50x1', 'R50x1')]


def test_rows_of_self_supervision_depend_on_the_arguments(tmp_path):
  """A teacher and a file of labels add a row each."""
  always = ['from scratch', 'from scratch, 10 %', 'masked patch', 'MAE', 'DINO']
  assert [*shipped('self_supervised.py').rows] == always
  path = epath.Path(tmp_path / 'labels')
  parts.save(path / pseudo_labels.SELECTION, {'copies': np.array([45_000])})
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
