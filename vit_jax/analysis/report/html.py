"""HTML elements whose text and attributes are escaped."""

import html
from collections.abc import Iterable, Sequence
from typing import Any

# Elements that are written without content and closing tag.
_EMPTY = ('img', 'meta', 'line', 'rect', 'polyline', 'circle')
STYLE = """
:root { color-scheme: light; --line: #d5d9de; --soft: #5b6470; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 16px; max-width: 1280px; color: #16191d;
  background: #fff; font: 15px/1.45 system-ui, sans-serif;
  overflow-wrap: anywhere; }
h1 { font-size: 24px; margin: 4px 0; } h2 { font-size: 18px;
  margin: 28px 0 8px; border-bottom: 1px solid var(--line); }
p { margin: 6px 0; } .soft, figcaption { color: var(--soft); font-size: 13px; }
.tiles, .charts, .pictures { display: grid; gap: 12px; }
.tiles { grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); }
.tile { border: 1px solid var(--line); border-radius: 6px;
  padding: 8px 12px; overflow-wrap: break-word; }
.tile b { display: block; font-size: 20px; }
.charts { grid-template-columns:
  repeat(auto-fill, minmax(min(100%, 380px), 1fr)); }
.pictures { grid-template-columns: repeat(auto-fill, minmax(112px, 1fr)); }
.figures { grid-template-columns:
  repeat(auto-fill, minmax(min(100%, 560px), 1fr)); display: grid; gap: 20px; }
.figures img { width: auto; max-width: 100%; }
figure { margin: 0; } img { width: 100%; display: block; }
.pictures img { image-rendering: pixelated; background: #eee; }
svg { width: 100%; height: auto; display: block; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; }
th, td { padding: 3px 10px 3px 0; text-align: left; vertical-align: top;
  font-size: 14px; border-bottom: 1px solid #eceef1;
  overflow-wrap: break-word; }
code { overflow-wrap: anywhere; font-size: 12px; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
.matrix { margin-bottom: 16px; }
.matrix td { padding: 2px 5px; text-align: right; border: 0; font-size: 12px; }
.matrix th { padding: 2px 6px; font-size: 12px; font-weight: 500; border: 0;
  max-width: 9em; } .matrix thead th { text-align: right; }
.bad { color: #a33300; } pre { overflow-x: auto; font-size: 12px; }
.bar { display: flex; height: 26px; border-radius: 4px; overflow: hidden; }
.key { display: inline-block; width: 11px; height: 11px; margin-right: 5px; }
.named { display: inline-block; }
""".strip()


class Html(str):
  """String that contains HTML; strings of other types are escaped."""


def tag(name: str, /, *children: Any, **attributes: Any) -> Html:
  """Creates an element, for example `tag('td', text, class_='number')`.

  Args:
    name: name of the element.
    *children: its content; anything that is not `Html` is escaped.
    **attributes: its attributes, which are escaped. 'class_' stands for 'class'
      and 'stroke_width' for 'stroke-width'; attributes that are None are left
      out.
  """
  written = ''.join(
    f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
    for key, value in attributes.items()
    if value is not None
  )
  if name in _EMPTY:
    return Html(f'<{name}{written}/>')
  return Html(f'<{name}{written}>{join(children)}</{name}>')


def escape(value: Any) -> Html:
  """Escapes a value so that it is safe in an element and in an attribute."""
  return value if isinstance(value, Html) else Html(html.escape(str(value)))


def join(children: Iterable[Any]) -> Html:
  """Concatenates elements and text, which is escaped."""
  return Html(''.join(escape(child) for child in children))


def table(
  head: Sequence[Any], rows: Iterable[Sequence[Any]], numbers: int = 0
) -> Html:
  """Creates a table that scrolls sideways if it is too wide for the page.

  Args:
    head: column headings.
    rows: rows of cells.
    numbers: number of columns, counted from the right, that are right-aligned.
  """
  first = len(head) - numbers

  def cells(name: str, row: Sequence[Any]) -> Html:
    return join(
      tag(name, cell, class_='number' if i >= first else None)
      for i, cell in enumerate(row)
    )

  body = join(tag('tr', cells('td', row)) for row in rows)
  head_row = tag('thead', tag('tr', cells('th', head)))
  return tag('div', tag('table', head_row, tag('tbody', body)), class_='scroll')


def page(title: str, *body: Any) -> str:
  """Returns a complete page that does not depend on other files."""
  head = join(
    [
      tag('meta', charset='utf-8'),
      tag(
        'meta', name='viewport', content='width=device-width, initial-scale=1'
      ),
      tag('title', title),
      tag('style', Html(STYLE)),
    ]
  )
  root = tag('html', tag('head', head), tag('body', *body), lang='en')
  return f'<!DOCTYPE html>\n{root}\n'


def number(value: Any, digits: int = 5) -> str:
  """Formats a number for reading: '0.5713', '1.2e-05', '12,345'."""
  if isinstance(value, bool) or not isinstance(value, int | float):
    return str(value)
  if float(value).is_integer() and abs(value) < 1e15:
    return f'{int(value):,}'
  return f'{value:.{digits}g}'
