"""Compares this start of a run with the records of earlier starts.

All processes must call each function, and it returns the same on all of them.
"""

import logging
from typing import Any

from etils import epath

from vit_jax import checkpoint
from vit_jax.config.completion import Config
from vit_jax.errors import UserError
from vit_jax.processes import consensus, runtime
from vit_jax.run import comparison, consistency, early_stopping, recovery
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
  """Reads the item `about` of a checkpoint.

  Args:
    workdir: directory of the run.
    step: step of a checkpoint; 0 for a run that has none.

  Returns:
    The item `about`; empty for step 0.

  Raises:
    UserError: the item is damaged, or there is no permission to read it.
    StorageError: the item cannot be read, even after retries.
  """
  if not step:
    return {}
  return checkpoint.load_about(workdir / 'checkpoints' / str(step))


def check_end(
  workdir: epath.Path, step: int | None, experiment: Experiment
) -> bool:
  """Checks that the newest checkpoint is not beyond the end of the run.

  All processes must call it.

  Args:
    workdir: directory of the run.
    step: step of the newest checkpoint; None if there is none.
    experiment: experiment of the run.

  Returns:
    Whether the run has finished, at its last step or early.

  Raises:
    UserError: the newest checkpoint is beyond the end.
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
    return True
  plateau = early_stopping.agreed(workdir, experiment.config)
  if plateau is None or plateau.step != step:
    return False
  log.info(
    '%s has ended early at step %d of %d: %s. No step is trained; the '
    'evaluators run again. To continue, set a larger early_stop_patience, or '
    'None.',
    workdir,
    step,
    total,
    plateau,
  )
  return True


class Comparison:
  """Compares this start of a run with the checkpoint that it resumes from.

  A run whose data, config or software settings changed would compute other
  numbers from here on; with other class folders, even its labels would change
  their meaning. The newest checkpoint is compared first, before anything is
  compiled. If the newest is damaged, the older one that is restored is compared
  too.
  """

  def __init__(
    self,
    workdir: epath.Path,
    current: Json,
    config: Config,
    *,
    allow_changes: bool,
  ):
    """Stores the description of this start.

    Args:
      workdir: directory of the run.
      current: item `about` of this start.
      config: completed config of this start.
      allow_changes: whether to resume although the checkpoint belongs to
        another run.
    """
    self._workdir, self._current, self._config = workdir, current, config
    self._allow_changes = allow_changes
    self._compared_step: int | None = None
    self._notes: list[Note] = []  # for the log and events.jsonl
    self._is_recorded = False

  def check_processes(self) -> None:
    """Checks that all processes have the same config, data and versions.

    Raises:
      UserError: processes differ.
    """
    consistency.check(self._current, self._config)

  def check_newest(self, step: int | None) -> None:
    """Compares this start with the newest checkpoint, before it is restored.

    A checkpoint whose item `about` is damaged is not compared, because another
    one may be restored.

    Args:
      step: step of the newest checkpoint; None if there is none.

    Raises:
      UserError: the checkpoint belongs to another run.
    """
    try:
      saved = about(self._workdir, step or 0)
    except UserError as error:
      log.warning('%s The step that is restored is compared instead.', error)
      return
    self._check(step or 0, saved)

  def check_restored(self, step: int, saved: Json) -> None:
    """Compares this start with the restored checkpoint, unless already done.

    Args:
      step: step of the checkpoint; 0 for a new run.
      saved: item `about` of the checkpoint.

    Raises:
      UserError: the checkpoint belongs to another run.
    """
    if step != self._compared_step:
      self._check(step, saved)

  def _check(self, step: int, saved: Json) -> None:
    if saved:
      notes = comparison.check(
        saved,
        self._current,
        self._config,
        events(self._workdir),
        checkpoint=f'{self._workdir} (its checkpoint of step {step})',
        allow_changes=self._allow_changes,
      )
      self._add_notes(step, notes)
    self._compared_step = step

  def _add_notes(self, step: int, notes: list[Note]) -> None:
    self._notes += [
      note._replace(fields={'step': step} | note.fields) for note in notes
    ]

  def record_start(
    self, step: int, saved: Json, ledger: Ledger, flops_per_image: float
  ) -> None:
    """Writes config.json, run.json and the notes of the comparisons.

    It is called after all checks, so that a run that is refused does not change
    these files. After a rollback only new notes are written.

    Args:
      step: step that the run starts at.
      saved: item `about` of the checkpoint of that step; empty for step 0.
      ledger: destination of an event for each note.
      flops_per_image: FLOPs of a training step per image.
    """
    if not self._is_recorded:
      # The config of the last start must be read before it is replaced.
      last = consensus.from_main(lambda: workdir_lib.last_config(self._workdir))
      last = last or saved.get('config', {})
      self._add_notes(step, comparison.evaluator_notes(last, self._config))
      if runtime.is_main():
        run = runtime.describe_run() | self._current['record']
        run['train_flops_per_image'] = flops_per_image
        workdir_lib.record(self._workdir, self._config, run)
    if runtime.is_main():
      for note in self._notes:
        log.warning('%s', note.text)
        ledger.event(note.kind, **note.fields)
    self._is_recorded, self._notes = True, []


def rollbacks(
  workdir: epath.Path, step: int, saved: Json
) -> list[recovery.Rollback]:
  """Returns all rollbacks of a run that resumes, in order.

  A warning lists the rollbacks that are missing in events.jsonl.

  Args:
    workdir: directory of the run.
    step: step of the checkpoint that the run resumes from.
    saved: item `about` of that checkpoint.
  """
  in_checkpoint = saved.get('rollbacks', [])
  found, missing = recovery.rollbacks(in_checkpoint, events(workdir))
  if missing:
    log.warning(
      'events.jsonl lacks rollbacks that the checkpoint of step %d '
      'contains; those of the checkpoint are used: %s',
      step,
      missing,
    )
  return found
