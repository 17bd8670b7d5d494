"""Accuracy over compute from one run and its branches (Figure 5's lengths).

python -m vit_jax.study --config=configs/studies/lengths.py

Every length of a training with a decaying schedule needs a run of its own. With
a constant rate and a cool-down over the last fifth (schedule `wsd`, arXiv
2106.04560 and 2405.18392), all lengths share one run: each is a branch of it
(`train --branch_from`) that adds its cool-down. A branch is the same, bit for
bit, as a run of its length from the start.

Arguments:
  model: digits, a small ViT on scikit-learn's digits (configs/quickstart.py),
    or a model of Table 3 on JFT (configs/vit.py), such as B/16 or L/16. The
    paper trains for 7 and 14 epochs (Table 6, Figure 5), by a linear decay; the
    constant rate is not the paper's.
  separate: 1 for runs from the start instead of branches, to compare; also
    their costs: --plan=v3:4x4 prints both.

`python -m examples.study_results CONFIG WORKDIR` draws the rows over exaFLOPs;
those of a branch include the steps before it, as if it had been trained from
the start.
"""

from typing import Any

from vit_jax.config import parse_arg
from vit_jax.sweeps.grid import Branch, Row, Stage, Study

COOLDOWN = 0.2
# Steps: 7 and 14 epochs of JFT, rounded so that branches begin at saved steps.
_SEVEN_EPOCHS = 7 * 303_000_000 // 4_096 // 60 * 60
LENGTHS_JFT = (_SEVEN_EPOCHS, 2 * _SEVEN_EPOCHS)
LENGTHS_DIGITS = (160, 320, 640)


def get_study(argument: str | None = None) -> Study:
  arg = parse_arg(argument, model='digits', separate=0)
  flags: dict[str, Any] = {}
  if arg.model == 'digits':
    lengths, saves = LENGTHS_DIGITS, 1
    path, metric = 'configs/quickstart.py', 'test/accuracy'
    flags['schedule.warmup'] = '50 steps'
  else:
    lengths, saves = LENGTHS_JFT, 12
    path = f'configs/vit.py:variant={arg.model},data=jft'
    metric = 'val/accuracy'
  starts = [round((1 - COOLDOWN) * length) for length in lengths]
  rows = {}
  if not arg.separate:
    # The starts of all branches are multiples of the first. All steps are kept.
    every = starts[0] // saves
    keys = {
      'schedule.decay': 'constant',
      'total': f'{starts[-1]} steps',
      'checkpoint.every': f'{every} steps',
      'checkpoint.keep': starts[-1] // every,
      'checkpoint.best': None,  # otherwise, steps of evaluations count, too
    }
    rows['constant'] = Row(pretrain=Stage(path, metric, flags | keys))
  for length, start in zip(lengths, starts, strict=True):
    keys = {
      'schedule.decay': 'wsd',
      'schedule.cooldown': COOLDOWN,
      'total': f'{length} steps',
    }
    rows[f'{length} steps'] = Row(
      pretrain=Stage(path, metric, flags | keys),
      branch=None if arg.separate else Branch('constant', start),
    )
  title = f'{arg.model}: one run of every length'
  return Study(title=title, rows=rows)


def get_extras(argument: str | None = None) -> dict[str, Any]:
  """Returns the figure, see examples/study_results.py."""
  rows = [name for name in get_study(argument).rows if name != 'constant']
  lines = dict.fromkeys(rows, ('with cool-down',))
  return dict(figure=dict(x='exaflops', lines=lines))
