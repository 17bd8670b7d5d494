"""Transforms of images with maps of the same pixels, such as classes."""

import dataclasses
from typing import Any

import numpy as np

from vit_jax.data.augment import transforms
from vit_jax.data.contract import Example, Spec
from vit_jax.data.images.decode import decode_map
from vit_jax.data.images.headers import DecodeError


@dataclasses.dataclass(frozen=True)
class _Maps:
  """Adds maps, cut out like the image, to a transform of `transforms`.

  Attributes:
    maps: keys of an example with maps of integers, see `decode.decode_map`; the
      results are int32 `[height, width]`, of the nearest pixels.
    table: class of each integer from 0; () for the integers themselves. 255
      means that evaluators and losses ignore a pixel: (255, 1, 0, 255) for the
      masks of oxford_iiit_pet.
  """

  _: dataclasses.KW_ONLY
  maps: tuple[str, ...]
  table: tuple[int, ...] = ()

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
    maps = {key: self._cut(example[key], view) for key in self.maps}
    return base.arrays(example, view) | maps

  def _cut(self, data: bytes | np.ndarray, view: transforms.View) -> np.ndarray:
    whole, size = decode_map(data), view.pixels.shape[:2]
    if whole.shape != view.size:
      raise DecodeError(f'a map has {whole.shape} pixels, not {view.size}')
    cut = view.geometry.of(whole[..., None], size, 'nearest')[..., 0]
    if not self.table:
      return cut.astype(np.int32)
    if cut.max() >= len(self.table):
      raise DecodeError(f'a map contains {cut.max()}, which has no class')
    return np.array(self.table, np.int32)[cut]


@dataclasses.dataclass(frozen=True)
class TrainTransform(_Maps, transforms.TrainTransform):
  """`transforms.TrainTransform` with maps."""


@dataclasses.dataclass(frozen=True)
class EvalTransform(_Maps, transforms.EvalTransform):
  """`transforms.EvalTransform` with maps."""
