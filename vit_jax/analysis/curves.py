"""Training curves of a run, read from metrics.jsonl and drawn to curves.png."""

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
  losses = sorted(name for name in series if name.endswith('/loss'))
  panels = []
  for title, names in (
    ('loss', ['loss', *losses]),
    ('learning rate', ['lr']),
    ('accuracy', accuracies),
  ):
    lines = {name: series[name] for name in names if name in series}
    if lines:
      panels.append(plotting.Panel('step', title, lines))
  try:
    paths.write(workdir / NAME, plotting.png(plotting.draw(panels, 3)))
  except OSError as error:
    log.warning('%s could not be written: %s', NAME, error)
