"""Finds the key or section at a path of a config, such as 'model.width'."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from vit_jax.config import plugins
from vit_jax.config.completion import Config, top_level
from vit_jax.config.plugins import Nested
from vit_jax.config.sections import EVALS, SECTIONS

Keys = dict[str, inspect.Parameter]


def value_type(config: Config, path: str) -> tuple[type | None, bool]:
  """Returns the plain type of a key and whether it may be None.

  The type is None if the key does not exist.
  """
  found = _parameter(config, path)
  return plugins.value_type(found.annotation) if found else (None, False)


def member_type(config: Config, path: str) -> type:
  """Returns the type of the members of a key's tuple.

  It is `object` if no annotation specifies it.
  """
  found = _parameter(config, path)
  return plugins.member_type(found.annotation) if found else object


def _parameter(config: Config, path: str) -> inspect.Parameter | None:
  """Returns the constructor's parameter of a key.

  The result is None if the key does not exist.
  """
  section, _, leaf = path.rpartition('.')
  return of_section(config, section).get(leaf)


def of_section(config: Config, path: str) -> Keys:
  """Returns the keys that a section may have, as `plugins.keys` does.

  Args:
    config: completed config.
    path: path of the section; '' for the top level.

  Returns:
    The keys; none if the section does not exist.
  """
  if not path:
    return plugins.keys(top_level)
  section, found = mark(config, path), _at(config, path)
  if section is None or found is None:
    return {}
  return section.keys(found.get('name') or '')


def mark(config: Config, path: str) -> Nested | None:
  """Returns the mark of the section at a path; None if it is not a section.

  The section itself may be None, but its parent must not.
  """
  parent, _, last = path.rpartition('.')
  if not parent:
    return Nested(SECTIONS[last]) if last in SECTIONS else None
  siblings = _at(config, parent)
  if siblings is None:
    return None
  if parent == 'evals':
    return Nested(EVALS) if last in config.evals else None
  outer, _, key = parent.rpartition('.')
  members = _nested(of_section(config, outer), key) if outer else None
  if members is not None and members.many:
    member = dataclasses.replace(members, many=False)
    return member if last in siblings else None
  found = _nested(of_section(config, parent), last)
  return None if found is None or found.many else found


def _nested(keys: Keys, key: str) -> Nested | None:
  return plugins.nested(keys[key].annotation) if key in keys else None


def _at(config: Config, path: str) -> Any:
  """Returns the section at a path; None if it is not a section."""
  values: Any = config
  for part in path.split('.'):
    values = values.get(part)
    if not isinstance(values, Mapping) and not hasattr(values, 'to_dict'):
      return None
  return values
