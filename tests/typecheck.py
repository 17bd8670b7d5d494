"""Run-time type checks by typeguard for jaxtyping's import hook.

`typeguard.typechecked` itself compiles a function's source again. The hook
passes generated functions, which have no source, so nothing would be checked.
`typeguard.check_type` on each value does the same job.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from typeguard import check_type


def typechecked(function: Callable[..., Any]) -> Callable[..., Any]:
  """Checks arguments and result of each call against the annotations."""
  signature = inspect.signature(function)

  def check(value: Any, annotation: Any) -> None:
    if annotation is not inspect.Signature.empty:
      check_type(value, annotation)

  @functools.wraps(function)
  def checked(*args: Any, **kwargs: Any) -> Any:
    for name, value in signature.bind(*args, **kwargs).arguments.items():
      parameter = signature.parameters[name]
      values = {
        parameter.VAR_POSITIONAL: lambda value: value,
        parameter.VAR_KEYWORD: lambda value: value.values(),
      }.get(parameter.kind, lambda value: [value])(value)
      for each in values:
        check(each, parameter.annotation)
    result = function(*args, **kwargs)
    check(result, signature.return_annotation)
    return result

  return checked
