"""Curves of runs, read from their workdirs and drawn."""

import logging
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath
from jaxtyping import Float

from vit_jax.analysis import plotting
from vit_jax.errors import UserError
from vit_jax.files import jsonl, paths
from vit_jax.run import ledger
from vit_jax.run import metrics as metrics_lib

log = logging.getLogger('vit_jax')
NAME = 'curves.png'
Series = dict[str, tuple[list[int], list[float]]]  # (steps, values) by metric


def read(workdir: epath.Path) -> Series:
  """Returns (steps, values) of the finite values of each metric, in order."""
  return read_all(workdir)[0]


def read_all(workdir: epath.Path) -> tuple[Series, list[tuple[int, str]]]:
  """Reads all metrics of a run.

  Args:
    workdir: directory of the run.

  Returns:
    (steps, values) of each metric, and (step, metric) of every value that was
    not finite.
  """
  series: Series = {}
  nulls: list[tuple[int, str]] = []
  for step, metrics in metrics_lib.read(workdir):
    for name, value in metrics.items():
      if value is None:  # not finite; JSON has no NaN and infinity
        nulls.append((step, name))
      else:
        steps, values = series.setdefault(name, ([], []))
        steps.append(step)
        values.append(value)
  return series, nulls


def draw(workdir: epath.Path) -> None:
  """Draws WORKDIR/curves.png.

  If the file cannot be written, this is logged and the run continues.
  """
  series = read(workdir)
  # Training metrics, whose names contain no slash, come before evaluators.
  names = sorted(series, key=lambda name: ('/' in name, name))
  chosen = {
    'loss': [n for n in names if n == 'loss' or n.endswith('/loss')],
    'learning rate': [n for n in names if n == 'lr'],
    'accuracy': [n for n in names if n.endswith('/accuracy')],
  }
  panels = [
    plotting.Panel('step', title, {name: series[name] for name in found})
    for title, found in chosen.items()
    if found
  ]
  try:
    paths.write(workdir / NAME, plotting.png(plotting.draw(panels, 3)))
  except OSError as error:
    log.warning('%s could not be written: %s', NAME, error)


class Run(NamedTuple):
  """The curves of a workdir.

  Attributes:
    series: (steps, values) of each metric.
    scales: for each axis 'steps', 'epochs', 'images' (millions), 'core_days'
      and 'exaflops', points (steps, positions on the axis), which are
      interpolated linearly. Axes that the workdir does not determine are left
      out.
  """

  series: Series
  scales: dict[str, tuple[list[float], list[float]]]

  def over(self, axis: str, metric: str) -> Float[np.ndarray, '2 n']:
    """Returns the points of a metric: positions on the axis, and values."""
    steps, values = self.series[metric]
    positions = np.interp(steps, *self.scales[axis])
    return np.array([positions, values], np.float64)


def read_run(workdir: epath.Path) -> Run:
  """Reads a run from metrics.jsonl, events.jsonl, config.json and run.json.

  Raises:
    UserError: the workdir does not contain metrics.jsonl, or a file cannot be
      read.
  """
  if not (workdir / 'metrics.jsonl').exists():
    raise UserError(
      f'{workdir} does not contain metrics.jsonl: give the workdir of a run.'
    )
  series = read(workdir)
  config = jsonl.read_object(workdir / 'config.json')
  run = jsonl.read_object(workdir / 'run.json')
  # At least 1, because `np.interp` needs increasing steps.
  last = float(max((max(s) for s, _ in series.values()), default=1) or 1)
  scales = {'steps': ([0.0, last], [0.0, last])}

  def linear(axis: str, *factors: Any) -> None:
    """Adds an axis on which the length of a step is a product of factors.

    A factor that config.json or run.json does not contain is None; the axis is
    then left out.
    """
    if all(isinstance(f, int | float) and f > 0 for f in factors):
      scales[axis] = ([0.0, last], [0.0, float(last * np.prod(factors))])

  batch = config.get('batch_size')
  examples = config.get('train', {}).get('num_examples')
  flops = run.get('train_flops_per_image')
  if isinstance(batch, int) and examples:
    linear('epochs', batch / examples)
  linear('images', batch, 1e-6)
  linear('exaflops', batch, flops, 1e-18)
  events = ledger.read(workdir / 'events.jsonl')
  spans, devices = ledger.training_spans(events), run.get('num_devices')
  if spans and isinstance(devices, int):
    steps, seconds = np.array(spans, np.float64).T
    days = np.cumsum(seconds) * devices / 86400
    scales['core_days'] = ([0.0, *steps.tolist()], [0.0, *days.tolist()])
  return Run(series, scales)


def names(workdirs: Sequence[epath.Path]) -> list[str]:
  """Returns short names of several workdirs: paths without their common parts.

  The names of 'study/A/final' and 'study/B/final' are 'A' and 'B'. The name of
  a single workdir is that of its directory.
  """
  if len(workdirs) < 2:
    return [workdir.name for workdir in workdirs]
  parts = [os.fspath(workdir).rstrip('/').split('/') for workdir in workdirs]
  for end in (0, -1):
    while min(map(len, parts)) > 1 and len({path[end] for path in parts}) == 1:
      for path in parts:
        del path[end]
  return ['/'.join(path) for path in parts]
