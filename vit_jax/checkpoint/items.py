"""What a step directory is made of, and how it checks itself."""

import contextlib
import json
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from vit_jax.arrays import tree
from vit_jax.errors import UserError

PyTree = Any
FORMAT = 3  # of a step directory; changes when old readers would fail
READABLE = (2, 3)
NAMES = ('params', 'average', 'extra', 'training', 'about', 'manifest')
_APART = ('params', 'average', 'extra')  # read alone by evaluations


class CorruptError(Exception):
  """A step directory does not hold what was written."""


def split(state: PyTree) -> dict[str, dict[str, Any]]:
  """A state's leaves by path, in the items that they are written to."""
  nested = tree.unflatten(tree.flatten(state))
  items = {name: nested.pop(name) for name in _APART if name in nested}
  return items | {'training': nested}


def join(items: dict[str, Any], like: PyTree) -> PyTree:
  """The inverse of `split`, with the structure of `like`."""
  flat: dict[str, Any] = {}
  for name, item in items.items():
    prefix = '' if name == 'training' else f'{name}/'
    flat |= {prefix + path: leaf for path, leaf in tree.flatten(item).items()}
  leaves = [flat[path] for path in tree.flatten(like)]
  return jax.tree.unflatten(jax.tree.structure(like), leaves)


def read_json(path: epath.Path, filename: str = 'metadata') -> dict[str, Any]:
  """Reads a JSON item, without waiting for other processes.

  Raises:
    CorruptError: absent, or no JSON object.
    OSError: it cannot be read.
  """
  try:
    content = json.loads((path / filename).read_text())
  except (FileNotFoundError, NotADirectoryError) as error:
    raise CorruptError(f'the item {path.name} is missing') from error
  except ValueError as error:
    raise CorruptError(
      f'the item {path.name} is unreadable: {error}'
    ) from error
  if not isinstance(content, dict):
    raise CorruptError(f'the item {path.name} is no JSON object')
  return content


def read_arrays(path: epath.Path, abstract: PyTree) -> PyTree:
  """Reads an item of arrays, without waiting for other processes.

  Each reads what its own devices hold. What is damaged raises anything.
  """
  with contextlib.closing(ocp.StandardCheckpointHandler()) as handler:
    return handler.restore(path, args=ocp.args.StandardRestore(abstract))


def root_cause(error: BaseException) -> str:
  """The innermost cause of an exception, in one line."""
  while error.__cause__ is not None:
    error = error.__cause__
  text = str(error).strip().splitlines()
  return f'{type(error).__name__}: {text[0][:300] if text else ""}'


def check_shapes(
  path: str, came: dict[str, tuple], wanted: dict[str, tuple]
) -> None:
  """Compares shapes by path.

  Raises:
    UserError: names up to five leaves that are missing, too many or different.
  """
  differing = [
    f'{key}: file {came.get(key, "none")}, model {wanted.get(key, "none")}'
    for key in sorted({*came, *wanted})
    if came.get(key) != wanted.get(key)
  ]
  if differing:
    more = f' and {len(differing) - 5} more' if len(differing) > 5 else ''
    raise UserError(
      f'{path} holds other parameters than the model: '
      f'{"; ".join(differing[:5])}{more}. Give the model keys '
      '(config.model.*, config.num_classes) that the file was made with.'
    )


def shapes(state: PyTree) -> dict[str, tuple]:
  """{path: shape}."""
  return {key: tuple(leaf.shape) for key, leaf in tree.flatten(state).items()}
