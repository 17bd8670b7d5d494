"""Tables of the paper: python -m vit_jax.study --config=configs/studies/….py.

A study has rows. Each row pre-trains a model and transfers its weights: it
fine-tunes them (after selecting a learning rate if the paper does so), or
evaluates them without training. A transfer starts when its pre-training is
finished.
The runs are executed one after another on this machine. The same command
resumes where it stopped and repeats nothing. If a run fails, its row is
skipped, the other rows continue, and the command ends with the list of errors.

--weights=ROW=PATH uses the weights at PATH for a row instead of training them.
--config.KEY=value applies to all runs (to evaluations only if KEY belongs to
source or reader), --pretrain.KEY=value to pre-trainings only.
--print_jobs prints the commands of the runs that can start now, one per line,
for a cluster; when they are done, the same command prints the next ones.
--plan=v3:4x4 (or h100:1x8) prints the predicted cost of the pre-trainings on
these devices, and starts nothing.

WORKDIR contains results.csv, results.md (each value next to the paper's), and a
workdir per run. examples/study_results.py draws its figure, and computes
further columns from its runs.
"""

import logging
import sys
from collections.abc import Mapping, Sequence

from absl import flags

from vit_jax.arrays import devices, memory
from vit_jax.cli import process
from vit_jax.config import overrides
from vit_jax.errors import UserError, check_choice
from vit_jax.sweeps import execution, grid, jobs, tables

log = logging.getLogger('vit_jax')


def define_flags() -> None:
  """Defines the flags of this command."""
  execution.define_flags()
  flags.DEFINE_multi_string(
    'weights', [], 'ROW=PATH: weights instead of pre-training; repeatable.'
  )
  flags.DEFINE_string(
    'plan',
    None,
    'Print the predicted cost of the pre-trainings on these devices (see '
    'plan --topology), such as v3:4x4 or h100:1x8, and start nothing.',
  )
  extracted = overrides.extract(sys.argv, 'pretrain')
  flags.DEFINE_multi_string('pretrain', extracted, 'Set by --pretrain.KEY=….')


def _weights(study: grid.Study, values: Sequence[str]) -> dict[str, str]:
  """Parses the values 'ROW=PATH' of --weights; returns paths by row."""
  paths_by_row = {}
  for value in values:
    row, _, path = value.partition('=')
    if not path:
      raise UserError(f'--weights is {value!r}; give ROW=PATH.')
    check_choice('the row of --weights', row, study.rows)
    paths_by_row[row] = path
  return paths_by_row


def _print_cost(
  study: grid.Study,
  topology: str,
  extra_flags: Sequence[str],
  weights: Mapping[str, str],
) -> None:
  """Prints the predicted cost of the pre-trainings of each row as a table.

  A run that branches from another one costs its own steps only.

  Args:
    study: study of a config.
    topology: devices of each run, as in `plan --topology`.
    extra_flags: flags '--config.KEY=value' for pre-trainings.
    weights: paths of weights that replace pre-trainings, by row.
  """
  unit = 'core-days' if devices.parse_gpus(topology) is None else 'GPU-days'
  print(f'| row | runs | fits | memory per device | s per step | {unit} |')
  print('|---' * 6 + '|')
  total = 0.0
  for name, row in study.rows.items():
    if row.pretrain is None or name in weights:
      continue
    log.info('planning the row %s', name)
    number = len(row.pretrain.seeds)
    keys = {**row.pretrain.flags, 'seed': row.pretrain.seeds[0]}
    words = [f'--config={row.pretrain.config}', *jobs.key_flags(keys)]
    plan = process.plan([*words, *extra_flags, f'--topology={topology}'])
    days = plan['predicted_core_days']
    step = cost = '–'  # unknown on this machine
    if days is not None:
      skipped = row.branch.step if row.branch else 0
      days *= number * (1 - skipped / plan['total_steps'])
      step, cost = f'{plan["predicted_step_seconds"]:.4f}', f'{days:,.1f}'
      total += days if plan['fits'] else 0
    fits = 'yes' if plan['fits'] else 'no'
    size = memory.text(plan['peak_bytes_per_device'])
    print(f'| {name} | {number} | {fits} | {size} | {step} | {cost} |')
  print(f'| total of what fits |  |  |  |  | {total:,.1f} |')


def main(arguments: list[str]) -> None:
  """Executes a study and prints its table, or prints its predicted cost."""
  values = flags.FLAGS
  study, workdir = execution.load(arguments, 'studies', grid.Study)
  weights = _weights(study, values.weights)
  extra_flags, pretrain_flags = values.overrides, values.pretrain
  if values.plan is not None:
    changes = [*extra_flags, *pretrain_flags]
    _print_cost(study, values.plan, changes, weights)
    return
  for name, row in study.rows.items():
    if row.pretrain is None and name not in weights:
      log.warning('%r is left out; give --weights=%s=PATH for it', name, name)
  execution.execute(
    lambda: jobs.of_study(study, workdir, extra_flags, pretrain_flags, weights),
    lambda graph: tables.of_study(study, graph),
    workdir,
    values.print_jobs,
  )


if __name__ == '__main__':
  process.run(main, define_flags)
