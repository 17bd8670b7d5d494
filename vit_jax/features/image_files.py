"""A source of single image files without labels."""

from collections.abc import Sequence
from typing import Any

from vit_jax.data.storage import files


class Images:
  """Image files in a given order."""

  name, num_classes = 'the images', 0
  class_names: list[str] = []

  def __init__(self, paths: Sequence[str]):
    """Stores the paths; each file is opened when its example is read."""
    self.paths = [*paths]

  def __len__(self) -> int:
    return len(self.paths)

  def __getitem__(self, index: int) -> dict[str, Any]:
    return {'image': files.read_image(self.paths[index])}

  def where(self, index: int) -> str:
    """Returns the path of the file."""
    return self.paths[index]
