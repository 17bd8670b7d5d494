"""Interfaces of data sources and transforms.

The transform of a run declares the content of a batch (`spec`). Host buffers,
the shared memory of worker processes, the compiled shapes and the arrays on the
devices are all derived from this declaration.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int

from vit_jax.data import fingerprint, progress
from vit_jax.data.images.channels import Pixels
from vit_jax.data.images.headers import DecodeError
from vit_jax.data.pipeline import order
from vit_jax.errors import UserError

Example = dict[str, Any]
# Arrays of one example, without the batch axis: {key: (shape, dtype)}. The
# arrays of a batch have the same keys, with a leading batch axis.
Spec = dict[str, tuple[tuple[int, ...], np.dtype]]
# Keys that the loader adds to those of a transform.
MASK: Spec = {'mask': ((), np.dtype(bool))}
REPLACED: Spec = {'replaced': ((), np.dtype(np.int32))}
# Keys for the targets of a head: the class of an image, int32 `[]`; several
# classes, zeros and ones, float32 `[classes]`; or numbers, float32
# `[numbers]`. A transform declares at most one of them.
TARGETS = ('label', 'labels', 'numbers')
_KINDS = 'biuf'  # NumPy's codes for booleans, integers and floating point
_MAX_BYTES = 4  # JAX uses numbers of at most 32 bits


class Source:
  """A dataset with random access; the base class of all.

  `vit_jax.data.sources.NAME` (or any other module) defines
  `Source(split, /, *, …)`, whose keyword-only parameters are the keys of the
  config's `source` section. A source must support pickling, because worker
  processes receive a copy. A subclass defines the attributes, `__len__` and
  `__getitem__`; the other methods have defaults.

  Attributes:
    name: name of the dataset, for messages.
    num_classes: number of classes; labels are 0 to num_classes - 1. 0 for a
      source without labels. For a source of numbers (to be predicted by
      regression), the number of them per image.
    class_names: names of the classes in the order of the labels, or names of
      the numbers; [] for a source without labels.
    label_keys: keys of examples whose values are labels, or lists of them.
  """

  name: str
  num_classes: int = 0
  class_names: list[str] = []
  label_keys: tuple[str, ...] = ('label',)

  def __len__(self) -> int:
    raise NotImplementedError

  def __getitem__(self, index: int) -> Example:
    """Returns one example for the transform.

    Returns:
      `image`, encoded bytes or pixels `[y, x, channels]`, uint8 or uint16;
      `label`, int, unless the source has no labels; and any further values that
      a transform uses, such as an encoded mask or a text.

    Raises:
      DecodeError: the record cannot be used (see `reader.on_bad_record`).
    """
    raise NotImplementedError

  def where(self, index: int) -> str:
    """Returns the file of an example, for messages; '' if there is none."""
    return ''

  def rows(self) -> Iterator[tuple[str, Int[np.ndarray, ' n']]]:
    """Yields pairs (part, positions), in the order of the examples.

    `part` is the name of a part of the stored data, such as a file, and
    `positions` are the positions of the source's examples in this part. They
    identify examples independently of the split, so that two splits of the same
    data can be compared, and listed examples can be left out. By default, there
    are no pairs, and neither is possible.
    """
    yield from ()

  def locate(
    self, positions: Int[np.ndarray, ' n'], seed: int
  ) -> Int[np.ndarray, ' n']:
    """Returns the indices of the examples at positions of training.

    By default, each epoch is a new random order of all examples. The result
    must depend on the arguments only.

    Args:
      positions: int64 positions ≥ 0, counted from the start of training.
      seed: seed of the run.
    """
    return order.shuffled(positions, len(self), seed)

  def replacements(self, index: int) -> Sequence[int] | np.ndarray:
    """Returns the indices that may replace a bad record; by default, all."""
    return range(len(self))

  def labels(self) -> Int[np.ndarray, ' n']:
    """Returns the labels of all examples; -1 for bad records.

    By default, every example is read, but images are not decoded.
    """
    text = f'reading the labels of {self.name}'
    indices = progress.shown(iter(range(len(self))), len(self), text)
    return np.array([self._label(index) for index in indices], np.int64)

  @property
  def own_order(self) -> bool:
    """True if `locate` or `replacements` is overridden."""
    kind = type(self)
    return (
      kind.locate is not Source.locate
      or kind.replacements is not Source.replacements
    )

  def without(self, indices: Int[np.ndarray, ' n']) -> 'Source':
    """Returns this source without the examples at these ascending indices.

    Raises:
      UserError: the source has its own order.
    """
    if self.own_order:
      raise UserError(
        f'{type(self).__qualname__} has its own order, so it needs `without`.'
      )
    return Remaining(self, indices)

  @property
  def fingerprint(self) -> dict[str, Any]:
    """Dataset fingerprint, compared when a run is resumed.

    See `data.fingerprint`.
    """
    return fingerprint.sampled(self)

  def ignored(self) -> list[str]:
    """Returns the files of the dataset that are not examples."""
    return []

  def _label(self, index: int) -> int:
    try:
      return int(self[index]['label'])
    except DecodeError:
      return -1


class Wrapped(Source):
  """Base class of sources that read the examples of another source."""

  def __init__(self, source: Source):
    self._source, self.name = source, source.name
    self.num_classes, self.class_names = source.num_classes, source.class_names
    self.label_keys = source.label_keys

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> Example:
    return self._source[self._find(index)]

  def where(self, index: int) -> str:
    """Returns the location of an example, if the source provides it."""
    return self._source.where(self._find(index))

  def ignored(self) -> list[str]:
    """Returns the files of the dataset that are not examples."""
    return self._source.ignored()

  def _find(self, index: int) -> int:
    """Returns the index of an example in the source."""
    return index


class Remaining(Wrapped):
  """A source without some of its examples."""

  def __init__(self, source: Source, indices: Int[np.ndarray, ' n']):
    """Leaves examples out; the order of the others is that of the source.

    Args:
      source: source of all examples.
      indices: indices of the examples to leave out, ascending.
    """
    super().__init__(source)
    self._left_out = indices
    # Number of remaining examples before each example that is left out.
    self._remaining_before = indices - np.arange(len(indices))

  def __len__(self) -> int:
    return len(self._source) - len(self._left_out)

  def rows(self) -> Iterator[tuple[str, Int[np.ndarray, ' n']]]:
    """Yields the remaining rows of the source."""
    start = 0
    for part, rows in self._source.rows():
      stop = start + len(rows)
      first, last = np.searchsorted(self._left_out, [start, stop])
      yield part, np.delete(rows, self._left_out[first:last] - start)
      start = stop

  def labels(self) -> Int[np.ndarray, ' n']:
    """Returns the remaining labels."""
    return np.delete(self._source.labels(), self._left_out)

  @property
  def fingerprint(self) -> dict[str, Any]:
    """Dataset fingerprint, compared when a run is resumed.

    It is that of the source, with the number of remaining examples and a
    checksum of the indices that are left out.
    """
    return self._source.fingerprint | {
      'size': len(self),
      'left_out': fingerprint.checksum(self._left_out),
    }

  def _find(self, index: int) -> int:
    # An example that is left out precedes remaining example `index` if at most
    # `index` remaining examples precede it. Indices out of range stay out of
    # range, for which the source raises.
    num_before = np.searchsorted(self._remaining_before, index, 'right')
    return index + int(num_before)


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

  If batches have several sizes, the property `variants` returns a sequence of
  (probability, transform), whose specs have the same keys, and the method
  `variant(seed, batch)` the index of the one that makes a batch, from the seed
  of the run and the number of the batch. The training step is compiled for each
  of them. Of the transform itself, only the keys of its spec are then used.
  """

  @property
  def spec(self) -> Spec:
    """Shape and dtype of each array of a transformed example.

    Supervised training uses `image` `[y, x, channels]`, uint8, or uint16 for
    images of 16 bits, and one of `TARGETS`. Several crops of an image are
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
  """A transform for evaluation, with the keys `image` and one of `TARGETS`.

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


def variants(transform: Transform) -> tuple[tuple[float, Transform], ...]:
  """Returns (probability, variant) of each variant of a transform.

  A transform without `variants` is its only variant.
  """
  return tuple(getattr(transform, 'variants', ())) or ((1.0, transform),)


def check_spec(transform: Transform) -> Spec:
  """Checks and returns the spec of a transform.

  Shapes are returned as tuples and dtypes as `np.dtype`.

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

  def fits(key: str) -> bool:
    if key not in arrays or key not in spec:
      return False
    shape, dtype = spec[key]
    same_kind = np.can_cast(arrays[key].dtype, dtype, 'same_kind')
    return arrays[key].shape == shape and same_kind

  differing = [key for key in arrays | spec if not fits(key)]
  if differing:
    returned = {k: arrays[k] for k in differing if k in arrays}
    actual = {
      key: (array.shape, array.dtype) for key, array in returned.items()
    }
    expected = {key: spec[key] for key in differing if key in spec}
    raise UserError(
      f'{_name(transform)} returned {_format(actual)}; its spec is '
      f'{_format(expected)}: return each array of the spec, and no other.'
    )


def require(
  keys: Iterable[str],
  *required: str,
  who: str,
  made_by: str = 'another transform',
) -> None:
  """Checks that a batch or a spec has the required keys.

  Args:
    keys: keys of the batch or the spec.
    *required: required keys.
    who: name of the objective or evaluator that requires them, for the message.
    made_by: name of a transform that makes them, for the message.

  Raises:
    UserError: a required key is missing.
  """
  missing = [key for key in required if key not in keys]
  if missing:
    raise UserError(
      f'{who} requires {", ".join(missing)} in a batch, but the transform '
      f'declares only {", ".join(keys)}: set augment.name or preprocess.name '
      f'to {made_by}.'
    )


def check_fields(example: Example, *keys: str) -> None:
  """Checks that an example has the fields that a transform uses.

  Args:
    example: example of a source.
    *keys: required fields.

  Raises:
    UserError: a field is missing.
  """
  if missing := [key for key in keys if key not in example]:
    # The loader adds `run_seed` and `run_position`.
    there = ', '.join(name for name in example if name[:4] != 'run_')
    raise UserError(
      f'the examples of the source contain {there}, but not '
      f'{", ".join(missing)}: use a source with it (others; texts, files, '
      'separator or numbers of a manifest; masks of a folder), or another key '
      'or name in augment and preprocess.'
    )


def check_others(others: Iterable[str], **used: str | None) -> None:
  """Checks that further values of an example do not replace those in use.

  Args:
    others: names of the further values, `source.others`.
    **used: {key of an example, `image` or `label`: name of its value in the
      data, `source.image_key` or `source.label_key`}.

  Raises:
    UserError: a further value has the key of another one.
  """
  for name in others:
    if name in used and used[name] != name:
      raise UserError(
        f'source.others contains {name!r}, but source.{name}_key is '
        f'{used[name]!r}, and an example has one {name!r}: remove it from '
        'source.others.'
      )


def check_label(label: Any, num_classes: int) -> None:
  """Checks that a label, or all of several, are classes.

  Args:
    label: integer, or array of integers.
    num_classes: number of classes.

  Raises:
    DecodeError: a label is out of range.
  """
  labels = np.asarray(label)
  if labels.min() < 0 or labels.max() >= num_classes:
    raise DecodeError(f'label {label}; allowed: 0 to {num_classes - 1}')


def target_key(keys: Iterable[str]) -> str:
  """Returns which of `TARGETS` a batch or a spec has; 'label' if none."""
  return next((key for key in TARGETS if key in keys), 'label')


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
