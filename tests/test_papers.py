"""Tests that shipped configs have the papers' numbers.

Each file of tests/papers has the rows of one table, typed in from the paper or
from its authors' code. The first column is a file of configs/ with arguments;
the others are keys of that config. The row `*` has the values of all rows. An
empty cell is not compared.
"""

import ast
import csv
import functools
import operator
import pathlib

import jax
import pytest

from tests.faults.counts import further
from vit_jax.config import loading
from vit_jax.training.experiment import Experiment

_TABLES = sorted((pathlib.Path(__file__).parent / 'papers').glob('*.csv'))


def _value(cell: str):
  """Returns the Python value of a cell, or its text."""
  try:
    return ast.literal_eval(cell)
  except (SyntaxError, ValueError):
    return cell


def _at(config, key: str):
  """Returns the value of a key such as optimizer.rules.0.1.after."""

  def inside(node, name):
    return operator.getitem(node, int(name) if name.isdigit() else name)

  return functools.reduce(inside, key.split('.'), config)


def _rows():
  """Yields a config and its cells, {key: text}, for each row."""
  for path in _TABLES:
    with path.open(newline='') as file:
      common, *rows = csv.DictReader(file)
    for row in rows:
      cells = {key: row[key] or common[key] for key in row if key != 'config'}
      yield pytest.param(row['config'], cells, id=row['config'])


@pytest.mark.parametrize('name, cells', list(_rows()))
def test_configs_equal_the_papers(name, cells):
  """All columns of a row are compared."""
  config = loading.load(f'configs/{name}')
  expected = {key: _value(cell) for key, cell in cells.items() if cell}
  found = {key: _at(config, key) for key in expected}
  for key, value in expected.items():
    if isinstance(value, (float, tuple)):
      value = pytest.approx(value)
    assert found[key] == value, key


@pytest.mark.slow
@pytest.mark.parametrize('name', ['dino', *further('dino_args_txt', 'augreg')])
def test_configs_of_the_papers_build(name):
  [path] = [path for path in _TABLES if path.stem == name]
  with path.open(newline='') as file:
    _, *rows = csv.DictReader(file)
  for row in rows:
    config = loading.load(f'configs/{row["config"]}')
    assert Experiment.build(config, jax.devices()).total_steps > 0
