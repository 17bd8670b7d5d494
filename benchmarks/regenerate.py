"""Regenerates tables of RESULTS.md and history/tables.md in benchmarks/.

  python benchmarks/regenerate.py [REGEX] [-- ARGUMENT ...]
  python benchmarks/regenerate.py --list [REGEX]

A table is generated if the paragraph above it is a command with a colon:

  `python benchmarks/kernels.py`:

  | chip | tokens | scheduled | date |
  |---|---|---|---|
  | v3 | 197 | 2,624 | 2026-11-25 |

All commands that contain a match of REGEX run one after another. The arguments
after `--` are appended to each of them, for example to compute only some rows:

  python benchmarks/regenerate.py kernels.py -- v5e:2x2
  python benchmarks/regenerate.py gpu_plans.py -- H/14

A command must print one Markdown table with all columns of the page's table;
other columns are left out. A printed row replaces the row of the page with the
same key, or is appended. All other rows stay. The key consists of the first
columns: as many as are needed to distinguish the rows. The last column, `date`,
is today's date, except if the command prints a column `date`.

The page is written after each command. If a command fails, for example because
a package is missing, its table stays as it is, and the end of the output names
the command and the last line that it printed. The text around a table must be
corrected by hand.

(Cog, which writes the output of code into a page, replaces whole tables and
stops at the first error.)
"""

import argparse
import datetime
import os
import pathlib
import re
import shlex
import subprocess
import sys
from typing import NamedTuple

FOLDER = pathlib.Path(__file__).parent
PAGES = [FOLDER / 'RESULTS.md', FOLDER / 'history/tables.md']
GENERATED = re.compile(
  r'^`(?P<command>python [^`]+)`:\n\n(?P<table>(?:\|.*\|\n)+)', re.MULTILINE
)
DATE = 'date'


class Failed(Exception):
  """A table that cannot be regenerated; the message contains the reason."""


class Table(NamedTuple):
  """A Markdown table, whose cells are text."""

  columns: list[str]
  rows: list[list[str]]

  @classmethod
  def parse(cls, text: str) -> 'Table':
    """Parses the lines of one table.

    Raises:
      Failed: there is no table or more than one, or a row is too short or long.
    """
    lines = [
      [cell.strip() for cell in line.strip()[1:-1].split('|')]
      for line in text.splitlines()
    ]
    heads = sum(all(re.match('[-:]+$', c) for c in line) for line in lines)
    if heads != 1 or len(lines) < 2:
      raise Failed(f'expected one table, got {heads}')
    columns, _, *rows = lines
    for row in rows:
      if len(row) != len(columns):
        raise Failed(
          f'expected {len(columns)} cells ({", ".join(columns)}), got {row}'
        )
    return cls(columns, rows)

  def __str__(self) -> str:
    lines = [
      '| ' + ' | '.join(row) + ' |' for row in (self.columns, *self.rows)
    ]
    lines.insert(1, '|' + '---|' * len(self.columns))
    return '\n'.join(lines) + '\n'

  def selected(self, columns: list[str], date: str) -> list[list[str]]:
    """Returns the rows with the given columns, of which `date` may be missing.

    Raises:
      Failed: another column is missing.
    """
    missing = [c for c in columns if c not in (*self.columns, DATE)]
    if missing:
      raise Failed(
        f'the printed table has no column {", ".join(missing)}; '
        f'its columns are {", ".join(self.columns)}'
      )
    rows = (dict(zip(self.columns, row, strict=True)) for row in self.rows)
    return [[({DATE: date} | row)[c] for c in columns] for row in rows]


def commands(page: str) -> dict[str, Table]:
  """Returns the generated tables of a page by their commands."""
  return {
    _command(match): Table.parse(match['table'])
    for match in GENERATED.finditer(page)
  }


def merged(old: Table, printed: Table, date: str) -> Table:
  """Returns a table of the page with the rows that its command printed.

  Args:
    old: table of the page.
    printed: table that the command printed.
    date: date of the printed rows, in the form 2026-11-25.

  Raises:
    Failed: the columns do not match.
  """
  if old.columns[-1] != DATE:
    raise Failed(f'the last column on the page must be {DATE}')
  new = printed.selected(old.columns, date)
  size = 1
  while size < len(old.columns) and not all(
    len({tuple(row[:size]) for row in rows}) == len(rows)
    for rows in (old.rows, new)
  ):
    size += 1
  # A key that exists keeps its position.
  rows = {tuple(row[:size]): row for row in (*old.rows, *new)}
  return Table(old.columns, list(rows.values()))


def run(command: str, arguments: list[str]) -> Table:
  """Runs a command, shows its output, and returns the table that it prints.

  Args:
    command: command of the page; words may contain environment variables.
    arguments: words to append.

  Raises:
    Failed: the command failed or did not print one table.
  """
  for name in re.findall(r'\$(\w+)', command):
    if name not in os.environ:
      raise Failed(f'the environment variable {name} is not set')
  words = map(os.path.expandvars, shlex.split(command)[1:])
  lines = []
  with subprocess.Popen(
    [sys.executable, *words, *arguments],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  ) as process:
    assert process.stdout is not None
    for line in process.stdout:
      print(line, end='', flush=True)
      lines.append(line)
  if process.returncode:
    last = next((line.strip() for line in lines[::-1] if line.strip()), '')
    raise Failed(f'exit code {process.returncode}: {last}')
  # Warnings may be printed between two rows.
  return Table.parse(''.join(line for line in lines if line.startswith('|')))


def regenerate(page: pathlib.Path, command: str, arguments: list[str]) -> None:
  """Runs a command and writes its rows to the page.

  Raises:
    Failed: the page was not changed.
  """
  printed = run(command, arguments)
  today = datetime.date.today().isoformat()

  def replaced(match: re.Match[str]) -> str:
    if _command(match) != command:
      return match[0]
    table = merged(Table.parse(match['table']), printed, today)
    return match[0].removesuffix(match['table']) + str(table)

  # The page is read now, because it may have been edited during the command.
  page.write_text(GENERATED.sub(replaced, page.read_text()))


def _command(match: re.Match[str]) -> str:
  """Returns the command above a table, which may be broken into lines."""
  return ' '.join(match['command'].split())


def _age(table: Table) -> str:
  """Returns the date of the oldest row, and the days since then."""
  oldest = min((row[-1] for row in table.rows), default='')
  if not oldest:
    return 'no rows'
  days = (datetime.date.today() - datetime.date.fromisoformat(oldest)).days
  return f'{oldest}, {days} days ago'


def main(argv: list[str] | None = None) -> None:
  """Runs the selected commands, and lists those that failed."""
  parser = argparse.ArgumentParser(
    description=(__doc__ or '').partition('\n')[0]
  )
  parser.add_argument('regex', nargs='?', default='', help='select commands')
  parser.add_argument(
    'arguments', nargs='*', help='after --: appended to each command'
  )
  parser.add_argument(
    '--list', action='store_true', help='print commands and oldest rows'
  )
  parser.add_argument('--page', type=pathlib.Path, help='instead of both pages')
  given = parser.parse_args(argv)
  pages = [given.page] if given.page else PAGES
  selected = [
    (page, command, table)
    for page in pages
    for command, table in commands(page.read_text()).items()
    if re.search(given.regex, command)
  ]
  if not selected:
    names = ' and '.join(map(str, pages))
    parser.error(f'no command of {names} contains {given.regex}')
  failed = {}
  for page, command, table in selected:
    if given.list:
      print(f'{_age(table)}: {command}')
      continue
    print(f'\n{command}', flush=True)
    try:
      regenerate(page, command, given.arguments)
    except Failed as error:
      failed[command] = error
  if failed:
    lines = (f'{command}: {error}' for command, error in failed.items())
    sys.exit('\nNot regenerated:\n' + '\n'.join(lines))


if __name__ == '__main__':
  main()
