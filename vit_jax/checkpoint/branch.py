"""Copies a step of another run as the first step of a new one."""

import uuid
from typing import Any

from etils import epath

from vit_jax.checkpoint import items, manifest, restore, steps
from vit_jax.checkpoint.items import CorruptError
from vit_jax.errors import UserError
from vit_jax.files import paths


def origin(root: epath.Path) -> dict[str, Any] | None:
  """Returns where the run of a directory comes from; None for other runs.

  Args:
    root: directory of checkpoints.

  Returns:
    `workdir`, `step` and `run` (the id) of the run that was branched.
  """
  if restore.FILE not in steps.listing(root):
    return None
  return items.read_json(root, restore.FILE).get('origin')


def read_about(root: epath.Path, step: int) -> dict[str, Any]:
  """Reads the item `about` of the step of another run.

  Raises:
    UserError: there is no such step, or it is damaged.
    OSError: the directory cannot be read.
  """
  existing = steps.committed(root)
  if step not in existing:
    raise UserError(
      f'{root} has no checkpoint of step {step}; its steps are '
      f'{", ".join(map(str, existing)) or "none"}.'
    )
  path = root / str(step)
  try:
    return manifest.read_about(path, manifest.read(path))
  except CorruptError as error:
    raise UserError(
      f'{path} is damaged ({error}): branch from another step.'
    ) from error


def copy_step(
  source: epath.Path, step: int, root: epath.Path, origin: dict[str, Any]
) -> None:
  """Copies a step, which belongs to a new run from then on.

  The manifest of the copy contains a new id of the run, and `origin`. The
  arrays are compared with its checksums when they are restored.

  Args:
    source: directory of checkpoints of the other run.
    step: number of updates completed.
    root: directory of checkpoints of the new run.
    origin: `workdir` and `step`, to which the id of the other run is added.

  Raises:
    CorruptError: the manifest is damaged.
    OSError: a file cannot be read or written.
  """
  content = manifest.verified(
    items.read_json(source / str(step) / 'manifest'), 'the manifest'
  )
  run, origin = uuid.uuid4().hex, origin | {'run': content.get('run')}
  content |= {'run': run, 'origin': origin}
  identity = manifest.text_with_checksum({'run': run, 'origin': origin})
  paths.save(root / restore.FILE, identity)
  with paths.new_folder(root / str(step)) as folder:
    _copy(source / str(step), folder)
    path = folder / 'manifest' / 'metadata'
    path.write_text(manifest.text_with_checksum(content))
    # An object store has no directories to rename, so this file is the last.
    mark = source / str(step) / steps.COMMITTED
    if mark.exists():
      mark.copy(folder / mark.name)


def _copy(source: epath.Path, target: epath.Path) -> None:
  """Copies a directory, without the mark of a committed step."""
  target.mkdir(parents=True, exist_ok=True)
  for path in source.iterdir():
    if path.is_dir():
      _copy(path, target / path.name)
    elif path.name != steps.COMMITTED:
      path.copy(target / path.name)
