"""Photographs at their own resolution, on which attention is drawn."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, UInt8

from vit_jax.analysis import rollout
from vit_jax.data.images import display
from vit_jax.data.images.resampling import resize

_MAX_SIDE = 2048  # pixels; larger photographs are reduced, to save memory


class Photograph(NamedTuple):
  """A photograph and the part of it that the model receives.

  Attributes:
    pixels: the whole photograph.
    box: (y, x, height, width) of the part that the model receives, pixels.
    name: name of the file; '' if there is none.
  """

  pixels: UInt8[np.ndarray, 'y x 3']
  box: tuple[float, float, float, float]
  name: str = ''

  @classmethod
  def of_input(cls, image: UInt8[np.ndarray, 'y x 3']) -> 'Photograph':
    """Returns an input of the model, which receives it as a whole."""
    return cls(image, (0.0, 0.0, *image.shape[:2]))

  @property
  def whole(self) -> bool:
    """True if the model receives the whole photograph, resized or not."""
    whole = (0, 0, *self.pixels.shape[:2])
    return bool(np.allclose(self.box, whole, atol=0.5))

  @property
  def extent(self) -> tuple[float, float, float, float]:
    """(left, right, bottom, top) of the box, in Matplotlib's coordinates.

    The centres of pixels have integer coordinates.
    """
    y, x, height, width = self.box
    return x - 0.5, x + width - 0.5, y + height - 0.5, y - 0.5

  def masked(
    self, weights: Float[np.ndarray, 'r c']
  ) -> UInt8[np.ndarray, 'y x 3']:
    """Darkens the photograph where weights are small; see `rollout.mask`.

    Args:
      weights: weights of the patches of the model's input.

    Returns:
      The photograph, white outside of the part that the model receives.
    """
    top, left, height, width = self.box
    y = slice(round(top), round(top + height))
    x = slice(round(left), round(left + width))
    seen = self.pixels[y, x]
    result = np.full_like(self.pixels, 255)
    result[y, x] = rollout.mask(weights, seen.shape[:2])[..., None] * seen
    return result


class Photographs(Sequence[Photograph]):
  """Photographs that are decoded when they are accessed, to save memory."""

  def __init__(
    self,
    images: Sequence[bytes | np.ndarray],
    transform: Any,
    names: Sequence[str] = (),
  ):
    """Stores encoded images.

    Args:
      images: encoded files, or pixels.
      transform: preprocessing of the images, a `data.contract.Preprocess`.
        Without a method `visible`, the
        photographs are the results of `pixels`.
      names: name of each file; empty if there are none.
    """
    self._images, self._transform, self._names = images, transform, names

  def __len__(self) -> int:
    return len(self._images)

  def __getitem__(self, index: Any) -> Any:
    """Decodes one photograph; raises DecodeError."""
    image = self._images[index]
    name = str(self._names[index]) if self._names else ''
    visible = getattr(self._transform, 'visible', None)
    if visible is None:
      pixels = display.rgb(self._transform.pixels(image))
      return Photograph.of_input(pixels)._replace(name=name)
    pixels = display.rgb(self._transform.decode(image))
    box = visible(*pixels.shape[:2])
    scale = min(1, _MAX_SIDE / max(pixels.shape))
    y, x = (max(1, round(scale * side)) for side in pixels.shape[:2])
    box = tuple(scale * value for value in box)
    return Photograph(resize(pixels, y, x, 'area'), box, name)
