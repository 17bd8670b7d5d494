"""Silent data corruption: a step computed twice must give the same bits."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.arrays import checksum, sharding
from vit_jax.run.ledger import Ledger

PyTree = Any
Step = Callable[..., tuple[PyTree, PyTree]]


class Replay:
  """Computes a step twice now and then, and compares the states after it."""

  def __init__(
    self,
    train_step: Step,
    fixed: tuple[Any, ...],
    ledger: Ledger,
    every_steps: int,
  ):
    """Nothing is computed yet.

    Args:
      train_step: (state, batch, *fixed) → (new state, metrics); donates the
        state.
      fixed: what all steps have in common.
      ledger: where a difference is written down.
      every_steps: steps from one replay to the next; 0 for none at all.
    """
    self._train_step, self._fixed = train_step, fixed
    self._ledger, self._every_steps = ledger, every_steps

  def run(
    self, state: PyTree, batch: PyTree, step: int
  ) -> dict[str, int] | None:
    """Checksums of the state after the update that makes it `step`.

    The update is done on a copy. Where no replay is due, None.
    """
    if not self._every_steps or step % self._every_steps:
      return None
    copy = jax.tree.map(jnp.copy, state)
    return _checksums(self._train_step(copy, batch, *self._fixed)[0])

  def compare(
    self, expected: dict[str, int] | None, state: PyTree, step: int
  ) -> None:
    """Compares the state after `step` updates with what `run` returned.

    Raises:
      RuntimeError: other bits.
    """
    if expected is None:
      return
    found = _checksums(state)
    leaves = [path for path in found if found[path] != expected[path]]
    if leaves:
      self._ledger.event('sdc', step=step, leaves=leaves)
      raise RuntimeError(
        f'silent data corruption: step {step} computed twice gives other '
        f'bits in {len(leaves)} leaves ({leaves[0]}, …) on some of '
        f'{jax.devices()}. Take the machine out and resume.'
      )


def _checksums(state: PyTree) -> dict[str, int]:
  """Of every leaf, by path."""
  mesh = jax.tree.leaves(state)[0].sharding.mesh
  return checksum.checksums(state, sharding.replicated(mesh))
