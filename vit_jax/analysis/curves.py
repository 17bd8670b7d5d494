"""Training curves of a run, read from metrics.jsonl and drawn to curves.png."""

import io
import logging

from etils import epath

from vit_jax.files import atomic, jsonl

log = logging.getLogger('vit_jax')


Series = dict[str, tuple[list[int], list[float]]]


def read(workdir: epath.Path) -> Series:
  """Returns the (steps, values) of each metric in order, without nulls."""
  return read_all(workdir)[0]


def read_all(workdir: epath.Path) -> tuple[Series, list[tuple[int, str]]]:
  """Reads all series.

  Also returns the (step, metric) of every value that is not finite.
  """
  series: Series = {}
  nulls: list[tuple[int, str]] = []
  for _, record in jsonl.read(workdir / 'metrics.jsonl'):
    step = record.pop('step', None) if record else None
    if record is None or type(step) is not int:
      continue  # the line is damaged
    for name, value in record.items():
      if value is None:
        nulls.append((step, name))
      elif isinstance(value, int | float):
        steps, values = series.setdefault(name, ([], []))
        steps.append(step)
        values.append(value)
  return series, nulls


def draw(workdir: epath.Path) -> None:
  """Writes WORKDIR/curves.png, or nothing if Matplotlib is not installed."""
  try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
  except ImportError:
    log.info(
      'curves.png is not drawn because Matplotlib is not installed: '
      'pip install matplotlib.'
    )
    return
  series = read(workdir)
  accuracies = sorted(name for name in series if name.endswith('/accuracy'))
  losses = ['loss', *sorted(name for name in series if name.endswith('/loss'))]
  panels = [
    ('loss', [name for name in losses if name in series]),
    ('learning rate', ['lr'] if 'lr' in series else []),
    ('accuracy', accuracies),
  ]
  panels = [(title, names) for title, names in panels if names]
  figure = Figure(figsize=(4.5 * len(panels), 3.5), layout='constrained')
  FigureCanvasAgg(figure)
  for index, (title, names) in enumerate(panels):
    axes = figure.add_subplot(1, len(panels), index + 1)
    for name in names:
      marker = 'o' if '/' in name else ''
      axes.plot(*series[name], label=name, marker=marker, markersize=3)
    axes.set_title(title)
    axes.set_xlabel('step')
    axes.grid(alpha=0.3)
    if len(names) > 1:
      axes.legend(fontsize='small')
  picture = io.BytesIO()
  figure.savefig(picture, format='png', dpi=120)
  try:
    atomic.write(workdir / 'curves.png', picture.getvalue())
  except OSError as error:
    log.warning('curves.png could not be written: %s', error)
