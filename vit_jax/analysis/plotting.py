"""Matplotlib figures without a display: lines, axes and legends of all charts.

Matplotlib is imported when the first figure is drawn, because this takes time.
"""

import io
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8

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


def class_colours() -> UInt8[np.ndarray, '256 3']:
  """Returns the colours of classes, those of Pascal VOC; 0 is black.

  The bits of a class number alternate between red, green and blue, from the
  most significant bit of the colours.
  """
  # [class, bit], the lowest bit first.
  bits = (np.arange(256)[:, None] >> np.arange(8)) & 1
  values = 128 >> (np.arange(8) // 3)  # of a bit: 128 three times, then 64, 32
  colours = [(bits[:, c::3] * values[c::3]).sum(1) for c in range(3)]
  return np.stack(colours, axis=1).astype(np.uint8)


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
