"""Tests of grids, unfinished runs, choices and tables of sweeps."""

import collections
import contextlib
import csv
import dataclasses
import itertools
import json
import math
import pathlib
import shlex
import shutil
import sys
import types

import pytest
from etils import epath
from finished_runs import finish, run

from vit_jax import sweep as command
from vit_jax.config import loading
from vit_jax.errors import PreemptedError, UserError
from vit_jax.processes import interruption
from vit_jax.run import lock
from vit_jax.run.ledger import Ledger
from vit_jax.sweeps import execution, grid, jobs, tables
from vit_jax.sweeps.grid import Stage, Sweep, Task

CONFIG = 'configs/quickstart.py'
RATE = 'schedule.base_lr'
GRID = {RATE: (0.1, 0.2), 'model.depth': (1, 2)}
TASK = Task(
  command='train',
  dev=Stage(CONFIG, 'dev/accuracy', flags={'total': '3 steps'}, seeds=(0, 1)),
  final=Stage(CONFIG, 'test/accuracy', seeds=(5, 6, 7)),
  grid=GRID,
)
SWEEP = Sweep('s', {'t': TASK})


def all_jobs(workdir, sweep=SWEEP, flags=()):
  """Returns the jobs of the task 't': 8 of the dev stage, and 3 final ones."""
  return jobs.of_sweep(sweep, str(workdir), flags)['t']['t']


def test_grid_combines_all_settings_and_seeds():
  """Each combination occurs once with each seed, with its flags."""
  found = all_jobs('/w', flags=['--config.init_from=a b'])
  runs = {(*job.setting.values(), job.seed) for job in found[:8]}
  assert runs == {*itertools.product(*GRID.values(), (0, 1))}
  job = found[3]
  command, *given = shlex.split(execution.line(job))[2:]
  assert command == 'vit_jax.train'
  assert {*given} == {
    f'--config={CONFIG}',
    f'--workdir=/w/{job.name}',
    '--config.total=3 steps',
    *(f'--config.{key}={value}' for key, value in job.setting.items()),
    f'--config.seed={job.seed}',
    '--config.init_from=a b',
  }
  assert jobs.label({'model.variant': 'B/16'}, 0) == 'model.variant=B-16,seed=0'


def test_default_workdir_contains_the_argument(monkeypatch):
  path = 'configs/sweeps/vtab.py:tasks=dtd'
  given = types.SimpleNamespace(config=path, workdir=None)
  monkeypatch.setattr(execution.flags, 'FLAGS', given)
  sweep, workdir = execution.load([], 'sweeps', Sweep)
  assert [*sweep.tasks] == ['dtd'] and workdir == 'runs/sweeps/vtab-tasks=dtd'


@pytest.mark.parametrize(
  'changes, message',
  [
    (dict(dev=None), 'settings needs a stage dev'),
    (dict(grid={'a': ()}), "'a': .*one value"),
    (dict(final=Stage(CONFIG, 'm', seeds=())), 'seeds are .*one value'),
  ],
)
def test_messages_of_wrong_tasks(changes, message):
  with pytest.raises(UserError, match=message):
    dataclasses.replace(TASK, **changes)


def test_print_jobs_prints_the_remaining_runs(tmp_path, capsys):
  """First the dev stage, then its unfinished run, the final stage, nothing."""

  def printed():
    run(command, SWEEP, tmp_path, print_jobs=True)
    return capsys.readouterr().out.splitlines()

  lines = printed()
  assert len(lines) == len(set(lines)) == 8
  dev = all_jobs(tmp_path)[:8]
  values = [0.5, 0.9, 0.75, 0.7, 0.8, None, 0.71, 0.72]
  for job, value in zip(dev[:7], values, strict=False):
    finish(job, value)
  assert printed() == [execution.line(dev[7])]
  finish(dev[7], values[7], checkpoint=False)
  assert printed() == [execution.line(dev[7])]  # its last state is not saved
  (pathlib.Path(dev[7].workdir) / 'checkpoints/3/about').mkdir()
  final = all_jobs(tmp_path)[8:]
  assert final[0].setting == {'schedule.base_lr': 0.1, 'model.depth': 2}
  assert printed() == [execution.line(job) for job in final]
  assert 'not finished' in (tmp_path / 'results.md').read_text()
  for job, value in zip(final, (0.6, 0.7, 0.5), strict=True):
    finish(job, value, steps=4)
  assert printed() == []
  text = (tmp_path / 'results.md').read_text()
  # The mean of the best setting is .725; others have .7 and .715.
  for part in ('72.50 ± 3.54', '60.00 ± 10.00', 'diverged'):
    assert text.count(part) == (2 if part == '72.50 ± 3.54' else 1)
  with open(tmp_path / 'results.csv', newline='') as file:
    rows = list(csv.DictReader(file))
  assert [float(row['value']) for row in rows[:8]] == [
    -math.inf if value is None else value for value in values
  ]
  assert len(rows) == 11 and rows[3]['model.depth'] == '2'
  with pytest.raises(UserError, match=r't/dev/.*--config.mix.mixup=1'):
    flags = ['--config.mix.mixup=1']
    run(command, SWEEP, tmp_path, overrides=flags, print_jobs=True)


def test_the_lowest_loss_is_chosen(tmp_path):
  """Losses are not shown in percent; a diverged run is the worst."""
  task = dataclasses.replace(
    TASK,
    dev=TASK.dev._replace(metric='dev/loss', seeds=(0,)),
    final=TASK.final._replace(metric='test/loss', seeds=(0,)),
  )
  sweep = Sweep('s', {'t': task})
  values = (0.5, None, 0.25, 0.75)
  for job, value in zip(all_jobs(tmp_path, sweep), values, strict=False):
    finish(job, value)
  final = all_jobs(tmp_path, sweep)[-1]
  assert final.setting == {'schedule.base_lr': 0.2, 'model.depth': 1}
  finish(final, 2.302585)
  run(command, sweep, tmp_path)
  text = (tmp_path / 'results.md').read_text()
  assert all(part in text for part in ('0.2500', '2.3026', 'diverged'))


def test_a_metric_without_a_direction_is_refused(tmp_path):
  """The first finished run is enough to find out."""
  task = dataclasses.replace(TASK, dev=TASK.dev._replace(metric='dev/count'))
  sweep = Sweep('s', {'t': task})
  finish(all_jobs(tmp_path, sweep)[0], 8)
  with pytest.raises(UserError, match="'dev/count'.*higher_is_better"):
    all_jobs(tmp_path, sweep)


def test_means_of_groups_and_published_results(tmp_path):
  """Means are over the tasks of complete groups, with equal weights."""
  final = Stage(CONFIG, 'test/accuracy', seeds=(0, 1, 2))
  groups = {'a': 'X', 'b': 'Y', 'c': 'X', 'd': 'Y'}
  tasks = {
    name: Task(command='finetune', final=final, group=group)
    for name, group in groups.items()
  }
  values = {'a': (0.5, 0.7, 0.6), 'b': (0.2, 0.2, 0.2), 'c': (0.9, 1.0, 0.8)}
  published = {'paper': {'a': 70.0, 'b': 71.0, 'c': 91.0}, 'other': {'a': 60.5}}

  def table():
    sweep = Sweep('s', tasks, published)
    graph = jobs.of_sweep(sweep, str(tmp_path), [])
    text = tables.of_sweep(sweep, graph)['results.md']
    rows = [line.split('|')[1:-1] for line in text.splitlines()]
    # {task or group: (result on the test split, published results)}
    return {r[0].strip(): [c.strip() for c in r[3:]] for r in rows if r}

  assert table()['b'] == ['not finished', '', '71', '']
  assert table()['**X** (2)'] == ['', '', '80.50', '']
  graph = jobs.of_sweep(Sweep('s', tasks), str(tmp_path), [])
  for name, each in values.items():
    for job, value in zip(graph[name][name], each, strict=True):
      finish(job, value)
  found = table()
  assert found['**X** (2)'] == ['75.00', '', '80.50', '']
  assert found['c'] == ['90.00 ± 10.00', '3', '91', '']
  assert not any(name in ''.join(found) for name in ('**Y**', '**mean**'))
  del tasks['d']
  found = table()
  assert found['**Y** (1)'] == ['20.00', '', '71.00', '']
  assert found['**mean** (3)'] == [f'{100 * 1.7 / 3:.2f}', '', '77.33', '']


# The script sends a signal to its parent and to itself, and ignores it.
SIGNALLED = "trap '' TERM; sleep 1; kill -TERM $PPID; sleep 1"


@pytest.fixture
def handled(monkeypatch):
  """Handles signals as in a command, which ends by them between two jobs."""
  monkeypatch.setattr(interruption.HANDLER, 'react', lambda number: None)
  interruption.HANDLER.install()
  yield
  interruption.HANDLER.release()


def python_that(tmp_path, monkeypatch, script):
  """Replaces the Python of jobs by a shell script."""
  file = tmp_path / 'python'
  file.write_text(f'#!/bin/sh\n{script}\n')
  file.chmod(0o755)
  monkeypatch.setattr(sys, 'executable', str(file))


STOPPED = PreemptedError, 'stopped in t/dev'


@pytest.mark.parametrize(
  'end, error, message',
  [
    ('exit 2', UserError, 't: .*exit code 2.*said so.*same command again'),
    ('exit 42', *STOPPED),
    ('kill -TERM $$', *STOPPED),
    ('kill -INT $$', *STOPPED),
    ('kill -KILL $$', UserError, 'ended with exit code -9'),
    # A signal to the sweep and its run, which ends with any code
    (f'{SIGNALLED}; exit 1', *STOPPED),
  ],
)
def test_a_run_that_fails(tmp_path, monkeypatch, handled, end, error, message):
  """The message contains the output of the run, which is kept in its log."""
  python_that(tmp_path, monkeypatch, f'echo said so\n{end}')
  with pytest.raises(error, match=f'(?s){message}'):
    run(command, SWEEP, tmp_path)
  (log,) = tmp_path.rglob('*.log')
  assert log.read_text() == 'said so\n'


def test_a_signal_at_the_end_of_a_run_stops_the_sweep(
  tmp_path, monkeypatch, handled
):
  """The run ignores the signal, because its results are written already."""
  finish(all_jobs(tmp_path / 'ready')[0], 0.5)
  copy = f'cp -r {tmp_path}/ready/t/dev/* {tmp_path}/w/t/dev'
  python_that(tmp_path, monkeypatch, f'{copy}; {SIGNALLED}')
  with pytest.raises(PreemptedError, match='stopped after t/dev'):
    run(command, SWEEP, tmp_path / 'w')
  assert len([*tmp_path.rglob('*.log')]) == 1


def test_a_setting_that_diverges_is_not_chosen(tmp_path, monkeypatch):
  """The setting is not run again, and the others continue."""
  script = f'echo "$@" >> {tmp_path}/all\nexit 43'
  python_that(tmp_path, monkeypatch, script)
  for job in all_jobs(tmp_path)[1:8]:
    finish(job, 0.5)
  for _ in range(2):
    run(command, SWEEP, tmp_path)
  assert (tmp_path / 'all').read_text().count('\n') == 4
  found = all_jobs(tmp_path)
  assert found[8].setting == TASK.settings[1]
  assert found[8].value == -math.inf


def test_a_failing_task_does_not_stop_the_others(tmp_path, monkeypatch):
  """The final message lists the first error of each."""
  python_that(tmp_path, monkeypatch, f'echo "$4" >> {tmp_path}/all\nexit 2')
  with pytest.raises(UserError, match=r'(?s)a: .*code 2.*b: .*code 2'):
    run(command, Sweep('s', {'a': TASK, 'b': TASK}), tmp_path / 'w')
  tried = (tmp_path / 'all').read_text().splitlines()
  assert [line.partition('/w/')[2][:2] for line in tried] == ['a/', 'b/']


def test_which_runs_are_finished(tmp_path):
  """A run that ended early is, one without its last evaluation is not."""
  (job, *_) = all_jobs(tmp_path)
  finish(job, 0.5)
  workdir, metric = epath.Path(job.workdir), job.metric

  def value():
    (job, *_) = all_jobs(tmp_path)
    return job.value if job.finished else None

  def write(name, content):
    (workdir / name).write_text(json.dumps(content) + '\n')

  assert value() == 0.5
  write('metrics.jsonl', {'step': 3, 'loss': 1.5})
  assert value() is None  # its last step is saved, but not evaluated
  write('metrics.jsonl', {'step': 3, metric: 0.0})
  assert value() == 0.0
  assert jobs.best_step(job.workdir, metric, 1) == 3
  ended = (workdir / 'events.jsonl').read_text()
  Ledger(workdir / 'events.jsonl').event('start', step=3)
  assert value() is None  # a later start has not ended yet
  (workdir / 'events.jsonl').write_text(ended)
  section = {'name': 'classification', 'split': 'x'}
  config = {'evals': {'dev': section, 'other': {}}}
  write('config.json', config)
  for name, split in {metric: 'x', 'dev_ema/y': 'x', 'unknown/y': ''}.items():
    assert jobs.split(job.workdir, name) == split
  shutil.rmtree(workdir)
  finish(job, 0.5, metric='val/accuracy')
  write('config.json', config)
  with pytest.raises(UserError, match="'dev/accuracy'.*val/accuracy"):
    value()


def test_a_sweep_waits_for_a_locked_workdir(tmp_path, monkeypatch):
  """The run of a killed sweep may still save."""
  (job, *_) = all_jobs(tmp_path)
  finish(job, 0.5)
  held, pauses = contextlib.ExitStack(), []
  held.enter_context(lock.hold(epath.Path(job.workdir)))

  def release(seconds):
    pauses.append(seconds)
    held.close()

  monkeypatch.setattr(execution.time, 'sleep', release)
  execution._wait_for_lock(job)
  assert len(pauses) == 1
  monkeypatch.setattr(execution, '_LOCK_TRIES', 2)
  with lock.hold(epath.Path(job.workdir)):
    execution._wait_for_lock(job)  # the run itself reports the lock
  assert len(pauses) == 3


def shipped(name):
  return grid.load(f'configs/sweeps/{name}', grid.Sweep)


@pytest.mark.parametrize('name', ['table4.py', 'vtab.py', 'digits.py'])
@pytest.mark.slow
def test_shipped_sweeps_are_complete(name):
  """All configs exist, and their stages use different data."""
  for task, each in shipped(name).tasks.items():
    final = loading.load(each.final.config)
    evaluator = each.final.metric.partition('/')[0]
    assert evaluator in final.evals, task
    if each.dev and not each.dev.flags:
      dev = loading.load(each.dev.config)
      assert dev.train.split != final.train.split, task
      assert dev.evals[evaluator].split != final.evals[evaluator].split
      assert dev.train.num_examples < final.train.num_examples


def test_shipped_sweeps_are_those_of_the_paper():
  """Rates of Table 4 and of the text of B.1.1, groups and means of VTAB."""

  def rates(task, argument=''):
    return [*shipped(f'table4.py{argument}').tasks[task].grid[RATE]]

  table = [0.003, 0.01, 0.03]
  assert rates('imagenet') == table
  for argument in (':model=hybrid', ':model=resnet'):
    assert rates('imagenet', argument) == [*table, 0.06]
    assert 0.06 not in rates('cifar10', argument)
  vtab = shipped('vtab.py')
  groups = collections.Counter(task.group for task in vtab.tasks.values())
  assert groups == {'Natural': 7, 'Specialized': 4, 'Structured': 8}
  # The means of Table 9 are those of Table 2, but for rounding.
  means = {name: sum(v.values()) / 19 for name, v in vtab.published.items()}
  expected = {'H/14 JFT': 77.63, 'L/16 JFT': 76.28, 'L/16 i21k': 72.72}
  assert means == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(
  'path, message',
  [
    ('configs/sweeps/table4.py:data=cifar', 'did you mean'),
    ('configs/sweeps/vtab.py:tasks=Naturel', 'did you mean'),
    (CONFIG, r'get_sweep\(\)'),
  ],
)
def test_wrong_sweeps_are_refused(path, message):
  with pytest.raises(UserError, match=message):
    grid.load(path, grid.Sweep)
