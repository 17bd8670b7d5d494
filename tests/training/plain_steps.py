"""Twenty training steps, by Adam's formula and by a `Trainer`."""

import jax
import jax.numpy as jnp
import numpy as np

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
  """Returns the losses of a training with Adam on the plain path.

  Args:
    experiment: defines the learning rates and the image size.
    start: initial parameters.
    gradient: (parameters, images, labels) → (loss, its gradient).
  """
  params, losses = start, []
  first = second = jax.tree.map(jnp.zeros_like, start)
  for step, batch in enumerate(batches(experiment.config)):
    loss, grads = gradient(params, batch['image'], batch['label'])
    losses.append(float(loss))
    first, second = _moments(first, second, grads)
    lr = float(experiment.trainer.schedule(step))
    params = _adam(params, first, second, lr, step + 1)
  return losses


def start_of(experiment):
  """Returns the initial parameters of a training, on the host."""
  with jax.set_mesh(experiment.mesh):
    state = jax.jit(experiment.init_state)(jax.random.key(0))
  return jax.device_get(state.params)


def ours(experiment, start):
  """Returns the losses of the experiment's own steps from these parameters."""
  losses = []
  with jax.set_mesh(experiment.mesh):
    places = jax.tree.map(lambda s: s.sharding, experiment.abstract_state)
    begin = jax.jit(experiment.trainer.state_of, out_shardings=places)
    state = begin(start, {})
    step = jax.jit(
      experiment.trainer.train_step, out_shardings=(places, None)
    )  # otherwise it would be compiled again for its own output
    for batch in batches(experiment.config):
      state, metrics = step(state, batch, jax.random.key(0), {})
      losses.append(float(metrics['loss']))
  return losses
