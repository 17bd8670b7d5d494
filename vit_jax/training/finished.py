"""Determines at a start whether the run is over, and what is left to do."""

import json
import logging
import math
from typing import NamedTuple

from etils import epath

from vit_jax.analysis import curves, report
from vit_jax.checkpoint import latest_step
from vit_jax.config import completion, keys
from vit_jax.config.schema import Config
from vit_jax.errors import UserError
from vit_jax.processes import consensus
from vit_jax.run import ledger, resume
from vit_jax.run import metrics as metrics_lib
from vit_jax.training.evaluations import Results
from vit_jax.training.recorder import metrics_text

log = logging.getLogger('vit_jax')


class Progress(NamedTuple):
  """What earlier starts of a run have done.

  Attributes:
    step: step of the newest checkpoint; None if there is none.
    is_over: whether no step is left to train.
    results: metrics of the evaluation at this step by name, if nothing at all
      is left to do; None otherwise.
  """

  step: int | None
  is_over: bool = False
  results: Results | None = None


def record(events: ledger.Ledger, folder: epath.Path, step: int) -> None:
  """Writes the event of a run that has nothing left to do.

  Args:
    events: events of the run.
    folder: directory of the run.
    step: number of updates completed at the end of the run.
  """
  metrics = sorted(_evaluation(folder, step))
  events.event(ledger.FINISHED, step=step, metrics=metrics)


def find(config: Config, folder: epath.Path) -> Progress:
  """Returns the progress of a run; all processes receive the same.

  Nothing is left to do if the last start had the same config and reached the
  end of the run, and its last checkpoint, metrics, curves and report are still
  there. Only a directory and small files are read, so this is reported early.

  Args:
    config: completed config of this start.
    folder: directory of the run.

  Raises:
    UserError: the newest checkpoint is beyond the end, the length of the
      training is invalid, or there is no permission to read the files.
    StorageError: the files of the run cannot be read.
  """
  total = keys.length(config).total_steps

  def read() -> tuple[int | None, Results | None]:
    # Step 0, saved by a signal before the first step, counts as no step.
    step = latest_step(folder / 'checkpoints') or None
    return step, None if step is None else _results(config, folder, step)

  step, results = consensus.from_main(read)
  if results is not None:
    log.info(
      '%s has finished: step %d is saved and evaluated, so nothing is computed.'
      ' %s',
      folder,
      step,
      metrics_text(results),
    )
  elif step is not None and step > total:
    raise UserError(
      f'{folder} is at step {step}, beyond the {total} steps of config.total='
      f'{config.total!r}: give a longer total, or another --workdir.'
    )
  elif step == total:
    log.info(
      '%s has ended at step %s of %d. No step is trained; the evaluators run '
      'again.',
      folder,
      step,
      total,
    )
  return Progress(step, results is not None or step == total, results)


def _results(config: Config, folder: epath.Path, step: int) -> Results | None:
  """Returns the metrics at `step`; None if something is left to do."""
  end = ledger.finished(ledger.read(folder / 'events.jsonl'))
  last = resume.last_config(folder) or {}
  files = ((config.log.curves, curves.NAME), (config.log.report, report.NAME))
  results = _evaluation(folder, step)
  is_complete = (
    end is not None
    and end['step'] == step
    and results.keys() >= set(end['metrics'])
    and last == json.loads(completion.to_json(config))
    and all((folder / name).exists() for enabled, name in files if enabled)
  )
  return results if is_complete else None


def _evaluation(folder: epath.Path, step: int) -> Results:
  """Returns the metrics of the evaluators that have run at `step`, by name."""
  return {
    name: math.nan if value is None else value
    for line_step, metrics in metrics_lib.read(folder)
    if line_step == step and 'loss' not in metrics
    for name, value in metrics.items()
  }
