"""Flags that are fields of a dataclass."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

# Functions that define flags of the types of fields other than strings.
_DEFINE: dict[Any, Callable[..., Any]] = {
  bool: flags.DEFINE_bool,
  int: flags.DEFINE_integer,
  int | None: flags.DEFINE_integer,
  float: flags.DEFINE_float,
  Sequence[int]: flags.DEFINE_list,
  tuple[int, int] | None: flags.DEFINE_list,
  tuple[str, ...]: flags.DEFINE_multi_string,
}


def flag(help: str, default: Any = None, **metadata: Any) -> Any:
  """Declares a field that is a flag.

  Args:
    help: help text of the flag.
    default: value if the flag is not given.
    **metadata: other metadata of the field.
  """
  return dataclasses.field(default=default, metadata={'help': help} | metadata)


def define(field: dataclasses.Field, suffix: str = '') -> None:
  """Defines the flag of a field.

  Args:
    field: field that `flag` declared.
    suffix: text that is added to the help text.
  """
  function = _DEFINE.get(field.type, flags.DEFINE_string)
  function(field.name, field.default, field.metadata['help'] + suffix)
