"""Tests that documents have the exit codes of vit_jax/launch."""

import re

import launch_jobs
import pytest
import yaml

from vit_jax import errors
from vit_jax.launch import __main__ as command
from vit_jax.launch.job import State
from vit_jax.launch.shell import Shell

CODES = [code for name, code in vars(errors).items() if name[:5] == 'EXIT_']
PAGE = (launch_jobs.ROOT / 'docs/resuming.md').read_text()
# Rows of the table of codes: code, meaning, and whether it is started again.
TABLE = {
  int(code): again
  for code, again in re.findall(r'\| (\d+) \| [^|]* \| (.*) \|', PAGE)
}


@pytest.mark.parametrize('code', [0, *CODES])
def test_the_table_states_the_reaction_of_the_launchers(code, monkeypatch):
  starts = []

  def run(job, shell):
    starts.append(job)
    return code if len(starts) < 9 else 0

  tpu = command.TARGETS['tpu']
  monkeypatch.setattr(tpu, 'state', lambda job, shell: State.READY)
  monkeypatch.setattr(tpu, 'run', run)
  shell = Shell(root=launch_jobs.ROOT, dry_run=False, echo=lambda line: None)
  launch_jobs.run(launch_jobs.changed('tpu', max_restarts=2), shell)
  reactions = {1: 'no', 3: 'yes, counted', 9: 'yes, without limit'}
  assert TABLE[code].partition(' by')[0] == reactions[len(starts)]
  assert len(TABLE) == len(CODES) + 1


def test_skypilot_restarts_after_codes_that_need_no_count():
  """A crash (1) could be repeated, and paid for, without an end."""
  task = yaml.safe_load((launch_jobs.ROOT / 'launch/sky.yaml').read_text())
  recovery = task['resources']['job_recovery']
  restarted = {code for code, again in TABLE.items() if again[:3] == 'yes'}
  assert set(recovery['recover_on_exit_codes']) == restarted - {1}
  assert recovery['max_restarts_on_errors'] == 0
