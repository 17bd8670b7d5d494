"""Comparison of several runs: metrics over steps, time and compute."""

import itertools
import os
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath
from jaxtyping import Float

from vit_jax.analysis import curves, plotting
from vit_jax.errors import UserError
from vit_jax.files import jsonl
from vit_jax.run import ledger

# Labels of the x axes over which the metrics are drawn.
AXES = {
  'steps': 'steps',
  'epochs': 'epochs',
  'images': 'images seen (millions)',
  'core_days': 'core-days (devices × days of training)',
  'exaflops': 'exaFLOPs of training',
}


class Run(NamedTuple):
  """The curves of a workdir.

  Attributes:
    name: name of the directory.
    series: (steps, values) of each metric.
    scales: for each axis of `AXES`, points (steps, positions on the axis),
      which are interpolated linearly. Axes that the workdir does not determine
      are left out.
    examples: number of training examples; None if config.json does not contain
      it.
    model: the section `model` of the config; {} if config.json is missing.
  """

  name: str
  series: dict[str, tuple[list[int], list[float]]]
  scales: dict[str, tuple[list[float], list[float]]]
  examples: int | None = None
  model: Mapping[str, Any] = types.MappingProxyType({})

  def over(self, axis: str, metric: str) -> Float[np.ndarray, '2 n']:
    """Returns the points of a metric: positions on the axis, and values."""
    steps, values = self.series[metric]
    positions = np.interp(steps, *self.scales[axis])
    return np.array([positions, values], np.float64)


def read(workdir: epath.Path) -> Run:
  """Reads a run from metrics.jsonl, events.jsonl, config.json and run.json.

  Raises:
    UserError: the workdir does not contain metrics.jsonl, or a file cannot be
      read.
  """
  if not (workdir / 'metrics.jsonl').exists():
    raise UserError(
      f'{workdir} does not contain metrics.jsonl: give the workdir of a run.'
    )
  series = curves.read(workdir)
  config = jsonl.read_object(workdir / 'config.json')
  run = jsonl.read_object(workdir / 'run.json')
  last = float(max((max(s) for s, _ in series.values()), default=1) or 1)
  scales = {'steps': ([0.0, last], [0.0, last])}

  def linear(axis: str, *factors: Any) -> None:
    """Adds an axis on which the length of a step is a product of factors."""
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
  return Run(
    workdir.name, series, scales, examples or None, config.get('model', {})
  )


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


def panels(runs: Sequence[Run]) -> tuple[list[str], list[str]]:
  """Returns the metrics and the x axes that at least one of the runs has."""
  names = {name for run in runs for name in run.series}
  results = [name for name in sorted(names) if is_result(name)]
  losses = [n for n in ('loss', *results) if _is_loss(n) and n in names]
  metrics = list(dict.fromkeys([*losses, *results]))
  return metrics, [a for a in AXES if any(a in run.scales for run in runs)]


def is_result(name: str) -> bool:
  """Returns whether a metric is an evaluator's result other than a count."""
  return '/' in name and not name.endswith('/count')


def _is_loss(name: str) -> bool:
  return name == 'loss' or name.endswith('/loss')


def compare(runs: Sequence[Run]) -> tuple[Any, dict[str, np.ndarray]]:
  """Draws every metric over every axis, with one line per run.

  Args:
    runs: runs, at least one of which has a loss or a result.

  Returns:
    The Matplotlib figure, and its arrays `[2, n]` by 'run/metric/axis'.

  Raises:
    UserError: none of the runs has a loss or a result.
  """
  metrics, axes_names = panels(runs)
  if not metrics:
    raise UserError(
      'none of these runs has logged a loss or a result yet: '
      f'{", ".join(run.name for run in runs)}.'
    )
  charts, arrays = [], {}
  for metric, axis in itertools.product(metrics, axes_names):
    lines = {
      f'{number}: {run.name}': run.over(axis, metric)
      for number, run in enumerate(runs, 1)
      if metric in run.series and axis in run.scales
    }
    charts.append(plotting.Panel(AXES[axis], metric, lines))
    arrays |= {f'{label}/{metric}/{axis}': lines[label] for label in lines}
  return plotting.draw(charts, len(axes_names)), arrays
