"""What a workdir tells of the run so far, the same to every process."""

import logging
from typing import Any

from etils import epath

from vit_jax import checkpoint
from vit_jax.config.completion import Config
from vit_jax.errors import UserError
from vit_jax.processes import consensus
from vit_jax.run import consistency, identity, ledger, recovery
from vit_jax.run import workdir as workdir_lib
from vit_jax.run.identity import Note
from vit_jax.training.experiment import Experiment

log = logging.getLogger('vit_jax')


def events(workdir: epath.Path) -> list[dict[str, Any]]:
  """What events.jsonl holds so far."""
  return consensus.from_main(lambda: ledger.read(workdir / 'events.jsonl'))


def about(workdir: epath.Path, step: int | None) -> dict[str, Any]:
  """What was saved beside the state of a step; nothing if it is not there.

  Where it cannot be read it is said, and the restore judges the state itself.
  """
  if not step:
    return {}
  try:  # all processes together: they agree on how reading went
    return checkpoint.load_about(workdir / 'checkpoints' / str(step))
  except UserError as error:
    log.warning('%s What it says of the run cannot be compared.', error)
    return {}


def check_end(
  workdir: epath.Path, step: int | None, experiment: Experiment
) -> None:
  """Raises UserError if the newest checkpoint is beyond the run's end."""
  total = experiment.total_steps
  if step is not None and step > total:
    raise UserError(
      f'{workdir} is at step {step}, beyond the {total} steps of config.total='
      f'{experiment.config.total!r}: give a longer total, or another --workdir '
      'to train anew.'
    )


def compare(
  workdir: epath.Path,
  step: int | None,
  now: dict[str, Any],
  config: Config,
  *,
  allow_changes: bool,
) -> list[Note]:
  """Compares a run's processes, its newest checkpoint and its last start.

  Args:
    workdir: of the run.
    step: of the newest checkpoint, if there is one.
    now: `about` of this run.
    config: of this run, completed.
    allow_changes: go on although it is another run.

  Returns:
    What is to be said.

  Raises:
    UserError: it is another run, or one process's is.
  """
  consistency.check(now, config)
  before = about(workdir, step)
  last = consensus.from_main(lambda: workdir_lib.last_config(workdir))
  notes = []
  if before:
    notes = identity.check(
      before,
      now,
      config,
      events(workdir),
      where=f'{workdir} (its checkpoint of step {step})',
      allow_changes=allow_changes,
    )
    last = last or before['config']
  notes += identity.evaluator_changes(last or {}, config)
  at = {'step': step or 0}
  return [note._replace(fields=at | note.fields) for note in notes]


def rollbacks(
  workdir: epath.Path, step: int, before: dict[str, Any]
) -> list[recovery.Rollback]:
  """All rollbacks of a run that resumes; says which events.jsonl lacks.

  Args:
    workdir: of the run.
    step: of the checkpoint it resumes from.
    before: `about` of that checkpoint.
  """
  saved = before.get('rollbacks', [])
  known, missing = recovery.rollbacks(saved, events(workdir))
  if missing:
    log.warning(
      'events.jsonl lacks rollbacks that the checkpoint of step %d holds; the '
      'run goes on by the checkpoint: %s',
      step,
      missing,
    )
  return known
