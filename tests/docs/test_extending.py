"""Tests the example of docs/extending.md as it is printed there."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests import cli


def run(folder, *arguments):
  """Runs a command with the folder on the Python path; returns its output."""
  path = os.pathsep.join((str(folder), str(cli.ROOT)))
  done = subprocess.run(
    [sys.executable, '-m', *arguments],
    env=cli.environment() | {'PYTHONPATH': path},
    cwd=folder,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


@pytest.mark.slow
def test_the_example_trains_and_is_evaluated(tmp_path):
  """The files of the page are written to disk, and two commands are run."""
  page = (cli.ROOT / 'docs' / 'extending.md').read_text()
  files = re.findall(r'```python\n# (my_lab/\w+\.py)\n(.*?)```', page, re.S)
  assert len(files) == 5
  for name, text in files:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
  workdir = tmp_path / 'run'
  keys = {'total': '4 steps', 'schedule.warmup': '1 steps'}
  keys |= {'evals.knn.every': '4 steps', 'optimizer.name': 'my_lab.lion'}
  keys |= {'schedule.name': 'my_lab.triangle'}
  run(tmp_path, 'vit_jax.train', *cli.flags('my_lab/config.py', workdir, keys))
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  last = {k: v for line in lines for k, v in json.loads(line).items()}
  out = run(tmp_path, 'vit_jax.evaluate', f'--checkpoint={workdir}', '--json')
  found = json.loads(out.splitlines()[-1])
  assert found['10nn'] == last['knn/10nn']
  assert found['teacher/10nn'] == last['knn_teacher/10nn']
