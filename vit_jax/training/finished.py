"""Determines at a start whether the run is over, and what is left to do."""

import json
import logging
import math
from typing import Any, NamedTuple

from etils import epath

from vit_jax.analysis import curves
from vit_jax.analysis.report import page
from vit_jax.checkpoint import latest_step
from vit_jax.config import completion
from vit_jax.config.schema import Config
from vit_jax.errors import UserError
from vit_jax.processes import consensus
from vit_jax.run import guards, ledger, resume
from vit_jax.run import metrics as metrics_lib
from vit_jax.training.evaluations import Results

log = logging.getLogger('vit_jax')
_EVENT = 'finished'


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


def record(events: ledger.Ledger, step: int, results: Results) -> None:
  """Writes the event of a run that has nothing left to do.

  Args:
    events: events of the run.
    step: number of updates completed at the end of the run.
    results: metrics of the evaluation at this step.
  """
  events.event(_EVENT, step=step, metrics=sorted(results))


def find(config: Config, folder: epath.Path, total: int) -> Progress:
  """Returns the progress of a run; all processes receive the same.

  Nothing is left to do if the last start had the same config and reached the
  end of the run, and its last checkpoint, metrics, curves and report are still
  there. Only a directory and small files are read, so this is reported early.

  Args:
    config: completed config of this start.
    folder: directory of the run.
    total: number of updates in the whole training.

  Raises:
    UserError: the newest checkpoint is beyond the end, or there is no
      permission to read the files of the run.
    StorageError: the files of the run cannot be read.
  """

  def read() -> tuple[int | None, str, Results | None]:
    step = latest_step(folder / 'checkpoints') or None
    if step is None:
      return None, '', None
    plateau = guards.plateau(folder, config)
    text = str(plateau) if plateau and plateau.step == step else ''
    return step, text, _results(config, folder, step)

  step, plateau, results = consensus.from_main(read)
  if results is not None:
    return Progress(step, True, results)
  if step is not None and step > total:
    raise UserError(
      f'{folder} is at step {step}, beyond the {total} steps of config.total='
      f'{config.total!r}: give a longer total, or another --workdir.'
    )
  if step != total and not plateau:
    return Progress(step)
  log.info(
    '%s has ended%s at step %s of %d. No step is trained; the evaluators run '
    'again. %s',
    folder,
    '' if step == total else ' early',
    step,
    total,
    f'{plateau}: to continue, set a larger value, or None.'
    if step != total
    else '',
  )
  return Progress(step, True)


def _results(config: Config, folder: epath.Path, step: int) -> Results | None:
  """Returns the metrics at `step`; None if something is left to do."""
  # The event is written last. A later start would follow it, even one that was
  # killed at once.
  events: list[dict[str, Any]] = [
    event
    for event in ledger.read(folder / 'events.jsonl')
    if event['event'] in ('start', _EVENT)
  ]
  last = resume.last_config(folder) or {}
  files = ((config.log.curves, curves.NAME), (config.log.report, page.NAME))
  results: Results = {}
  for line_step, metrics in metrics_lib.read(folder):
    if line_step == step and 'loss' not in metrics:
      for name, value in metrics.items():
        results[name] = math.nan if value is None else value
  is_complete = (
    events
    and events[-1]['event'] == _EVENT
    and events[-1]['step'] == step
    and last == json.loads(completion.to_json(config))
    and all((folder / name).exists() for enabled, name in files if enabled)
  )
  if not is_complete or not results.keys() >= set(events[-1]['metrics']):
    return None
  return results
