"""Tests that imports point downwards, and of where Flax and Orbax are used."""

import ast
import graphlib
import pathlib
import re

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / 'vit_jax'

# Packages from the top down: each imports only packages below it. All others
# are commands, which do not import each other.
_TABLE = (PACKAGE.parent / 'ARCHITECTURE.md').read_text()
_TABLE = _TABLE.partition('## Packages')[2].partition('\n## ')[0]
PACKAGES = re.findall(r'^\| `(\w+)(?:/|\.py)` \|', _TABLE, flags=re.MULTILINE)
MODULES = {
  '.'.join(path.relative_to(PACKAGE.parent).with_suffix('').parts): path
  for path in PACKAGE.rglob('*.py')
  if path != PACKAGE / '__init__.py'  # it imports the public functions lazily
}


def package(module):
  """Returns 'models' for 'vit_jax.models.vit'."""
  return module.split('.')[1]


def imports(path):
  """Yields dotted names that a file imports, at its top or in functions."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path} imports relatively'
      yield from (f'{node.module}.{alias.name}' for alias in node.names)


def internal(path):
  """Yields the modules of this package that a file imports."""
  for name in imports(path):
    if name.startswith('vit_jax.'):
      parent = name.rpartition('.')[0]
      packages = (f'{name}.__init__', f'{parent}.__init__')
      known = [n for n in (name, parent, *packages) if n in MODULES]
      assert known, f'{path} imports {name}, which is no module'
      yield known[0]


def outside(package):
  """Returns the modules that import an outside package."""
  return {
    module
    for module, path in MODULES.items()
    if any(name.split('.')[0] == package for name in imports(path))
  }


def test_architecture_lists_packages_that_exist():
  assert len(PACKAGES) > 10
  assert {*PACKAGES} <= {package(module) for module in MODULES}


@pytest.mark.parametrize('module', sorted(MODULES))
def test_imports_point_downwards(module):
  """No module imports a package above its own; no command imports another."""
  here = package(module)
  for other in set(map(package, internal(MODULES[module]))) - {here}:
    assert other in PACKAGES, f'{module} imports the command {other}'
    if here in PACKAGES:
      below = PACKAGES[PACKAGES.index(here) + 1 :]
      assert other in below, f'{module} imports {other}, which is above it'


def test_modules_do_not_import_each_other_in_cycles():
  graph = {module: set(internal(path)) for module, path in MODULES.items()}
  graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_only_models_import_flax():
  """All other packages work with plain trees of arrays."""
  assert {package(module) for module in outside('flax')} == {'models'}


def test_only_checkpoint_imports_orbax():
  assert {package(module) for module in outside('orbax')} == {'checkpoint'}
