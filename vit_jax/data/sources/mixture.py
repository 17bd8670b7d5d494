"""A mixture of several sources, each with a fixed fraction of the examples.

A repeating pattern of 1,000 slots determines the member at each position. A
member of weight w (of a sum of 1) has w · 1000 slots (rounded), shuffled by the
seed. The number of earlier positions of a member can therefore be computed. The
n-th position of a member has the example that training on only this member,
with a seed of its own, would use at position n: every member is read in whole
epochs, each in a new order. The cost is the same for every position, and no
state is stored.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import numpy as np
from jaxtyping import Int

from vit_jax.config import schema
from vit_jax.config.completion import complete_section
from vit_jax.config.schema import SECTIONS, Nested, Section
from vit_jax.data import contract, filters
from vit_jax.data.pipeline import order
from vit_jax.data.storage.splits import Concatenation
from vit_jax.errors import UserError, check_range, closest

SLOTS = 1000


def member(*, weight: float) -> None:
  """Declares the keys of a member in addition to those of its source.

  Args:
    weight: weight above 0; the member's fraction of the examples is its weight
      divided by the sum of all weights.
  """
  del weight


# The section of each member has the keys of its source and those of `member`.
_MEMBERS = Nested(
  SECTIONS['source'], many=True, beside='vit_jax.data.sources.mixture:member'
)


class Source(contract.Source):
  """The examples of all members, concatenated; `locate` mixes them.

  Attributes:
    name: name for messages, such as 'mixture of imagenet/train, pets/train'.
    num_classes: number of classes, the same for every member.
    class_names: class names, the same for every member.
    label_keys: keys of labels in the examples of any member.
  """

  def __init__(self, split: str, /, *, members: Annotated[Section, _MEMBERS]):
    """Opens the members.

    Args:
      split: one split for all members ('train[:99%]'), or the members to use
        and their splits: 'web/train,pets/train+validation', or only
        'pets/test'.
      members: {name of your choice: section of a source, with `name`, `weight`
        and the source's own keys}. Weights are above 0, and are divided by
        their sum.

    Raises:
      UserError: there are no members; a weight, split or key is invalid; the
        classes of members differ; or a member cannot be opened.
    """
    chosen = _chosen(split, list(members))
    sections: Any = complete_section(
      'source.members', _MEMBERS, {name: members[name] for name in chosen}
    )
    weights = {name: section.weight for name, section in sections.items()}
    for name, weight in weights.items():
      check_range(f'source.members.{name}.weight', weight, above=0)
    self._counts = slot_counts(weights)
    self._members = [
      schema.construct(
        _MEMBERS.constructor(section.name), section, chosen[name]
      )
      for name, section in sections.items()
    ]
    self._names = list(sections)
    self._index = Concatenation(map(len, self._members))
    self.name = f'mixture of {", ".join(m.name for m in self._members)}'
    self.class_names = self._members[0].class_names
    self.num_classes = self._members[0].num_classes
    keys = (key for member in self._members for key in member.label_keys)
    self.label_keys = tuple(dict.fromkeys(keys))
    for member in self._members[1:]:
      if member.class_names != self.class_names:
        raise UserError(
          f'the {self.num_classes} classes of {self._members[0].name} differ '
          f'from the {member.num_classes} of {member.name}: members need the '
          'same classes in the same order (most sources have class_map).'
        )

  def __len__(self) -> int:
    return len(self._index)

  def rows(self) -> Iterator[tuple[str, Int[np.ndarray, ' n']]]:
    """Yields the rows of all members, as MEMBER/PART; see `data.contract`."""
    for name, member in zip(self._names, self._members, strict=True):
      for part, rows in member.rows():
        yield f'{name}/{part}', rows

  def __getitem__(self, index: int) -> dict[str, Any]:
    number, row = self._index.find(index)
    return self._members[number][row]

  @property
  def fingerprint(self) -> dict[str, Any]:
    """Dataset fingerprint, compared when a run is resumed.

    See `data.fingerprint`.
    """
    return {
      'size': len(self),
      'class_names': list(self.class_names),
      'members': [member.fingerprint for member in self._members],
    }

  def where(self, index: int) -> str:
    """Returns the location of an example in its member."""
    number, row = self._index.find(index)
    return self._members[number].where(row)

  def ignored(self) -> list[str]:
    """Returns the files of all members that are not examples."""
    return [path for member in self._members for path in member.ignored()]

  def without(self, indices: Int[np.ndarray, ' n']) -> 'Source':
    """Returns this mixture, with members without some of their examples.

    Members keep their weights.

    Args:
      indices: indices of the examples to leave out, ascending.

    Raises:
      UserError: no example of a member remains.
    """
    other = copy.copy(self)
    other._members = []
    start = 0
    for member in self._members:
      stop = start + len(member)
      first, last = np.searchsorted(indices, [start, stop])
      own = indices[first:last] - start
      other._members.append(filters.without(member, own))
      start = stop
    other._index = Concatenation(map(len, other._members))
    return other

  def replacements(self, index: int) -> range:
    """Returns the indices of all examples of the same member.

    A bad record is replaced by an example of its own member, so that every
    member keeps its fraction of the batches.
    """
    number, row = self._index.find(index)
    return range(index - row, index - row + len(self._members[number]))

  def locate(
    self, positions: Int[np.ndarray, ' n'], seed: int
  ) -> Int[np.ndarray, ' n']:
    """Returns the indices of the examples at positions in training.

    Of 1,000 positions that start at a multiple of 1,000, every member has
    exactly its number of slots. In other ranges, its fraction is random.

    Args:
      positions: int64 positions ≥ 0, counted from the start of training.
      seed: seed of the run.

    Returns:
      int64 indices in [0, len(self)).
    """
    # Number of the member in each slot of the pattern, [SLOTS].
    member_of = np.repeat(np.arange(len(self._counts)), self._counts)
    member_of = member_of[order.shuffled(np.arange(SLOTS), SLOTS, seed)]
    cycle, slot = np.divmod(positions, SLOTS)
    indices = np.empty(len(positions), np.int64)
    start = 0  # index of the member's first example in the mixture
    for number, count in enumerate(self._counts):
      is_own = member_of == number
      earlier = np.cumsum(is_own) - is_own  # own slots before each slot
      rows = np.flatnonzero(is_own[slot])
      # Numbers of the positions among those of this member.
      own_positions = cycle[rows] * count + earlier[slot[rows]]
      size = len(self._members[number])
      # Members of equal size must not be read in the same order.
      own_seed = np.random.SeedSequence([seed, number]).generate_state(1)
      indices[rows] = start + order.shuffled(
        own_positions, size, int(own_seed[0])
      )
      start += size
    return indices


def slot_counts(weights: Mapping[str, float]) -> list[int]:
  """Returns the number of slots of each member, `SLOTS` in total.

  Numbers are rounded by the method of largest remainders.

  Args:
    weights: weight of each member.

  Raises:
    UserError: a weight is too small for one slot.
  """
  exact = np.array(list(weights.values())) / sum(weights.values()) * SLOTS
  counts = np.floor(exact).astype(int)
  by_remainder = np.argsort(counts - exact, kind='stable')  # the largest first
  counts[by_remainder[: SLOTS - counts.sum()]] += 1
  if counts.min() < 1:
    name = list(weights)[int(counts.argmin())]
    raise UserError(
      f'the weight {weights[name]} of {name!r} must be at least 1/{SLOTS} of '
      f'the sum {sum(weights.values())}.'
    )
  return counts.tolist()


def _chosen(split: str, names: list[str]) -> dict[str, str]:
  """Returns {member: split} in the order of the members.

  Raises:
    UserError: there are no members, or the split cannot be parsed.
  """
  if names and '/' not in split:
    return dict.fromkeys(names, split)
  chosen = {}
  for piece in split.split(','):
    name, _, spec = piece.strip().partition('/')
    if name not in names or not spec or name in chosen:
      raise UserError(
        f'{piece!r} in the split {split!r} of a mixture is neither a split of '
        f'all source.members nor, once, MEMBER/SPLIT; {closest(name, names)}.'
      )
    chosen[name] = spec
  return {name: chosen[name] for name in names if name in chosen}
