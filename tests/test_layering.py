"""Imports point downwards only; Flax and Orbax stay in their packages."""

import ast
import graphlib
import pathlib
import re

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / 'vit_jax'

# Packages from the top down: each imports only packages below it. A command is
# a file next to them; commands do not import each other.
COMMANDS = (
  'analyze',
  *('train', 'finetune', 'evaluate', 'predict', 'convert', 'preview'),
  *('goodput', 'check_data', 'plan', 'prepare', 'export', 'features'),
  *('pseudo_label', 'sweep', 'study', 'configs', 'launch', '__main__'),
)
PACKAGES = (
  *('cli', 'sweeps', 'training', 'evaluators', 'weights', 'analysis'),
  'checkpoint',
  *('run', 'objectives', 'optim', 'models', 'data', 'arrays', 'config'),
  *('files', 'processes', 'errors'),
)
MODULES = {
  '.'.join(path.relative_to(PACKAGE.parent).with_suffix('').parts): path
  for path in PACKAGE.rglob('*.py')
  if path != PACKAGE / '__init__.py'  # its lazy import is the package's face
}


def package(module):
  """'models' of 'vit_jax.models.vit'."""
  return module.split('.')[1]


def imports(path):
  """Dotted names that a file imports, at its top or inside functions."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path} imports relatively'
      yield from (f'{node.module}.{alias.name}' for alias in node.names)


def internal(path):
  """The modules of this package that a file imports."""
  for name in imports(path):
    if name.startswith('vit_jax.'):
      parent = name.rpartition('.')[0]
      packages = (f'{name}.__init__', f'{parent}.__init__')
      known = [n for n in (name, parent, *packages) if n in MODULES]
      assert known, f'{path} imports {name}, which is no module'
      yield known[0]


def outside(package):
  """The modules that import an outside package."""
  return {
    module
    for module, path in MODULES.items()
    if any(name.split('.')[0] == package for name in imports(path))
  }


def test_every_module_has_a_package():
  """A new package needs its place, here and in ARCHITECTURE.md."""
  assert {package(module) for module in MODULES} <= {*PACKAGES, *COMMANDS}


@pytest.mark.parametrize('module', sorted(MODULES))
def test_imports_point_downwards(module):
  """No module imports a package above its own; no command imports another."""
  here = package(module)
  for other in set(map(package, internal(MODULES[module]))) - {here}:
    assert other not in COMMANDS, f'{module} imports the command {other}'
    if here in PACKAGES:
      below = PACKAGES[PACKAGES.index(here) + 1 :]
      assert other in below, f'{module} imports {other}, which is above it'


def test_the_table_of_architecture_is_this_list():
  """Its rows name the packages, in this order."""
  text = (PACKAGE.parent / 'ARCHITECTURE.md').read_text()
  table = text.partition('## Packages')[2].partition('\n## ')[0]
  rows = re.findall(r'^\| `(\w+)(?:/|\.py)` \|', table, flags=re.MULTILINE)
  assert tuple(rows) == PACKAGES


def test_no_cycles():
  """Modules within a package have an order, too."""
  graph = {module: set(internal(path)) for module, path in MODULES.items()}
  graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_only_models_import_flax():
  """Everyone else sees plain trees of arrays."""
  assert {package(module) for module in outside('flax')} == {'models'}


def test_only_checkpoint_imports_orbax():
  """Orbax can be replaced in one package."""
  assert {package(module) for module in outside('orbax')} == {'checkpoint'}
