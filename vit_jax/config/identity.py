"""Values that identify a run, and keys that may differ when it is resumed.

Constructors mark the keys that do not affect the trained weights as operational
(`schema.operational`). All other values identify the run. Operational keys of
data are their locations, which are stored as absolute paths.
"""

import contextlib
import fnmatch
import math
import os
from collections.abc import Iterable
from typing import Any

from vit_jax.config import completion, durations, keys, schema
from vit_jax.config.schema import MARKS, SECTIONS, Config, Nested
from vit_jax.errors import UserError
from vit_jax.files.paths import is_remote

Json = dict[str, Any]
Changes = dict[str, tuple[Any, Any]]  # {key: (value before, value now)}

# Sections whose operational keys are the locations of data and of tokenizers.
_WITH_PATHS = [
  SECTIONS[name] for name in ('source', 'train', 'augment', 'preprocess')
]


def identity(values: Any, config: Any = None) -> Json:
  """Returns the values that a resumed run must not change, by flat key.

  Args:
    values: config, or a config as a dict.
    config: config whose constructors mark the operational keys; by default
      `values`.
  """
  patterns = operational(values if config is None else config)
  return without(completion.flatten(values), patterns)


def operational(config: Any) -> list[str]:
  """Returns patterns of the flat keys that a resumed run may change.

  They include evaluators, which do not affect the trained weights; see
  `of_section`.

  Args:
    config: config, or a config as a dict.
  """
  patterns = [*schema.operational_keys(keys.top_level), 'evals.*']
  for section, mark in MARKS.items():
    if section != 'evals':
      patterns += of_section(section, mark, config[section])
  return patterns


def of_section(path: str, mark: Nested, values: Any) -> list[str]:
  """Returns the patterns of one section and of the sections nested in it."""
  return [
    f'{inner}.{key}{end}'
    for inner, own, section in schema.sections(path, mark, values)
    for key in own.operational_keys(section)
    # A pattern for the key itself, and one for its keys if it is a section.
    for end in ('', '.*')
  ]


def without(values: Json, patterns: Iterable[str]) -> Json:
  """Returns the values whose keys match none of the patterns."""
  return {
    key: value
    for key, value in values.items()
    if not any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)
  }


def changes(old: Json, config: Config) -> Changes:
  """Returns the differences in values that a resumed run must not change.

  Args:
    old: config of an earlier start, as `completion.to_json` wrote it,
      possibly in another version of this program.
    config: completed config of this start.
  """
  return differences(identity(completed(old), config), identity(config))


def completed(config: Json) -> Json:
  """Adds defaults of keys that did not exist in an earlier version."""
  with contextlib.suppress(UserError):
    return completion.from_dict(config).to_dict()
  return config


def differences(old: Json, new: Json) -> Changes:
  """Returns the keys of two flat dicts whose values differ, with both values.

  Args:
    old: earlier values; a missing key counts as None.
    new: current values; a missing key counts as None.
  """
  pairs = {
    key: (_canonical(key, old.get(key)), _canonical(key, new.get(key)))
    for key in sorted({*old, *new})
  }
  return {
    key: (before, now) for key, (before, now) in pairs.items() if before != now
  }


def _canonical(key: str, value: Any) -> Any:
  """Returns the canonical form of a value, the same for equivalent values.

  '1 epoch' becomes '1 epochs', an `image_size` of 16 becomes (16, 16), and NaN
  becomes 'nan'.
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


def absolute(config: Config) -> Config:
  """Returns a config in which relative local paths of data are absolute.

  A stored config is then valid in any directory.

  Args:
    config: completed config, or some of its sections.
  """
  result = config.copy_and_resolve_references()
  for name in MARKS.keys() & result.keys():
    for _, mark, values in schema.sections(name, MARKS[name], result[name]):
      if mark.pattern not in _WITH_PATHS:
        continue
      for key in mark.operational_keys(values):
        value = values.get(key)
        # ~ is expanded when the path is opened.
        if isinstance(value, str) and not (
          is_remote(value) or value.startswith('~')
        ):
          values[key] = os.path.abspath(value)
  # The frozen weights of LoRA are opened together with those of the run. Their
  # path may follow a format (timm:PATH) and precede a step (PATH@STEP).
  if result.get('lora', {}).get('rank') and result.init_from:
    form, colon, path = result.init_from.rpartition(':')
    if os.path.exists(path.partition('@')[0]):
      result.init_from = form + colon + os.path.abspath(path)
  return result
