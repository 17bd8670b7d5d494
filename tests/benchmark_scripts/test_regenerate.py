"""Tests that tables of the results of benchmarks are regenerated."""

import argparse
import datetime
import importlib
import re
import runpy
import shlex
import sys
import types

import pytest

from benchmarks import regenerate
from tests import cli

TODAY = datetime.date.today().isoformat()
# Prints a table with a row for each word; columns are not in the page's order.
SCRIPT = """
import sys
print('| chip | ms | tokens | cost |\\n|---|---|---|---|', flush=True)
for word in sys.argv[1:]:
  print('a warning between rows', file=sys.stderr)
  chip, tokens, ms = word.split(',')
  print(f'| {chip} | {ms} | {tokens} | 9 |', flush=True)
"""
# Its command is broken into two lines.
PAGE = """# Page

Text with `python script.py`.

`python script.py v3,50,1.5
v3,64,2.5`:

| chip | tokens | ms | date |
|---|---|---|---|
| v3 | 50 | 8 | 2020-01-01 |
| v2 | 50 | 7 | 2020-01-02 |

Tried:

| chip | tokens | ms |
|---|---|---|
| v3 | 50 | 6 |

`python script.py v4,1,0.5`:

| chip | ms | date |
|---|---|---|
| v4 | 5 | 2020-01-03 |
"""


class Day(datetime.date):
  """Dates of which today does not change during the tests."""

  @classmethod
  def today(cls):
    return cls.fromisoformat(TODAY)


def test_rows_are_replaced_and_dated(tmp_path, monkeypatch):
  """Other rows, tables and the text stay; keys may have several columns."""
  monkeypatch.setattr(regenerate, 'datetime', types.SimpleNamespace(date=Day))
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'script.py').write_text(SCRIPT)
  page = tmp_path / 'RESULTS.md'
  page.write_text(PAGE)
  regenerate.main([f'--page={page}'])
  assert page.read_text() == PAGE.replace(
    '| v3 | 50 | 8 | 2020-01-01 |', f'| v3 | 50 | 1.5 | {TODAY} |'
  ).replace(
    '2020-01-02 |\n', f'2020-01-02 |\n| v3 | 64 | 2.5 | {TODAY} |\n'
  ).replace('| v4 | 5 | 2020-01-03 |', f'| v4 | 0.5 | {TODAY} |')


TEXT = '\n'.join(page.read_text() for page in regenerate.PAGES)
TABLES = regenerate.commands(TEXT)


def test_every_table_with_dates_is_generated():
  """Other tables with a column `date` would have a wrong command above them."""
  assert len(TABLES) == len(re.findall(r'\| date \|\n', TEXT)) > 10
  for command, table in TABLES.items():
    assert table.columns[-1] == regenerate.DATE, command
    for row in table.rows:
      assert datetime.date.fromisoformat(row[-1]) <= datetime.date.today()


class _Parsed(Exception):
  """Raised instead of the work of a script."""


@pytest.mark.parametrize('command', TABLES)
def test_commands_of_the_page_parse(command, monkeypatch):
  """Their scripts accept the flags and have the columns of the table."""
  script, *words = shlex.split(command)[1:]
  monkeypatch.chdir(cli.ROOT)
  monkeypatch.syspath_prepend('benchmarks')
  if script == '-m':
    module, *words = words
    script = f'{module.replace(".", "/")}.py'
    main = importlib.import_module(module).main
  else:
    main = runpy.run_path(script)['main']
  parse = argparse.ArgumentParser.parse_args

  def stop(parser, *arguments):
    raise _Parsed(parse(parser, *arguments))

  monkeypatch.setattr(argparse.ArgumentParser, 'parse_args', stop)
  monkeypatch.setattr(sys, 'argv', [script, *words])
  with pytest.raises(_Parsed):
    main()
  source = (cli.ROOT / script).read_text()
  columns = TABLES[command].columns
  # Names of columns are strings or parts of a head; those for image sizes are
  # made from numbers.
  assert not [
    column
    for column in columns[:-1]
    if not re.search(rf"['\"|] ?{re.escape(column)} ?['\"|]", source)
    and not re.match(r'\d+ px$', column)
  ]
