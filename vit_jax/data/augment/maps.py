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
  """Converts integers of pixels into classes.

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

  def classes_of(
    self, integers: Integer[np.ndarray, 'y x'], classes: int = 0
  ) -> Int[np.ndarray, 'y x']:
    """Returns the class of each pixel, int32, or `IGNORED`.

    Args:
      integers: integers of a map.
      classes: number of classes; 0 for any.

    Raises:
      DecodeError: an integer is not in the table, or is not a class.
    """
    ids = integers.astype(np.int64)
    ignored = ids == self.ignore_label
    if self.table:
      _check(ids[~ignored], len(self.table))
      ids = np.array(self.table)[np.where(ignored, 0, ids)]
      ignored |= ids == self.ignore_label
    if self.reduce_zero_label:
      ids, ignored = ids - 1, ignored | (ids == 0)
    if classes:
      _check(ids[~ignored], classes)
    return np.where(ignored, IGNORED, ids).astype(np.int32)


def _check(ids: Int[np.ndarray, ' n'], count: int) -> None:
  if ids.size and not 0 <= ids.min() <= ids.max() < count:
    bad = ids[(ids < 0) | (ids >= count)][0]
    raise DecodeError(
      f'a map contains {bad}, which has no class; allowed: 0 to {count - 1}, '
      'and ignore_label'
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
    base: Any = super()
    entry = self.image_size, np.dtype(np.int32)  # pyright: ignore
    return base.spec | dict.fromkeys(self.maps, entry)

  def arrays(
    self, example: Example, view: transforms.View
  ) -> dict[str, np.ndarray]:
    """Returns the maps; raises DecodeError for a bad one."""
    base: Any = super()
    arrays = base.arrays(example, view)
    for key in self.maps:
      integers = self.integers(example, key, view.size)
      cut = view.geometry.of_map(integers, view.pixels.shape[:2])
      arrays |= {key: self.classes_of(cut)}
    return arrays


@dataclasses.dataclass(frozen=True)
class TrainTransform(_Maps, transforms.TrainTransform):
  """`transforms.TrainTransform` with maps."""


@dataclasses.dataclass(frozen=True)
class EvalTransform(_Maps, transforms.EvalTransform):
  """`transforms.EvalTransform` with maps."""
