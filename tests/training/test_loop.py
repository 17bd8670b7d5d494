"""Tests of the order of events in the training loop."""

import contextlib
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from etils import epath

from vit_jax.errors import PreemptedError, UserError
from vit_jax.processes import consensus
from vit_jax.run.profiling import Profile
from vit_jax.training import loop
from vit_jax.training.evaluations import is_due
from vit_jax.training.experiment import Experiment
from vit_jax.training.session import Session


class Recorded(Session):
  """A session for the loop; `log` contains the calls in order.

  Schedules are real. Steps, evaluators and checkpoints only record that they
  were called, and check the state that they get.
  """

  def __init__(self, total, evals, save, stop_at=None, stop_in_eval=None):
    self.log, self.workdir = [], epath.Path('nowhere')
    self.stop_at, self.stop_in_eval, self.stopped = stop_at, stop_in_eval, False
    self.completed, self.fixed = 0, ('key',)
    self.experiment = Mock(
      spec=Experiment,
      total_steps=total,
      steps=lambda duration: int(duration.split()[0]),
      log=SimpleNamespace(report=False),
      config=SimpleNamespace(early_stop_patience=None),
    )

    def due(every, step):
      return is_due(f'{every} steps', self.experiment, step)

    self.evaluations = SimpleNamespace(
      due=lambda step: ['val'] if due(evals, step) else [], run=self._evaluate
    )
    self.save_is_due, self.save = lambda step: due(save, step), self._save
    self.finish_saving = lambda step, state: self.log.append(f'finish {step}')
    self.checkpoints = SimpleNamespace(best=None, best_line=lambda: None)
    self.preemption = SimpleNamespace(reached=self._reached)
    self.ledger = SimpleNamespace(
      span=lambda kind: contextlib.nullcontext(),
      flush=lambda step: self.log.append(f'flush {step}'),
    )
    self.recorder = SimpleNamespace(
      drain=lambda: self.log.append('drain'),
      append=lambda step, metrics: self.log.append(f'metrics {step}'),
      evaluations=self._write,
      summary=lambda step, steps, results: f'{steps} steps to {step}',
      host_times=SimpleNamespace(waiting=contextlib.nullcontext),
    )

  def _reached(self):
    self.stopped |= self.stop_at is not None and self.completed >= self.stop_at
    return self.stopped

  def weights(self, state):
    return f'weights of {state}'

  def _evaluate(self, names, weights, step):
    assert names == ['val'] and weights == f'weights of params {step}'
    if step == self.stop_in_eval:
      self.stopped = True
      return None
    self.log.append(f'evaluate {step}')
    return {'val/accuracy': float(step)}

  def _write(self, step, results):
    if results:
      self.log.append(f'write {step} {results}')

  def _save(self, step, state, results=None):
    assert state == f'params {step}'
    self.log.append(f'save {step} {sorted(results or {})}')

  @contextlib.contextmanager
  def train_batches(self, step):
    yield (f'batch {number}' for number in range(step, 100))

  def compiled_step(self, state, batch, key):
    step = self.completed
    assert (state, batch, key) == (f'params {step}', f'batch {step}', 'key')
    self.completed = step + 1
    return f'params {step + 1}', {}


def train(session, step=0):
  session.completed = step
  profile = Profile(None, session.workdir)
  return loop._train(session, f'params {step}', step, profile)


def evaluation(step, saved=False):
  """Returns the calls of an evaluation, with a save if it is due."""
  return [
    'drain',
    *([f'save {step} []'] if saved else []),
    f'evaluate {step}',
    f"write {step} {{'val/accuracy': {float(step)}}}",
  ]


def test_metrics_are_fetched_before_saving_and_evaluating():
  """After fetching come saving, evaluating and writing, then the next step."""
  session = Recorded(total=5, evals=2, save=4)
  results = train(session)
  assert session.log == [
    'metrics 1',
    'metrics 2',
    *evaluation(2),
    'metrics 3',
    'metrics 4',
    *evaluation(4, saved=True),
    'metrics 5',
    *evaluation(5, saved=True),
    'finish 5',
    'flush 5',
  ]
  assert results == {'val/accuracy': 5.0}


def test_a_resumed_run_repeats_what_was_due():
  """A crash may have lost the step's evaluation and its save."""
  session = Recorded(total=5, evals=2, save=2)
  train(session, step=2)
  assert session.log[:5] == [*evaluation(2, saved=True), 'metrics 3']


def test_a_failing_evaluator_ends_the_run_after_the_save():
  session = Recorded(total=4, evals=2, save=2)
  session.evaluations.run = Mock(side_effect=UserError('too few examples'))
  with pytest.raises(UserError, match='too few'):
    train(session)
  assert session.log == ['metrics 1', 'metrics 2', 'drain', 'save 2 []']


@pytest.mark.parametrize(
  'step, total, moment',
  [
    *((step, 9, 'stop_at') for step in (1, 2, 3)),
    (4, 4, 'stop_at'),  # a resumed run makes the last evaluation
    *((2, total, 'stop_in_eval') for total in (2, 9)),
  ],
)
def test_a_signal_saves_and_ends_the_run(step, total, moment):
  """The save need not be due, and nothing is evaluated to its end."""
  session = Recorded(total, evals=2, save=3, **{moment: step})
  with pytest.raises(PreemptedError, match=f'step {step} of {total}'):
    train(session)
  assert session.log[-5:] == [
    f'metrics {step}',
    'drain',
    f'save {step} []',
    f'finish {step}',
    f'flush {step}',
  ]


@pytest.mark.parametrize(
  'every, total, due',
  [
    # Half of 225 is rounded to 112; 224 would be one step before the end.
    (112, 225, [112, 225]),
    (781, 4688, [781, 1562, 2343, 3124, 3905, 4688]),
    (100, 1000, [*range(100, 1001, 100)]),
    (5, 12, [5, 10, 12]),
    (1, 4, [1, 2, 3, 4]),
    (0, 9, [9]),
  ],
)
def test_a_rounded_interval_is_not_due_just_before_the_end(every, total, due):
  """The last multiple is left out if only rounding put it there."""
  run = Mock(spec=Experiment, total_steps=total, steps=lambda _: every)
  assert [step for step in range(total + 1) if is_due('1 %', run, step)] == due


def test_a_process_ends_early_like_the_main_one(monkeypatch):
  """It may still see an older version of metrics.jsonl."""
  plateau = {'step': 3, 'best_step': 1, 'evaluations': 2}
  monkeypatch.setattr(consensus, 'from_main', lambda function: plateau)
  session = Mock(spec=Session, experiment=Mock(total_steps=9))
  session.experiment.config.early_stop_patience = 2
  session.checkpoints, session.ledger = Mock(best='val/accuracy'), Mock()
  session.workdir = epath.Path('nowhere')
  assert Session.ends_early(session, {'val/accuracy': 0.5}, 3)
  session.ledger.event.assert_called_once_with('early_stop', **plateau)
  assert not Session.ends_early(session, {'test/accuracy': 0.5}, 3)
  assert not Session.ends_early(session, {'val/accuracy': 0.5}, 9)  # the end
