"""Transforms of images with several labels, or with numbers to predict.

A batch then has `labels` or `numbers` in place of `label`; see
`data.contract.TARGETS`.
"""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Bool

from vit_jax.data.augment import transforms
from vit_jax.data.contract import Example, Spec, check_fields
from vit_jax.data.images.headers import DecodeError


def multi_hot(
  example: Example, key: str, num_classes: int
) -> Bool[np.ndarray, ' k']:
  """Returns which classes an example has.

  Args:
    example: example of a source.
    key: key of its labels, a list of integers.
    num_classes: number of classes.

  Raises:
    DecodeError: a label is out of range.
    UserError: the source does not have the field of the labels.
  """
  check_fields(example, key)
  labels = np.asarray(example[key], np.int64).reshape(-1)
  last = num_classes - 1
  if labels.size and not 0 <= labels.min() <= labels.max() <= last:
    raise DecodeError(f'labels {labels.tolist()}; allowed: 0 to {last}')
  row = np.zeros(num_classes, bool)
  row[labels] = True
  return row


@dataclasses.dataclass(frozen=True)
class _Targets:
  """Keys of these transforms, of which one is set.

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
    base: Any = super()
    key = 'numbers' if self.numbers else 'labels'
    shape = (len(self.numbers) or self.classes,)
    return {'image': base.spec['image'], key: (shape, np.dtype(np.float32))}

  def __call__(self, example: Example, rng: Any = None) -> dict[str, Any]:
    """Returns image and targets; raises DecodeError for a bad record."""
    base: Any = super()
    values = base.__call__({'label': 0, **example}, rng)
    del values['label']
    if not self.numbers:
      labels = multi_hot(example, 'labels', self.classes)
      return values | {'labels': labels.astype(np.float32)}
    check_fields(example, *self.numbers)
    numbers = [example[key] for key in self.numbers]
    return values | {'numbers': np.array(numbers, np.float32)}


@dataclasses.dataclass(frozen=True)
class TrainTransform(_Targets, transforms.TrainTransform):
  """`transforms.TrainTransform` with several labels, or with numbers."""


@dataclasses.dataclass(frozen=True)
class EvalTransform(_Targets, transforms.EvalTransform):
  """`transforms.EvalTransform` with several labels, or with numbers."""
