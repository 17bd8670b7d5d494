"""Linear classifiers of frozen features, trained as by DINO or by MAE.

Both use random batches of the features. All features are on every device, and
every device computes the same, so that the result does not depend on the number
of devices.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from vit_jax.arrays import host, sharding
from vit_jax.evaluators.features import Labelled
from vit_jax.evaluators.linear_fit import Classifier, untrained

_MOMENTUM = 0.9
_TRUST = 1e-3
_BATCH_EPSILON = 1e-6  # added to the variance of a batch
_RUNNING = 0.1  # share of a batch in the running statistics
_DEVIATION = 0.01  # of the first kernel
_WARMUP = 10  # epochs
_REFERENCE = 256  # the batch size that learning rates are given for


class Recipe(NamedTuple):
  """Recipe of the training.

  Attributes:
    solver: 'sgd' (DINO: cosine decay from epoch to epoch) or 'lars' (MAE:
      updates of the kernel are scaled by a trust ratio; linear warm-up for 10
      epochs, or for half of the epochs if there are fewer than 20, then cosine
      decay from step to step).
    norm: 'batch', without scale and shift; 'standard' or 'none'.
    lr: learning rate for a batch of 256; it is scaled with the batch size.
    epochs: number of passes over the features.
    batch_size: at most the number of examples; the examples that do not fill
      the last batch of an epoch are left out of that epoch.
    seed: seed of the kernel and of the order.
  """

  solver: str
  norm: str
  lr: float
  epochs: int
  batch_size: int
  seed: int


class State(NamedTuple):
  """State that a step changes; running statistics only with batch norm."""

  kernel: Float[Array, 'd k']
  bias: Float[Array, ' k']
  kernel_momentum: Float[Array, 'd k']
  bias_momentum: Float[Array, ' k']
  mean: Float[Array, ' d']
  variance: Float[Array, ' d']


def fit(
  data: Labelled,
  recipe: Recipe,
  mesh: Mesh,
  check: Callable[[], None] = lambda: None,
) -> Classifier:
  """Trains from a random kernel.

  Args:
    data: examples; classes without examples are not learned.
    recipe: recipe of the training.
    mesh: devices.
    check: is called before every epoch; it may raise to end the training early.
  """
  empty = untrained(data, recipe.norm == 'standard')
  labels = np.searchsorted(empty.classes, data.labels)
  features = data.features
  if recipe.norm == 'standard':
    features = empty.inputs(features)
  whole = sharding.replicated(mesh)

  def place(array: np.ndarray, dtype: Any) -> jax.Array:
    leaf = jax.ShapeDtypeStruct(array.shape, dtype, sharding=whole)
    return host.place(array, leaf)

  d, k = empty.kernel.shape
  first = initial(d, k, recipe.seed)
  state = State(*(place(each, np.float32) for each in first))
  placed = place(features, np.float32), place(labels, np.int32)
  run = jax.jit(
    functools.partial(epoch, recipe.solver == 'lars', recipe.norm == 'batch'),
    out_shardings=whole,
  )
  size = min(recipe.batch_size, len(labels))
  steps = len(labels) // size
  for number in range(recipe.epochs):
    check()
    order = order_of(len(labels), number, recipe.seed)[: steps * size]
    rates = learning_rates(recipe, number, steps, size)
    state = run(
      state,
      *placed,
      order.reshape(steps, size).astype(np.int32),
      rates.astype(np.float32),
    )
  last = jax.device_get(state)
  if recipe.norm == 'batch':
    scale = np.sqrt(last.variance.astype(np.float64) + _BATCH_EPSILON)
    empty = empty._replace(mean=last.mean, scale=scale)
  return empty._replace(kernel=last.kernel, bias=last.bias)


def initial(d: int, k: int, seed: int) -> list[np.ndarray]:
  """Returns the initial `State`.

  The kernel has standard deviation .01; the mean is 0 and the variance 1.
  """
  kernel = np.random.default_rng(seed).normal(0, _DEVIATION, (d, k))
  zeros, bias = np.zeros((d, k)), np.zeros(k)
  return [kernel, bias, zeros, bias, np.zeros(d), np.ones(d)]


def order_of(n: int, number: int, seed: int) -> Int[np.ndarray, ' n']:
  """Returns the order of the examples in an epoch."""
  return np.random.default_rng([seed, number]).permutation(n)


def learning_rates(
  recipe: Recipe, number: int, steps: int, size: int
) -> Float[np.ndarray, ' steps']:
  """Returns the learning rate of each step of an epoch.

  Args:
    recipe: recipe of the training.
    number: number of epochs before this one.
    steps: steps per epoch.
    size: batch size.
  """
  highest = recipe.lr * size / _REFERENCE
  if recipe.solver == 'sgd':
    share = 0.5 * (1 + np.cos(np.pi * number / recipe.epochs))
    return np.full(steps, highest * share)
  warmup = min(_WARMUP, recipe.epochs / 2)
  time = number + np.arange(steps) / steps
  progress = (time - warmup) / (recipe.epochs - warmup)
  share = 0.5 * (1 + np.cos(np.pi * progress))
  return highest * np.where(time < warmup, time / warmup, share)


def epoch(
  lars: bool,
  batch_norm: bool,
  state: State,
  features: Float[Array, 'n d'],
  labels: Int[Array, ' n'],
  order: Int[Array, 'steps b'],
  rates: Float[Array, ' steps'],
) -> State:
  """Makes one pass over the examples.

  Args:
    lars: scale the kernel's gradient by the trust ratio.
    batch_norm: normalise each feature over the batch.
    state: state before the epoch.
    features: features of all examples.
    labels: labels from 0 to k - 1.
    order: rows of each batch.
    rates: learning rate of each step.
  """

  def step(state: State, inputs: Any) -> tuple[State, None]:
    rows, rate = inputs
    x = features[rows]
    if batch_norm:
      x, state = _normalised(x, state)
    at_kernel, at_bias = _gradients(state, x, labels[rows])
    if lars:
      at_kernel *= trust_ratio(state.kernel, at_kernel)
    kernel_momentum = _MOMENTUM * state.kernel_momentum + at_kernel
    bias_momentum = _MOMENTUM * state.bias_momentum + at_bias
    state = state._replace(
      kernel=state.kernel - rate * kernel_momentum,
      bias=state.bias - rate * bias_momentum,
      kernel_momentum=kernel_momentum,
      bias_momentum=bias_momentum,
    )
    return state, None

  return jax.lax.scan(step, state, (order, rates))[0]


def trust_ratio(
  kernel: Float[Array, 'd k'], gradient: Float[Array, 'd k']
) -> Float[Array, '']:
  """Returns .001 · |W| / |gradient|, or 1 if one of the two norms is 0.

  Reference: You et al., arXiv 1708.03888, equation 6, without weight decay;
  biases are not scaled.
  """
  weight, update = jnp.linalg.norm(kernel), jnp.linalg.norm(gradient)
  both = (weight > 0) & (update > 0)
  return jnp.where(both, _TRUST * weight / jnp.where(both, update, 1), 1.0)


def _gradients(
  state: State, x: Float[Array, 'b d'], labels: Int[Array, ' b']
) -> tuple[Float[Array, 'd k'], Float[Array, ' k']]:
  """Computes the gradients of the mean cross-entropy, in full precision."""
  matmul = functools.partial(jnp.matmul, precision='highest')
  share = jax.nn.softmax(matmul(x, state.kernel) + state.bias)
  error = share - (labels[:, None] == jnp.arange(share.shape[-1]))
  error /= len(x)
  return matmul(x.T, error), error.sum(axis=0)


def _normalised(
  x: Float[Array, 'b d'], state: State
) -> tuple[Float[Array, 'b d'], State]:
  """Normalizes by the batch's mean and biased variance.

  The running variance is unbiased.
  """
  size, mean, variance = len(x), x.mean(axis=0), x.var(axis=0)
  unbiased = variance * (size / max(size - 1, 1))
  state = state._replace(
    mean=(1 - _RUNNING) * state.mean + _RUNNING * mean,
    variance=(1 - _RUNNING) * state.variance + _RUNNING * unbiased,
  )
  return (x - mean) / jnp.sqrt(variance + _BATCH_EPSILON), state
