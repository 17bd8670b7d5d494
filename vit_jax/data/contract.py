"""Interfaces of data sources and transforms.

The transform of a run declares the content of a batch (`spec`). Host buffers,
the shared memory of worker processes, the compiled shapes and the arrays on the
devices are all derived from this declaration.
"""

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from vit_jax.data.images.channels import Pixels
from vit_jax.errors import UserError

Example = dict[str, Any]
# Arrays of one example, without the batch axis: {key: (shape, dtype)}. The
# arrays of a batch have the same keys, with a leading batch axis.
Spec = dict[str, tuple[tuple[int, ...], np.dtype]]
# Keys that the loader adds to those of a transform.
MASK: Spec = {'mask': ((), np.dtype(bool))}
REPLACED: Spec = {'replaced': ((), np.dtype(np.int32))}
_KINDS = 'biuf'  # NumPy's codes for booleans, integers and floating point
_MAX_BYTES = 4  # JAX uses numbers of at most 32 bits


class Source(Protocol):
  """A dataset with random access.

  `vit_jax.data.sources.NAME` (or any other module) defines
  `Source(split, /, *, …)`, whose keyword-only parameters are the keys of the
  config's `source` section. A source must support pickling, because worker
  processes receive a copy. The following methods are optional:

  - `where(index)` returns the file of an example, for messages.
  - `rows()` yields pairs (part, positions), in the order of the examples: the
    name of a part of the stored data, such as a file, and the positions of the
    source's examples in it, int64 `[n]`. They identify examples independently
    of the split, so that two splits of the same data can be compared, and
    listed examples can be left out.
  - `with_labels(key)` returns the same source whose examples also contain,
    under that key, a list of all correct labels, which may be empty.
  - `locate(positions, seed)` returns the indices (int64 `[n]`) of the examples
    at positions counted from the start of training, in place of the usual order
    (a new random order of all examples in each epoch; see
    `pipeline.order.of_source`). It must depend on its arguments only.
  - `replacements(index)` returns the indices from which the replacement of a
    bad record is drawn; by default, all examples.
  - `labels()` returns the labels of all examples, int64 `[n]`, without reading
    images; the label of a bad record is -1. Without this method, the labels are
    read together with the images (see `data.balanced`).
  - `without(indices)` returns the same source without the examples at these
    ascending indices. A source with `locate` or `replacements` needs it for
    `train.leave_out`.

  Attributes:
    name: name of the dataset, for messages.
    num_classes: number of classes; labels are 0 to num_classes - 1. 0 for a
      source without labels.
    class_names: names of the classes in the order of the labels; [] for a
      source without labels.
  """

  name: str
  num_classes: int
  class_names: list[str]

  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> Example:
    """Returns one example for the transform.

    Returns:
      `image`, encoded bytes or pixels `[y, x, channels]`, uint8 or uint16;
      `label`, int, unless the source has no labels; and any further values that
      a custom transform uses.

    Raises:
      DecodeError: the record cannot be used (see `reader.on_bad_record`).
    """
    ...


class Transform(Protocol):
  """Function from an example of a source to the arrays of a batch.

  `vit_jax.data.augment.NAME` (or any other module) defines
  `TrainTransform(image_size, /, *, …)` for the config's `augment` section and
  `EvalTransform(image_size, /, *, …)` for its `preprocess` section. The
  keyword-only parameters are the keys of the section. A transform must support
  pickling.

  The method `in_batches(size, parts)` is optional for a TrainTransform: it
  returns the transform for global batches of `size` examples that are computed
  in `parts` micro-batches, of which micro-batch i has the rows i, i + parts, …
  """

  @property
  def spec(self) -> Spec:
    """Shape and dtype of each array of a transformed example.

    Supervised training uses `image` `[y, x, channels]`, uint8, or uint16 for
    images of 16 bits, and `label`, int32 `[]`. Several crops of an image are
    one array, `[crops, y, x, channels]`. Numbers have at most 32 bits. The keys
    `mask` and `replaced` are reserved for the loader.
    """
    ...

  def __call__(
    self, example: Example, rng: np.random.Generator | None
  ) -> dict[str, np.ndarray | int]:
    """Transforms one example.

    Args:
      example: example returned by the source; in training also `run_seed`, the
        seed of the run, and `run_position`, the position of the example counted
        from the start of training.
      rng: random generator, which depends only on the seed and the example's
        position in training, and must be the only source of randomness. None in
        evaluation.

    Returns:
      A value for each key of `spec`, and no others. The loader checks integer
      values of `label` against the source's classes; an example whose label is
      out of range is a bad record.

    Raises:
      DecodeError: the example cannot be used.
    """
    ...


class Preprocess(Transform, Protocol):
  """A transform for evaluation, with the keys `image` and `label`.

  The method `visible(height, width)` is optional: from the size of an image in
  pixels, it returns the box (y, x, height, width) of the image that `pixels`
  resizes to its result, as floats in pixels. Figures then show attention on the
  whole image, and otherwise on the result of `pixels`. A transform with
  `visible` also has `decode(image)`, which returns the whole image, upright,
  as pixels `[y, x, channels]`.
  """

  def pixels(self, image: bytes | np.ndarray) -> Pixels:
    """Transforms an image without a label, for prediction."""
    ...


def where(source: Any, index: int) -> str:
  """Returns the location of an example; '' if the source has no locations.

  Args:
    source: a source; its method `where` is optional.
    index: index of the example.
  """
  return getattr(source, 'where', lambda _: '')(index)


def check_spec(transform: Transform) -> Spec:
  """Checks and returns the spec of a transform.

  Raises:
    UserError: the spec has a key, dtype or shape that is not allowed.
  """
  spec, name = transform.spec, _name(transform)
  for key, (shape, dtype) in spec.items():
    kind = np.dtype(dtype)
    is_number = kind.kind in _KINDS and kind.itemsize <= _MAX_BYTES
    if key in MASK | REPLACED or not is_number or min(shape, default=1) < 1:
      raise UserError(
        f'{name} declares {key!r} as {kind} {list(shape)}; allowed: bool, int '
        'and float of at most 32 bits, dimensions of at least 1, and keys '
        f'other than {" and ".join(MASK | REPLACED)}.'
      )
  return {key: (tuple(s), np.dtype(d)) for key, (s, d) in spec.items()}


def train_spec(transform: Transform, on_bad_record: str) -> Spec:
  """Returns the spec of one example of a training batch.

  It has the transform's keys and, with on_bad_record='skip', also `replaced`,
  the number of bad records that were replaced at the example's position.
  """
  added = REPLACED if on_bad_record == 'skip' else {}
  return check_spec(transform) | added


def eval_spec(transform: Transform) -> Spec:
  """Returns the spec of one example of an evaluation batch.

  It has the transform's keys, and `mask`, which is False on padding and on bad
  records.
  """
  return check_spec(transform) | MASK


def check_values(
  transform: Transform, values: dict[str, Any], spec: Spec
) -> None:
  """Checks that a transformed example matches the spec of the transform.

  Raises:
    UserError: the keys, a shape or a dtype differ from the spec.
  """
  arrays = {key: np.asarray(value) for key, value in values.items()}
  if arrays.keys() != spec.keys() or not all(
    array.shape == spec[key][0]
    and np.can_cast(array.dtype, spec[key][1], 'same_kind')
    for key, array in arrays.items()
  ):
    actual = {key: (array.shape, array.dtype) for key, array in arrays.items()}
    raise UserError(
      f'{_name(transform)} returned {_format(actual)}; its spec is '
      f'{_format(spec)}: both must be equal.'
    )


def require(keys: Iterable[str], *required: str, who: str) -> None:
  """Checks that a batch or a spec has the required keys.

  Args:
    keys: keys of the batch or the spec.
    *required: required keys.
    who: name of the objective or evaluator that requires them, for the message.

  Raises:
    UserError: a required key is missing.
  """
  missing = [key for key in required if key not in keys]
  if missing:
    raise UserError(
      f'{who} requires {", ".join(missing)} in a batch, but the transform '
      f'declares only {", ".join(keys)}: set augment.name or preprocess.name '
      'to another transform.'
    )


def layout(spec: Spec, rows: int) -> Spec:
  """Returns the shapes and dtypes of a batch of `rows` examples."""
  return {key: ((rows, *shape), dtype) for key, (shape, dtype) in spec.items()}


def num_bytes(spec: Spec) -> int:
  """Returns the total size of the arrays in a spec, in bytes."""
  return sum(
    int(np.prod(shape)) * dtype.itemsize for shape, dtype in spec.values()
  )


def _format(spec: Spec) -> str:
  """Formats a spec for messages: {'label': 'int32 []'}."""
  return str({key: f'{d} {list(shape)}' for key, (shape, d) in spec.items()})


def _name(transform: Transform) -> str:
  """Returns the dotted name of the class of a transform."""
  kind = type(transform)
  return f'{kind.__module__}.{kind.__qualname__}'
