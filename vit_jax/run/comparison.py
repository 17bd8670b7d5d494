"""Compares config, data and software of a resumed run with its checkpoint.

Every checkpoint contains a record of everything that its numbers depend on
(`record`, in the item `about`). A run with another config, data or settings of
JAX is not resumed. Different package versions, which usually change only the
last bits, are logged.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from vit_jax.config import identity
from vit_jax.config.completion import Config
from vit_jax.config.identity import Changes, differences
from vit_jax.data import fingerprint as fingerprints
from vit_jax.data.matching import names_differ
from vit_jax.errors import UserError
from vit_jax.processes import versions

_LENGTH = (
  ' The learning rate depends on the total and changes at the next step, so '
  'the result will differ from that of a run which had this length from the '
  'start.'
)

# Settings of JAX that change initialization, dropout or all matrix products.
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
  """A change with which a run may resume, for the log and for events.jsonl.

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
  """Returns everything that a run's numbers depend on, except its config.

  Args:
    fingerprint: fingerprint of the training data, see `data.fingerprint`.
    frozen: digests of the frozen models' weights, by name.
  """
  return {
    'fingerprint': fingerprint,
    'frozen': frozen,
    'flags': {name: getattr(jax.config, name, None) for name in _FLAGS},
    'versions': {
      'backend': jax.default_backend(),
      'vit_jax': versions.commit(),
      **{name: versions.package_version(name) for name in _PACKAGES},
    },
  }


def check(
  saved: dict[str, Any],
  current: dict[str, Any],
  config: Config,
  events: Iterable[dict[str, Any]],
  *,
  checkpoint: str,
  allow_changes: bool,
) -> list[Note]:
  """Compares a checkpoint's item `about` with that of the resuming run.

  Args:
    saved: item `about` of the checkpoint. Entries that an older version did
      not write are not compared.
    current: item `about` of the resuming run.
    config: completed config of the resuming run.
    events: events of the run, which contain the changes allowed earlier.
    checkpoint: description of the checkpoint, for the message.
    allow_changes: whether to resume although config, data or settings differ.

  Returns:
    Notes for the log and events.jsonl.

  Raises:
    UserError: config, data or settings differ.
  """
  old, new = saved.get('record', {}), current['record']
  fingerprint = old.get('fingerprint', {'class_names': saved['class_names']})
  changes = identity.config_changes(saved['config'], config)
  data = fingerprints.comparable(new['fingerprint'], fingerprint)
  changes |= _common_changes('data: ', fingerprint, data)
  changes |= _common_changes('weights ', old.get('frozen', {}), new['frozen'])
  changes |= _common_changes('setting ', old.get('flags', {}), new['flags'])
  # A change that was allowed once by --allow_config_change stays allowed.
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
    raise refusal(checkpoint, changes)
  notes = []
  if changes:
    fields = {'changes': {key: _digest(v[1]) for key, v in changes.items()}}
    text = 'resumed with changes:' + format_changes(changes)
    notes.append(Note('config_change', fields, text))
  upgrades = _common_changes('', old.get('versions', {}), new['versions'])
  if upgrades:
    text = (
      'versions differ from those that wrote the checkpoint; the numbers may '
      'differ in the last bits from here on, or more if vit_jax itself has '
      'changed:' + format_changes(upgrades)
    )
    notes.append(Note('versions', {'changes': upgrades}, text))
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


def evaluator_notes(last: dict[str, Any], config: Config) -> list[Note]:
  """Returns a note for each evaluator whose settings have changed.

  Args:
    last: config of the last start, as a dict.
    config: completed config of this run.
  """
  notes = []
  for name, changes in identity.evaluator_changes(last, config).items():
    fields = {'name': name, 'changes': changes}
    text = (
      f'evals.{name} has other settings than before, so its earlier and later '
      f'metrics {name}/… are not comparable, also not for checkpoint.best. '
      'Give the evaluator another name to distinguish them:'
      + format_changes(changes)
    )
    notes.append(Note('evaluator_change', fields, text))
  return notes


def refusal(subject: str, changes: Changes) -> UserError:
  """Returns the error for a run that must not resume, with all differences.

  Args:
    subject: workdir or checkpoint that belongs to another run.
    changes: differences from that run.
  """
  return UserError(
    f'{subject} belongs to another run:{format_changes(changes)}\nGive another '
    '--workdir, or resume with the change by --allow_config_change.'
    + (_LENGTH if 'total' in changes else '')
  )


def format_changes(
  changes: Changes, old: str = 'before', new: str = 'now'
) -> str:
  """Formats changes, one per line.

  Args:
    changes: {key: (old value, new value)}.
    old: text after each old value.
    new: text after each new value.
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
