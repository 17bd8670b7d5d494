"""Tests of the recognition of a finished run."""

import json
import math

import pytest
from etils import epath
from minimal_config import completed

from vit_jax.config import completion
from vit_jax.errors import UserError
from vit_jax.run.ledger import Ledger
from vit_jax.training import finished


@pytest.fixture
def config():
  """Returns a config with all files that a run writes at its end."""
  return completed(total='6 steps', **{'log.report': True, 'log.curves': True})


@pytest.fixture
def run(tmp_path, config):
  """Returns the workdir of a finished run of six steps."""
  folder = epath.Path(tmp_path)
  for item in ('params', 'about'):
    (folder / 'checkpoints/6' / item).mkdir(parents=True)
  for name in ('curves.png', 'report.html'):
    (folder / name).touch()
  (folder / 'config.json').write_text(completion.to_json(config))
  lines = (
    {'step': 3, 'val/accuracy': 0.25, 'val/loss': 3.0},
    {'step': 6, 'loss': 1.0},
    {'step': 6, 'val/accuracy': 0.5, 'val/loss': None},
  )
  text = ''.join(json.dumps(line) + '\n' for line in lines)
  (folder / 'metrics.jsonl').write_text(text)
  ledger = Ledger(folder / 'events.jsonl')
  ledger.event('start', step=0)
  finished.record(ledger, folder, 6)
  return folder


def test_the_last_evaluation_of_a_finished_run_is_found(run, config):
  """Metrics that are not finite are null in the file."""
  step, is_over, results = finished.find(config, run)
  assert (step, is_over) == (6, True)
  expected = {'val/accuracy': 0.5, 'val/loss': math.nan}
  assert results == pytest.approx(expected, nan_ok=True)


def other_evaluators(run):
  values = json.loads((run / 'config.json').read_text())
  (run / 'config.json').write_text(json.dumps(values | {'evals': {}}))


def without_last_line(name):
  """Returns a function that removes the last line of a file of a run."""

  def change(run):
    lines = (run / name).read_text().splitlines(keepends=True)
    (run / name).write_text(''.join(lines[:-1]))

  return change


def removed(name):
  return lambda run: (run / name).unlink()


@pytest.mark.parametrize(
  'change',
  [
    lambda run: Ledger(run / 'events.jsonl').event('start', step=6),
    without_last_line('events.jsonl'),
    other_evaluators,
    without_last_line('metrics.jsonl'),
    lambda run: (run / 'checkpoints/6').rename(run / 'checkpoints/6.bad'),
    removed('config.json'),
    removed('report.html'),
    removed('curves.png'),
  ],
)
def test_a_run_with_something_left_to_do_is_not_finished(run, config, change):
  """Each of these is what a kill, a damage or a new config leaves behind."""
  change(run)
  assert finished.find(config, run).results is None


def test_a_run_at_its_last_step_is_over(run, config):
  """With another config, only its evaluators run again."""
  other_evaluators(run)
  assert finished.find(config, run) == (6, True, None)
  assert finished.find(completed(total='7 steps'), run) == (6, False, None)
  with pytest.raises(UserError, match='at step 6, beyond the 5 steps'):
    finished.find(completed(total='5 steps'), run)
