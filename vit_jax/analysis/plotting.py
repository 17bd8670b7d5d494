"""Matplotlib figures without a display: lines, axes and legends of all charts.

Matplotlib is imported when the first figure is drawn, because this takes time.
"""

import io
from typing import Any

from vit_jax.analysis.style import COLOURS

_DPI = 110
_DASHES = ('-', '--', ':')  # the next one is used after all colours
_MARKED = 40  # maximum number of points of a line with markers


def new_figure(width: float, height: float) -> Any:
  """Creates a figure whose size is given in inches."""
  from matplotlib.figure import Figure

  return Figure(figsize=(width, height), layout='constrained')


def png(figure: Any) -> bytes:
  """Returns the figure as the bytes of a PNG file."""
  file = io.BytesIO()
  figure.savefig(file, format='png', dpi=_DPI)
  return file.getvalue()


def line(axes: Any, points: Any, number: int, label: str | None = None) -> None:
  """Draws a line.

  Args:
    axes: Matplotlib axes.
    points: values of x, and values of y.
    number: index of the line, which determines its colour and its dashes.
    label: name in the legend.
  """
  axes.plot(
    *points,
    label=label,
    color=COLOURS[number % len(COLOURS)],
    linestyle=_DASHES[number // len(COLOURS) % len(_DASHES)],
    linewidth=1.2,
    marker='o' if len(points[0]) <= _MARKED else '',
    markersize=3,
  )


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
