"""What the framework asks of data: sources of examples, and transforms.

A run's transform declares what a batch holds (`spec`). Host buffers, the shared
memory of worker processes, the shapes that are compiled for and the arrays on
the devices are all derived from that one declaration.
"""

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
from jaxtyping import UInt8

from vit_jax.errors import UserError

Example = dict[str, Any]
# Of one example, without the batch axis: {key: (shape, dtype)}. The arrays of a
# batch have the same keys, with the examples along a leading axis.
Spec = dict[str, tuple[tuple[int, ...], np.dtype]]
# What the loader adds to the keys of a transform.
MASK: Spec = {'mask': ((), np.dtype(bool))}
REPLACED: Spec = {'replaced': ((), np.dtype(np.int32))}
_KINDS = 'biuf'  # booleans, integers, floating-point numbers
_MAX_BYTES = 4  # JAX computes with 32 bits at most


class Source(Protocol):
  """A data set with random access.

  `vit_jax.data.sources.NAME` (or any module of your own) defines
  `Source(split, /, *, …)`, whose keyword-only parameters are the keys of the
  config's `source` section. It must survive pickling: worker processes get a
  copy. The following methods are optional:

  - `where(index)` returns the file of an example, for messages.
  - `rows()` yields the examples as (part, positions in it), so that two splits
    of the same data can be compared.
  - `with_labels(key)` returns the same source whose examples also contain,
    under that key, a list of all correct labels, which may be empty.
  - `locate(positions, seed)` returns the indices of the examples at positions
    counted from the start of the training, in place of the usual order (a new
    random order of all examples in each epoch).
  - `replacements(index)` returns the range of indices from which a bad record
    is replaced, by default those of all examples.

  Attributes:
    name: for messages.
    num_classes: labels are from 0 to num_classes - 1; 0 without labels.
    class_names: in the order of the labels; [] without labels.
  """

  name: str
  num_classes: int
  class_names: list[str]

  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> Example:
    """Returns one example for the transform.

    Returns:
      `image`, encoded bytes or uint8 `[y, x, 3]`; `label`, int, unless the
      source has no labels; and further values for a transform of your own.

    Raises:
      DecodeError: the record cannot be used (see `reader.on_bad_record`).
    """
    ...


class Transform(Protocol):
  """Makes what a batch holds of an example.

  `vit_jax.data.augment.NAME` (or any module of your own) defines
  `TrainTransform(image_size, /, *, …)` for the config's `augment` section and
  `EvalTransform(image_size, /, *, …)` for `preprocess`; keyword-only parameters
  are the keys of the section. A transform must survive pickling.
  """

  @property
  def spec(self) -> Spec:
    """{key: (shape, dtype)} of what is made of one example.

    Supervised training has `image`, uint8 `[y, x, 3]`, and `label`, int32 `[]`.
    Several crops of an image are a key of their own, `[crops, y, x, 3]`.
    Numbers have 32 bits at most. `mask` and `replaced` belong to the loader.
    """
    ...

  def __call__(
    self, example: Example, rng: np.random.Generator | None
  ) -> dict[str, np.ndarray | int]:
    """Transforms one example.

    Args:
      example: as the source gives it.
      rng: in training a generator that follows from the seed and the position
        alone: all that is random must come from it. None in evaluation.

    Returns:
      Exactly the keys of `spec`. A `label` of integers is checked against the
      source's classes: one out of range is a bad record.

    Raises:
      DecodeError: the example cannot be used.
    """
    ...


class Preprocess(Transform, Protocol):
  """A transform for evaluation: its keys are `image` and `label`."""

  def pixels(self, image: bytes | np.ndarray) -> UInt8[np.ndarray, 'y x 3']:
    """Returns `image` for an image without a label, for prediction."""
    ...


def check_spec(transform: Transform) -> Spec:
  """Returns the spec of a transform, checked.

  Raises:
    UserError: it has an entry that no batch can have.
  """
  spec, who = transform.spec, _name(transform)
  for key, (shape, dtype) in spec.items():
    if key in MASK | REPLACED:
      raise UserError(
        f'{who} declares the key {key!r}, which the loader adds itself: take '
        'another name.'
      )
    kind = np.dtype(dtype)
    if kind.kind not in _KINDS or kind.itemsize > _MAX_BYTES:
      raise UserError(
        f'{who} declares {key!r} as {kind}; allowed: booleans, integers and '
        'floating-point numbers of 32 bits at most.'
      )
    if any(side < 1 for side in shape):
      raise UserError(
        f'{who} declares {key!r} with the shape {shape}; sides must be at '
        'least 1.'
      )
  return {key: (tuple(s), np.dtype(d)) for key, (s, d) in spec.items()}


def train_spec(transform: Transform, on_bad_record: str) -> Spec:
  """Returns the content of a training batch per example.

  It has the transform's keys; under 'skip' also `replaced`, the number of bad
  records that were met.
  """
  added = REPLACED if on_bad_record == 'skip' else {}
  return check_spec(transform) | added


def eval_spec(transform: Transform) -> Spec:
  """Returns the content of an evaluation batch per example.

  It has the transform's keys, and `mask`, which is False on padding.
  """
  return check_spec(transform) | MASK


def check_values(
  transform: Transform, values: dict[str, Any], spec: Spec
) -> None:
  """Raises UserError unless a transform returned what its spec declares."""
  if values.keys() != spec.keys():
    raise UserError(
      f'{_name(transform)} returned the keys {sorted(values)}; its spec '
      f'declares {sorted(spec)}: make them the same.'
    )
  for key, (shape, dtype) in spec.items():
    value = np.asarray(values[key])
    if value.shape != shape or not np.can_cast(value.dtype, dtype, 'same_kind'):
      raise UserError(
        f'{_name(transform)} returned {key!r} as {value.dtype} '
        f'{list(value.shape)}; its spec declares {dtype} {list(shape)}: make '
        'them the same.'
      )


def require(keys: Iterable[str], *wanted: str, who: str) -> None:
  """Raises UserError unless a batch (or a spec) has the keys that who wants."""
  missing = [key for key in wanted if key not in keys]
  if missing:
    raise UserError(
      f'{who} needs {", ".join(missing)} in a batch, and the transform '
      f'declares only {", ".join(keys)}: name a transform that declares them '
      '(augment.name, preprocess.name), or take an objective or an evaluator '
      'that needs no more.'
    )


def layout(spec: Spec, rows: int) -> Spec:
  """Shapes and types of a batch of that many rows."""
  return {key: ((rows, *shape), dtype) for key, (shape, dtype) in spec.items()}


def num_bytes(spec: Spec) -> int:
  """Bytes of arrays of these shapes and types."""
  return sum(
    int(np.prod(shape)) * dtype.itemsize for shape, dtype in spec.values()
  )


def _name(transform: Transform) -> str:
  kind = type(transform)
  return f'{kind.__module__}.{kind.__qualname__}'
