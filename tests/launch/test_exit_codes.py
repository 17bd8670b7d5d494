"""Tests that documents have the exit codes of vit_jax/launch."""

import pathlib

import launch_jobs
import pytest

from vit_jax import errors
from vit_jax.launch import __main__ as command
from vit_jax.launch.job import State
from vit_jax.launch.shell import Shell

ROOT = pathlib.Path(__file__).parents[2]
CODES = [code for name, code in vars(errors).items() if name[:5] == 'EXIT_']


def rows(page: str, *head: str) -> list[list[str]]:
  """Returns the cells of the one table with these column heads."""
  text = (ROOT / page).read_text()
  start = f'| {" | ".join(head)} |\n'
  assert text.count(start) == 1, f'{page} has no table {start}'
  body = text.partition(start)[2].partition('\n\n')[0].splitlines()[1:]
  return [[cell.strip() for cell in row.split('|')[1:-1]] for row in body]


@pytest.fixture
def reaction(monkeypatch):
  """Returns a function from a code to the reaction, in the document's words."""

  def launch(code: int) -> str:
    starts = []

    def run(job, shell):
      starts.append(job)
      return code if len(starts) < 9 else 0

    tpu = command.TARGETS['tpu']
    monkeypatch.setattr(tpu, 'state', lambda job, shell: State.READY)
    monkeypatch.setattr(tpu, 'run', run)
    shell = Shell(ROOT, dry_run=False, echo=lambda line: None)
    launch_jobs.run(launch_jobs.changed('tpu', max_restarts=2), shell)
    return {1: 'no', 3: 'yes, counted', 9: 'yes, without limit'}[len(starts)]

  return launch


def test_the_table_states_the_reaction_of_the_launchers(reaction):
  head = ('code', 'meaning', 'started again by `vit_jax.launch`?')
  table = {int(row[0]): row[2] for row in rows('docs/resuming.md', *head)}
  assert sorted(table) == sorted([0, *CODES])
  for code, again in table.items():
    assert again.partition(' by')[0] == reaction(code), f'code {code}'
