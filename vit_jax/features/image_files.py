"""A source of image files, the alternative to the splits of other sources."""

from collections.abc import Sequence
from typing import Any

from vit_jax.data.storage import files


class Images:
  """Image files, in the order given."""

  name, num_classes = 'the images', 0
  class_names: list[str] = []

  def __init__(self, paths: Sequence[str]):
    """Opens nothing yet."""
    self.paths = [*paths]

  def __len__(self) -> int:
    return len(self.paths)

  def __getitem__(self, index: int) -> dict[str, Any]:
    return {'image': files.read_image(self.paths[index])}

  def where(self, index: int) -> str:
    """Returns the path of the file."""
    return self.paths[index]
