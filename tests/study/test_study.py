"""Chains of runs, given weights, tables and figures of studies."""

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
from done import finish

from vit_jax.config import loading
from vit_jax.config.completion import flatten
from vit_jax.errors import UserError
from vit_jax.study import __main__ as command
from vit_jax.study import chains, contents, picture, tables
from vit_jax.study.chains import Given
from vit_jax.study.contents import Evaluation, Figure, Row, Study
from vit_jax.sweeps import grid, jobs
from vit_jax.sweeps.grid import Stage, Task

CONFIG, TUNING = 'configs/quickstart.py', 'configs/finetune_quickstart.py'
FEW = Evaluation(
  *('fewshot', '5shot', 'test[50%:]', 'digits'),
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


def test_a_transfer_waits_for_its_pretraining(tmp_path, capsys):
  """Pre-training, its transfers, the chosen setting, then nothing."""
  given = Given(['--config.total=2 steps'], ['--config.source.data_dir=d'])
  one = study(r=row(seeds=(0, 1), paper={'tuned': 84.15}))

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
    *('python', '-m', 'vit_jax.evaluate', f'--checkpoint={first.workdir}'),
    *('--evaluator=fewshot', '--dataset=digits', '--split=test[50%:]'),
    f'--out={evaluation.workdir}/result.json',
    *('--config.evals.fewshot.shots=(5,10)', '--config.source.data_dir=d'),
  ]
  for run in tunings:
    assert run.flags[-2:] == [
      *(given.all[0], f'--config.init_from={first.workdir}')
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
  finish(second, None)  # it diverged: nothing starts from it
  chain, ready = step()
  assert ready == []
  text = (tmp_path / 'results.md').read_text()
  line = '| r | diverged | 25.00 | 37.50 | 75.00 ± 7.07 (84.15) |'
  assert line in text and 'Not finished' not in text
  with open(tmp_path / 'results.csv', newline='') as file:
    rows = list(csv.DictReader(file))
  told = [(r['column'], r['stage'], float(r['value'])) for r in rows]
  assert told == [
    *(('pre-training', 'final', 0.5), ('pre-training', 'final', -math.inf)),
    *(('5-shot', 'final', 0.25), ('10-shot', 'final', 0.375)),
    *(('tuned', 'dev', 0.1), ('tuned', 'dev', 0.9)),
    *(('tuned', 'final', 0.7), ('tuned', 'final', 0.8)),
    ('tuned', 'paper', 0.8415),
  ]
  with pytest.raises(UserError, match='--config'):
    command.run(one, str(tmp_path), Given(), print_jobs=True)


def test_weights_take_the_place_of_a_pretraining(tmp_path):
  """Nothing is trained for the row; weights of an unknown row are refused."""
  two = study(a=row(), b=row())
  found = command.run(
    *(two, str(tmp_path), None, {'a': 'x/B_16.npz'}), print_jobs=True
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
  assert command._take_pretrain(argv) == ['--config.total=3 steps']
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


def test_a_column_of_several_tasks(tmp_path):
  """The mean has equal weights and appears when all are finished."""
  final = Stage(TUNING, 'test/accuracy', seeds=(0, 1))
  task = Task(command='finetune', final=final)
  several = Row(
    pretrain=Stage(CONFIG, 'test/accuracy'),
    transfers={'V/a': task, 'V/b': task},
  )
  assert several.columns == ['pre-training', 'V']

  def now():
    return chains.of_row('r', several, str(tmp_path), Given(), 'w')

  *first, last = all_ready(now())
  for run, value in zip(first, (0.5, 0.7, 0.1), strict=True):
    finish(run, value)
  assert now().spread('V') is None
  finish(last, 0.3)
  assert str(now().spread('V')) == '40.00'  # of .6 and .2
  chain = {'r': now()}
  text = tables.markdown(Study(title='s', rows={'r': several}), chain)
  assert '| row | V |' in text  # no pre-training, no column of it


def test_early_stopping(tmp_path):
  """Transfers start from the best checkpoint that exists."""
  early = row(early_stopping=True)

  def now():
    return chains.of_row('r', early, str(tmp_path), Given())

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


def test_a_row_that_fails_is_left(tmp_path, monkeypatch):
  """The other rows continue; the final message lists the errors."""
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
  told = {'train_flops_per_image': flops, 'num_devices': 1}
  (workdir / 'run.json').write_text(json.dumps(told))


def test_figures(tmp_path):
  """Points are ordered by x, with published ones in arrays of their own."""
  pretrain = Stage(CONFIG, 'test/accuracy')
  rows = {
    'big': Row(
      pretrain=pretrain._replace(seeds=(0, 1)), lines=('L',), place=300
    ),
    'small': Row(
      pretrain=pretrain,
      lines=('L', 'M'),
      place=20,
      paper={'pre-training': 60},
    ),
    'later': Row(pretrain=pretrain, place=20),
  }
  shown = Study(title='s', rows=rows, figure=Figure('images'))

  def now(workdir=tmp_path):
    return {
      name: chains.of_row(name, each, str(workdir), Given())
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
  assert len(found) == 4
  over = Study(title='s', rows=rows, figure=Figure('exaflops'))
  costs = picture.arrays(over, now())['pre-training/L'][0]
  np.testing.assert_allclose(costs, [3 * 2 * 1e-3, 3 * 2 * 1e-2])
  course = Study(
    title='s', rows=rows, figure=Figure('epochs', ('test/accuracy',))
  )
  arrays = picture.arrays(course, now())
  np.testing.assert_allclose(
    arrays['test/accuracy/big'], [[3 * 2 / 8], [75], [deviation]]
  )
  for each in (shown, over, course):
    png = picture.figure(each, picture.arrays(each, now()))
    assert png[:4] == b'\x89PNG' and len(png) > 5_000
  command.run(shown, str(tmp_path), print_jobs=True)
  saved = np.load(io.BytesIO((tmp_path / 'figure.npz').read_bytes()))
  assert set(saved) == set(found) and (tmp_path / 'figure.png').exists()


def test_wrong_studies():
  """Each error names the value and what is allowed."""
  for make, message in [
    (lambda: row(paper={'tund': 1}), "did you mean 'tuned'"),
    (lambda: Study(title='s', rows={}), 'has no rows'),
    (
      lambda: Study(title='s', rows={'a': row()}, figure=Figure('x')),
      "'x'; allowed",
    ),
    (lambda: contents.load(CONFIG), r'defines no get_study\(\)'),
    (lambda: contents.load('configs/studies/finetuned.py:table=4'), '2, 5 and'),
    (lambda: contents.load('configs/studies/finetuned.py:rows=Q'), 'rows=Q'),
    (lambda: contents.load('configs/studies/fewshot.py:figure=5'), 'not here'),
  ]:
    with pytest.raises(UserError, match=message):
      make()


# The study, its rows, and published numbers of some rows, typed in again.
SHIPPED = [
  ('cifar10.py', 9, {}),
  ('finetuned.py:table=2', 3, {'L/16 i21k': {'VTAB-1k': 72.72}}),
  ('finetuned.py:table=5', 14, {'H/14 i21k': {'CIFAR-100': 93.82}}),
  ('finetuned.py:table=5', 14, {'B/32 i1k': {'Flowers': 85.43}}),
  ('finetuned.py:table=5', 14, {'B/16 jft': {'ImageNet': 84.15}}),
  ('finetuned.py:table=6', 18, {'R50+L/16 14 epochs': {'Flowers': 99.11}}),
  ('fewshot.py:table=8', 8, {'2d shared': {'5-shot': 64.022}}),
  ('fewshot.py:figure=4', 24, {}),
  ('fewshot.py:figure=8', 12, {}),
  ('fewshot.py:figure=9', 3, {}),
]


@pytest.mark.parametrize('name, count, numbers', SHIPPED, ids=lambda x: str(x))
def test_the_shipped_studies(name, count, numbers, tmp_path):
  """All configs exist, with the keys that are set and the metric."""
  found = contents.load(f'configs/studies/{name}')
  assert len(found.rows) == count
  for each, columns in numbers.items():
    for column, number in columns.items():
      assert found.rows[each].paper[column] == number
  known = {}
  for each in found.rows.values():
    for what in [each.pretrain, *each.transfers.values()]:
      if isinstance(what, Evaluation):
        continue
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
  assert sum(line.startswith('| ') for line in lines) == count + 1


def test_directories_of_rows_differ():
  """No two rows of a shipped study share a directory."""
  for name in dict.fromkeys(name for name, *_ in SHIPPED):
    rows = contents.load(f'configs/studies/{name}').rows
    assert len({grid.directory(row) for row in rows}) == len(rows)
