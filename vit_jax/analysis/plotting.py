"""Matplotlib figures without a display: lines, axes and legends of all charts.

Matplotlib is imported when the first figure is drawn, because this takes time.
"""

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

FORMATS = ('png', 'pdf', 'svg')
# The palette of Okabe and Ito, which colour-blind people can distinguish.
COLOURS = (
  '#0072B2',
  '#D55E00',
  '#009E73',
  '#CC79A7',
  '#E69F00',
  '#56B4E9',
  '#000000',
  '#F0E442',
)
_DASHES = ('-', '--', ':')  # the next one is used after all colours
_MARKED = 40  # maximum number of points of a line with markers


class Format(NamedTuple):
  """Format of the files of figures.

  Attributes:
    name: one of `FORMATS`.
    dpi: resolution of rasterized parts, dots per inch. Photographs in PDF and
      SVG files keep their own resolution.
  """

  name: str = 'png'
  dpi: int = 110


PNG = Format()


class Panel(NamedTuple):
  """A chart of a figure.

  Attributes:
    x: label of the x axis.
    y: label of the y axis.
    lines: points of each line by its label: values of x, values of y, and
      optionally standard deviations of y.
    published: points of published numbers, by the labels of `lines`.
    ticks: positions of the ticks of a logarithmic x axis, which are chosen
      automatically if there are none; None for a linear axis.
  """

  x: str
  y: str
  lines: Mapping[str, Any]
  published: Mapping[str, Any] = {}
  ticks: Sequence[float] | None = None


def new_figure(width: float, height: float) -> Any:
  """Creates a figure whose size is given in inches."""
  from matplotlib.figure import Figure

  return Figure(figsize=(width, height), layout='constrained')


def png(figure: Any) -> bytes:
  """Returns the figure as the bytes of a PNG file."""
  return encode([figure], PNG)[0]


def encode(pages: Iterable[Any], form: Format) -> list[bytes]:
  """Returns the content of the files of a figure.

  Args:
    pages: Matplotlib figures, of which only one at a time is in memory if this
      is a generator.
    form: format of the files.

  Returns:
    One file with all pages for PDF, and one file per page otherwise.
  """
  if form.name == 'pdf':
    from matplotlib.backends.backend_pdf import PdfPages

    file = io.BytesIO()
    with PdfPages(file) as document:
      for page in pages:
        _keep_resolution(page)
        document.savefig(page, dpi=form.dpi)
    return [file.getvalue()]
  contents = []
  for page in pages:
    if form.name == 'svg':
      _keep_resolution(page)
    file = io.BytesIO()
    page.savefig(file, format=form.name, dpi=form.dpi)
    contents.append(file.getvalue())
  return contents


def _keep_resolution(figure: Any) -> None:
  """Embeds images without an explicit filter as they are, in vector formats."""
  for axes in figure.axes:
    for image in axes.images:
      if image.get_interpolation() in ('auto', 'antialiased'):
        image.set_interpolation('none')


def draw(panels: Sequence[Panel], columns: int, title: str = '') -> Any:
  """Draws charts next to each other; equal labels have equal colours.

  Args:
    panels: charts.
    columns: number of charts side by side.
    title: title of the figure.

  Returns:
    The Matplotlib figure.
  """
  from matplotlib import ticker

  columns = max(1, min(columns, len(panels)))
  rows = max(1, -(-len(panels) // columns))
  figure = new_figure(4 * columns, 3 * rows + 0.5)
  figure.suptitle(title, fontsize=10, wrap=True)
  grid = list(figure.subplots(rows, columns, squeeze=False).flat)
  labels = list(
    dict.fromkeys(label for p in panels for label in (*p.lines, *p.published))
  )
  for axes, panel in zip(grid, panels, strict=False):
    describe(axes, panel.x, panel.y)
    if panel.ticks is not None:
      axes.set_xscale('log')
      if panel.ticks:
        axes.set_xticks(panel.ticks)
        axes.xaxis.set_major_formatter(_three_digits)
      else:
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter('{x:,g}')
      axes.minorticks_off()
    else:
      axes.locator_params(axis='x', nbins=4)
      axes.ticklabel_format(axis='x', style='sci', scilimits=(-2, 5))
      axes.xaxis.get_offset_text().set_fontsize(7)
    for label, points in panel.lines.items():
      number = labels.index(label)
      x, y, *std = points
      if std:
        colour = COLOURS[number % len(COLOURS)]
        axes.errorbar(x, y, std[0], fmt='none', ecolor=colour, capsize=2)
      line(axes, (x, y), number, label)
    style = dict(linestyle=':', marker='o', markerfacecolor='none')
    for label, points in panel.published.items():
      number = labels.index(label)
      line(axes, points[:2], number, f'{label} (paper)', **style)
  for axes in grid[len(panels) :]:
    axes.set_visible(False)
  if len(labels) > 1:
    legend(figure, 'outside lower center', 4)
  return figure


def _three_digits(value: Any, position: int | None = None) -> str:
  """Formats a number such as 1,281,167 as 1.28M, for an axis."""
  from matplotlib import ticker

  del position
  return ticker.EngFormatter(sep='')(float(f'{value:.3g}'))


def line(
  axes: Any, points: Any, number: int, label: str | None = None, **style: Any
) -> None:
  """Draws a line.

  Args:
    axes: Matplotlib axes.
    points: values of x, and values of y.
    number: index of the line, which determines its colour and its dashes.
    label: name in the legend.
    **style: arguments of `matplotlib.axes.Axes.plot`.
  """
  defaults = dict(
    color=COLOURS[number % len(COLOURS)],
    linestyle=_DASHES[number // len(COLOURS) % len(_DASHES)],
    linewidth=1.2,
    marker='o' if len(points[0]) <= _MARKED else '',
    markersize=3,
  )
  axes.plot(*points, label=label, **(defaults | style))


def describe(axes: Any, x_label: str, y_label: str = '') -> None:
  """Labels the axes in a small font, and draws a faint grid."""
  axes.set_xlabel(x_label, fontsize=8)
  axes.set_ylabel(y_label, fontsize=8, parse_math=False)
  axes.tick_params(labelsize=7)
  axes.grid(alpha=0.3)


def legend(figure: Any, place: str, columns: int) -> None:
  """Adds a legend of the lines of all axes; equal labels share one entry.

  Args:
    figure: Matplotlib figure.
    place: position, see `loc` of `matplotlib.figure.Figure.legend`.
    columns: maximum number of columns.
  """
  handles = {}
  for axes in figure.axes:
    entries = zip(*axes.get_legend_handles_labels(), strict=True)
    handles |= {label: handle for handle, label in entries}
  if handles:
    figure.legend(
      list(handles.values()),
      list(handles),
      loc=place,
      fontsize=8,
      ncols=min(columns, len(handles)),
    )
