"""Tests of the files in launch/ that install the package."""

import importlib.metadata
import re
import subprocess

import pytest
from launch_jobs import ROOT, write_program
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


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
