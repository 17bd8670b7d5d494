"""Imports point downwards only; flax and Orbax stay in their rooms."""

import ast
import graphlib
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / 'vit_jax'

# Modules by layer; a directory stands for all in it. One may import what is
# below. The rooms of layers 1 and 2 do not know each other, but for SIBLINGS.
LAYERS = {
  0: 'errors tree plugins durations losses flops sharding config overrides '
  'arguments spelling schedule checksum ledger lock watchdog atomic jsonl '
  'identity agreement storage interruption peers',
  1: 'models optim metrics data runtime workdir preemption stragglers',
  # At the side of the models:
  1.5: 'interop analysis recorder recovery bad_records',
  2: 'objectives evaluators checkpoint step replay',
  2.5: 'experiment compiling pretrained',
  3: 'past session loop cli entry train finetune evaluate predict plan prepare '
  'convert analyze preview goodput check_data',
}
# Within a layer these know each other, the first the second.
SIBLINGS = {('compiling', 'experiment')}
LAYER_OF = {
  room: layer for layer, rooms in LAYERS.items() for room in rooms.split()
}
MODULES = {
  '.'.join(path.relative_to(PACKAGE.parent).with_suffix('').parts): path
  for path in PACKAGE.rglob('*.py')
  if path != PACKAGE / '__init__.py'  # its lazy import is the package's face
}


def room(module):
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


def test_every_module_has_a_layer():
  """A new room needs a layer, here and in ARCHITECTURE.md."""
  assert {room(module) for module in MODULES} <= set(LAYER_OF)


@pytest.mark.parametrize('module', sorted(MODULES))
def test_imports_point_downwards(module):
  """Nobody imports a layer above its own, or a sibling it should not know."""
  here = room(module)
  own = LAYER_OF.get(here, 3)  # unknown ones fail the test above
  for other in map(room, internal(MODULES[module])):
    layer = LAYER_OF.get(other, 3)
    assert layer <= own, f'{module} (layer {own}) imports {other} ({layer})'
    if own in (1, 2) and (here, other) not in SIBLINGS | {(here, here)}:
      assert layer < own, f'{module} and {other} are both in layer {own}'
    if own == 2:
      assert layer != 1.5, f'{module} (layer 2) imports {other}, at the side'


def test_no_cycles():
  """Within a layer, too, there is an order."""
  graph = {module: set(internal(path)) for module, path in MODULES.items()}
  graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_only_models_import_flax():
  """Everyone else sees plain trees of arrays."""
  assert {room(module) for module in outside('flax')} == {'models'}


def test_only_checkpoint_imports_orbax():
  """Orbax can be replaced in one room."""
  assert {room(module) for module in outside('orbax')} == {'checkpoint'}
