"""HTML pages as element trees, which escape all text and attributes."""

import pathlib
from collections.abc import Iterable, Sequence
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

_STYLE = pathlib.Path(__file__).with_name('style.css')


def tag(name: str, /, *children: Any, **attributes: Any) -> Element:
  """Creates an element, for example `tag('td', text, class_='number')`.

  Args:
    name: name of the element.
    *children: its content: elements, and values that are written as text. None
      is left out.
    **attributes: its attributes; 'class_' stands for 'class'. Attributes that
      are None are left out.
  """
  element = Element(name)
  for key, value in attributes.items():
    if value is not None:
      element.set(key.rstrip('_'), str(value))
  for child in children:
    if isinstance(child, Element):
      element.append(child)
    elif child is not None and len(element):
      element[-1].tail = (element[-1].tail or '') + str(child)
    elif child is not None:
      element.text = (element.text or '') + str(child)
  return element


def table(
  head: Sequence[Any], rows: Iterable[Sequence[Any]], numbers: int = 0
) -> Element:
  """Creates a table that scrolls sideways if it is too wide for the page.

  Args:
    head: column headings.
    rows: rows of cells.
    numbers: number of columns, counted from the right, that are right-aligned.
  """
  first = len(head) - numbers

  def cells(name: str, row: Sequence[Any]) -> Element:
    kinds = ('number' if i >= first else None for i in range(len(row)))
    return tag(
      'tr',
      *(tag(name, c, class_=k) for c, k in zip(row, kinds, strict=True)),
    )

  body = tag('tbody', *(cells('td', row) for row in rows))
  whole = tag('table', tag('thead', cells('th', head)), body)
  return tag('div', whole, class_='scroll')


def page(title: str, *body: Element | None) -> str:
  """Returns a complete page that does not depend on other files."""
  scale = 'width=device-width, initial-scale=1'
  head = tag(
    'head',
    tag('meta', charset='utf-8'),
    tag('meta', name='viewport', content=scale),
    tag('title', title),
    tag('style', _STYLE.read_text()),
  )
  root = tag('html', head, tag('body', *body), lang='en')
  text = ElementTree.tostring(root, encoding='unicode', method='html')
  # Names of files may have bytes that are not UTF-8.
  text = text.encode(errors='backslashreplace').decode()
  return f'<!DOCTYPE html>\n{text}\n'


def number(value: float, digits: int = 5) -> str:
  """Formats a number for reading: '0.5713', '1.2e-05', '12,345'."""
  if float(value).is_integer() and abs(value) < 1e15:
    return f'{int(value):,}'
  return f'{value:.{digits}g}'
