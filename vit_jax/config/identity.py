"""The identity of a config: the keys that a resumed run must not change.

Keys that do not change what is computed (where data lie, how often something is
logged) are marked by each constructor with `plugins.operational`. All others
make another run of it.
"""

import contextlib
import fnmatch
from typing import Any

from vit_jax.config import canonical, plugins
from vit_jax.config import completion as config_lib
from vit_jax.config.completion import Config
from vit_jax.errors import UserError

Changes = dict[str, tuple[Any, Any]]  # {key: (value before, value now)}


def identity(values: Any, config: Any = None) -> dict[str, Any]:
  """Returns the flat keys of a config whose change makes another run of it.

  Args:
    values: config, or a dict of one.
    config: config that determines which keys those are; by default `values`.

  Returns:
    The values of these keys, in one spelling for equal values.
  """
  patterns = operational(values if config is None else config)
  return {
    key: canonical.one(key, value)
    for key, value in config_lib.flatten(values).items()
    if not any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)
  }


def operational(config: Any) -> list[str]:
  """Returns patterns of the flat keys that a resumed run may change.

  Evaluators are among them, because they change nothing that is trained; see
  `evaluator_changes`.

  Args:
    config: config, or a dict of one.
  """
  patterns = [*plugins.operational_keys(config_lib.top_level), 'evals.*']
  for section, pattern in config_lib.SECTIONS.items():
    patterns += _of_section(section, plugins.Nested(pattern), config[section])
  return patterns


def _of_section(path: str, mark: plugins.Nested, values: Any) -> list[str]:
  """Returns the patterns of one section and of those nested in it.

  Args:
    path: path of the section: 'model', 'optimizer.schedule'.
    mark: constructors that the section's name chooses from.
    values: the section.
  """
  name = values.get('name') or ''
  keys = plugins.operational_keys(mark.constructor(name))
  # The key itself, and everything in it if it is a section.
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


def config_changes(before: dict[str, Any], config: Config) -> Changes:
  """Returns the changed keys that make another run of a config.

  Args:
    before: config of an earlier start, as `config.to_json` wrote it, perhaps
      in another version of this program.
    config: completed config of this start.
  """
  old = identity(_completed(before), config)
  return differences(old, identity(config))


def evaluator_changes(
  before: dict[str, Any], config: Config
) -> dict[str, Changes]:
  """Returns the changed keys of evaluators that have kept their names.

  Args:
    before: config of an earlier start, as a dict.
    config: completed config of this start.

  Returns:
    The changes by the name of the evaluator; only evaluators with changes.
  """
  found = {}
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
      found[name] = changes
  return found


def _completed(config: dict[str, Any]) -> dict[str, Any]:
  """Fills in the keys that a version before did not have yet."""
  with contextlib.suppress(UserError):  # it has keys of another version
    return config_lib.from_dict(config).to_dict()
  return config


def differences(old: dict[str, Any], new: dict[str, Any]) -> Changes:
  """Returns the keys of two flat dicts whose values differ, with both values.

  Args:
    old: values before.
    new: values now; a missing key counts as None in both.
  """
  return {
    key: (old.get(key), new.get(key))
    for key in sorted({*old, *new})
    if _comparable(old.get(key)) != _comparable(new.get(key))
  }


def _comparable(value: Any) -> Any:
  """Replaces NaN, which does not equal itself."""
  return 'nan' if value != value else value
