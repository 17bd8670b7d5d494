"""Tests of bad steps: rolled back, and never in the parameters."""

import numpy as np
import pytest

from tests import cli
from tests.faults.counts import injected
from vit_jax.data.pipeline import order

N, BATCH, SEED = 256, 32, 0


def _config(workdir, marked: list[int], **changes):
  overrides = {
    **{k: v for k, v in cli.SMALL_L16.items() if not k.startswith('source')},
    'source.name': 'tests.faults.poison',
    'source.num_examples': N,
    'source.num_classes': 20,
    'source.marked': '(' + ','.join(map(str, marked)) + ',)',
    'objective.name': 'tests.faults.poison',
    'augment.crop': 'none',
    'average_decay': 0.9,
    'checkpoint.every': '4 steps',
    'total': '8 steps',
    'schedule.warmup': '2 steps',
    'schedule.base_lr': 1e-4,
    **changes,
  }
  return cli.command(
    'train', *cli.flags('configs/l16_i21k.py', workdir, overrides)
  )


def _finite(workdir) -> None:
  for path, array in cli.final_params(workdir).items():
    assert np.isfinite(array).all(), path
  last = cli.records(workdir)[-1]
  assert np.isfinite(last['val/loss']) and np.isfinite(last['val_ema/loss'])


@pytest.mark.slow
def test_too_many_bad_steps_roll_back(tmp_path):
  """The run returns to the last save once, and skips the bad batches."""
  indices = order.shuffled(np.arange(N), N, SEED)
  marked = [int(indices[b * BATCH]) for b in (5, 6)]  # batches 5 and 6
  injected('bad batches in a row')
  changes = {'recovery.max_skipped': 1}
  cli.run(_config(tmp_path / 'run', marked, **changes))
  (event,) = cli.events(tmp_path / 'run', 'rollback')
  assert event['from'] == 7 and event['step'] == 4
  assert event['skip'] == [5, 6]
  lines = [r for r in cli.records(tmp_path / 'run') if 'loss' in r]
  assert [r['step'] for r in lines] == list(range(1, 9))
  # Batches 5 and 6 are never drawn again; 8 and 9 stand in for 6 and 7.
  assert sum(r['skipped'] for r in lines) <= 2
  aside = (tmp_path / 'run/metrics_set_aside.jsonl').read_text()
  assert aside.count('"loss": null') == 2
  _finite(tmp_path / 'run')


@pytest.mark.slow
def test_a_diverging_run_ends_with_code_43(tmp_path):
  """It ends after max_rollbacks; the message says where to look."""
  every = list(range(0, N, 8))  # a mark in about every batch
  changes = {'recovery.max_skipped': 0, 'recovery.max_rollbacks': 2}
  injected('a run that diverges')
  _, err = cli.run(_config(tmp_path / 'run', every, **changes), code=43)
  assert 'diverged:' in err and 'after 2 rollback(s)' in err
  assert len(cli.events(tmp_path / 'run', 'rollback')) == 2
  assert 'Traceback' not in err
