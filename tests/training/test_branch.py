"""Tests of runs that begin from the whole state of a step of another run."""

import pytest
from etils import epath
from minimal_config import completed

from tests import cli
from tests.faults.counts import further
from vit_jax.checkpoint import manifest
from vit_jax.errors import UserError
from vit_jax.training import branch, loop

CHANGES = {
  'source': {'name': 'synthetic', 'num_examples': 64, 'num_classes': 10},
  'train.split': 'train[:64]',
  'total': '6 steps',
  'schedule.base_lr': 1e-2,
  'schedule.decay': 'constant',
  'schedule.warmup': '2 steps',
  'checkpoint.every': '2 steps',
  'checkpoint.keep': 10,
  'log.every': '1 steps',
  'log.tensorboard': False,
  'log.curves': False,
  'log.report': False,
  'evals': {},
}
COOLED = {'schedule.decay': 'wsd', 'schedule.cooldown': 0.5}


def train(folder, origin=None, **changes):
  config = completed(**CHANGES | changes)
  if origin:
    branch.begin(origin, config, folder)
  loop.run(config, folder)
  return folder


@pytest.fixture(scope='module')
def constant(tmp_path_factory):
  """Returns a finished run of six steps with a constant rate."""
  return train(epath.Path(tmp_path_factory.mktemp('constant')) / 'run')


def leaves(folder, step):
  return manifest.read(folder / f'checkpoints/{step}').leaves


@pytest.mark.slow
@pytest.mark.parametrize(
  'at, changes',
  [
    (4, {'total': '8 steps', **COOLED}),
    *further([6, {'total': '8 steps'}]),  # a finished run is continued
  ],
)
def test_a_branch_equals_a_run_with_its_schedule(
  constant, tmp_path, at, changes
):
  """All leaves of the last state, and all metrics, have the same bits.

  No later metrics of the other run are copied. The same command goes on if
  run_id.json is damaged.
  """
  path, steps = epath.Path(tmp_path), int(changes['total'].split()[0])
  branched = train(path / 'branch', f'{constant}@{at}', **changes)
  alone = train(path / 'alone', **changes)
  assert leaves(branched, steps) == leaves(alone, steps)
  assert cli.lines(branched) == cli.lines(alone)
  assert leaves(branched, at) == leaves(constant, at)
  assert not (branched / 'metrics_set_aside.jsonl').exists()
  (branched / 'checkpoints/run_id.json').write_text('{')
  train(branched, f'{constant}@{at}', **changes)
  with pytest.raises(UserError, match='has checkpoints already'):
    train(branched, f'{constant}@{at - 2}', **changes)


@pytest.mark.parametrize(
  'changes, expected',
  [
    ({}, {}),
    (
      {
        'optimizer.weight_decay_end': 0.1,  # depends on the total
        'optimizer.rules': (
          ('head/.*', {'after': '50 %'}),
          ('cls', {'after': '1 steps'}),
        ),
      },
      {'optimizer (100 %)': (6, 8), 'optimizer (50 %)': (3, 4)},
    ),
    (
      {
        'objective': {'name': 'dino'},
        'augment': {'name': 'multicrop'},
        'num_classes': 0,
        'mix': {},
      },
      {'objective (100 %)': (6, 8)},
    ),
  ],
)
def test_durations_that_a_branch_moves(changes, expected):
  """The whole length, and durations in %, but none in steps or epochs."""
  config = completed(**CHANGES | changes | {'total': '8 steps'})
  assert branch._moved('6 steps', config) == expected
  assert not branch._moved('8 steps', config)


@pytest.mark.slow
@pytest.mark.parametrize(
  'ending, changes, words',
  [
    ('', {}, 'give a workdir and a step'),
    ('@5', {}, r'@5: .*\[2, 4, 6\]'),
    ('@4', {'batch_size': 32, 'seed': 3}, 'batch_size: .*seed: '),
    ('@4', {'total': '4 steps'}, '@4: .*before the end.*4 steps'),
  ],
)
def test_wrong_branches_are_refused(constant, tmp_path, ending, changes, words):
  """One message names the step, the workdir or the keys; nothing is written."""
  workdir = epath.Path(tmp_path)
  with pytest.raises(UserError, match=f'(?s){words}'):
    branch.begin(f'{constant}{ending}', completed(**CHANGES | changes), workdir)
  assert not (workdir / 'checkpoints').exists()
