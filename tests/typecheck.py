"""Run-time type checks by typeguard for jaxtyping's import hook.

`typeguard.typechecked` itself compiles a function's source again. The hook
passes generated functions, which have no source, so nothing would be checked.
`typeguard.check_type` on each value does the same job. It is slow, so it is
called only for values that are not instances of the annotated classes.
"""

import functools
import inspect
import itertools
import types
import typing
from collections.abc import Callable
from typing import Any

from typeguard import check_type


def typechecked(function: Callable[..., Any]) -> Callable[..., Any]:
  """Checks arguments and result of each call against the annotations."""
  signature = inspect.signature(function)
  parameters = list(signature.parameters.values())
  checks = {p.name: _check(p.annotation) for p in parameters}
  check_result = _check(signature.return_annotation)
  of_kind = {p.kind: checks[p.name] for p in parameters}
  # Arguments that do not exist are refused by the function itself.
  further = of_kind.get(inspect.Parameter.VAR_POSITIONAL, _check(Any))
  named = of_kind.get(inspect.Parameter.VAR_KEYWORD, _check(Any))
  positional = [
    checks[p.name]
    for p in parameters
    if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
  ]

  @functools.wraps(function)
  def checked(*args: Any, **kwargs: Any) -> Any:
    for check, value in itertools.zip_longest(
      positional[: len(args)], args, fillvalue=further
    ):
      check(value)
    for name, value in kwargs.items():
      checks.get(name, named)(value)
    result = function(*args, **kwargs)
    check_result(result)
    return result

  return checked


def _check(annotation: Any) -> Callable[[Any], Any]:
  """Returns a function that raises an error for values of other types."""
  classes = _classes(annotation)
  without_protocols = _without_protocols(annotation)

  def check(value: Any) -> None:
    # A subclass of a protocol conforms to it; its members are not evaluated.
    inherits = annotation in type(value).__mro__
    if not isinstance(value, classes) and not inherits:
      check_type(value, without_protocols)

  return check


def _without_protocols(annotation: Any) -> Any:
  """Returns the annotation with Any for protocols in tuple[…], list[…], ….

  `check_type` would evaluate all members of their values.
  """
  if not isinstance(annotation, types.GenericAlias):
    return annotation
  inner = [
    Any if getattr(each, '_is_protocol', False) else _without_protocols(each)
    for each in annotation.__args__
  ]
  return types.GenericAlias(annotation.__origin__, tuple(inner))


def _classes(annotation: Any) -> tuple[type, ...]:
  """Returns classes whose instances all conform to the annotation."""
  if annotation is None:
    return (types.NoneType,)
  if annotation in (Any, typing.Self, inspect.Signature.empty):
    return (object,)
  if typing.get_origin(annotation) in (typing.Union, types.UnionType):
    parts = map(_classes, typing.get_args(annotation))
    return tuple(itertools.chain.from_iterable(parts))
  # `isinstance` does not accept list[int] and most protocols.
  is_class = inspect.isclass(annotation) and not typing.get_origin(annotation)
  is_protocol = getattr(annotation, '_is_protocol', False)
  return (annotation,) if is_class and not is_protocol else ()
