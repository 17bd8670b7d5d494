"""Transforms of images with several labels, or with numbers to predict.

A batch then has `labels` or `numbers` in place of `label`; see
`data.contract.TARGETS`.
"""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from vit_jax.data.augment import transforms
from vit_jax.data.contract import Example, Spec, check_fields, check_label
from vit_jax.data.images.headers import DecodeError


def multi_hot(
  example: Example, key: str, num_classes: int
) -> Bool[np.ndarray, ' k']:
  """Returns which classes an example has.

  Args:
    example: example of a source.
    key: key of its labels, an integer or a list of integers.
    num_classes: number of classes.

  Raises:
    DecodeError: a label is not an integer, or is out of range.
    UserError: the source does not have the field of the labels.
  """
  check_fields(example, key)
  try:
    labels = np.asarray(example[key], np.int64).reshape(-1)
  except (TypeError, ValueError) as error:
    raise DecodeError(
      f'{key!r} is {example[key]!r}; allowed: integers'
    ) from error
  if labels.size:
    check_label(labels.tolist(), num_classes)
  row = np.zeros(num_classes, bool)
  row[labels] = True
  return row


def _numbers(
  example: Example, keys: tuple[str, ...]
) -> Float[np.ndarray, ' n']:
  """Returns the number at each key of an example, float32.

  Raises:
    DecodeError: a value is missing (None), or is not a finite number.
    UserError: the source does not have one of the fields.
  """
  check_fields(example, *keys)
  values = {key: example[key] for key in keys}
  message = f'{values}; allowed: finite numbers'
  try:
    with np.errstate(over='ignore'):  # larger numbers become infinite
      numbers = np.array([*values.values()], np.float32)  # None becomes NaN
  except (OverflowError, TypeError, ValueError) as error:
    raise DecodeError(message) from error
  if not np.isfinite(numbers).all():
    raise DecodeError(message)
  return numbers


@dataclasses.dataclass(frozen=True)
class _Targets:
  """Replaces the label of a transform of `transforms` by other targets.

  A config sets exactly one of the two keys.

  Attributes:
    classes: number of classes, for examples with a list of integers `labels`.
    numbers: keys of examples with one number each, in the order of the outputs
      of the model; () for labels.
  """

  _: dataclasses.KW_ONLY
  classes: int = 0
  numbers: tuple[str, ...] = ()

  @property
  def spec(self) -> Spec:
    """Spec of `image`, and float32 `labels [classes]` or `numbers [n]`."""
    base: Any = super()  # the transform, which follows in a subclass's bases
    key = 'numbers' if self.numbers else 'labels'
    shape = (len(self.numbers) or self.classes,)
    return {'image': base.spec['image'], key: (shape, np.dtype(np.float32))}

  def __call__(self, example: Example, rng: Any = None) -> dict[str, Any]:
    """Returns image and targets; raises DecodeError for a bad record."""
    base: Any = super()
    # The transform requires a label, which these examples need not have.
    values = base.__call__({'label': 0, **example}, rng)
    del values['label']
    if self.numbers:
      return values | {'numbers': _numbers(example, self.numbers)}
    labels = multi_hot(example, 'labels', self.classes)
    return values | {'labels': labels.astype(np.float32)}


@dataclasses.dataclass(frozen=True)
class TrainTransform(_Targets, transforms.TrainTransform):
  """`transforms.TrainTransform` with several labels, or with numbers."""


@dataclasses.dataclass(frozen=True)
class EvalTransform(_Targets, transforms.EvalTransform):
  """`transforms.EvalTransform` with several labels, or with numbers."""
