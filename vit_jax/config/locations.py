"""Absolute paths of data, so that a stored config is valid in any directory."""

import dataclasses
import os
from typing import Any

from vit_jax.config import schema
from vit_jax.config.schema import MARKS, SECTIONS, Config, Nested
from vit_jax.files.paths import is_remote

# Sections whose operational keys are the locations of data and of tokenizers.
_NAMES = 'source', 'train', 'augment', 'preprocess'
_WITH_PATHS = [SECTIONS[name] for name in _NAMES]


def absolute(config: Config) -> Config:
  """Returns a config in which relative local paths of data are absolute.

  Args:
    config: completed config, or some of its sections.
  """
  result = config.copy_and_resolve_references()
  for name in (*_NAMES, 'evals'):
    if name in result:
      _set_absolute(MARKS[name], result[name])
  # The frozen weights of LoRA are opened together with those of the run.
  if result.get('lora', {}).get('rank') and result.init_from:
    form, colon, path = result.init_from.rpartition(':')
    if os.path.exists(path.partition('@')[0]):
      result.init_from = form + colon + os.path.abspath(path)
  return result


def _set_absolute(mark: Nested, section: Any) -> None:
  """Makes the paths in a section and in its inner sections absolute.

  Args:
    mark: mark of the section, which determines its keys.
    section: completed section, changed in place.
  """
  if mark.many:
    member = dataclasses.replace(mark, many=False)
    for each in section.values():
      _set_absolute(member, each)
    return
  name = section.get('name') or ''
  for key, parameter in mark.keys(name).items():
    inner, value = schema.nested(parameter.annotation), section.get(key)
    if inner is not None and value is not None:
      _set_absolute(inner, value)
  if mark.pattern in _WITH_PATHS:
    for key in schema.operational_keys(mark.constructor(name)):
      value = section.get(key)
      if isinstance(value, str) and not is_remote(value) and value[:1] != '~':
        section[key] = os.path.abspath(value)
