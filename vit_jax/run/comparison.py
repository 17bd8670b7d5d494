"""Compares a resumed run with the one it was: config, data and software.

Every checkpoint contains a record of what its numbers depend on (`record`, in
the item `about`). When a run is resumed, a difference that makes it another run
is refused. One that can only change the last bits is logged.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from vit_jax.config import identity
from vit_jax.config.completion import Config
from vit_jax.config.identity import Changes, differences
from vit_jax.data.matching import names_differ
from vit_jax.errors import UserError
from vit_jax.processes import versions

_LENGTH = (
  ' The learning rate follows from the total: at the next step it is that of '
  'the new length, so the result is not that of a run which had this length '
  'from the start.'
)

# Settings of JAX that affect initialization, dropout or every product.
_FLAGS = (
  'jax_threefry_partitionable',
  'jax_default_prng_impl',
  'jax_enable_x64',
  'jax_default_matmul_precision',
)
_PACKAGES = (
  'jax',
  'jaxlib',
  'libtpu',
  'flax',
  'optax',
  'numpy',
  'opencv-python-headless',
)


class Note(NamedTuple):
  """A change that does not stop a run, for the log and for events.jsonl.

  Attributes:
    kind: kind of the event.
    fields: fields of the event.
    text: message for the log.
  """

  kind: str
  fields: dict[str, Any]
  text: str


def record(
  fingerprint: dict[str, Any], frozen: dict[str, str]
) -> dict[str, Any]:
  """Returns what the numbers of a run depend on in addition to its config.

  Args:
    fingerprint: fingerprint of the training data, see `data.fingerprint`.
    frozen: digests of weights that the training uses, by name.
  """
  return {
    'fingerprint': fingerprint,
    'frozen': frozen,
    'flags': {name: getattr(jax.config, name, None) for name in _FLAGS},
    'versions': {
      'backend': jax.default_backend(),
      'vit_jax': versions.commit(),
      **{name: versions.of_package(name) for name in _PACKAGES},
    },
  }


def check(
  before: dict[str, Any],
  about: dict[str, Any],
  config: Config,
  events: Iterable[dict[str, Any]],
  *,
  where: str,
  allow_changes: bool,
) -> list[Note]:
  """Compares a checkpoint's item `about` with that of the resuming run.

  Args:
    before: item `about` of the checkpoint; what an older version did not
      record is not compared.
    about: item `about` of this run.
    config: completed config of this run.
    events: events of the run; they contain the changes allowed before.
    where: description of the checkpoint, for the message.
    allow_changes: whether to go on although it is another run.

  Returns:
    Notes for the log and events.jsonl.

  Raises:
    UserError: config, data or settings differ.
  """
  old, new = before.get('record', {}), about['record']
  known = old.get('fingerprint', {'class_names': before['class_names']})
  changes = identity.config_changes(before['config'], config)
  changes |= _common_changes('data: ', known, new['fingerprint'])
  changes |= _common_changes('weights ', old.get('frozen', {}), new['frozen'])
  changes |= _common_changes('setting ', old.get('flags', {}), new['flags'])
  # A change that --allow_config_change allowed once stays allowed.
  accepted: dict[str, str] = {}
  for event in events:
    if event['event'] == 'config_change':
      accepted |= event['changes']
  changes = {
    key: pair
    for key, pair in changes.items()
    if accepted.get(key) != _digest(pair[1])
  }
  if changes and not allow_changes:
    raise refusal(where, changes)
  notes = []
  if changes:
    fields = {'changes': {key: _digest(v[1]) for key, v in changes.items()}}
    text = 'resumed with changes:' + listed(changes)
    notes.append(Note('config_change', fields, text))
  others = _common_changes('', old.get('versions', {}), new['versions'])
  if others:
    text = (
      'other versions than those that wrote the checkpoint; the numbers may '
      'differ in the last bits from here on, or more if this package is '
      'another:' + listed(others)
    )
    notes.append(Note('versions', {'changes': others}, text))
  return notes


def _common_changes(
  prefix: str, old: dict[str, Any], new: dict[str, Any]
) -> Changes:
  """Returns the differences in the keys that both dicts have."""
  both = [key for key in old if key in new]
  found = differences(
    {key: old[key] for key in both}, {key: new[key] for key in both}
  )
  return {prefix + key: pair for key, pair in found.items()}


def evaluator_notes(before: dict[str, Any], config: Config) -> list[Note]:
  """Returns a note for each evaluator that differs under the same name.

  Args:
    before: config of the last start, as a dict.
    config: completed config of this run.
  """
  notes = []
  for name, changes in identity.evaluator_changes(before, config).items():
    fields = {'name': name, 'changes': changes}
    text = (
      f'evals.{name} is another evaluator from here on: numbers of {name}/… '
      'before and after cannot be compared, and checkpoint.best compares '
      'both; give it another name to keep them apart:' + listed(changes)
    )
    notes.append(Note('evaluator_change', fields, text))
  return notes


def refusal(where: str, changes: Changes) -> UserError:
  """Returns the error of a run that is refused, with everything that differs.

  Args:
    where: description of what belongs to another run.
    changes: the differences.
  """
  return UserError(
    f'{where} belongs to another run:{listed(changes)}\nGive another '
    '--workdir, or resume with the change by --allow_config_change.'
    + (_LENGTH if 'total' in changes else '')
  )


def listed(changes: Changes, old: str = 'before', new: str = 'now') -> str:
  """Formats changes, one per line.

  Args:
    changes: the differences.
    old: text after the first value of each.
    new: text after the second value.
  """
  lines = []
  for key, (first, second) in changes.items():
    if key.endswith('class_names') and first and second:
      lines.append(f'{key}: {names_differ(first, second)}')
    else:
      lines.append(f'{key}: {_short(first)} {old}, {_short(second)} {new}')
  return ''.join(f'\n  {line}' for line in lines)


def _short(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= 200 else text[:200] + ' …'


def _digest(value: Any) -> str:
  return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
