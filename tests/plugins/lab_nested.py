"""A model outside the package with nested sections: a stem, and heads."""

from typing import Annotated

from vit_jax.config import schema
from vit_jax.config.schema import Nested, Section
from vit_jax.models.contract import Model as Base


class Stem:
  """One layer, selected by the dotted name of this module."""

  def __init__(self, width, /, *, kernel_size: int = 3, bias: bool = True):
    self.width, self.kernel_size, self.bias = width, kernel_size, bias


@schema.operational('shown')
class Head:
  """A linear layer."""

  def __init__(self, width, /, *, outputs: int, shown: bool = False):
    self.width, self.outputs, self.shown = width, outputs, shown


def head_keys(*, weight: float = 1.0) -> None:
  """Declares the keys of a head's section that are not the head's own."""
  del weight


STEM = Nested('tests.plugins.{name}:Stem')
HEADS = Nested(
  'tests.plugins.{name}:Head',
  many=True,
  beside='tests.plugins.lab_nested:head_keys',
)


class Model(Base):
  """Builds its parts and computes nothing."""

  def __init__(
    self,
    num_classes,
    /,
    *,
    width: int = 8,
    stem: Annotated[Section | None, STEM] = None,
    heads: Annotated[Section, HEADS],
  ):
    def built(mark, section):
      constructor = mark.constructor(section['name'])
      return schema.construct(constructor, section, width)

    self.num_classes = num_classes
    self.stem = None if stem is None else built(STEM, stem)
    self.heads = {name: built(HEADS, each) for name, each in heads.items()}
    self.weights = {name: each['weight'] for name, each in heads.items()}
