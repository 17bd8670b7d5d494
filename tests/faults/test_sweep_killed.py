"""Tests of `sweep` after SIGKILL."""

import csv
import pathlib
import statistics

import pytest

from tests import cli

ARGUMENTS = ('--config=tests/sweep/small_digits.py',)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_killed_sweep_runs_everything_once(tmp_path):
  """It is killed during the first run, and while the third one starts."""
  arguments = cli.command('sweep', *ARGUMENTS, f'--workdir={tmp_path}')
  dev = tmp_path / 'digits/dev'
  rates, seeds = ('1e-05', '0.01'), (0, 1)
  names = [
    f'schedule.base_lr={rate},seed={seed}' for rate in rates for seed in seeds
  ]
  for path in (dev / names[0] / 'checkpoints/8', dev / f'{names[2]}.log'):
    cli.kill_when(arguments, path.exists, 'a sweep and its run', 120)
  out, _ = cli.run(arguments)
  starts, accuracies = {}, {}
  final = tmp_path / f'digits/final/{names[2]}'
  for path in [*(dev / name for name in names), final]:
    steps = [event['step'] for event in cli.events(path, 'start')]
    starts[path.name, path.parent.name] = steps
    assert list(cli.losses(path)) == list(range(1, 25))
    evaluated = [r for r in cli.records(path) if 'test/accuracy' in r]
    assert [r['step'] for r in evaluated] == [24]
    accuracies[path] = evaluated[0]['test/accuracy']
  resumed = starts.pop((names[0], 'dev'))
  assert len(resumed) == 2 and resumed[0] == 0 and resumed[1] >= 4
  assert set(map(tuple, starts.values())) == {(0,)}  # started once, from step 0
  best = [100 * accuracies[dev / name] for name in names[2:]]
  spread = f'{statistics.mean(best):.2f} ± {statistics.stdev(best):.2f}'
  assert f'{spread} | {100 * accuracies[final]:.2f} |' in out
  with open(tmp_path / 'results.csv', newline='') as file:
    rows = list(csv.DictReader(file))
  values = {pathlib.Path(r['workdir']): float(r['value']) for r in rows}
  assert values == accuracies
  before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob('*.jsonl')}
  out, _ = cli.run([*arguments, '--print_jobs'])
  assert out == ''  # nothing remains to be done
  for path, changed in before.items():
    assert path.stat().st_mtime_ns == changed
