"""Writes and checks the manifest of a step, which contains checksums.

A manifest is JSON: `leaves` (shape, dtype and checksum of every array by path),
`sums` (checksums of the other JSON items), `step`, `run` and `seed` (of the run
that wrote it), and `checksum` (of the manifest itself).
"""

import dataclasses
import json
import zlib
from typing import Any

from etils import epath

from vit_jax.arrays import checksum, tree
from vit_jax.checkpoint import items
from vit_jax.checkpoint.agreement import CorruptError

PyTree = Any
_CHECKSUM = 'checksum'


@dataclasses.dataclass(frozen=True)
class Manifest:
  """Content of a manifest, whose checksum was correct.

  Attributes:
    leaves: {path: [shape, dtype, checksum]}.
    sums: {item: checksum}.
    step: number of updates completed; None in exported weights.
    run: id of the run that wrote the step; None in exported weights.
    seed: seed of the run at that step; None in exported weights.
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


def with_checksum(content: dict[str, Any]) -> dict[str, Any]:
  """Returns a copy of a JSON object, with its checksum added."""
  return {**content, _CHECKSUM: json_checksum(content)}


def text_with_checksum(content: dict[str, Any]) -> str:
  """Returns the text of `with_checksum(content)`, to be written to a file."""
  return json.dumps(with_checksum(content)) + '\n'


def verified(content: dict[str, Any], name: str) -> dict[str, Any]:
  """Verifies and removes the checksum of a JSON object.

  Args:
    content: result of `with_checksum`.
    name: name of the object, for messages.

  Raises:
    CorruptError: the checksum is missing or wrong.
  """
  plain = {k: v for k, v in content.items() if k != _CHECKSUM}
  if content.get(_CHECKSUM) != json_checksum(plain):
    raise CorruptError(f'the checksum of {name} is not what was saved')
  return plain


def leaves(state: PyTree) -> dict[str, Any]:
  """Computes shape, dtype and checksum of every leaf, by path.

  All processes must call it.

  Args:
    state: arrays, sharded in any way.
  """
  flat = tree.flatten(state)
  sums = checksum.checksums(state)
  return {
    path: [list(leaf.shape), str(leaf.dtype), sums[path]]
    for path, leaf in flat.items()
  }


def make(state: PyTree, about: dict[str, Any], **origin: Any) -> dict[str, Any]:
  """Returns the manifest of a state and its item `about`.

  Args:
    state: arrays, sharded in any way.
    about: content of the item `about`.
    **origin: `step`, `run` and `seed`; nothing for exported weights.
  """
  sums = {'about': json_checksum(about)}
  return with_checksum({'leaves': leaves(state), 'sums': sums, **origin})


def read(step_dir: epath.Path) -> Manifest:
  """Reads the manifest of a step.

  Args:
    step_dir: step directory.

  Raises:
    CorruptError: the manifest is missing, or its checksum is wrong.
    OSError: the manifest cannot be read.
  """
  content = items.read_json(step_dir / 'manifest')
  content = verified(content, 'the manifest')
  # Later versions may add fields.
  fields = {field.name for field in dataclasses.fields(Manifest)}
  return Manifest(**{k: v for k, v in content.items() if k in fields})


def read_about(step_dir: epath.Path, written: Manifest) -> dict[str, Any]:
  """Reads the item `about`, and compares it with its checksum.

  Args:
    step_dir: step directory.
    written: manifest of the step.

  Raises:
    CorruptError: the item is missing, or its checksum is wrong.
    OSError: the item cannot be read.
  """
  about = items.read_json(step_dir / 'about')
  if json_checksum(about) != written.sums.get('about'):
    raise CorruptError('the checksum of about is not what was saved')
  return about


def check_leaves(
  step_dir: epath.Path, written: dict[str, Any], expected: PyTree
) -> None:
  """Compares the shapes and dtypes in a manifest with those to be restored.

  Args:
    step_dir: step directory, for messages.
    written: `leaves` of the manifest.
    expected: tree of arrays or abstract arrays.

  Raises:
    UserError: shapes or dtypes differ, because the step belongs to another
      model, or because JAX is configured to use other dtypes.
  """
  in_file = {path: (*entry[0], entry[1]) for path, entry in written.items()}
  in_model = {
    path: (*leaf.shape, str(leaf.dtype))
    for path, leaf in tree.flatten(expected).items()
  }
  tree.check_shapes(str(step_dir), in_file, in_model)


def compare(actual: dict[str, Any], written: dict[str, Any]) -> None:
  """Compares `leaves` of a restored state with those of the manifest.

  Args:
    actual: result of `leaves` for the restored state.
    written: `leaves` of the manifest.

  Raises:
    CorruptError: leaves differ; the message names up to three of them.
  """
  differing = [path for path in actual if actual[path] != written.get(path)]
  if differing:
    more = f' and {len(differing) - 3} more' if len(differing) > 3 else ''
    raise CorruptError(
      f'the checksum of {", ".join(differing[:3])}{more} is not what was saved'
    )
