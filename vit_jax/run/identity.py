"""Whether a resumed run is the one it was: its config, its data, its software.

With every checkpoint goes a record of what its numbers depend on (`record`, in
the item `about`). A resumed run compares: what makes another run of it is
refused, what only may change the last bits is said.
"""

import contextlib
import fnmatch
import hashlib
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from vit_jax.config import canonical, plugins
from vit_jax.config import completion as config_lib
from vit_jax.config.completion import Config
from vit_jax.data.matching import names_differ
from vit_jax.errors import UserError
from vit_jax.processes import versions

Changes = dict[str, tuple[Any, Any]]  # {key: (value before, value now)}
_LENGTH = (
  ' The learning rate follows from the total: at the next step it is that of '
  'the new length, and the run is not one that had this length from the start.'
)

# Settings of JAX on which initialisation, dropout or every product depends.
_FLAGS = (
  *('jax_threefry_partitionable', 'jax_default_prng_impl'),
  *('jax_enable_x64', 'jax_default_matmul_precision'),
)
_PACKAGES = (
  *('jax', 'jaxlib', 'libtpu', 'flax', 'optax', 'numpy'),
  'opencv-python-headless',
)


class Note(NamedTuple):
  """A change that does not stop a run, for the log and for events.jsonl."""

  kind: str
  fields: dict[str, Any]
  text: str


def identity(values: Any, config: Any = None) -> dict[str, Any]:
  """The flat keys of a config whose change makes another run of it.

  Args:
    values: a config, or a dict of one.
    config: says which keys those are; by default `values` does.
  """
  patterns = operational(values if config is None else config)
  return {
    key: canonical.one(key, value)
    for key, value in config_lib.flatten(values).items()
    if not any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)
  }


def operational(config: Any) -> list[str]:
  """Patterns of the flat keys that a resumed run may change.

  Each constructor marks its own (`plugins.operational`). Evaluators change
  nothing that is trained; see `evaluator_changes`.
  """
  patterns = [*plugins.operational_keys(config_lib.top_level), 'evals.*']
  for section, pattern in config_lib.SECTIONS.items():
    patterns += _of_section(section, plugins.Nested(pattern), config[section])
  return patterns


def _of_section(where: str, mark: plugins.Nested, values: Any) -> list[str]:
  """The same for one section and those nested in it."""
  name = values.get('name') or ''
  keys = plugins.operational_keys(mark.constructor(name))
  # The key, and all that is in it where it is a section itself.
  patterns = [f'{where}.{key}{end}' for key in keys for end in ('', '.*')]
  for key, parameter in mark.keys(name).items():
    inner, value = plugins.nested(parameter.annotation), values.get(key)
    if inner is None or value is None:
      continue
    sections = (
      {f'.{k}': v for k, v in value.items()} if inner.many else {'': value}
    )
    for end, section in sections.items():
      patterns += _of_section(f'{where}.{key}{end}', inner, section)
  return patterns


def record(
  fingerprint: dict[str, Any], frozen: dict[str, str]
) -> dict[str, Any]:
  """What the numbers of a run depend on besides its config; JSON-able.

  Args:
    fingerprint: of the training data, see `data.fingerprint`.
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


def config_changes(before: dict[str, Any], config: Config) -> Changes:
  """The keys that make another run of it.

  Args:
    before: what `config.to_json` wrote, perhaps by another version.
    config: completed.
  """
  old = identity(_completed(before), config)
  return differences(old, identity(config))


def check(
  before: dict[str, Any],
  about: dict[str, Any],
  config: Config,
  events: Iterable[dict[str, Any]],
  *,
  where: str,
  allow_changes: bool,
) -> list[Note]:
  """Compares a checkpoint's `about` with that of the run that resumes it.

  Args:
    before: of the checkpoint; what an older version did not record is not
      compared.
    about: of this run.
    config: of this run, completed.
    events: of the run; a change that was allowed since stands there.
    where: the checkpoint, for the message.
    allow_changes: go on although it is another run.

  Returns:
    What is to be said.

  Raises:
    UserError: config, data or settings are others.
  """
  old, new = before.get('record', {}), about['record']
  known = old.get('fingerprint', {'class_names': before['class_names']})
  changes = config_changes(before['config'], config)
  changes |= _common_changes('data: ', known, new['fingerprint'])
  changes |= _common_changes('weights ', old.get('frozen', {}), new['frozen'])
  changes |= _common_changes('setting ', old.get('flags', {}), new['flags'])
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
      'other versions than those the checkpoint was made with; the numbers may '
      'differ in the last bits from here on, or more if this package is '
      'another:' + listed(others)
    )
    notes.append(Note('versions', {'changes': others}, text))
  return notes


def _common_changes(
  prefix: str, old: dict[str, Any], new: dict[str, Any]
) -> Changes:
  """What differs in the keys that both have."""
  both = [key for key in old if key in new]
  found = differences(
    *({key: each[key] for key in both} for each in (old, new))
  )
  return {prefix + key: pair for key, pair in found.items()}


def evaluator_changes(before: dict[str, Any], config: Config) -> list[Note]:
  """Evaluators that are others under the same name, a note each.

  Args:
    before: the config of the last start, as a dict.
    config: of this run, completed.
  """
  notes = []
  old = _completed(before).get('evals', {})
  for name, section in config.evals.to_dict().items():
    if name not in old:
      continue
    constructor = plugins.resolve(config_lib.EVALS, section['name'])
    harmless = plugins.operational_keys(constructor)
    flat = (config_lib.flatten(part) for part in (old[name], section))
    past, now = (
      {k: v for k, v in part.items() if k not in harmless} for part in flat
    )
    changes = differences(past, now)
    if changes:
      fields = {'name': name, 'changes': changes}
      text = (
        f'evals.{name} is another evaluator from here on: numbers of {name}/… '
        'before and after cannot be compared, and checkpoint.best compares '
        'both; take another name for it to keep them apart:' + listed(changes)
      )
      notes.append(Note('evaluator_change', fields, text))
  return notes


def refusal(where: str, changes: Changes) -> UserError:
  """The message of a run that is refused, with everything that differs."""
  return UserError(
    f'{where} belongs to another run:{listed(changes)}\nTake another '
    '--workdir, or resume with the change by --allow_config_change.'
    + (_LENGTH if 'total' in changes else '')
  )


def _completed(config: dict[str, Any]) -> dict[str, Any]:
  with contextlib.suppress(UserError):  # keys that only another version knows
    return config_lib.from_dict(config).to_dict()
  return config


def differences(old: dict[str, Any], new: dict[str, Any]) -> Changes:
  """The keys of flat dicts whose values differ, with both values."""
  return {
    key: (old.get(key), new.get(key))
    for key in sorted({*old, *new})
    if _plain(old.get(key)) != _plain(new.get(key))
  }


def _plain(value: Any) -> Any:
  """Comparable: NaN is itself."""
  return 'nan' if value != value else value


def listed(changes: Changes, there: str = 'there', now: str = 'now') -> str:
  """A line for each; where, in words, each of the two values is found."""
  lines = []
  for key, (old, new) in changes.items():
    if key.endswith('class_names') and old and new:
      lines.append(f'{key}: {names_differ(old, new)}')
    else:
      lines.append(f'{key}: {_short(old)} {there}, {_short(new)} {now}')
  return ''.join(f'\n  {line}' for line in lines)


def _short(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= 200 else text[:200] + ' …'


def _digest(value: Any) -> str:
  return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
