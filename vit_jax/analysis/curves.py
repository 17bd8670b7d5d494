"""Training curves of a run, read from metrics.jsonl and drawn to curves.png."""

import logging

from etils import epath

from vit_jax.analysis import plotting
from vit_jax.files import atomic
from vit_jax.run import metric_lines

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
  for step, metrics in metric_lines.read(workdir):
    for name, value in metrics.items():
      if value is None:
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
  accuracies = sorted(name for name in series if name.endswith('/accuracy'))
  losses = ['loss', *sorted(name for name in series if name.endswith('/loss'))]
  panels = [
    ('loss', [name for name in losses if name in series]),
    ('learning rate', ['lr'] if 'lr' in series else []),
    ('accuracy', accuracies),
  ]
  panels = [(title, names) for title, names in panels if names]
  figure = plotting.new_figure(4.5 * len(panels), 3.5)
  for index, (title, names) in enumerate(panels):
    axes = figure.add_subplot(1, len(panels), index + 1)
    for number, name in enumerate(names):
      plotting.line(axes, series[name], number, label=name)
    axes.set_title(title)
    plotting.describe(axes, 'step')
    if len(names) > 1:
      axes.legend(fontsize='small')
  try:
    atomic.write(workdir / NAME, plotting.png(figure))
  except OSError as error:
    log.warning('%s could not be written: %s', NAME, error)
