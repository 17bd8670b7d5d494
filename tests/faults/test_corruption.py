"""Tests of the detection of silent data corruption by repeated steps."""

import json

import numpy as np
import pytest

from tests import cli
from tests.faults.counts import injected

CONFIG = 'configs/l16_i21k.py'
CHANGES = cli.SMALL_L16 | {
  'total': '12 steps',
  'schedule.warmup': '4 steps',
  'micro_batches': 1,
}


def _command(workdir, **changes):
  return cli.command('train', *cli.flags(CONFIG, workdir, CHANGES | changes))


@pytest.mark.slow
def test_repeated_steps_do_not_change_a_run(tmp_path):
  """On sound devices, the bits equal those of a run without repeated steps."""
  plain, replayed = tmp_path / 'plain', tmp_path / 'replayed'
  cli.run(_command(plain))
  cli.run(_command(replayed, **{'recovery.sdc_every': '5 steps'}))
  assert cli.losses(replayed) == cli.losses(plain)
  theirs = cli.final_params(plain)
  for path, array in cli.final_params(replayed).items():
    np.testing.assert_array_equal(array, theirs[path], err_msg=path)


@pytest.mark.slow
def test_a_step_with_other_bits_ends_the_run(tmp_path):
  """The message names the leaves that differ."""
  injected('a step that gives other bits')
  objective = {
    'objective.name': 'tests.faults.poison',
    'objective.harm': 'bits',
  }
  changes = objective | {'recovery.sdc_every': '5 steps'}
  _, err = cli.run(_command(tmp_path / 'run', **changes), code=1)
  # Step 5 is the 5th and 6th evaluation, both good; step 10 the 11th and 12th.
  assert 'silent data corruption: computing step 10 twice' in err
  lines = (tmp_path / 'run/events.jsonl').read_text().splitlines()
  (event,) = [e for e in map(json.loads, lines) if e['event'] == 'sdc']
  assert event['step'] == 10 and 'params/head/kernel' in event['leaves']
