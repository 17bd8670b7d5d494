"""Detects silent data corruption by computing a step twice."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.arrays import checksum, sharding
from vit_jax.run.ledger import Ledger

PyTree = Any
Step = Callable[..., tuple[PyTree, PyTree]]


class Replay:
  """Computes some steps twice and compares the states after them."""

  def __init__(
    self,
    compiled_step: Step,
    fixed: tuple[Any, ...],
    ledger: Ledger,
    every_steps: int,
  ):
    """Sets the interval of the replays.

    Args:
      compiled_step: function (state, batch, *fixed) → (new state, metrics)
        that donates the state.
      fixed: further arguments, which are the same for all steps.
      ledger: destination of the event `sdc`.
      every_steps: number of steps between two replays; 0 for no replays.
    """
    self._compiled_step, self._fixed = compiled_step, fixed
    self._ledger, self._every_steps = ledger, every_steps

  def run(
    self, state: PyTree, batch: PyTree, step: int
  ) -> dict[str, int] | None:
    """Computes the update on a copy of the state, if a replay is due.

    Args:
      state: state before the update.
      batch: batch of the update.
      step: number of updates completed, including this one.

    Returns:
      Checksums of the state after the update, by path; None if no replay is
      due.
    """
    if not self._every_steps or step % self._every_steps:
      return None
    copy = jax.tree.map(jnp.copy, state)  # the step donates its state
    return _checksums(self._compiled_step(copy, batch, *self._fixed)[0])

  def compare(
    self, expected: dict[str, int] | None, state: PyTree, step: int
  ) -> None:
    """Compares a state with the replay of the same update.

    Args:
      expected: result of `run`.
      state: state after the update.
      step: number of updates completed.

    Raises:
      RuntimeError: the bits differ.
    """
    if expected is None:
      return
    actual = _checksums(state)
    leaves = [path for path in actual if actual[path] != expected[path]]
    if leaves:
      self._ledger.event('sdc', step=step, leaves=leaves)
      raise RuntimeError(
        f'silent data corruption: computing step {step} twice gave different '
        f'bits in {len(leaves)} leaves ({leaves[0]}, …) on some of '
        f'{jax.devices()}. Replace the machine and run the same command again.'
      )


def _checksums(state: PyTree) -> dict[str, int]:
  mesh = jax.tree.leaves(state)[0].sharding.mesh
  return checksum.checksums(state, sharding.replicated(mesh))
