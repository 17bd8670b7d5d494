"""Curves and last results of runs, read from their workdirs and drawn."""

import itertools
import logging
import os
import types
from collections.abc import Mapping, Sequence
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
# Labels of the x axes over which the metrics are drawn.
AXES = {
  'steps': 'steps',
  'epochs': 'epochs',
  'images': 'images seen (millions)',
  'core_days': 'core-days (devices × days of training)',
  'exaflops': 'exaFLOPs of training',
}


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
  series: Series
  scales: dict[str, tuple[list[float], list[float]]]
  examples: int | None = None
  model: Mapping[str, Any] = types.MappingProxyType({})

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
  return Run(
    workdir.name, series, scales, examples or None, config.get('model', {})
  )


def read_runs(workdirs: Sequence[epath.Path]) -> list[Run]:
  """Reads several runs, with the names of `names`; see `read_run`."""
  return [
    read_run(workdir)._replace(name=name)
    for workdir, name in zip(workdirs, names(workdirs), strict=True)
  ]


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


def is_result(name: str) -> bool:
  """Returns whether a metric is an evaluator's result other than a count."""
  return '/' in name and not name.endswith('/count')


def compare(runs: Sequence[Run]) -> tuple[Any, dict[str, np.ndarray]]:
  """Draws every metric over every axis, with one line per run.

  Args:
    runs: runs, at least one of which has a loss or a result.

  Returns:
    The Matplotlib figure, and its arrays `[2, n]` by 'run/metric/axis'.

  Raises:
    UserError: none of the runs has a loss or a result.
  """
  found = {name for run in runs for name in run.series}
  # The training loss comes first, then losses of evaluators.
  metrics = sorted(
    (name for name in found if name == 'loss' or is_result(name)),
    key=lambda name: (name != 'loss', not name.endswith('/loss'), name),
  )
  axes_names = [a for a in AXES if any(a in run.scales for run in runs)]
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


def _labels(models: Sequence[Mapping[str, Any]]) -> list[str]:
  """Labels each model by its name and the keys that differ for this name."""

  def shown(value: Any) -> Any:
    """Returns the value of a key; for a section of the config, its name."""
    return value.get('name', value) if isinstance(value, dict) else value

  labels = []
  for model in models:
    same_name = [other for other in models if other['name'] == model['name']]
    differing = [
      f' {key}={shown(value)}'
      for key, value in sorted(model.items())
      if value is not None and any(o.get(key) != value for o in same_name)
    ]
    labels.append(''.join([str(model['name']), *differing]))
  return labels


def compare_sizes(runs: Sequence[Run]) -> tuple[Any, dict[str, np.ndarray]]:
  """Draws the last result of each run over its number of training examples.

  There is a panel per result. Runs of the same model are points of one line,
  which passes through the means of equal data sizes. The label of a line is the
  model's name and, if names are not enough, the keys in which the models
  differ. Runs without a model, a number of examples or results are left out.

  Returns:
    The Matplotlib figure, and its points `[2, n]` by 'label/metric', ordered by
    data size.

  Raises:
    UserError: no run has a model, a number of examples and a result.

  Reference: arXiv 2010.11929, Figures 3 and 4, which have the same form.
  """
  complete = [run for run in runs if run.examples and run.model.get('name')]
  labels = _labels([run.model for run in complete])
  found: dict[str, dict[str, list[Any]]] = {}
  for run, label in zip(complete, labels, strict=True):
    for metric in filter(is_result, run.series):
      points = found.setdefault(metric, {}).setdefault(label, [])
      points.append((run.examples, run.series[metric][1][-1]))
  if not found:
    raise UserError(
      'no run has a model, train.num_examples and results: '
      f'{", ".join(run.name for run in runs)}; give other workdirs.'
    )
  panels, arrays = [], {}
  for metric, by_label in sorted(found.items()):
    lines = {
      label: np.array(sorted(points), np.float64).T
      for label, points in sorted(by_label.items())
    }
    ticks = np.unique(np.concatenate([x for x, _ in lines.values()])).tolist()
    title = f'{metric}, last value of each run'
    panels.append(
      plotting.Panel('training examples', title, lines, ticks=ticks, means=True)
    )
    arrays |= {f'{label}/{metric}': lines[label] for label in lines}
  return plotting.draw(panels, 3), arrays
