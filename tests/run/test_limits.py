"""Tests of bounds of metrics."""

import dataclasses
import json
import logging

import numpy as np
import pytest
from etils import epath
from minimal_config import completed

from vit_jax.config import completion, identity
from vit_jax.errors import DivergedError, UserError
from vit_jax.run.guards import Limit, Limits, Recovery
from vit_jax.run.ledger import Ledger


def steps(duration):
  number, unit = duration.split(' ')
  return int(number) * {'steps': 1, 'epochs': 10}[unit]


@pytest.fixture
def watched(tmp_path):
  """Returns a function that checks a sequence of values and returns events."""
  path = epath.Path(tmp_path) / 'events.jsonl'

  def feed(limit, values, first=1):
    limits = Limits({'alarm': dataclasses.asdict(limit)}, steps, Ledger(path))
    for step, value in enumerate(values, first):
      limits.step(step, {'entropy': value, 'loss': 1.0})
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]

  return feed


def test_a_metric_out_of_bounds_gives_one_warning(watched, caplog):
  """The warning comes in the third step in a row out of bounds."""
  limit = Limit(metric='entropy', at_least=0.5, during='3 steps')
  with caplog.at_level(logging.WARNING, 'vit_jax'):
    events = watched(limit, [1, 0.4, 0.4, 0.5, 0.1, 0.2, 0.3, 0.1, 0.1])
  (event,) = events
  assert event['event'] == 'limit' and event['name'] == 'alarm'
  assert (event['metric'], event['step'], event['value']) == ('entropy', 7, 0.3)
  (record,) = caplog.records
  assert 'LIMIT EXCEEDED' in record.message and 'at least 0.5' in record.message


@pytest.mark.parametrize(
  'bounds, values, warned',
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
def test_steps_with_a_warning(watched, bounds, values, warned):
  events = watched(Limit(metric='entropy', **bounds), values)
  assert [event['step'] for event in events] == warned


def test_stop_ends_the_run(watched):
  """The exit code is that of a divergence; the warning and event come first."""
  limit = Limit(metric='entropy', at_least=0.5, during='2 steps', stop=True)
  with pytest.raises(DivergedError, match='alarm: entropy is 0.2 at step 3'):
    watched(limit, [1, 0.1, 0.2, 0.3])
  assert watched(limit, [])[0]['step'] == 3


def test_messages_of_wrong_limits(watched):
  """They are raised when recovery is built, an unknown metric at a step."""
  for settings, message in (
    ({}, 'no bound'),
    (dict(at_least=np.nan), 'finite'),
    (dict(at_least=0.1, during='0 steps'), 'above 0'),
    (dict(at_least=0.1, start='soon'), 'not a duration'),
  ):
    with pytest.raises(UserError, match=message):
      Recovery(limits={'alarm': dict(metric='entropy', **settings)})
  with pytest.raises(UserError, match="limits.alarm.*did you mean 'entropy'"):
    watched(Limit(metric='entropi', at_least=0.5), [1.0])


def test_limits_may_change_when_a_run_resumes():
  """They can be added, changed and removed."""
  limit = dict(metric='loss', at_most=9.0)
  without, one, other = (
    completed(**changes)
    for changes in (
      {},
      {'recovery.limits': dict(high=limit)},
      {'recovery.limits': dict(high=limit | dict(at_most=8.0, stop=True))},
    )
  )
  assert other.recovery.limits.high.during == '200 steps'
  for before in (without, one, other):
    for now in (without, one, other):
      changes = identity.changes(before.to_dict(), now)
      assert not changes, changes
  assert 'recovery.limits.high.stop' in completion.flatten(other)
