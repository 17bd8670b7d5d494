"""Tests of bounds of metrics, rollbacks and early stopping."""

import itertools
import json

import numpy as np
import pytest
from etils import epath
from minimal_config import completed

from vit_jax.config import identity
from vit_jax.data.pipeline import order
from vit_jax.errors import DivergedError, UserError
from vit_jax.run import guards
from vit_jax.run.guards import Limits, Recovery, RollbackError
from vit_jax.run.ledger import Ledger, read


@pytest.fixture
def watch(tmp_path):
  """Returns a function that checks a sequence of values and returns events."""
  path = epath.Path(tmp_path) / 'events.jsonl'

  def steps(duration):
    number, unit = duration.split(' ')
    return int(number) * {'steps': 1, 'epochs': 10}[unit]

  def feed(values, metric='entropy', **limit):
    limits = Limits({'alarm': limit | {'metric': metric}}, steps, Ledger(path))
    for step, value in enumerate(values, 1):
      limits.step(step, {'entropy': value, 'loss': 1.0})
    return read(path)

  return feed


def test_a_metric_out_of_bounds_gives_one_warning(watch, caplog):
  """The warning comes in the third step in a row out of bounds."""
  values = [1, 0.4, 0.4, 0.5, 0.1, 0.2, 0.3, 0.1, 0.1]
  [event] = watch(values, at_least=0.5, during='3 steps')
  expected = dict(
    event='limit', name='alarm', metric='entropy', step=7, value=0.3
  )
  assert expected.items() <= event.items()
  [message] = caplog.messages
  assert 'LIMIT EXCEEDED' in message and 'at least 0.5' in message


@pytest.mark.parametrize(
  'limit, values, warned',
  [
    # Each interval is counted from its start.
    (dict(at_most=2.0, during='2 steps'), [3, 3, 3, 2, 3, 1, 3, 3], [2, 8]),
    # Values on a bound and short intervals beyond it are allowed.
    (
      dict(at_least=0.0, at_most=1.0, during='2 steps'),
      [0, 1, 1.1, 0.5, -0.1, 0, 1, 2, 1] * 5,
      [],
    ),
    # Comparisons with NaN are false.
    (dict(at_least=0.0, during='1 steps'), [np.nan], [1]),
    (dict(at_most=9.0, during='1 steps'), [np.nan], [1]),
    # Steps before `start` are not checked.
    (dict(at_least=0.5, during='2 steps', start='1 epochs'), [0] * 14, [12]),
  ],
)
def test_steps_with_a_warning(watch, limit, values, warned):
  assert [event['step'] for event in watch(values, **limit)] == warned


def test_stop_ends_the_run(watch):
  """The exit code is that of a divergence; the event is written first."""
  limit = dict(at_least=0.5, during='2 steps', stop=True)
  with pytest.raises(DivergedError, match='alarm: entropy is 0.2 at step 3'):
    watch([1, 0.1, 0.2, 0.3], **limit)
  assert watch([], **limit)[0]['step'] == 3


@pytest.mark.parametrize(
  'limit, words',
  [
    ({}, 'no bound'),
    (dict(at_least=np.nan), 'finite'),
    (dict(at_least=0.1, during='0 steps'), 'above 0'),
    (dict(at_least=0.1, start='soon'), 'not a duration'),
  ],
)
def test_wrong_limits_are_refused_when_recovery_is_built(limit, words):
  with pytest.raises(UserError, match=words):
    Recovery(limits={'alarm': dict(metric='entropy', **limit)})


def test_a_limit_of_an_unknown_metric_is_refused(watch):
  with pytest.raises(UserError, match="limits.alarm.*did you mean 'entropy'"):
    watch([1.0], metric='entropi', at_least=0.5)


def test_limits_may_change_when_a_run_resumes():
  """They can be added, changed and removed."""
  limit = dict(metric='loss', at_most=9.0)
  configs = [completed()] + [
    completed(**{'recovery.limits': dict(high=high)})
    for high in (limit, limit | dict(at_most=8.0, stop=True))
  ]
  assert configs[1].recovery.limits.high.during == '200 steps'
  for before, now in itertools.permutations(configs, 2):
    assert not identity.changes(before.to_dict(), now)


def _train(bad, saved_step, total, limits):
  """Returns the batches of all steps that remain, and all rollbacks.

  Args:
    bad: batches whose step is bad.
    saved_step: step after which a checkpoint is saved.
    total: number of steps.
    limits: a Recovery.
  """
  rollbacks, drawn, step, streak = [], {}, 0, 0
  checkpoint = (0, 0)
  while step < total:
    drawn[step] = order.batch_index(step, guards.skip_list(rollbacks))
    streak = streak + 1 if drawn[step] in bad else 0
    step += 1
    if streak > limits.max_skipped:
      error = RollbackError(step, streak)
      made = guards.rollback(error, rollbacks, checkpoint[0], limits)
      rollbacks = [*rollbacks, made]
      step, streak = checkpoint
    elif step == saved_step:
      checkpoint = (step, streak)
  return [drawn[step] for step in range(total)], rollbacks


@pytest.mark.parametrize('saved_step', range(9))
@pytest.mark.parametrize('bad', [{4, 5}, {3, 4, 5, 6}, {0, 1, 2}])
def test_no_good_batch_is_skipped(saved_step, bad):
  """The checkpoint may lie within or after the bad steps."""
  limits = Recovery(max_skipped=1, max_rollbacks=9)
  drawn, rollbacks = _train(bad, saved_step, 12, limits)
  assert rollbacks
  good = [batch for batch in range(max(drawn) + 1) if batch not in bad]
  assert [batch for batch in drawn if batch not in bad] == good
  assert drawn == sorted(set(drawn))  # each once, in order


def test_bad_steps_before_the_checkpoint_are_not_skipped_again():
  """Only batches that would be drawn again are skipped."""
  made = guards.rollback(RollbackError(7, 4), [], 4, Recovery(max_skipped=3))
  assert made == {'from': 7, 'step': 4, 'skip': [4, 5, 6]}


FIRST = {'from': 7, 'step': 4, 'skip': [5, 6]}
SECOND = {'from': 19, 'step': 12, 'skip': [20]}


def test_rollbacks_in_the_checkpoint_count():
  """Lost lines of events.jsonl do not allow further rollbacks."""
  with pytest.raises(DivergedError, match='after 1 rollback'):
    guards.rollback(RollbackError(9, 2), [FIRST], 4, Recovery(max_rollbacks=1))


@pytest.mark.parametrize(
  'saved, written, known',
  [
    ([], [FIRST], [FIRST]),  # not in the checkpoint yet, or it is old
    ([FIRST], [FIRST, SECOND], [FIRST, SECOND]),
    ([FIRST], [], [FIRST]),  # the line was lost
    ([FIRST, SECOND], [SECOND], [FIRST, SECOND]),
    ([FIRST], [SECOND], [FIRST, SECOND]),
  ],
)
def test_rollbacks_of_checkpoint_and_events_are_merged(saved, written, known):
  """Either of the two records may be incomplete."""
  events = [{'event': 'rollback', 'time': 'x', **each} for each in written]
  start = {'event': 'start', 'step': 0}
  assert guards.rollbacks(saved, [start, *events]) == known


def _workdir(folder, values, name='val/accuracy'):
  """Writes metrics.jsonl with training lines between the evaluations."""
  lines = []
  for step, value in values:
    lines += [{'step': step, 'loss': 9}, {'step': step, name: value}]
  text = '\n'.join(map(json.dumps, lines))
  (folder / 'metrics.jsonl').write_text(text + '\n{"step": 99, "val/acc')
  return epath.Path(folder)


@pytest.mark.parametrize('metric, sign', [('accuracy', 1), ('loss', -1)])
@pytest.mark.parametrize(
  'values, best_step',
  [
    ([(1, 0.5), (2, 0.4), (3, 0.3)], 1),
    ([(1, 0.5), (2, 0.6), (3, 0.6), (4, 0.6)], 2),  # equal is no improvement
    ([(1, 0.5), (2, None), (3, None)], 1),  # not finite
    ([(1, None), (2, None)], 0),
    ([(1, 0.1), (2, 0.5), (3, 0.4), (2, 0.9), (4, 0.5)], 2),  # evaluated again
    ([(1, 0.5), (2, 0.4), (3, 0.6)], None),
    ([(1, 0.5), (2, 0.4)], None),
    ([(1, 0.5), (2, 0.4), (2, 0.3)], None),  # one evaluation, written twice
    ([], None),
  ],
)
def test_a_run_ends_when_its_best_evaluation_is_too_old(
  tmp_path, values, best_step, metric, sign
):
  """It ends after two evaluations that are not better than the best."""
  name = f'val/{metric}'
  signed = [(step, value and sign * value) for step, value in values]
  workdir = _workdir(tmp_path, signed, name)
  found = guards.plateau(workdir, name, sign, 2)
  if best_step is None:
    assert found is None
  else:
    assert found is not None and found['best_step'] == best_step
    assert found['step'] == max(step for step, _ in values)
    assert found['evaluations'] >= 2 and found['metric'] == name
  assert guards.plateau(workdir, name, sign, 4) is None
  assert guards.plateau(workdir, 'test/accuracy', 1, 2) is None
