"""Several sources at once; each has a fixed fraction of every batch.

A pattern of 1,000 slots, which repeats, determines the member at each position.
A member of weight w has w · 1000 slots (rounded), shuffled by the seed. The
number of earlier positions of a member therefore follows from arithmetic, and
its n-th position holds the example of position n in a training on that member
alone: every member is read in whole epochs, each in a new order. The cost is
the same for every position, and no state is stored.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import numpy as np
from jaxtyping import Int

from vit_jax.config import plugins
from vit_jax.config.completion import complete_nested
from vit_jax.config.plugins import Nested, Section
from vit_jax.config.sections import SECTIONS
from vit_jax.data import fingerprint
from vit_jax.data.pipeline import order
from vit_jax.data.storage.concatenation import Concatenation
from vit_jax.errors import UserError, check_range, closest

SLOTS = 1000


def _beside(*, weight: float) -> None:
  """Declares the keys of a member in addition to those of its source.

  Args:
    weight: weight above 0; the member's fraction of a batch is its weight
      divided by the sum of all.
  """
  del weight


_MEMBERS = Nested(SECTIONS['source'], many=True, beside=_beside)


class Source:
  """The examples of all members, concatenated; `locate` mixes them.

  Attributes:
    name: name for messages, 'mixture of imagenet/train, pets/train'.
    num_classes: number of classes of each member.
    class_names: class names of each member.
  """

  def __init__(self, split: str, /, *, members: Annotated[Section, _MEMBERS]):
    """Opens the members.

    Args:
      split: split of every member ('train[:99%]'), or of some of them, each
        with its own: 'web/train,pets/train+validation', or 'pets/test' alone.
      members: {name of your choice: section of a source, with its `name` and a
        `weight`}. Weights are positive; a share is a weight over their sum.

    Raises:
      UserError: no members, a wrong weight, split or key, classes that differ,
        or what a member raises.
    """
    chosen = _chosen(split, list(members))
    sections: Any = complete_nested(
      'source.members', _MEMBERS, {name: members[name] for name in chosen}
    )
    weights = {name: section.weight for name, section in sections.items()}
    for name, weight in weights.items():
      check_range(f'source.members.{name}.weight', weight, above=0)
    self._counts = slot_counts(weights)
    self._members = [
      plugins.build(_MEMBERS.constructor(section.name), section, chosen[name])
      for name, section in sections.items()
    ]
    self._index = Concatenation(map(len, self._members))
    self.name = f'mixture of {", ".join(m.name for m in self._members)}'
    self.class_names = self._members[0].class_names
    self.num_classes = self._members[0].num_classes
    for member in self._members[1:]:
      if member.class_names != self.class_names:
        raise UserError(
          f'{self._members[0].name} has {self.num_classes} classes and '
          f'{member.name} {member.num_classes}, or in another order, or by '
          'other names: members of a mixture must agree on them (class_map '
          'gives most sources any list).'
        )

  def __len__(self) -> int:
    return len(self._index)

  def rows(self) -> Iterator[tuple[str, Int[np.ndarray, ' n']]]:
    """Yields the examples of members that know theirs; see `data.contract`."""
    for number, member in enumerate(self._members):
      for part, rows in getattr(member, 'rows', tuple)():
        yield f'{number}/{part}', rows

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
      'members': [fingerprint.of(member) for member in self._members],
    }

  def where(self, index: int) -> str:
    """Returns the location of an example in its member."""
    number, row = self._index.find(index)
    return self._members[number].where(row)

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
    """Example indices at positions counted from the start of the training.

    Of each 1,000 positions from a multiple of 1,000 on, every member has its
    share exactly; of any others, as a random order has it.

    Args:
      positions: int64, ≥ 0.
      seed: seed of the run.

    Returns:
      int64 indices in [0, len(self)).
    """
    member_of = np.repeat(np.arange(len(self._counts)), self._counts)
    member_of = member_of[order.shuffled(np.arange(SLOTS), SLOTS, seed)]
    cycle, slot = np.divmod(positions, SLOTS)
    indices = np.empty(len(positions), np.int64)
    start = 0
    for number, count in enumerate(self._counts):
      here = member_of == number
      earlier = np.cumsum(here) - here  # slots of this member before each slot
      rows = np.flatnonzero(here[slot])
      turn = cycle[rows] * count + earlier[slot[rows]]
      size = len(self._members[number])
      own = np.random.SeedSequence([seed, number]).generate_state(1)
      indices[rows] = start + order.shuffled(turn, size, int(own[0]))
      start += size
    return indices


def slot_counts(weights: Mapping[str, float]) -> list[int]:
  """Returns the slots of each member, by the method of largest remainders.

  Raises:
    UserError: a weight is too small for one slot.
  """
  exact = np.array(list(weights.values())) / sum(weights.values()) * SLOTS
  counts = np.floor(exact).astype(int)
  largest = np.argsort(counts - exact, kind='stable')[: SLOTS - counts.sum()]
  counts[largest] += 1
  if counts.min() < 1:
    name = list(weights)[int(counts.argmin())]
    raise UserError(
      f'the weight {weights[name]} of {name!r} is less than 1/{SLOTS} of the '
      f'sum {sum(weights.values())}: raise it, or leave the member out.'
    )
  return counts.tolist()


def _chosen(split: str, names: list[str]) -> dict[str, str]:
  """Returns {member: split} in the order of the members."""
  if not names:
    raise UserError(
      'source.members is empty: give {name: dict(name=…, weight=…, …)}.'
    )
  if '/' not in split:
    return dict.fromkeys(names, split)
  found = {}
  for piece in split.split(','):
    name, _, spec = piece.strip().partition('/')
    if name not in names or not spec or name in found:
      raise UserError(
        f'the split {split!r} of a mixture has the part {piece!r}; give one '
        'split for all members, or member/split for some of them, once each, '
        f'with commas; {closest(name, names)}.'
      )
    found[name] = spec
  return {name: found[name] for name in names if name in found}
