"""Recognizes a finished run, so that a restart does not evaluate it again."""

import json
import math

from etils import epath

from vit_jax.analysis import curves
from vit_jax.analysis.report import page
from vit_jax.config import completion
from vit_jax.config.completion import Config
from vit_jax.processes import consensus
from vit_jax.run import ledger, metric_lines, workdir
from vit_jax.training import history
from vit_jax.training.evaluations import Results

_EVENT = 'finished'


def record(events: ledger.Ledger, step: int, results: Results) -> None:
  """Writes the event of a run that has nothing left to do.

  Args:
    events: events of the run.
    step: number of updates completed at the end of the run.
    results: metrics of the evaluation at this step.
  """
  events.event(_EVENT, step=step, metrics=sorted(results))


def find(config: Config, folder: epath.Path) -> tuple[int, Results] | None:
  """Returns the last step and its metrics if there is nothing left to do.

  This is the case if the last start of the run had the same config and reached
  its end, and its last checkpoint, metrics, curves and report are still there.
  All processes receive the same result.

  Args:
    config: completed config of this start.
    folder: directory of the run.

  Returns:
    The number of updates completed, and the metrics of the evaluation at this
    step by name; None if something is left to do.

  Raises:
    UserError: there is no permission to read the files of the run.
    StorageError: the files of the run cannot be read.
  """
  newest = history.newest_step(folder)
  if not newest:
    return None
  return consensus.from_main(lambda: _find(config, folder, newest))


def _find(
  config: Config, folder: epath.Path, newest: int
) -> tuple[int, Results] | None:
  # The event is written last. A later start would follow it, even one that was
  # killed at once.
  kinds = ('start', _EVENT)
  events = [
    event
    for event in ledger.read(folder / 'events.jsonl')
    if event['event'] in kinds
  ]
  if not events or events[-1]['event'] != _EVENT:
    return None
  step, names = events[-1]['step'], events[-1]['metrics']
  same_config = workdir.last_config(folder) == json.loads(
    completion.to_json(config)
  )
  if step != newest or not same_config:
    return None
  for is_wanted, name in (
    (config.log.curves, curves.NAME),
    (config.log.report, page.NAME),
  ):
    if is_wanted and not (folder / name).exists():
      return None
  results = _evaluation(folder, step)
  return (step, results) if set(names) <= results.keys() else None


def _evaluation(folder: epath.Path, step: int) -> Results:
  """Reads the metrics of the evaluators after `step` updates."""
  results: Results = {}
  for line_step, metrics in metric_lines.read(folder):
    if line_step == step and 'loss' not in metrics:
      for name, value in metrics.items():
        results[name] = math.nan if value is None else value
  return results
