"""Further columns and the figure of a study, from its runs.

python -m examples.study_results CONFIG WORKDIR

CONFIG is the `--config` of the study, and WORKDIR its workdir; nothing is
trained. The file of the study defines `get_extras(argument)`, which returns a
dict with these keys, both optional:

  columns: {name: (function, published numbers by row)}. The function has the
    argument {transfer: metrics of its final runs}, and returns the value of
    each seed, as fractions. The table is printed.
  figure: the fields of `Figure`, as a dict. It is written to
    WORKDIR/figure.png, and its data to WORKDIR/figure.npz: arrays [3, n] by
    'column/line', ordered by x, with positions on the x axis, values in %, and
    sample standard deviations. Published values have the key
    'column/line/paper'.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath
from matplotlib import ticker

from vit_jax.analysis import curves, gallery, plotting
from vit_jax.config import loading
from vit_jax.errors import UserError
from vit_jax.files import jsonl, paths
from vit_jax.run import ledger
from vit_jax.sweeps import grid, jobs, tables
from vit_jax.sweeps.grid import FINAL, UPSTREAM
from vit_jax.sweeps.jobs import DIVERGED, Columns, Graph
from vit_jax.sweeps.tables import Spread

AXES = {
  'images': 'images of the pre-training set',
  'epochs': 'epochs of pre-training',
  'exaflops': 'exaFLOPs of pre-training',
  'core_days': 'core-days of pre-training',
  'images_per_second': 'images per second and core in inference',
}
Extras = Mapping[str, Any]
Arrays = dict[str, np.ndarray]


class Figure(NamedTuple):
  """A figure with a panel for each column and a line for each model.

  Attributes:
    x: key of `AXES`. With 'epochs', the curves of pre-trainings are drawn.
    columns: columns of the y axes; with 'epochs', metrics of pre-trainings.
    lines: lines that contain a row or a published model; by default, a line of
      its own.
    places: positions on the x axis: the number of images, the images per second
      of inference, or the published cost of the pre-training. The row's own
      results use this cost only if its weights are given instead of trained.
  """

  x: str
  columns: Sequence[str] = (UPSTREAM,)
  lines: Mapping[str, Sequence[str]] = {}
  places: Mapping[str, float] = {}


def load_extras(path: str) -> Extras:
  """Returns the result of `get_extras`, with the figure as a `Figure`."""
  extras = loading.call(path, 'get_extras')
  if 'figure' in extras:
    extras['figure'] = Figure(**extras['figure'])
  return extras


def graph_of(study: grid.Study, workdir: str) -> Graph:
  """Returns the jobs of a study, with the rows whose weights were given."""
  given = {
    name: 'given'
    for name in study.rows
    if epath.Path(f'{workdir}/{jobs.directory(name)}/given').exists()
  }
  return jobs.of_study(study, workdir, [], [], given)


def further(columns: Columns, function: Any) -> Spread | None:
  """Returns the value of a further column; None if a run is not finished.

  Args:
    columns: jobs of a row.
    function: function of the column.
  """
  transfers = {key: runs for key, runs in columns.items() if key != UPSTREAM}
  finished = {key: jobs.finished(j, FINAL) for key, j in transfers.items()}
  if not all(map(jobs.complete, transfers.values())):
    return None
  found = [job for each in finished.values() for job in each]
  if not found or any(job.value == DIVERGED for job in found):
    return Spread(DIVERGED)
  metrics = {k: [job.metrics for job in each] for k, each in finished.items()}
  return Spread.of(function(metrics))


def spread(columns: Columns, column: str, extras: Extras) -> Spread | None:
  """Returns the value of any column; None if a run is not finished."""
  if column in extras.get('columns', {}):
    return further(columns, extras['columns'][column][0])
  return tables.spread(columns, column)


def table(study: grid.Study, graph: Graph, extras: Extras) -> str:
  """Returns the further columns as a Markdown table."""
  columns = extras.get('columns', {})
  rows = [['row', *columns]]
  published = [name for _, papers in columns.values() for name in papers]
  for name in dict.fromkeys([*study.rows, *published]):
    cells = [name]
    for function, papers in columns.values():
      value = further(graph[name], function) if name in graph else None
      number = f' ({papers[name]})' if name in papers else ''
      cells.append(('–' if value is None else str(value)) + number)
    rows.append(cells)
  head, *lines = (f'| {" | ".join(cells)} |' for cells in rows)
  return '\n'.join([head, '|---' * len(rows[0]) + '|', *lines])


def arrays(study: grid.Study, graph: Graph, extras: Extras) -> Arrays:
  """Returns the data of the figure, see the top of the file."""
  figure: Figure = extras['figure']
  if figure.x == 'epochs':
    return _over_epochs(study, graph, figure)
  found = defaultdict(list)
  papers = {name: row.paper for name, row in study.rows.items()}
  papers |= study.published
  for column in figure.columns:
    _, numbers = extras.get('columns', {}).get(column, (None, {}))
    for name in study.rows:
      x = x_position(figure, name, graph[name])
      value = spread(graph[name], column, extras)
      if x is None or value is None or not math.isfinite(value.mean):
        continue
      std = 0.0 if math.isnan(value.std) else value.std
      for line in figure.lines.get(name, (name,)):
        found[f'{column}/{line}'].append((x, 100 * value.mean, 100 * std))
    for name, paper in papers.items():
      number = {**paper, **({column: numbers[name]} if name in numbers else {})}
      if name in figure.places and column in number:
        point = (figure.places[name], number[column].mean, 0.0)
        for line in figure.lines.get(name, (name,)):
          found[f'{column}/{line}/paper'].append(point)
  return {key: np.array(sorted(points)).T for key, points in found.items()}


def x_position(figure: Figure, name: str, columns: Columns) -> float | None:
  """Returns a row's position on the x axis, such as its pre-training cost.

  Args:
    figure: figure of the study.
    name: name of the row.
    columns: jobs of the row.

  Returns:
    The position; None if the pre-trainings are not finished, or if it is not
    defined.
  """
  pretrain = columns.get(UPSTREAM, ())
  if figure.x in ('images', 'images_per_second') or not pretrain:
    return figure.places.get(name)
  costs = [
    scale[1][-1]
    for job in jobs.finished(pretrain)
    if (scale := read_run(epath.Path(job.workdir)).scales.get(figure.x))
  ]
  if not costs or not jobs.complete(pretrain):
    return None
  return float(np.mean(costs))


def _over_epochs(study: grid.Study, graph: Graph, figure: Figure) -> Arrays:
  """Returns pre-training metrics by epoch, as mean and std over seeds."""
  found = {}
  for name in study.rows:
    runs = [
      read_run(epath.Path(job.workdir))
      for job in jobs.finished(graph[name].get(UPSTREAM, ()))
    ]
    for metric in figure.columns:
      series = [
        run.over('epochs', metric)
        for run in runs
        if metric in run.series and 'epochs' in run.scales
      ]
      if series and all(one.shape == series[0].shape for one in series):
        values = 100 * np.stack([one[1] for one in series])
        std = values.std(0, ddof=1) if len(series) > 1 else 0 * values[0]
        stacked = np.stack([series[0][0], values.mean(0), std])
        found[f'{metric}/{name}'] = stacked
  return found


class Run(NamedTuple):
  """The curves of a workdir.

  Attributes:
    series: (steps, values) of each metric.
    scales: for each axis 'epochs', 'core_days' and 'exaflops', points (steps,
      positions on the axis), which are interpolated linearly. Axes that the
      workdir does not determine are left out.
  """

  series: curves.Series
  scales: dict[str, tuple[list[float], list[float]]]

  def over(self, axis: str, metric: str) -> np.ndarray:
    """Returns the points of a metric: positions on the axis, and values."""
    steps, values = self.series[metric]
    positions = np.interp(steps, *self.scales[axis])
    return np.array([positions, values], np.float64)


def read_run(workdir: epath.Path) -> Run:
  """Reads the curves of a run, and the axes that its workdir determines."""
  series = curves.read(workdir)
  config = jsonl.read_object(workdir / 'config.json')
  run = jsonl.read_object(workdir / 'run.json')
  # At least 1, because `np.interp` needs increasing steps.
  last = float(max((max(s) for s, _ in series.values()), default=1) or 1)
  batch = config.get('batch_size', 0)
  examples = config.get('train', {}).get('num_examples')
  scales = {}
  for axis, factor in {
    'epochs': batch / examples if examples else 0,
    'exaflops': batch * run.get('train_flops_per_image', 0) * 1e-18,
  }.items():
    if factor:
      scales[axis] = ([0.0, last], [0.0, last * factor])
  spans = ledger.training_spans(ledger.read(workdir / 'events.jsonl'))
  if spans and 'num_devices' in run:
    steps, seconds = np.array(spans, np.float64).T
    days = np.cumsum(seconds) * run['num_devices'] / 86400
    scales['core_days'] = ([0.0, *steps.tolist()], [0.0, *days.tolist()])
  return Run(series, scales)


def draw(study: grid.Study, figure: Figure, found: Arrays) -> Any:
  """Draws the figure: one panel for each column, one colour for each line.

  Args:
    study: study of the figure.
    figure: definition of the figure.
    found: result of `arrays`.
  """
  names = [*study.rows, *study.published]
  lines = list(
    dict.fromkeys(
      line for name in names for line in figure.lines.get(name, (name,))
    )
  )
  image = plotting.new_figure(4 * len(figure.columns), 3.5)
  image.suptitle(study.title, fontsize=10, wrap=True)
  hollow = dict(linestyle=':', marker='o', markerfacecolor='none')
  for index, column in enumerate(figure.columns):
    axes = image.add_subplot(1, len(figure.columns), index + 1)
    plotting.describe(axes, AXES[figure.x], f'{column} (%)')
    if figure.x != 'epochs':
      axes.set_xscale('log')
      axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=''))
      axes.minorticks_off()
    if figure.x == 'images':
      axes.set_xticks(sorted({*figure.places.values()}))
    for number, line in enumerate(lines):
      if (points := found.get(f'{column}/{line}')) is not None:
        colour = plotting.COLOURS[number % len(plotting.COLOURS)]
        axes.errorbar(*points, fmt='none', ecolor=colour, capsize=2)
        plotting.line(axes, points[:2], number, line)
      if (points := found.get(f'{column}/{line}/paper')) is not None:
        label = f'{line} (paper)'
        plotting.line(axes, points[:2], number, label, **hollow)
  plotting.legend(image, 'outside lower center', 4)
  return image


def main(arguments: Sequence[str]) -> None:
  """Prints the further columns of a study, and draws its figure."""
  if len(arguments) != 2:
    raise UserError(f'give CONFIG and WORKDIR; got {[*arguments]}.')
  path, workdir = arguments
  study, extras = grid.load(path, grid.Study), load_extras(path)
  graph = graph_of(study, workdir)
  if extras.get('columns'):
    print(table(study, graph, extras))
  if 'figure' in extras and (found := arrays(study, graph, extras)):
    folder = paths.locate(workdir)
    (folder / 'figure.npz').write_bytes(gallery.archive(found))
    image = plotting.png(draw(study, extras['figure'], found))
    (folder / 'figure.png').write_bytes(image)
    print(f'written: {folder / "figure.png"} and figure.npz')


if __name__ == '__main__':
  try:
    main(sys.argv[1:])
  except UserError as error:
    sys.exit(str(error))
