"""A source of coloured shapes on noise, with maps of classes and captions.

It is for the other examples: `segmentation.py` and `contrastive.py`.
"""

from typing import Any

import cv2
import numpy as np

from vit_jax.data import contract

COLOURS = {'red': (220, 40, 40), 'green': (40, 200, 40), 'blue': (50, 60, 230)}
SHAPES = ('circle', 'square')  # classes 1 and 2 of a map; 0 is the background
SIDE = 64  # height and width of the images, pixels


class Source(contract.Source):
  """One shape per image; the label is its colour and kind."""

  def __init__(self, split: str, /, *, num_examples: int = 512):
    """Returns a source whose examples depend only on split and index.

    Args:
      split: any text, from which the examples are drawn.
      num_examples: number of examples.
    """
    self.name, self._count = f'shapes/{split}', num_examples
    self.class_names = [f'{c} {s}' for c in COLOURS for s in SHAPES]
    self.num_classes, self._split = len(self.class_names), [*split.encode()]

  def __len__(self) -> int:
    return self._count

  def __getitem__(self, index: int) -> dict[str, Any]:
    """Returns `image`, `label`, `segments` (a PNG file) and `caption`."""
    if not 0 <= index < len(self):
      raise IndexError(index)
    rng = np.random.default_rng([*self._split, index])
    label = int(rng.integers(self.num_classes))
    colour, kind = divmod(label, len(SHAPES))
    segments = np.zeros((SIDE, SIDE), np.uint8)
    radius = int(rng.integers(12, 22))
    x, y = (int(v) for v in rng.integers(radius, SIDE - radius, 2))
    if kind:
      corners = (x - radius, y - radius), (x + radius, y + radius)
      cv2.rectangle(segments, *corners, 2, -1)
    else:
      cv2.circle(segments, (x, y), radius, 1, -1)
    noise = rng.integers(0, 256, (SIDE, SIDE, 3))
    painted = 0.6 * np.array([*COLOURS.values()][colour]) + 0.4 * noise
    image = np.where(segments[..., None] > 0, painted, noise).astype(np.uint8)
    return {
      'image': image,
      'label': label,
      'segments': cv2.imencode('.png', segments)[1].tobytes(),
      'caption': f'a {self.class_names[label]}',
    }
