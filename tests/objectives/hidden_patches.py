"""Helpers for tests of objectives on hidden patches."""

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.objectives.contract import Inputs

SIZE, SIDE, GRID, COUNT = (16, 24), 4, (4, 6), 24
KEY = jax.random.key(5)


def batch(n=4, size=SIZE, seed=0):
  rng = np.random.default_rng(seed)
  images = rng.integers(0, 256, (n, *size, 3)).astype(np.uint8)
  return {'image': jnp.array(images)}


def noisy(of, examples):
  """Returns random parameters, of which none is zero."""
  shapes, _ = jax.eval_shape(of.init, KEY, examples)
  rng = np.random.default_rng(1)
  return jax.tree.map(
    lambda s: jnp.asarray(rng.normal(0, 0.2, s.shape), s.dtype), shapes
  )


def loss_of(of, params, examples, key):
  return of.loss(params, Inputs({}, examples, key, jnp.array(0), {}))[0]
