"""Tests of the files in launch/ that install the package, and of exit codes."""

import importlib.metadata
import re
import subprocess

import launch_jobs
import pytest
import yaml
from launch_jobs import ROOT, write_program
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from vit_jax import errors
from vit_jax.launch import __main__ as command
from vit_jax.launch.job import State
from vit_jax.launch.shell import Shell


@pytest.mark.parametrize('file', ['tpu', 'cuda'])
def test_containers_are_made_of_what_a_commit_has(file):
  text = (ROOT / f'launch/Dockerfile.{file}').read_text()
  copied = re.findall(r'^COPY (.*) \S+$', text, flags=re.MULTILINE)
  for name in ' '.join(copied).split():
    assert (ROOT / name).exists(), name
  extra = {'tpu': 'tpu', 'cuda': 'gpu'}[file]
  setup = (ROOT / 'setup.py').read_text()
  needed = re.findall(rf"'{extra}': \['(.*)'\]", setup)
  assert len(needed) == 1 and f"'{needed[0]}'" in text
  assert f"--editable='.[{extra}]'" in text
  assert text.count('--constraint=constraints.txt') == text.count('pip install')
  constraints = (ROOT / 'constraints.txt').read_text().splitlines()
  (version,) = re.findall(r'^FROM python:([\d.]+)-slim$', text, re.MULTILINE)
  assert f'(Python {version}, CPU)' in constraints[0]
  # A pinned compiler would conflict with the version that JAX requires.
  pinned = [line for line in constraints if re.match('libtpu|nvidia', line)]
  assert not pinned


def test_constraints_allow_what_jax_needs_on_a_tpu():
  """Otherwise the installation fails, but only on a slice."""
  lines = (ROOT / 'constraints.txt').read_text().splitlines()
  pins = [Requirement(line) for line in lines if line and line[0] not in '#-']
  versions = {
    canonicalize_name(pin.name): next(iter(pin.specifier)).version
    for pin in pins
  }
  if importlib.metadata.version('jax') != versions['jax']:
    pytest.skip('another version of JAX is installed')
  for text in importlib.metadata.requires('jax') or []:
    needed = Requirement(text)
    version = versions.get(canonicalize_name(needed.name))
    on_tpu = not needed.marker or needed.marker.evaluate({'extra': 'tpu'})
    if on_tpu and version:
      assert needed.specifier.contains(version, prereleases=True), text


def test_unavailable_packages_give_one_message(tmp_path):
  """Prints the reason of pip and the remedy, also when it is run again."""
  python = tmp_path / 'python'
  write_program(
    python,
    '#!/usr/bin/env bash\n'
    'case "$*" in\n'
    '  *"-m venv"*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python";;\n'
    '  *"pip install"*) echo "ERROR: no matching distribution" >&2; exit 1;;\n'
    'esac\n',
  )
  venv = tmp_path / 'venv'
  for _ in range(2):
    ran = subprocess.run(
      ['bash', ROOT / 'launch/local.sh'],
      env={'PATH': '/usr/bin:/bin', 'PYTHON': str(python)}
      | {'VIT_JAX_VENV': str(venv), 'VIT_JAX_RUNS': str(tmp_path / 'runs')},
      capture_output=True,
      text=True,
      timeout=60,
    )
    assert ran.returncode == 2, ran.stderr
    reason, message = ran.stderr.splitlines()
    assert reason == 'ERROR: no matching distribution'
    assert 'PIP_INDEX_URL' in message
  assert not (tmp_path / 'runs').exists()


SKY = yaml.safe_load((ROOT / 'launch/sky.yaml').read_text())


@pytest.mark.parametrize(
  ('nodes', 'is_gpu', 'more'),
  [
    (1, True, []),
    (2, False, []),  # the hosts of a TPU slice
    (
      2,
      True,
      [
        '--coordinator_address=10.0.0.1:9999',
        '--num_processes=2',
        '--process_id=1',
      ],
    ),
  ],
)
def test_the_task_for_skypilot_trains_on_all_nodes(
  tmp_path, nodes, is_gpu, more
):
  """The script is that of the file, with the variables of SkyPilot."""
  trainer = tmp_path / 'vit_jax/bin/python'
  show = 'printf "%s\\n" "$TFDS_DATA_DIR" "$@"; exit 42'
  write_program(trainer, f'#!/bin/bash\n{show}\n')
  if is_gpu:
    write_program(tmp_path / 'bin/nvidia-smi', '#!/bin/sh\n')
  given = dict(WORKDIR='gs://b/a b', DATA_DIR='gs://b/d', FLAGS='--a=1 --b')
  ran = subprocess.run(
    ['bash', '-c', SKY['run']],
    env={'PATH': f'{tmp_path}/bin:/usr/bin:/bin', 'HOME': str(tmp_path)}
    | {'SKYPILOT_NUM_NODES': str(nodes), 'SKYPILOT_NODE_RANK': '1'}
    | {'SKYPILOT_NODE_IPS': '10.0.0.1\n10.0.0.2'}
    | SKY['envs']
    | given,
    capture_output=True,
    text=True,
  )
  assert ran.returncode == 42, ran.stderr
  config = SKY['envs']['CONFIG']
  assert (ROOT / config).exists()
  assert ran.stdout.splitlines() == [
    'gs://b/d',
    *['-m', 'vit_jax.train', f'--config={config}', '--workdir=gs://b/a b'],
    *[*more, '--a=1', '--b'],
  ]


CODES = [code for name, code in vars(errors).items() if name[:5] == 'EXIT_']
PAGE = (ROOT / 'docs/resuming.md').read_text()
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
  shell = Shell(root=ROOT, dry_run=False, echo=lambda line: None)
  launch_jobs.run(launch_jobs.changed('tpu', max_restarts=2), shell)
  reactions = {1: 'no', 3: 'yes, counted', 9: 'yes, without limit'}
  assert TABLE[code].partition(' by')[0] == reactions[len(starts)]
  assert len(TABLE) == len(CODES) + 1


def test_skypilot_restarts_after_codes_that_need_no_count():
  """A crash (1) could be repeated, and paid for, without an end."""
  recovery = SKY['resources']['job_recovery']
  restarted = {code for code, again in TABLE.items() if again[:3] == 'yes'}
  assert set(recovery['recover_on_exit_codes']) == restarted - {1}
  assert recovery['max_restarts_on_errors'] == 0
