"""Tests of rollbacks: the batches that are skipped, and their record."""

import pytest

from vit_jax.data.pipeline import order
from vit_jax.errors import DivergedError
from vit_jax.run import guards
from vit_jax.run.guards import Recovery, RollbackError


def _train(bad, saves, total, limits):
  """Returns the batches drawn at each step, and all rollbacks.

  Args:
    bad: batches whose step is bad.
    saves: steps after which a checkpoint is saved.
    total: steps.
    limits: a Recovery.
  """
  known, drawn, step, streak = [], {}, 0, 0
  checkpoint = (0, 0)
  while step < total:
    drawn[step] = order.batch_index(step, guards.skip_list(known))
    streak = streak + 1 if drawn[step] in bad else 0
    step += 1
    if streak > limits.max_skipped:
      error = RollbackError(step, streak)
      known = [
        *known,
        guards.rollback(error, known, checkpoint[0], limits),
      ]
      step, streak = checkpoint
    elif step in saves:
      checkpoint = (step, streak)
  return [drawn[step] for step in range(total)], known


@pytest.mark.parametrize('save', range(9))
@pytest.mark.parametrize('bad', [{4, 5}, {3, 4, 5, 6}, {0, 1, 2}])
def test_no_good_batch_is_skipped(save, bad):
  """The checkpoint may lie within or after the bad steps."""
  limits = Recovery(max_skipped=1, max_rollbacks=9)
  drawn, known = _train(bad, {save}, 12, limits)
  assert known
  good = [batch for batch in range(max(drawn) + 1) if batch not in bad]
  assert [batch for batch in drawn if batch not in bad] == good
  assert drawn == sorted(set(drawn))  # each once, in order


def test_bad_steps_before_the_checkpoint_are_not_skipped_again():
  """Only batches that would be drawn again are skipped."""
  limits = Recovery(max_skipped=3)
  made = guards.rollback(RollbackError(7, 4), [], 4, limits)
  assert made == {'from': 7, 'step': 4, 'skip': [4, 5, 6]}
  assert order.batch_index(4, guards.skip_list([made])) == 7


def test_rollbacks_in_the_checkpoint_count():
  """Lost lines of events.jsonl do not allow further rollbacks."""
  known = [{'from': 7, 'step': 4, 'skip': [5, 6]}]
  with pytest.raises(DivergedError, match='after 1 rollback'):
    guards.rollback(RollbackError(9, 2), known, 4, Recovery(max_rollbacks=1))


def _events(rollbacks):
  events = [{'event': 'rollback', 'time': 'x', **r} for r in rollbacks]
  return [{'event': 'start', 'step': 0}, *events]


FIRST = {'from': 7, 'step': 4, 'skip': [5, 6]}
SECOND = {'from': 19, 'step': 12, 'skip': [20]}


@pytest.mark.parametrize(
  'saved, written, known',
  [
    ([], [], []),
    ([], [FIRST], [FIRST]),  # not in the checkpoint yet, or it is old
    ([FIRST], [FIRST, SECOND], [FIRST, SECOND]),
    ([FIRST], [], [FIRST]),  # the line was lost
    ([FIRST, SECOND], [SECOND], [FIRST, SECOND]),
    ([FIRST], [SECOND], [FIRST, SECOND]),
  ],
)
def test_rollbacks_of_checkpoint_and_events_are_merged(saved, written, known):
  """Either of the two records may be incomplete."""
  assert guards.rollbacks(saved, _events(written)) == known
