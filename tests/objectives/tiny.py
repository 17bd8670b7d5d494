"""Random batches and parameters for tests of objectives on small images."""

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.objectives.contract import Inputs

KEY = jax.random.key(5)
# Images of patches that are masked.
SIZE, SIDE, GRID, COUNT = (16, 24), 4, (4, 6), 24
TOTAL, EPOCH = 40, 4


def steps(duration):
  """Converts durations of a run with `TOTAL` steps, `EPOCH` per epoch."""
  number, unit = duration.split(' ')
  scale = {'steps': 1, 'epochs': EPOCH, '%': TOTAL / 100}[unit]
  return round(float(number) * scale)


def images_of(*shape, seed=0):
  """Returns random pixels, uint8 `[*shape, 3]`."""
  rng = np.random.default_rng(seed)
  return jnp.array(rng.integers(0, 256, (*shape, 3)), jnp.uint8)


def batch(n=4, size=SIZE, seed=0):
  return {'image': images_of(n, *size, seed=seed)}


def labelled(n, size, classes, seed=0):
  labels = np.random.default_rng(seed).integers(0, classes, n)
  return batch(n, size, seed) | {'label': jnp.array(labels, jnp.int32)}


def noisy(of, seed=1, scale=0.2):
  """Returns random parameters, of which none is zero."""
  shapes, _ = jax.eval_shape(of.init, KEY, None)
  return noise_like(shapes, seed, scale)


def noise_like(shapes, seed=1, scale=0.2):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda s: jnp.array(rng.normal(0, scale, s.shape), s.dtype), shapes
  )


def inputs(batch, extra=None, frozen=None, key=KEY, step=0):
  return Inputs(extra or {}, batch, key, jnp.array(step), frozen or {})


def loss_of(of, params, examples, key):
  return of.loss(params, inputs(examples, key=key))[0]
