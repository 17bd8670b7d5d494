"""Linear classifiers of frozen features, trained as in DINO or in MAE.

Both recipes use random batches of the features. Every device has all features
and computes the same updates, so that the result does not depend on the number
of devices.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from vit_jax.arrays import host, sharding
from vit_jax.evaluators.features import Labelled
from vit_jax.evaluators.linear_fit import Classifier, untrained

_MOMENTUM = 0.9
_TRUST = 1e-3  # trust coefficient of LARS
_BATCH_EPSILON = 1e-6  # added to the variance of a batch
_RUNNING = 0.1  # weight of a batch in the running statistics
_INITIAL_STD = 0.01  # standard deviation of the initial kernel
_WARMUP = 10  # epochs
_REFERENCE = 256  # batch size that learning rates refer to


class Recipe(NamedTuple):
  """Recipe of the training.

  Attributes:
    solver: 'sgd' (DINO: cosine decay, changed once per epoch) or 'lars' (MAE:
      updates of the kernel are scaled by a trust ratio; linear warm-up for 10
      epochs, or for half of the epochs if there are fewer than 20, then cosine
      decay, changed at every step).
    norm: normalization of the features: 'batch' (batch norm without scale and
      shift), 'standard' (by mean and standard deviation of all examples) or
      'none'.
    lr: learning rate for a batch of 256; it is scaled with the batch size.
    epochs: number of passes over the features.
    batch_size: batch size, or the number of examples if that is smaller. The
      examples that do not fill the last batch of an epoch are left out of that
      epoch.
    seed: seed of the initial kernel and of the order of the examples.
  """

  solver: str
  norm: str
  lr: float
  epochs: int
  batch_size: int
  seed: int


class Statistics(NamedTuple):
  """Running mean and unbiased variance of the features, for batch norm."""

  mean: Float[Array, ' d']
  variance: Float[Array, ' d']


def fit(
  data: Labelled,
  recipe: Recipe,
  mesh: Mesh,
  check: Callable[[], None] = lambda: None,
) -> Classifier:
  """Trains a linear classifier from a random kernel.

  Args:
    data: examples; classes without examples are never predicted.
    recipe: recipe of the training.
    mesh: mesh of the devices.
    check: function that is called before every epoch; it may raise to end the
      training early.

  Returns:
    Trained classifier, which includes the normalization of the features (batch
    norm: by the running statistics).
  """
  empty = untrained(data, recipe.norm == 'standard')
  labels = np.searchsorted(empty.classes, data.labels).astype(np.int32)
  features = data.features
  if recipe.norm == 'standard':
    features = empty.inputs(features)
  whole = sharding.replicated(mesh)

  def place(array: Any) -> jax.Array:
    leaf = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=whole)
    return host.place(array, leaf)

  d, k = empty.kernel.shape
  params, optimizer = initial(d, k, recipe.seed), optimizer_of(recipe.solver)
  statistics = Statistics(jnp.zeros(d), jnp.ones(d))
  state = (params, optimizer.init(params), statistics)
  state = jax.tree.map(place, jax.device_get(state))
  placed = place(features.astype(np.float32)), place(labels)
  run = jax.jit(
    functools.partial(epoch, optimizer, recipe.norm == 'batch'),
    out_shardings=whole,
  )
  size = min(recipe.batch_size, len(labels))
  steps = len(labels) // size
  for number in range(recipe.epochs):
    check()
    order = order_of(len(labels), number, recipe.seed)[: steps * size]
    rates = learning_rates(recipe, number, steps, size)
    order = order.reshape(steps, size).astype(np.int32)
    state = run(state, *placed, order, rates.astype(np.float32))
  params, _, statistics = jax.device_get(state)
  if recipe.norm == 'batch':
    variance = statistics.variance.astype(np.float64)
    scale = np.sqrt(variance + _BATCH_EPSILON)
    empty = empty._replace(mean=statistics.mean, scale=scale)
  return empty._replace(**params)


def initial(d: int, k: int, seed: int) -> dict[str, np.ndarray]:
  """Returns a random kernel `[d, k]` with std .01 and a bias of 0, float32."""
  kernel = np.random.default_rng(seed).normal(0, _INITIAL_STD, (d, k))
  return {
    'kernel': kernel.astype(np.float32),
    'bias': np.zeros(k, np.float32),
  }


def optimizer_of(solver: str) -> optax.GradientTransformation:
  """Returns momentum; 'lars' first scales the kernel's update by a trust ratio.

  The caller multiplies the result by the learning rate: after momentum, as in
  MAE's code.

  Args:
    solver: 'sgd' or 'lars'.

  Reference: You et al., arXiv 1708.03888, equation 6, without weight decay.
  """
  momentum = optax.trace(_MOMENTUM)
  if solver == 'sgd':
    return momentum
  ratio = optax.scale_by_trust_ratio(trust_coefficient=_TRUST)
  kernel_only = {'kernel': True, 'bias': False}
  return optax.chain(optax.masked(ratio, kernel_only), momentum)


def order_of(n: int, number: int, seed: int) -> Int[np.ndarray, ' n']:
  """Returns the order of the examples in an epoch.

  Args:
    n: number of examples.
    number: number of epochs before this one.
    seed: seed of the order.
  """
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
  peak = recipe.lr * size / _REFERENCE
  if recipe.solver == 'sgd':
    factor = 0.5 * (1 + np.cos(np.pi * number / recipe.epochs))
    return np.full(steps, peak * factor)
  warmup = min(_WARMUP, recipe.epochs / 2)
  time = number + np.arange(steps) / steps  # in epochs
  progress = (time - warmup) / (recipe.epochs - warmup)
  factor = 0.5 * (1 + np.cos(np.pi * progress))
  return peak * np.where(time < warmup, time / warmup, factor)


def epoch(
  optimizer: optax.GradientTransformation,
  batch_norm: bool,
  state: Any,
  features: Float[Array, 'n d'],
  labels: Int[Array, ' n'],
  order: Int[Array, 'steps b'],
  rates: Float[Array, ' steps'],
) -> Any:
  """Trains for one pass over the examples.

  Args:
    optimizer: transformation of the gradients.
    batch_norm: whether to normalize each feature over the batch.
    state: parameters, state of the optimizer and running statistics.
    features: features of all examples.
    labels: labels from 0 to k - 1.
    order: indices of the examples in each batch.
    rates: learning rate of each step.

  Returns:
    State after the epoch.
  """

  def loss(
    params: Any, x: Float[Array, 'b d'], labels: Int[Array, ' b']
  ) -> Any:
    logits = jnp.matmul(x, params['kernel'], precision='highest')
    logits += params['bias']
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()

  def step(state: Any, inputs: Any) -> tuple[Any, None]:
    params, optimizer_state, statistics = state
    rows, rate = inputs
    x = features[rows]
    if batch_norm:
      x, statistics = normalized(x, statistics)
    gradients = jax.grad(loss)(params, x, labels[rows])
    updates, optimizer_state = optimizer.update(
      gradients, optimizer_state, params
    )
    params = jax.tree.map(lambda p, update: p - rate * update, params, updates)
    return (params, optimizer_state, statistics), None

  return jax.lax.scan(step, state, (order, rates))[0]


def normalized(
  x: Float[Array, 'b d'], statistics: Statistics
) -> tuple[Float[Array, 'b d'], Statistics]:
  """Normalizes features by the mean and the biased variance of the batch.

  Args:
    x: features of the batch.
    statistics: running statistics before the batch.

  Returns:
    Normalized features, and the running statistics after the batch, whose
    variance is unbiased.
  """
  size, mean, variance = len(x), x.mean(axis=0), x.var(axis=0)
  batch: Any = Statistics(mean, variance * (size / max(size - 1, 1)))
  running: Any = optax.incremental_update(batch, statistics, _RUNNING)
  return (x - mean) / jnp.sqrt(variance + _BATCH_EPSILON), running
