"""What features are computed of: a source from an index on, or image files."""

from collections.abc import Sequence
from typing import Any

from vit_jax.data.contract import Source
from vit_jax.data.storage import files

UNLABELLED = 0  # for the transform, which wants a label


class Rest:
  """The examples of a source from `start` on."""

  def __init__(self, source: Source, start: int):
    """Reads nothing yet."""
    self._source, self._start = source, start
    self.name, self.num_classes = source.name, source.num_classes or 1
    self.class_names = source.class_names

  def __len__(self) -> int:
    return len(self._source) - self._start

  def __getitem__(self, index: int) -> dict[str, Any]:
    return {'label': UNLABELLED, **self._source[self._start + index]}

  def where(self, index: int) -> str:
    """Where the source has an example, if it knows."""
    index += self._start
    return getattr(self._source, 'where', lambda _: '')(index)


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
    """The file."""
    return self.paths[index]
