"""Compares a run with what its workdir holds of the starts before.

Every function is called by all processes and returns the same on each.
"""

import logging
from typing import Any

from etils import epath

from vit_jax import checkpoint
from vit_jax.config.completion import Config
from vit_jax.errors import UserError
from vit_jax.processes import consensus, runtime
from vit_jax.run import comparison, consistency, recovery
from vit_jax.run import ledger as ledger_lib
from vit_jax.run import workdir as workdir_lib
from vit_jax.run.comparison import Note
from vit_jax.run.ledger import Ledger
from vit_jax.training.experiment import Experiment

log = logging.getLogger('vit_jax')
Json = dict[str, Any]


def events(workdir: epath.Path) -> list[Json]:
  """Reads the events of the run so far."""
  return consensus.from_main(lambda: ledger_lib.read(workdir / 'events.jsonl'))


def newest_step(workdir: epath.Path) -> int | None:
  """Returns the step of the newest checkpoint, or None if there is none.

  Raises:
    StorageError: the directory cannot be listed.
  """
  return consensus.from_main(
    lambda: checkpoint.latest_step(workdir / 'checkpoints')
  )


def about(workdir: epath.Path, step: int) -> Json:
  """Reads what was saved next to the state of a step.

  Args:
    workdir: directory of the run.
    step: step of a checkpoint; 0 for a run that has none.

  Returns:
    The item `about`; empty for step 0.

  Raises:
    UserError: it is damaged or may not be read.
    StorageError: it cannot be read, however often this is tried.
  """
  if not step:
    return {}
  # All processes read it, and agree on whether all of them could.
  return checkpoint.load_about(workdir / 'checkpoints' / str(step))


def check_end(
  workdir: epath.Path, step: int | None, experiment: Experiment
) -> None:
  """Checks that the newest checkpoint is not beyond the end of the run.

  Args:
    workdir: directory of the run.
    step: step of the newest checkpoint; None if there is none.
    experiment: experiment of the run.

  Raises:
    UserError: it is.
  """
  total = experiment.total_steps
  if step is not None and step > total:
    raise UserError(
      f'{workdir} is at step {step}, beyond the {total} steps of config.total='
      f'{experiment.config.total!r}: give a longer total, or another --workdir '
      'to train from the start.'
    )
  if step == total:
    log.info(
      '%s has finished: its newest checkpoint is that of step %d of %d. No '
      'step is trained; the evaluators run again.',
      workdir,
      step,
      total,
    )


class Comparison:
  """Compares this start of a run with the checkpoint that it resumes from.

  A run whose data, config or software settings changed would go on with other
  numbers, and with other class folders even with other labels. The newest
  checkpoint is compared first, before anything is compiled. If another one is
  restored in the end, because the newest is damaged, that one is compared too.
  """

  def __init__(
    self,
    workdir: epath.Path,
    now: Json,
    config: Config,
    *,
    allow_changes: bool,
  ):
    """Compares nothing yet.

    Args:
      workdir: directory of the run.
      now: item `about` of this start.
      config: completed config of this start.
      allow_changes: whether to go on although it is another run.
    """
    self._workdir, self._now, self._config = workdir, now, config
    self._allow_changes = allow_changes
    self._compared: int | None = None  # step of a checkpoint
    self._notes: list[Note] = []  # for the log and events.jsonl
    self._is_recorded = False

  def check_processes(self) -> None:
    """Checks that all processes are about to run the same.

    Raises:
      UserError: one of them is not.
    """
    consistency.check(self._now, self._config)

  def check_newest(self, step: int | None) -> None:
    """Compares the newest checkpoint, so that a refusal comes early.

    A checkpoint whose description is damaged is not compared: restoring decides
    what to do with it.

    Args:
      step: step of the newest checkpoint; None if there is none.

    Raises:
      UserError: it belongs to another run.
    """
    try:
      before = about(self._workdir, step or 0)
    except UserError as error:
      log.warning('%s The step that is restored is compared instead.', error)
      return
    self._check(step or 0, before)

  def check_restored(self, step: int, before: Json) -> None:
    """Compares the checkpoint that was restored, unless it was the newest.

    Args:
      step: step of the checkpoint; 0 for a new run.
      before: its item `about`.

    Raises:
      UserError: it belongs to another run.
    """
    if step != self._compared:
      self._check(step, before)

  def _check(self, step: int, before: Json) -> None:
    if before:
      notes = comparison.check(
        before,
        self._now,
        self._config,
        events(self._workdir),
        where=f'{self._workdir} (its checkpoint of step {step})',
        allow_changes=self._allow_changes,
      )
      self._add(step, notes)
    self._compared = step

  def _add(self, step: int, notes: list[Note]) -> None:
    self._notes += [
      note._replace(fields={'step': step} | note.fields) for note in notes
    ]

  def record_start(
    self, step: int, before: Json, ledger: Ledger, flops_per_image: float
  ) -> None:
    """Writes config.json, run.json and the notes, once the run can start.

    A run that was refused leaves these files as they were. After a rollback
    only new notes are written.

    Args:
      step: step that the run starts at.
      before: item `about` of the checkpoint of that step; empty for step 0.
      ledger: events of the run.
      flops_per_image: FLOPs of a training step per image.
    """
    if not self._is_recorded:
      # Must be read before config.json is replaced by that of this start.
      last = consensus.from_main(lambda: workdir_lib.last_config(self._workdir))
      last = last or before.get('config', {})
      self._add(step, comparison.evaluator_notes(last, self._config))
      if runtime.is_main():
        run = runtime.describe_run() | self._now['record']
        run['train_flops_per_image'] = flops_per_image
        workdir_lib.record(self._workdir, self._config, run)
    if runtime.is_main():
      for note in self._notes:
        log.warning('%s', note.text)
        ledger.event(note.kind, **note.fields)
    self._is_recorded, self._notes = True, []


def rollbacks(
  workdir: epath.Path, step: int, before: Json
) -> list[recovery.Rollback]:
  """Returns all rollbacks of a run that resumes, in order.

  Rollbacks that events.jsonl lacks are logged.

  Args:
    workdir: directory of the run.
    step: step of the checkpoint that the run resumes from.
    before: item `about` of that checkpoint.
  """
  saved = before.get('rollbacks', [])
  known, missing = recovery.rollbacks(saved, events(workdir))
  if missing:
    log.warning(
      'events.jsonl lacks rollbacks that the checkpoint of step %d '
      'contains; those of the checkpoint are used: %s',
      step,
      missing,
    )
  return known
