"""A step's manifest: written with the step, and compared when it is read.

A manifest is JSON: `leaves` (shape, dtype and checksum of every array by path),
`sums` (checksums of the other JSON items), `step`, `run` and `seed` (of the run
that wrote it), and `checksum`, its own. Before format 3 it held only the
content of `leaves`; the rest is not checked then.
"""

import dataclasses
import json
import zlib
from typing import Any

from etils import epath

from vit_jax.arrays import checksum, sharding, tree
from vit_jax.checkpoint import items
from vit_jax.checkpoint.items import CorruptError
from vit_jax.errors import UserError

PyTree = Any
_OWN = 'checksum'


@dataclasses.dataclass(frozen=True)
class Manifest:
  """A manifest whose checksum is right.

  Attributes:
    leaves: {path: [shape, dtype, checksum]}.
    sums: {item: checksum}; empty before format 3.
    step: number of updates completed; None before format 3.
    run: id of the run that wrote it; None before format 3 and in exported
      weights.
    seed: seed of the run at that step; None before format 3.
  """

  leaves: dict[str, Any]
  sums: dict[str, int]
  step: int | None = None
  run: str | None = None
  seed: int | None = None


def json_checksum(value: Any) -> int:
  """Computes the CRC-32 of a JSON value, independent of its formatting."""
  plain = json.loads(json.dumps(value))  # tuples become lists
  return zlib.crc32(json.dumps(plain, sort_keys=True).encode())


def sealed(content: dict[str, Any]) -> dict[str, Any]:
  """Returns a JSON object with its own checksum added."""
  return {**content, _OWN: json_checksum(content)}


def sealed_text(content: dict[str, Any]) -> str:
  """Returns the text of a file that holds `sealed(content)`."""
  return json.dumps(sealed(content)) + '\n'


def unsealed(content: dict[str, Any], name: str) -> dict[str, Any]:
  """Inverts `sealed`.

  Args:
    content: JSON object with a checksum.
    name: name of the object, for messages.

  Raises:
    CorruptError: the checksum is missing or wrong.
  """
  inner = {k: v for k, v in content.items() if k != _OWN}
  if content.get(_OWN) != json_checksum(inner):
    raise CorruptError(f'the checksum of {name} is not what was saved')
  return inner


def leaves(state: PyTree) -> dict[str, Any]:
  """Computes shape, dtype and checksum of every leaf, by path.

  All processes must call it.

  Args:
    state: arrays, sharded in any way.
  """
  flat = tree.flatten(state)
  mesh = next(iter(flat.values())).sharding.mesh
  sums = checksum.checksums(state, sharding.replicated(mesh))
  return {
    path: [list(leaf.shape), str(leaf.dtype), sums[path]]
    for path, leaf in flat.items()
  }


def make(state: PyTree, about: dict[str, Any], **whose: Any) -> dict[str, Any]:
  """Returns the manifest of a state and its item `about`.

  Args:
    state: arrays, sharded in any way.
    about: content of the item `about`.
    **whose: `step`, `run` and `seed`, for a step of a run.
  """
  sums = {'about': json_checksum(about)}
  return sealed({'leaves': leaves(state), 'sums': sums, **whose})


def read(step_dir: epath.Path) -> Manifest:
  """Reads a step's manifest.

  Args:
    step_dir: step directory.

  Raises:
    CorruptError: it is missing, or its checksum is wrong.
    OSError: it cannot be read.
  """
  content = items.read_json(step_dir / 'manifest')
  if content and all(_is_leaf(entry) for entry in content.values()):
    return Manifest(content, {})  # before format 3
  content = unsealed(content, 'the manifest')
  known = {field.name for field in dataclasses.fields(Manifest)}
  return Manifest(**{k: v for k, v in content.items() if k in known})


def _is_leaf(entry: Any) -> bool:
  """Returns whether a JSON value is [shape, dtype, checksum]."""
  return (
    isinstance(entry, list)
    and [type(part) for part in entry] == [list, str, int]
    and all(type(size) is int for size in entry[0])
  )


def read_about(step_dir: epath.Path, written: Manifest) -> dict[str, Any]:
  """Reads the item `about`, and compares it with its checksum.

  Args:
    step_dir: step directory.
    written: manifest of the step.

  Raises:
    CorruptError: it is missing, or its checksum is wrong.
    OSError: it cannot be read.
  """
  about = items.read_json(step_dir / 'about')
  if written.sums and json_checksum(about) != written.sums.get('about'):
    raise CorruptError('the checksum of about is not what was saved')
  return about


def check_leaves(
  step_dir: epath.Path, written: dict[str, Any], wanted: PyTree
) -> None:
  """Compares the shapes and dtypes in a manifest with those to be restored.

  Args:
    step_dir: step directory, for messages.
    written: `leaves` of its manifest.
    wanted: tree of arrays or abstract arrays.

  Raises:
    UserError: they differ, because they belong to another model or because
      JAX is configured to use other dtypes.
  """
  shapes = {path: tuple(entry[0]) for path, entry in written.items()}
  items.check_shapes(str(step_dir), shapes, items.shapes(wanted))
  for path, leaf in tree.flatten(wanted).items():
    if str(leaf.dtype) != written[path][1]:
      raise UserError(
        f'{step_dir} holds {path} as {written[path][1]}, but this process '
        f'expects {leaf.dtype}: start it as the run was started '
        '(JAX_ENABLE_X64 unset, the same version).'
      )


def compare(actual: dict[str, Any], written: dict[str, Any]) -> None:
  """Compares `leaves` of a restored state with those of the manifest.

  Args:
    actual: result of `leaves` for the restored state.
    written: `leaves` of the manifest.

  Raises:
    CorruptError: they differ; names up to three leaves.
  """
  differing = [path for path in actual if actual[path] != written.get(path)]
  if differing:
    more = f' and {len(differing) - 3} more' if len(differing) > 3 else ''
    raise CorruptError(
      f'the checksum of {", ".join(differing[:3])}{more} is not what was saved'
    )
