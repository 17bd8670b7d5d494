"""Tests that the requirements cover what the package imports."""

import ast
import importlib.metadata
import re
import sys

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.cli import ROOT

# Modules that JAX imports for the StableHLO export without requiring them.
_FOR_JAX = {'flatbuffers'}
# Modules of the extra `huggingface`, whose source is imported if it is used.
_OF_EXTRAS = {'datasets'}


def required(name):
  lines = (ROOT / name).read_text().splitlines()
  pins = [Requirement(line) for line in lines if line and line[0] not in '#-']
  return {canonicalize_name(pin.name) for pin in pins}


def imported_at_the_start():
  """Returns the top-level names that modules import outside of functions."""
  names = set()
  for path in (ROOT / 'vit_jax').rglob('*.py'):
    for node in ast.parse(path.read_text()).body:
      if isinstance(node, ast.Import):
        names |= {alias.name.split('.')[0] for alias in node.names}
      elif isinstance(node, ast.ImportFrom):
        names.add(node.module.split('.')[0])
  return names - {'vit_jax', *sys.stdlib_module_names}


def test_imported_packages_are_required():
  """An indirect requirement may vanish with another package's new version."""
  packages = importlib.metadata.packages_distributions()
  allowed = required('requirements.txt')
  for module in (imported_at_the_start() | _FOR_JAX) - _OF_EXTRAS:
    names = {canonicalize_name(name) for name in packages[module]}
    assert names & allowed, (module, names)


def test_only_the_extra_requires_tensorflow():
  for name in ('requirements.txt', 'requirements-test.txt'):
    assert not {'tensorflow', 'tensorflow-cpu'} & required(name), name
  assert 'tensorflow' in required('requirements-tensorflow.txt')


def test_the_compiler_for_gpus_is_that_of_the_tested_jax():
  """XLA's plug-ins work with one version of JAX."""
  constraints = (ROOT / 'constraints.txt').read_text()
  (version,) = re.findall(r'^jax==(.+)$', constraints, re.MULTILINE)
  text = (ROOT / 'requirements-gpu.txt').read_text()
  assert re.findall(r'^jax-.*==(.+)$', text, re.MULTILINE) == [version] * 2
