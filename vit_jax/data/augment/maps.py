"""Transforms of images with maps of the same pixels, such as classes."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Int, Integer

from vit_jax.data.augment import transforms
from vit_jax.data.contract import Example, Spec, check_fields
from vit_jax.data.images.decode import decode_map
from vit_jax.data.images.headers import DecodeError

IGNORED = -1  # value of pixels that losses and evaluators leave out


@dataclasses.dataclass(frozen=True)
class Classes:
  """Converts integers of pixels into classes; the base of all such transforms.

  Attributes:
    table: class of each integer from 0; () for the integers themselves. For the
      masks of oxford_iiit_pet, (255, 1, 0, 255) leaves out the border.
    ignore_label: integer, before or after the table, of pixels that are ignored
      (`IGNORED`); None for none.
    reduce_zero_label: whether 0 is ignored, and all others are one less
      (ADE20k), after the table.
  """

  _: dataclasses.KW_ONLY
  table: tuple[int, ...] = ()
  ignore_label: int | None = 255
  reduce_zero_label: bool = False

  dtype = np.int32  # of the result; not annotated, so that it is not a field

  def integers(
    self, example: Example, key: str, size: tuple[int, int]
  ) -> Integer[np.ndarray, 'y x']:
    """Returns the integers of an example.

    Args:
      example: example of the source.
      key: key of the map.
      size: (height, width) of the image, pixels.

    Raises:
      UserError: the source has no such key.
      DecodeError: the map is damaged, or has another size than the image.
    """
    check_fields(example, key)
    integers = decode_map(example[key])
    if integers.shape != size:
      raise DecodeError(
        f'the map {key!r} has {integers.shape} pixels, its image {size}'
      )
    return integers

  def cut(
    self,
    integers: Integer[np.ndarray, 'y x'],
    geometry: transforms.Geometry,
    size: tuple[int, int],
    classes: int = 0,
  ) -> Int[np.ndarray, 'height width']:
    """Returns the classes in a part of a map, of the nearest pixels.

    Args:
      integers: integers of the whole map.
      geometry: part of the map.
      size: (height, width) of the result. Pixels beyond the lower and the right
        edge of a smaller part are `IGNORED`.
      classes: number of classes; 0 for any.

    Raises:
      DecodeError: an integer is not in the table, or is not a class.
    """
    ids = geometry.of_map(integers, size).astype(np.int64)
    ignored = ids == self.ignore_label
    if self.table:
      _check(ids[~ignored], len(self.table))
      ids = np.array(self.table)[np.where(ignored, 0, ids)]
      ignored |= ids == self.ignore_label
    if self.reduce_zero_label:
      ids, ignored = ids - 1, ignored | (ids == 0)
    if classes:
      is_changed = self.table or self.reduce_zero_label
      after = ' after table and reduce_zero_label' if is_changed else ''
      _check(ids[~ignored], classes, after)
    height, width = ids.shape
    result = np.full(size, IGNORED, self.dtype)
    result[:height, :width] = np.where(ignored, IGNORED, ids)
    return result


def _check(ids: Int[np.ndarray, ' n'], count: int, after: str = '') -> None:
  """Checks that integers are below a number, and not negative.

  Args:
    ids: integers.
    count: number.
    after: how the integers differ from those in the file, for the message.
  """
  if ids.size and not 0 <= ids.min() <= ids.max() < count:
    bad = ids[(ids < 0) | (ids >= count)][0]
    raise DecodeError(
      f'a map contains {bad}{after}, which has no class; allowed: 0 to '
      f'{count - 1}, and ignore_label'
    )


@dataclasses.dataclass(frozen=True)
class _Maps(Classes):
  """Adds maps, cut out like the image, to a transform of `transforms`.

  Attributes:
    maps: keys of an example with maps of integers, see `decode.decode_map`; the
      results are int32 `[height, width]`, of the nearest pixels.
  """

  _: dataclasses.KW_ONLY
  maps: tuple[str, ...]

  @property
  def spec(self) -> Spec:
    """Spec of the transform, and of the maps."""
    base: Any = super()  # the transform, which follows in a subclass's bases
    entry = self.image_size, np.dtype(self.dtype)  # pyright: ignore
    return base.spec | dict.fromkeys(self.maps, entry)

  def arrays(
    self, example: Example, view: transforms.View
  ) -> dict[str, np.ndarray]:
    """Returns the maps; raises DecodeError for a bad one."""
    maps = {key: self.integers(example, key, view.size) for key in self.maps}
    size = view.pixels.shape[:2]
    return {key: self.cut(x, view.geometry, size) for key, x in maps.items()}


@dataclasses.dataclass(frozen=True)
class TrainTransform(_Maps, transforms.TrainTransform):
  """`transforms.TrainTransform` with maps."""


@dataclasses.dataclass(frozen=True)
class EvalTransform(_Maps, transforms.EvalTransform):
  """`transforms.EvalTransform` with maps."""
