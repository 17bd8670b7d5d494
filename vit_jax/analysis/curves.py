"""Curves of a run, read from its workdir and drawn."""

import logging

from etils import epath

from vit_jax.analysis import plotting
from vit_jax.files import paths
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
  panels = {title: found for title, found in chosen.items() if found}
  labels = list(dict.fromkeys(n for found in panels.values() for n in found))
  figure = plotting.new_figure(4 * max(len(panels), 1), 3.5)
  for index, (title, found) in enumerate(panels.items(), 1):
    axes = figure.add_subplot(1, len(panels), index)
    plotting.describe(axes, 'step', title)
    axes.locator_params(axis='x', nbins=4)
    axes.ticklabel_format(axis='x', style='sci', scilimits=(-2, 5))
    axes.xaxis.get_offset_text().set_fontsize(7)
    for name in found:  # equal names have equal colours
      plotting.line(axes, series[name], labels.index(name), name)
  if len(labels) > 1:
    plotting.legend(figure, 'outside lower center', 4)
  try:
    paths.write(workdir / NAME, plotting.png(figure))
  except OSError as error:
    log.warning('%s could not be written: %s', NAME, error)
