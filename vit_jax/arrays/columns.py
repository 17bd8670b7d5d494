"""Tables as aligned text."""

from collections.abc import Sequence


def align(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
  """Pads cells so that columns line up, two spaces apart.

  Args:
    rows: rows of cells; all rows have the same length.
    right: indices of the columns that are aligned to the right.
  """
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

  def cell(text: str, column: int) -> str:
    width = widths[column]
    return text.rjust(width) if column in right else text.ljust(width)

  lines = ['  '.join(cell(t, i) for i, t in enumerate(row)) for row in rows]
  return '\n'.join(line.rstrip() for line in lines)
