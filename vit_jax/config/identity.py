"""Determines which keys of its config a resumed run must not change.

Each constructor marks the keys that do not affect the trained weights (the
location of data, the interval between log lines) with `plugins.operational`. If
any other key changes, the config belongs to another run.
"""

import contextlib
import fnmatch
import math
from typing import Any

from vit_jax.config import completion as config_lib
from vit_jax.config import durations, plugins
from vit_jax.config.completion import Config
from vit_jax.config.sections import EVALS, MARKS
from vit_jax.errors import UserError

Changes = dict[str, tuple[Any, Any]]  # {key: (value before, value now)}


def identity(values: Any, config: Any = None) -> dict[str, Any]:
  """Returns the values that a resumed run must not change.

  Args:
    values: config, or a config as a dict.
    config: config whose constructors mark the operational keys; by default
      `values`.

  Returns:
    Values in canonical form, by flat key.
  """
  patterns = operational(values if config is None else config)
  return {
    key: canonical_value(key, value)
    for key, value in config_lib.flatten(values).items()
    if not any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)
  }


def canonical_value(key: str, value: Any) -> Any:
  """Returns the canonical form of a value, the same for equivalent values.

  '1 epoch' becomes '1 epochs', an `image_size` of 16 becomes (16, 16), and NaN
  becomes 'nan'.

  Args:
    key: flat key, such as 'schedule.warmup'.
    value: value of the key, with tuples as lists.
  """
  if key == 'image_size' and isinstance(value, list) and len(value) == 1:
    return value * 2
  if isinstance(value, float) and math.isnan(value):
    return 'nan'  # NaN does not equal itself
  if isinstance(value, str):
    with contextlib.suppress(UserError):
      number, unit = durations.parse(value)
      return f'{number:.17g} {unit}'
  return value


def operational(config: Any) -> list[str]:
  """Returns patterns of the flat keys that a resumed run may change.

  They include evaluators, which do not affect the trained weights; see
  `evaluator_changes`.

  Args:
    config: config, or a config as a dict.
  """
  patterns = [*plugins.operational_keys(config_lib.top_level), 'evals.*']
  for section, mark in MARKS.items():
    if section != 'evals':
      patterns += _of_section(section, mark, config[section])
  return patterns


def _of_section(path: str, mark: plugins.Nested, values: Any) -> list[str]:
  """Returns the patterns of one section and of the sections nested in it.

  Args:
    path: path of the section, such as 'model' or 'model.stem'.
    mark: `Nested` mark of the section, which determines its constructor.
    values: values of the section.
  """
  name = values.get('name') or ''
  keys = plugins.operational_keys(mark.constructor(name))
  # A pattern for the key itself, and one for its keys if it is a section.
  patterns = [f'{path}.{key}{end}' for key in keys for end in ('', '.*')]
  for key, parameter in mark.keys(name).items():
    inner, value = plugins.nested(parameter.annotation), values.get(key)
    if inner is None or value is None:
      continue
    sections = (
      {f'.{k}': v for k, v in value.items()} if inner.many else {'': value}
    )
    for end, section in sections.items():
      patterns += _of_section(f'{path}.{key}{end}', inner, section)
  return patterns


def config_changes(old: dict[str, Any], config: Config) -> Changes:
  """Returns the differences in values that a resumed run must not change.

  Args:
    old: config of an earlier start, as `config.to_json` wrote it, possibly in
      another version of this program.
    config: completed config of this start.
  """
  return differences(identity(_completed(old), config), identity(config))


def evaluator_changes(
  old: dict[str, Any], config: Config
) -> dict[str, Changes]:
  """Returns the changed values of evaluators, except operational keys.

  Evaluators that exist in only one of the two configs are left out.

  Args:
    old: config of an earlier start, as a dict.
    config: completed config of this start.

  Returns:
    The changes by the name of the evaluator; only evaluators with changes.
  """
  found = {}
  old_evals = _completed(old).get('evals', {})
  for name, section in config.evals.to_dict().items():
    if name not in old_evals:
      continue
    constructor = plugins.resolve(EVALS, section['name'])
    ignored = plugins.operational_keys(constructor)
    old_values, new_values = (
      {k: v for k, v in config_lib.flatten(part).items() if k not in ignored}
      for part in (old_evals[name], section)
    )
    changes = differences(old_values, new_values)
    if changes:
      found[name] = changes
  return found


def _completed(config: dict[str, Any]) -> dict[str, Any]:
  """Adds defaults of keys that did not exist in an earlier version."""
  # An earlier version may have had keys that no longer exist.
  with contextlib.suppress(UserError):
    return config_lib.from_dict(config).to_dict()
  return config


def differences(old: dict[str, Any], new: dict[str, Any]) -> Changes:
  """Returns the keys of two flat dicts whose values differ, with both values.

  Args:
    old: earlier values; a missing key counts as None.
    new: current values; a missing key counts as None.
  """
  return {
    key: (old.get(key), new.get(key))
    for key in sorted({*old, *new})
    if _comparable(old.get(key)) != _comparable(new.get(key))
  }


def _comparable(value: Any) -> Any:
  """Replaces NaN by a string, because NaN does not equal itself."""
  return 'nan' if value != value else value
