"""What a step's manifest says, and whether the step is what it says.

A manifest is JSON: `leaves` (shape, dtype and checksum of every array by path),
`sums` (checksums of the other JSON items), `step`, `run` and `seed` (whose step
it is), and `checksum`, its own. Before format 3 it was `leaves` alone; what
such a manifest does not say is not checked.
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
  """A manifest that is what was written.

  Attributes:
    leaves: {path: [shape, dtype, checksum]}.
    sums: {item: checksum}; empty before format 3, as all below are None.
    step: updates completed.
    run: the id of the run that wrote it; None in exported weights too.
    seed: the run's at that step.
  """

  leaves: dict[str, Any]
  sums: dict[str, int]
  step: int | None = None
  run: str | None = None
  seed: int | None = None


def json_checksum(value: Any) -> int:
  """CRC-32 of what a JSON value means, however it is written."""
  meant = json.loads(json.dumps(value))
  return zlib.crc32(json.dumps(meant, sort_keys=True).encode())


def sealed(content: dict[str, Any]) -> dict[str, Any]:
  """JSON with a checksum of its own."""
  return {**content, _OWN: json_checksum(content)}


def sealed_text(content: dict[str, Any]) -> str:
  """A small file's text: `sealed`, as JSON."""
  return json.dumps(sealed(content)) + '\n'


def unsealed(content: dict[str, Any], name: str) -> dict[str, Any]:
  """The inverse of `sealed`.

  Raises:
    CorruptError: the checksum is missing or another.
  """
  inner = {k: v for k, v in content.items() if k != _OWN}
  if content.get(_OWN) != json_checksum(inner):
    raise CorruptError(f'the checksum of {name} is not what was saved')
  return inner


def leaves(state: PyTree) -> dict[str, Any]:
  """Shape, dtype and checksum of every leaf, by path; on all processes."""
  flat = tree.flatten(state)
  mesh = next(iter(flat.values())).sharding.mesh
  sums = checksum.checksums(state, sharding.replicated(mesh))
  return {
    path: [list(leaf.shape), str(leaf.dtype), sums[path]]
    for path, leaf in flat.items()
  }


def make(state: PyTree, about: dict[str, Any], **whose: Any) -> dict[str, Any]:
  """The manifest of a state and what travels with it, to be written.

  Args:
    state: arrays.
    about: the item of that name.
    **whose: `step`, `run` and `seed`, of a step of a run.
  """
  sums = {'about': json_checksum(about)}
  return sealed({'leaves': leaves(state), 'sums': sums, **whose})


def read(step_dir: epath.Path) -> Manifest:
  """A step's manifest.

  Raises:
    CorruptError: it is missing, or not what was written.
    OSError: it cannot be read.
  """
  content = items.read_json(step_dir / 'manifest')
  if content and all(_is_leaf(entry) for entry in content.values()):
    return Manifest(content, {})  # before format 3
  content = unsealed(content, 'the manifest')
  known = {field.name for field in dataclasses.fields(Manifest)}
  return Manifest(**{k: v for k, v in content.items() if k in known})


def _is_leaf(entry: Any) -> bool:
  return (
    isinstance(entry, list)
    and [type(part) for part in entry] == [list, str, int]
    and all(type(size) is int for size in entry[0])
  )


def read_about(step_dir: epath.Path, written: Manifest) -> dict[str, Any]:
  """The item `about`, compared with its checksum.

  Raises:
    CorruptError: it is missing, or not what was written.
    OSError: it cannot be read.
  """
  about = items.read_json(step_dir / 'about')
  if written.sums and json_checksum(about) != written.sums.get('about'):
    raise CorruptError('the checksum of about is not what was saved')
  return about


def check_leaves(
  step_dir: epath.Path, written: dict[str, Any], wanted: PyTree
) -> None:
  """Compares shapes and types with what is to be restored.

  Raises:
    UserError: they differ: they belong to another model, or JAX has been told
      to use other types.
  """
  shapes = {path: tuple(entry[0]) for path, entry in written.items()}
  items.check_shapes(str(step_dir), shapes, items.shapes(wanted))
  for path, leaf in tree.flatten(wanted).items():
    if str(leaf.dtype) != written[path][1]:
      raise UserError(
        f'{step_dir} holds {path} as {written[path][1]}, and this process '
        f'would make it {leaf.dtype}: start it as the run was started '
        '(JAX_ENABLE_X64 unset, the same version).'
      )


def compare(now: dict[str, Any], written: dict[str, Any]) -> None:
  """Compares `leaves` of what was restored with what was saved.

  Raises:
    CorruptError: names up to three leaves that differ.
  """
  differing = [path for path in now if now[path] != written.get(path)]
  if differing:
    more = f' and {len(differing) - 3} more' if len(differing) > 3 else ''
    raise CorruptError(
      f'the checksum of {", ".join(differing[:3])}{more} is not what was saved'
    )
