"""Tables and figures: python -m vit_jax.study --config=configs/studies/….py.

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

WORKDIR contains results.csv, results.md (each value next to the paper's),
figure.png and figure.npz if the study has a figure, and a workdir per run.
"""

import logging
import re
import sys
from collections.abc import Mapping, Sequence

from absl import flags

from vit_jax.analysis import gallery
from vit_jax.cli import process
from vit_jax.errors import UserError, closest
from vit_jax.files import atomic, paths
from vit_jax.study import chains, contents, costs, picture, tables
from vit_jax.study.chains import Chain, ExtraFlags
from vit_jax.study.contents import Study
from vit_jax.sweeps import frame, jobs

log = logging.getLogger('vit_jax')


def define_flags() -> None:
  """Defines the flags of this command."""
  frame.define_flags('study', 'studies')
  flags.DEFINE_multi_string(
    'weights', [], 'ROW=PATH: weights instead of pre-training; repeatable.'
  )
  flags.DEFINE_string(
    'plan',
    None,
    'Print the predicted cost of the pre-trainings on these devices (see '
    'plan --topology), such as v3:4x4 or h100:1x8, and start nothing.',
  )
  flags.DEFINE_multi_string(
    'pretrain', _extract_pretrain(sys.argv), 'Set by --pretrain.KEY=….'
  )


def _extract_pretrain(argv: list[str]) -> list[str]:
  """Removes each `--pretrain.KEY=value`; returns them as `--config.KEY=…`."""
  extracted = [arg for arg in argv if re.match(r'--?pretrain\..+=', arg)]
  argv[:] = [arg for arg in argv if arg not in extracted]
  return [re.sub(r'^--?pretrain\.', '--config.', arg) for arg in extracted]


def run(
  study: Study,
  workdir: str,
  extra_flags: ExtraFlags | None = None,
  weights: Mapping[str, str] | None = None,
  print_jobs: bool = False,
) -> dict[str, Chain]:
  """Executes a study, or prints the commands of its runs.

  Args:
    study: study to execute.
    workdir: local directory of all runs.
    extra_flags: flags that are added to the runs.
    weights: paths of weights that replace pre-trainings, by row.
    print_jobs: whether to print the commands instead of running them.

  Returns:
    The progress of each row at the end.

  Raises:
    UserError: runs failed, or the workdir belongs to another study.
    PreemptedError: a signal arrived.
  """
  weights = weights or {}
  _check_weights(study, weights)
  total = sum(
    chains.num_runs(row, name in weights) for name, row in study.rows.items()
  )
  failed: dict[str, UserError] = {}
  while True:
    found = {
      name: chains.of_row(
        name, row, workdir, extra_flags or ExtraFlags(), weights.get(name)
      )
      for name, row in study.rows.items()
    }
    parts = [part for chain in found.values() for part in chain.progress]
    jobs.check_flags(workdir, [run for part in parts for run in part.runs])
    _write(study, workdir, found)
    ready = {
      job.workdir: (name, job)
      for name, chain in found.items()
      if name not in failed
      for part in chain.progress
      for job in part.ready
    }
    if print_jobs or not ready:
      break
    name, job = next(iter(ready.values()))
    try:
      # Counted by workdir, because several columns may share an evaluation.
      done = {score.run.workdir for part in parts for score in part.scores}
      jobs.finish([job], done=len(done), total=total)
    except UserError as error:
      log.warning('the row %s is skipped: %s', name, error)
      failed[name] = error
  if print_jobs:
    for _, job in ready.values():
      print(jobs.line(job))
  if failed:
    raise UserError('\n'.join(f'{n}: {e}' for n, e in failed.items()))
  return found


def _check_weights(study: Study, weights: Mapping[str, str]) -> None:
  """Checks the rows of --weights, and logs which rows still need it.

  Raises:
    UserError: there is no such row.
  """
  for name in weights:
    if name not in study.rows:
      near = closest(name, study.rows)
      raise UserError(f'--weights={name}=…: there is no row {name!r}; {near}.')
  without = [
    name
    for name, row in study.rows.items()
    if row.pretrain is None and name not in weights
  ]
  if without:
    log.warning(
      'some rows have no pre-training and are left out; give '
      '--weights=ROW=PATH for %s',
      ', '.join(without),
    )


def _write(study: Study, workdir: str, found: Mapping[str, Chain]) -> None:
  """Writes tables and figure of the finished runs."""
  folder = paths.locate(workdir)
  atomic.save(folder / 'results.csv', tables.rows(study, found))
  atomic.save(folder / 'results.md', tables.markdown(study, found))
  if study.figure is None:
    return
  arrays = picture.arrays(study, found)
  if arrays:
    atomic.save(folder / 'figure.npz', gallery.archive(arrays))
    atomic.save(folder / 'figure.png', picture.figure(study, arrays))


def _weights(values: Sequence[str]) -> dict[str, str]:
  """Parses the values 'ROW=PATH' of --weights; returns paths by row."""
  pairs = [value.partition('=') for value in values]
  for row, _, path in pairs:
    if not path:
      raise UserError(f'--weights is {row!r}; give ROW=PATH.')
  return {row: path for row, _, path in pairs}


def main(arguments: list[str]) -> None:
  """Executes a study and prints its table, or prints its predicted cost."""
  values = flags.FLAGS
  study, workdir = frame.load_config(arguments, 'studies', contents.load)
  extra_flags = ExtraFlags(values.pretrain, values.overrides)
  weights = _weights(values.weights)
  if values.plan is not None:
    _check_weights(study, weights)
    found = costs.predict(study, values.plan, extra_flags, weights)
    print(costs.markdown(study, values.plan, found))
    return
  run(study, workdir, extra_flags, weights, values.print_jobs)
  frame.print_table(workdir)


if __name__ == '__main__':
  process.run(main, define_flags)
