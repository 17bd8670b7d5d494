"""Begins a run from the whole state of a step of another run.

A branch has the parameters, optimizer, averages, objective's state and position
in the data of the step, and another schedule or length: for example, a run with
a constant rate can end with several cool-downs, or a finished run can be
continued. Metrics up to the step are copied. Up to the branch, and after it, a
run computes the same numbers as one that had its schedule from the start, if
the two schedules agree up to the step.
"""

import re
import uuid
from typing import Any

from etils import epath

from vit_jax.checkpoint import items, manifest, restore, steps
from vit_jax.checkpoint.items import CorruptError
from vit_jax.config.schema import Config
from vit_jax.errors import UserError
from vit_jax.files import jsonl, paths
from vit_jax.run import ledger, lock, metrics, resume
from vit_jax.training.experiment import total_steps


def begin(text: str, config: Config, workdir: epath.Path) -> None:
  """Copies the step to a new workdir, unless that was done before.

  All processes must call it, before the run is started.

  Args:
    text: value of --branch_from, 'WORKDIR@STEP'.
    config: completed config of the branch.
    workdir: directory of the branch.

  Raises:
    UserError: the step does not exist, the workdir has another run, or keys
      other than those of the schedule and the length differ.
    StorageError: the files cannot be read or written, even after retries.
  """
  match = re.fullmatch(r'(.+)@(\d+)', text)
  if match is None:
    raise UserError(
      f'--branch_from is {text!r}; give a workdir and a step of its '
      'checkpoints, as in runs/long@10000.'
    )
  source, step = paths.locate(match[1]), int(match[2])
  items.with_retries(
    lambda: items.on_main(_begin, source, step, config, workdir),
    f'{source} at step {step}',
  )


def _begin(
  source: epath.Path, step: int, config: Config, workdir: epath.Path
) -> None:
  root = workdir / 'checkpoints'
  origin = {'workdir': str(source), 'step': step}
  paths.check_writable(workdir)
  with lock.hold(workdir):
    existing = steps.committed(root)
    if existing and (_origin(root) or {}).items() >= origin.items():
      return
    if existing:
      raise UserError(
        f'{workdir} has checkpoints already (step {existing[-1]}): give '
        'another --workdir, or omit --branch_from to resume.'
      )
    about = _read_about(source / 'checkpoints', step)
    changes = resume.config_changes(about['config'], config)
    resume.check_branch(f'{source}@{step}', changes)
    if step >= (total := total_steps(config)):
      raise UserError(
        f'--branch_from={source}@{step} is at the end of the {total} steps of '
        f'config.total={config.total!r}: give a longer total.'
      )
    events = ledger.Ledger(workdir / 'events.jsonl')
    events.event('branch', **origin)
    events.event('config_change', changes=resume.digests(changes))
    lines = [
      line
      for line, record in jsonl.read(source / 'metrics.jsonl')
      if record is not None and metrics.is_before(record, step)
    ]
    paths.write(workdir / 'metrics.jsonl', b''.join(lines))
    _copy_step(source / 'checkpoints', step, root, origin)


def _origin(root: epath.Path) -> dict[str, Any] | None:
  """Returns where the run of a directory comes from; None for other runs.

  Args:
    root: directory of checkpoints.

  Returns:
    `workdir`, `step` and `run` (the id) of the run that was branched.
  """
  if restore.FILE not in steps.listing(root):
    return None
  return items.read_json(root, restore.FILE).get('origin')


def _read_about(root: epath.Path, step: int) -> dict[str, Any]:
  """Reads the item `about` of the step of another run.

  Raises:
    UserError: there is no such step, or it is damaged.
    OSError: the directory cannot be read.
  """
  try:
    if not steps.is_step(path := root / str(step)):
      raise CorruptError('there is no such step')
    return manifest.read_about(path, manifest.read(path))
  except CorruptError as error:
    existing = ', '.join(map(str, steps.committed(root))) or 'none'
    raise UserError(
      f'{path} cannot be branched: {error}. The steps of the run are '
      f'{existing}: give another.'
    ) from error


def _copy_step(
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
    _copy_folder(source / str(step), folder)
    path = folder / 'manifest' / 'metadata'
    path.write_text(manifest.text_with_checksum(content))
    # An object store has no directories to rename, so this file is the last.
    mark = source / str(step) / steps.COMMITTED
    if mark.exists():
      mark.copy(folder / mark.name)


def _copy_folder(source: epath.Path, target: epath.Path) -> None:
  """Copies a directory, without the mark of a committed step."""
  target.mkdir(parents=True, exist_ok=True)
  for path in source.iterdir():
    if path.is_dir():
      _copy_folder(path, target / path.name)
    elif path.name != steps.COMMITTED:
      path.copy(target / path.name)
