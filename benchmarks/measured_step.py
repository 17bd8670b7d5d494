"""Measures the training step of a config on the devices of this machine."""

import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.arrays import sharding
from vit_jax.training import compiling
from vit_jax.training.experiment import Experiment

_ROUNDS, _STEPS, _WARMUP = 5, 5, 3


class Step:
  """The training step of a config, its state and a random batch.

  Attributes:
    compiled: the compiled step.
    seconds: seconds that the compilation took.
  """

  def __init__(
    self, experiment: Experiment, options: Mapping[str, Any] | None = None
  ):
    """Compiles the step, and puts state and batch on the devices.

    Args:
      experiment: experiment on devices of this machine.
      options: options of XLA in addition to those of a run.
    """
    self._experiment = experiment
    start = time.perf_counter()
    with jax.set_mesh(experiment.mesh):
      self.compiled = compiling.compile_step(experiment, dict(options or {}))
    self.seconds = time.perf_counter() - start
    abstract = experiment.abstract_state
    init = jax.jit(
      experiment.init_state,
      out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract),
    )
    with jax.set_mesh(experiment.mesh):
      seed = experiment.config.seed
      self._key = sharding.random_key(seed, experiment.mesh)
      self._state = init(self._key)
    self._batch = {
      name: jax.device_put(_random(leaf, experiment), leaf.sharding)
      for name, leaf in experiment.abstract_batch().items()
    }

  def run(self, steps: int) -> None:
    """Runs steps and waits for the last one."""
    with jax.set_mesh(self._experiment.mesh):
      for _ in range(steps):
        self._state, metrics = self.compiled(
          self._state, self._batch, self._key, {}
        )
    jax.block_until_ready((self._state, metrics))

  def times(self, rounds: int = _ROUNDS, steps: int = _STEPS) -> list[float]:
    """Returns the seconds per step of each round of `steps` steps."""
    self.run(_WARMUP)
    seconds = []
    for _ in range(rounds):
      start = time.perf_counter()
      self.run(steps)
      seconds.append((time.perf_counter() - start) / steps)
    return seconds


def _random(leaf: jax.ShapeDtypeStruct, experiment: Experiment) -> np.ndarray:
  """Returns random pixels, labels, or a mask without padding."""
  rng = np.random.default_rng(0)
  if leaf.dtype == np.uint8:
    return rng.integers(0, 256, leaf.shape, np.uint8)
  if jnp.issubdtype(leaf.dtype, jnp.integer):
    classes = experiment.config.get('num_classes') or 2
    return rng.integers(0, classes, leaf.shape).astype(leaf.dtype)
  return np.ones(leaf.shape, leaf.dtype)
