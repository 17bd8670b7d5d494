"""Twenty training steps, by Adam's formula and by a `Trainer`."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.arrays import tree
from vit_jax.config import loading
from vit_jax.plan.compile import changed
from vit_jax.training.experiment import Experiment

STEPS, CLASSES = 20, 10
SMALL = dict(
  batch_size=16,
  num_classes=CLASSES,
  micro_batches=1,
  total=f'{STEPS} steps',
  schedule__warmup='10 steps',
  train__num_examples=1000,
  model__unroll=1,
  optimizer__weight_decay=0.03,
  optimizer__decay_mask='all',
  optimizer__clip_norm=None,
  model__dtype='float32',
)
# Every axis of the mesh, and micro-batches of one example per device.
MESH = dict(
  mesh__data=2,
  mesh__fsdp=2,
  mesh__model=2,
  micro_batches=2,
  batch_size=8,
)


class Trained(NamedTuple):
  """The results of a training.

  Attributes:
    losses: loss of each step.
    norms: norm of each step's gradient.
    params: parameters after the last step.
  """

  losses: list[float]
  norms: list[float]
  params: Any


def build(path, **more):
  """Builds the experiment of a config with small sizes, also on a mesh."""
  config = changed(loading.load(path), **(SMALL | more))
  devices = jax.devices() if 'mesh__data' in more else jax.devices()[:1]
  return Experiment.build(config, devices)


def batches(config):
  """Yields images with a brightness per class, which can be learned."""
  (height, width), size = config.image_size, config.batch_size
  rng = np.random.default_rng(0)
  for _ in range(STEPS):
    label = rng.integers(0, CLASSES, size, dtype=np.int32)
    noise = rng.integers(0, 128, (size, height, width, 3))
    image = noise + 12 * label[:, None, None, None]
    yield {'image': image.astype(np.uint8), 'label': label}


@jax.jit
def _moments(first, second, grads):
  first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
  second = jax.tree.map(lambda v, g: 0.999 * v + 1e-3 * g * g, second, grads)
  return first, second


@jax.jit
def _adam(params, first, second, lr, t):
  """Applies Table 3's update: decay on all parameters, times the rate."""

  def update(p, m, v):
    direction = m / (1 - 0.9**t) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return p - lr * (direction + 0.03 * p)

  return jax.tree.map(update, params, first, second)


def plainly(experiment, start, gradient):
  """Trains with Adam on the plain path.

  Args:
    experiment: defines the learning rates and the image size.
    start: initial parameters.
    gradient: (parameters, images, labels) → (loss, its gradient).
  """
  params, losses, norms = start, [], []
  first = second = jax.tree.map(jnp.zeros_like, start)
  for step, batch in enumerate(batches(experiment.config)):
    loss, grads = gradient(params, batch['image'], batch['label'])
    losses.append(float(loss))
    squares = [(np.float64(g) ** 2).sum() for g in jax.tree.leaves(grads)]
    norms.append(float(np.sqrt(sum(squares))))
    first, second = _moments(first, second, grads)
    lr = float(experiment.trainer.schedule(step))
    params = _adam(params, first, second, lr, step + 1)
  return Trained(losses, norms, jax.device_get(params))


def start_of(experiment):
  """Returns the initial parameters of a training, on the host."""
  with jax.set_mesh(experiment.mesh):
    state = jax.jit(experiment.init_state)(jax.random.key(0))
  return jax.device_get(state.params)


def ours(experiment, start):
  """Runs the experiment's own steps from the same parameters."""
  losses, norms = [], []
  with jax.set_mesh(experiment.mesh):
    places = jax.tree.map(lambda s: s.sharding, experiment.abstract_state())
    begin = jax.jit(experiment.trainer.state_of, out_shardings=places)
    state = begin(start, {})
    step = jax.jit(
      experiment.trainer.train_step, out_shardings=(places, None)
    )  # otherwise it would be compiled again for its own output
    for batch in batches(experiment.config):
      state, metrics = step(state, batch, jax.random.key(0), {})
      losses.append(float(metrics['loss']))
      norms.append(float(metrics['grad_norm']))
    return Trained(losses, norms, jax.device_get(state.params))


def unsettled(start):
  """Returns parameters that all matter, and keeps rectifiers off their kinks.

  All parameters get noise: heads and last norms start at 0, which would make
  other gradients zero. If a rectifier's input is a rounding error away from 0,
  the gradients of the two paths differ, and Adam enlarges small gradients.
  Therefore, norms before rectifiers get biases of ±4 standard deviations.
  """
  rng, moved = np.random.default_rng(0), {}
  for path, leaf in tree.flatten(start).items():
    leaf = leaf + rng.normal(0, 0.05, leaf.shape).astype(np.float32)
    if re.search(r'(gn_root|gn[123]|gn_out|^norm)/bias$', path):
      # What is added to a shortcut of ±4 must not be rounded away.
      signs = [1] if path.endswith('layers/gn3/bias') else [-1, 1]
      leaf += rng.choice(signs, leaf.shape) * np.float32(4)
    moved[path] = leaf
  return tree.unflatten(moved)


def check(experiment, gradient):
  """Asserts that an experiment's steps equal those of the plain path.

  It compares losses, norms of gradients, and the final distance of each leaf,
  relative to how far the leaf moved. The differences are 6e-7, 7e-7 and 2e-5,
  and 3e-4 for an AxialResNet, which has the most rectifiers.

  Args:
    experiment: experiment with a model in float32.
    gradient: see `plainly`.
  """
  start = unsettled(start_of(experiment))
  expected = plainly(experiment, start, gradient)
  found = ours(experiment, start)
  assert expected.losses[-1] < 0.99 * expected.losses[0]
  np.testing.assert_allclose(found.losses, expected.losses, rtol=5e-6)
  np.testing.assert_allclose(found.norms, expected.norms, rtol=5e-6)
  begin, end, other = map(tree.flatten, (start, expected.params, found.params))
  for path, leaf in end.items():
    way, apart = leaf - begin[path], other[path] - leaf
    # The softmax does not depend on a bias of all keys: its gradient is a
    # rounding error around 0, which Adam turns into steps of either sign.
    if not path.endswith('attention/key/bias'):
      share = np.linalg.norm(apart) / np.linalg.norm(way)
      assert share < 2e-3, (path, share)
