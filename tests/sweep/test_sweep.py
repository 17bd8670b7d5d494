"""Tests of grids, unfinished runs, choices and tables of sweeps."""

import contextlib
import csv
import json
import math
import pathlib
import shlex
import signal
import subprocess
import sys

import pytest
from etils import epath
from finished_runs import finish

from vit_jax import sweep as command
from vit_jax.config import loading
from vit_jax.errors import PreemptedError, UserError
from vit_jax.processes import interruption
from vit_jax.run import lock
from vit_jax.sweeps import frame, grid, jobs, results
from vit_jax.sweeps.grid import Stage, Sweep, Task

CONFIG = 'configs/quickstart.py'


def task(group='', seeds=(0, 1), **grid_of):
  return Task(
    command='train',
    dev=Stage(CONFIG, 'dev/accuracy', flags={'total': '3 steps'}, seeds=seeds),
    final=Stage(CONFIG, 'test/accuracy', seeds=(5, 6, 7)),
    grid=grid_of or {'schedule.base_lr': (0.1, 0.2), 'model.depth': (1, 2)},
    group=group,
  )


def test_grid_combines_all_settings_and_seeds():
  """Each combination occurs with each seed, in order, with its flags."""
  found = grid.runs('t', task(), 'dev', '/w', ['--config.init_from=a b'])
  assert [(run.setting, run.seed) for run in found] == [
    ({'schedule.base_lr': lr, 'model.depth': depth}, seed)
    for lr in (0.1, 0.2)
    for depth in (1, 2)
    for seed in (0, 1)
  ]
  name = 'schedule.base_lr=0.1,model.depth=2,seed=1'
  assert found[3].name == f't/dev/{name}'
  assert shlex.split(jobs.line(found[3])) == [
    'python',
    '-m',
    'vit_jax.train',
    f'--config={CONFIG}',
    f'--workdir=/w/t/dev/{name}',
    '--config.total=3 steps',
    '--config.schedule.base_lr=0.1',
    '--config.model.depth=2',
    '--config.seed=1',
    '--config.init_from=a b',
  ]
  assert grid.label({'model.variant': 'B/16'}, 0) == 'model.variant=B-16,seed=0'
  settings = dict(command='train', final=Stage(CONFIG, 'm'))
  assert Task(**settings).settings == [{}]
  for more, message in [
    (dict(command='tune'), "command is 'tune'"),
    (dict(grid={'a': (1, 2)}), 'dev is None'),
    (dict(grid={'a': ()}), 'grid is .*one value for each key'),
    (dict(final=Stage(CONFIG, 'm', seeds=())), 'seeds is empty'),
  ]:
    with pytest.raises(UserError, match=message):
      Task(**(settings | more))


def test_print_jobs_prints_the_remaining_runs(tmp_path, capsys):
  """First the dev stage, then its unfinished run, the final stage, nothing."""
  sweep = Sweep('s', {'t': task()})

  def printed():
    command.run(sweep, str(tmp_path), print_jobs=True)
    return capsys.readouterr().out.splitlines()

  lines = printed()
  assert len(lines) == len(set(lines)) == 8
  dev = grid.runs('t', sweep.tasks['t'], 'dev', str(tmp_path), [])
  values = [0.5, 0.9, 0.75, 0.7, 0.8, math.nan, 0.71, 0.72]
  for run, value in zip(dev[:7], values, strict=False):
    finish(run, value if math.isfinite(value) else None)
  assert printed() == [jobs.line(dev[7])]
  finish(dev[7], values[7], checkpoint=False)
  assert printed() == [jobs.line(dev[7])]  # its last state is not saved
  (pathlib.Path(dev[7].workdir) / 'checkpoints/3/about').mkdir()
  chosen = {'schedule.base_lr': 0.1, 'model.depth': 2}  # .725; others .7, .715
  final = grid.runs('t', sweep.tasks['t'], 'final', str(tmp_path), [], chosen)
  assert printed() == [jobs.line(run) for run in final]
  assert 'not finished' in (tmp_path / 'results.md').read_text()
  for run, value in zip(final, (0.6, 0.7, 0.5), strict=True):
    finish(run, value, steps=4)
  assert printed() == []
  text = (tmp_path / 'results.md').read_text()
  setting = 'schedule.base_lr 0.1, model.depth 2'
  assert f'| t | {setting} | 72.50 ± 3.54 | 60.00 ± 10.00 | 3 |' in text
  assert '| schedule.base_lr 0.2, model.depth 1 | diverged |' in text
  text = (tmp_path / 'results.csv').read_text()
  rows = list(csv.DictReader(text.splitlines()))
  assert len(rows) == 11 and rows[3]['model.depth'] == '2'
  assert [row['value'] for row in rows][4:6] == ['0.8', '-inf']
  other = Sweep('s', {'t': task(seeds=(0, 1), **{'schedule.base_lr': (0.1,)})})
  command.run(other, str(tmp_path / 'other'), print_jobs=True)
  with pytest.raises(UserError, match=r't/dev/.*--config.mix.mixup=1'):
    command.run(sweep, str(tmp_path), ['--config.mix.mixup=1'], True)
  wrong = tmp_path / 'wrong'
  (run, *_) = grid.runs('t', task(), 'dev', str(wrong), [])
  finish(run, 0.5, metric='val/accuracy')
  with pytest.raises(UserError, match="'dev/accuracy'.*val/accuracy"):
    command.run(sweep, str(wrong), print_jobs=True)


def test_means_of_groups(tmp_path):
  """Means are over the tasks of complete groups, with equal weights."""
  values = {'a': (0.5, 0.7, 0.6), 'b': (0.2, 0.2, 0.2), 'c': (0.9, 1.0, 0.8)}
  groups = {'a': 'X', 'b': 'Y', 'c': 'X', 'd': 'Y'}
  final = Stage(CONFIG, 'test/accuracy', seeds=(0, 1, 2))
  tasks = {
    name: Task(command='finetune', final=final, group=group)
    for name, group in groups.items()
  }
  scores = {}
  for name, each in values.items():
    found = grid.runs(name, tasks[name], 'final', str(tmp_path), [])
    pairs = zip(found, each, strict=True)
    scores[name] = [results.Score(run, value) for run, value in pairs]
  text = results.table(Sweep('s', tasks), scores)
  assert '| **X** (2) | | | 75.00 | |' in text
  assert '**Y**' not in text and '**mean**' not in text
  assert '| c | as it is | | 90.00 ± 10.00 | 3 |' in text
  del tasks['d']
  text = results.table(Sweep('s', tasks), scores)
  assert '| **Y** (1) | | | 20.00 | |' in text
  assert f'| **mean** (3) | | | {100 * 1.7 / 3:.2f} | |' in text


def test_published_results_have_columns(tmp_path):
  """Their means need no finished run, but a value for each task."""
  final = Stage(CONFIG, 'test/accuracy')
  tasks = {
    name: Task(command='finetune', final=final, group=group)
    for name, group in (('a', 'X'), ('b', 'X'), ('c', 'Y'))
  }
  published = {
    'paper': {'a': 70.0, 'b': 71.0, 'c': 90.0},
    'other': {'a': 60.5, 'c': 80.0},
  }
  text = results.table(Sweep('s', tasks, published), {})
  assert '| task | chosen | dev | test | runs | paper | other |' in text
  assert '| b | | | not finished | | 71 | |' in text
  assert '| **X** (2) | | | | | 70.50 | |' in text
  assert '| **Y** (1) | | | | | 90.00 | 80.00 |' in text
  assert '| **mean** (3) | | | | | 77.00 | |' in text


def test_table_9_next_to_vtab():
  """The means of Table 9 are those of Table 2, but for rounding."""
  published = grid.load('configs/sweeps/vtab.py').published
  means = {name: sum(v.values()) / 19 for name, v in published.items()}
  expected = {'H/14 JFT': 77.63, 'L/16 JFT': 76.28, 'L/16 i21k': 72.72}
  assert means == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(
  'end, error, message',
  [
    (
      'exit 2',
      UserError,
      'ended with exit code 2.*said so.*same command again',
    ),
    ('exit 42', PreemptedError, 'stopped in t/dev'),
    ('kill -TERM $$', PreemptedError, 'stopped in t/dev'),
    ('kill -INT $$', PreemptedError, 'stopped in t/dev'),
    ('kill -KILL $$', UserError, 'ended with exit code -9'),
  ],
)
def test_a_run_that_fails_ends_the_sweep(
  tmp_path, monkeypatch, end, error, message
):
  """The message contains the output of the run, which is kept in its log."""
  script = tmp_path / 'python'
  script.write_text(f'#!/bin/sh\necho said so\n{end}\n')
  script.chmod(0o755)
  monkeypatch.setattr(sys, 'executable', str(script))
  with pytest.raises(error, match=f'(?s){message}'):
    command.run(Sweep('s', {'t': task()}), str(tmp_path))
  (log,) = tmp_path.rglob('*.log')
  assert log.read_text() == 'said so\n'


def test_a_setting_that_diverges_is_not_chosen(tmp_path, monkeypatch):
  """The setting is not run again, and the others continue."""
  script = tmp_path / 'python'
  script.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/all\nexit 43\n')
  script.chmod(0o755)
  monkeypatch.setattr(sys, 'executable', str(script))
  sweep = Sweep('s', {'t': task()})
  dev = grid.runs('t', sweep.tasks['t'], 'dev', str(tmp_path), [])
  for run in dev[1:]:
    finish(run, 0.5)
  final = Task.settings.fget(sweep.tasks['t'])[1]
  for run in grid.runs(
    't', sweep.tasks['t'], 'final', str(tmp_path), [], final
  ):
    finish(run, 0.25)
  for _ in range(2):
    scores = command.run(sweep, str(tmp_path))
  assert (tmp_path / 'all').read_text().count('\n') == 1
  assert results.best(scores['t'][:8]) == final


def test_same_runs_have_the_same_flags(tmp_path):
  """The last value of each flag counts."""
  (run, *_) = grid.runs('t', task(), 'dev', str(tmp_path), ['--a=1', '--a=2'])
  jobs.check_flags(str(tmp_path), [run])
  jobs.check_flags(str(tmp_path), [run._replace(flags=['--a=2', *run.flags])])
  for flags in (['--a=2', '--a=1'], ['--b=1', '--a=2']):
    other = run._replace(flags=[*run.flags[:-2], *flags])
    with pytest.raises(UserError, match='(--a=1|--b=1)'):
      jobs.check_flags(str(tmp_path), [other])


def test_shipped_sweeps_are_complete():
  """All configs exist, and their stages use different data."""
  table = grid.load('configs/sweeps/table4.py')
  rates = [0.003, 0.01, 0.03]
  assert list(table.tasks['imagenet'].grid['schedule.base_lr']) == rates
  for model in ('hybrid', 'resnet'):  # the text of B.1.1
    other = grid.load(f'configs/sweeps/table4.py:model={model}').tasks
    found = list(other['imagenet'].grid['schedule.base_lr'])
    assert found == [*rates, 0.06]
    assert 0.06 not in other['cifar10'].grid['schedule.base_lr']
  assert len(table.tasks) == 5
  vtab = grid.load('configs/sweeps/vtab.py')
  sizes = {}
  for each in vtab.tasks.values():
    sizes[each.group] = sizes.get(each.group, 0) + 1
  assert sizes == {'Natural': 7, 'Specialized': 4, 'Structured': 8}
  assert len(grid.load('configs/sweeps/vtab.py:tasks=Natural').tasks) == 7
  digits = grid.load('configs/sweeps/digits.py')
  for sweep in (table, vtab, digits):
    for name, each in sweep.tasks.items():
      final = loading.load(each.final.config)
      evaluator = each.final.metric.partition('/')[0]
      assert evaluator in final.evals, name
      if each.dev and not each.dev.flags:
        dev = loading.load(each.dev.config)
        assert dev.train.split != final.train.split, name
        assert dev.evals[evaluator].split != final.evals[evaluator].split
        assert dev.train.num_examples < final.train.num_examples
  for wrong in ('table4.py:data=cifar', 'vtab.py:tasks=Naturel'):
    with pytest.raises(UserError, match='did you mean'):
      grid.load(f'configs/sweeps/{wrong}')
  with pytest.raises(UserError, match=r'get_sweep\(\)'):
    grid.load(CONFIG)
  place = frame.default_workdir('sweeps', 'configs/sweeps/vtab.py:tasks=dtd')
  assert place == 'runs/sweeps/vtab-tasks=dtd'


def finished_run(tmp_path, **options):
  """Returns the first run of the dev stage, finished."""
  (run, *_) = grid.runs('t', task(), 'dev', str(tmp_path), [])
  finish(run, 0.5, **options)
  return run


def test_a_run_stopped_in_its_last_evaluation_is_unfinished(tmp_path, capsys):
  """Its last step is saved, but its metric is not written."""
  run = finished_run(tmp_path)
  assert jobs.value(run) == 0.5
  metrics = pathlib.Path(run.workdir) / 'metrics.jsonl'
  metrics.write_text('{"step": 3, "loss": 1.5}\n')
  assert jobs.value(run) is None
  command.run(Sweep('s', {'t': task()}), str(tmp_path), print_jobs=True)
  assert jobs.line(run) in capsys.readouterr().out


def test_a_run_that_ended_early_is_finished(tmp_path):
  """Its metric is that of its last evaluation."""
  run = finished_run(tmp_path)
  workdir = pathlib.Path(run.workdir)
  config = json.loads((workdir / 'config.json').read_text())
  config |= dict(total='9 steps', checkpoint=dict(best=run.metric))
  lines = [{'step': step, run.metric: 0.8 - 0.1 * step} for step in (1, 2, 3)]
  text = ''.join(json.dumps(line) + '\n' for line in lines)
  (workdir / 'metrics.jsonl').write_text(text)
  for patience, value in ((2, 0.5), (3, None)):
    config['early_stop_patience'] = patience
    (workdir / 'config.json').write_text(json.dumps(config))
    assert jobs.value(run) == (value and pytest.approx(value))


def test_a_metric_of_zero_counts(tmp_path):
  """It is compared like any other value."""
  run = finished_run(tmp_path)
  metrics = pathlib.Path(run.workdir) / 'metrics.jsonl'
  metrics.write_text(json.dumps({'step': 3, run.metric: 0.0}) + '\n')
  assert jobs.value(run) == 0.0
  assert jobs.best_step(run) == 3


def test_split_of_a_metric(tmp_path):
  """The split is found for the metrics of averages, too."""
  run = finished_run(tmp_path)
  file = pathlib.Path(run.workdir) / 'config.json'
  config = json.loads(file.read_text())
  evaluator = run.metric.partition('/')[0]
  config['evals'] = {evaluator: {'split': 'train[90%:]'}, 'other': {}}
  file.write_text(json.dumps(config))
  assert jobs.split(run) == 'train[90%:]'
  assert jobs.split(run._replace(metric=f'{evaluator}_ema/x')) == 'train[90%:]'
  assert jobs.split(run._replace(metric='unknown/x')) == ''
  evaluation = run._replace(command='evaluate', flags=['--split=test[5:]'])
  assert jobs.split(evaluation) == 'test[5:]'


def test_a_sweep_waits_for_a_locked_workdir(tmp_path, monkeypatch):
  """The run of a killed sweep may still save; the log names it."""
  run = finished_run(tmp_path)
  workdir = epath.Path(run.workdir)
  pauses = []

  def release(seconds):
    pauses.append(seconds)
    held.close()

  held = contextlib.ExitStack()
  held.enter_context(lock.hold(workdir))
  monkeypatch.setattr(jobs.time, 'sleep', release)
  jobs._wait_for_lock(run)
  assert len(pauses) == 1
  monkeypatch.setattr(jobs, '_LOCK_TIMEOUT_S', -1.0)
  with lock.hold(workdir), pytest.raises(UserError, match='another run'):
    jobs._wait_for_lock(run)


def test_progress_counts_the_whole_sweep():
  """Both stages: four settings of two seeds, and three final runs."""
  assert task().num_runs == 4 * 2 + 3


def test_a_signal_to_sweep_and_run_is_a_preemption(tmp_path, monkeypatch):
  """Whatever the exit code of the run, because it is interrupted."""

  class Process(subprocess.Popen):
    def __init__(self, words, **options):
      pass

    def wait(self):
      interruption.HANDLER.react(signal.SIGTERM)
      return 1

    def send_signal(self, number):
      assert number == signal.SIGTERM

  monkeypatch.setattr(subprocess, 'Popen', Process)
  with pytest.raises(PreemptedError, match='stopped in t/dev'):
    command.run(Sweep('s', {'t': task()}), str(tmp_path))


def test_a_signal_at_the_end_of_a_run_stops_the_sweep(tmp_path, monkeypatch):
  """The run ignores the signal, because its results are written already."""
  sweep = Sweep('s', {'t': task()})
  started = []

  class Process(subprocess.Popen):
    """Finishes its run, and receives a signal when it can no longer stop."""

    def __init__(self, words, **options):
      dev = grid.runs('t', sweep.tasks['t'], 'dev', str(tmp_path), [])
      self.run = dev[len(started)]
      started.append(words)

    def wait(self):
      finish(self.run, 0.5)
      if len(started) == 2:
        interruption.HANDLER.react(signal.SIGTERM)
      return 0

    def send_signal(self, number):
      assert number == signal.SIGTERM

  monkeypatch.setattr(subprocess, 'Popen', Process)
  with pytest.raises(PreemptedError, match='t/dev'):
    command.run(sweep, str(tmp_path))
  assert len(started) == 2
