"""Twenty training steps against a plain ViT written with jax.numpy alone.

No scan, no rematerialisation, no kernel, no derivative by hand, no sharding;
Adam as its paper has it. Both start from the same parameters.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.arrays import tree
from vit_jax.config import overrides
from vit_jax.objectives.mixing import normalize
from vit_jax.plan.evaluate import changed
from vit_jax.training.experiment import Experiment

STEPS, CLASSES = 20, 10
SMALL = dict(
  **dict(model__width=128, model__depth=3, model__mlp_dim=256),
  **dict(model__num_heads=2, model__patch_size=8, model__dropout=0.0),
  **dict(
    image_size=(32, 32), batch_size=16, num_classes=CLASSES, micro_batches=1
  ),
  **dict(total=f'{STEPS} steps', schedule__warmup='10 steps'),
  **dict(train__num_examples=1000, model__unroll=1),
)


def changes(dtype, **model):
  return dict(
    model__dtype=dtype, **{f'model__{k}': v for k, v in model.items()}
  )


# (changes of the config, relative tolerance of each loss)
WAYS = {
  'float32': (changes('float32'), 1e-5),
  'unrolled': (changes('float32', unroll=3, remat='full'), 1e-5),
  'kernels on a mesh': (
    changes('float32', attention='kernel')
    | dict(mesh__data=4, mesh__fsdp=2, micro_batches=2),
    1e-5,
  ),
  'unrolled on a mesh, layers apart': (
    changes('float32', unroll=3) | dict(mesh__data=8, micro_batches=2),
    1e-5,
  ),
  'bfloat16': (changes('bfloat16', remat='none'), 4e-3),
  'bfloat16 on a mesh, layers apart': (
    changes('bfloat16', unroll=3, remat='dots')
    | dict(mesh__data=8, micro_batches=2),
    4e-3,
  ),
  'bfloat16 kernels': (changes('bfloat16', attention='kernel'), 4e-3),
}


def batches():
  """Images with something to learn in them: a brightness for each class."""
  rng = np.random.default_rng(0)
  for _ in range(STEPS):
    label = rng.integers(0, CLASSES, 16, dtype=np.int32)
    noise = rng.integers(0, 128, (16, 32, 32, 3))
    image = noise + 12 * label[:, None, None, None]
    yield {'image': image.astype(np.uint8), 'label': label}


def norm(x, p):
  centred = x - x.mean(-1, keepdims=True)
  deviation = jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
  return centred / deviation * p['scale'] + p['bias']


def dense(x, p, axes=1):
  return jnp.tensordot(x, p['kernel'], axes) + p['bias']


def attention(x, p):
  q, k, v = (dense(x, p[name]) for name in ('query', 'key', 'value'))
  logits = jnp.einsum('nqhc,nkhc->nhqk', q, k) / jnp.sqrt(q.shape[-1])
  y = jnp.einsum('nhqk,nkhc->nqhc', jax.nn.softmax(logits, -1), v)
  return dense(y, p['out'], axes=2)


def plain_loss(params, image, label):
  """Equations 1 to 4 of the paper and the sigmoid cross-entropy."""
  x = normalize(jnp.asarray(image)).reshape(-1, 4, 8, 4, 8, 3)
  x = x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, 16, 8, 8, 3)
  x = dense(x, params['embedding'], axes=3)
  cls = jnp.broadcast_to(params['cls'], (len(x), 1, x.shape[-1]))
  x = jnp.concatenate([cls, x], 1) + params['position']['embedding']
  for i in range(SMALL['model__depth']):
    p = jax.tree.map(lambda leaf, i=i: leaf[i], params['encoder']['layers'])
    x = x + attention(norm(x, p['norm1']), p['attention'])
    y = jax.nn.gelu(dense(norm(x, p['norm2']), p['mlp']['fc1']))
    x = x + dense(y, p['mlp']['fc2'])
  x = norm(x, params['encoder']['norm'])[:, 0]
  x = jnp.tanh(dense(x, params['pre_logits']))
  logits, targets = dense(x, params['head']), jax.nn.one_hot(label, CLASSES)
  terms = jax.nn.softplus(logits) - targets * logits
  return terms.sum(-1).mean()


@functools.cache
def start_params():
  """What every way starts from, on the host."""
  experiment = build(**WAYS['float32'][0])
  with jax.set_mesh(experiment.mesh):
    state = jax.jit(experiment.init_state)(jax.random.key(0))
  return jax.device_get(state.params)


@jax.jit
def moments(first, second, grads):
  first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
  second = jax.tree.map(lambda v, g: 0.999 * v + 1e-3 * g * g, second, grads)
  return first, second


@jax.jit
def adam(params, first, second, lr, t):
  """Table 3's update: weight decay 0.03 on everything, times the rate."""

  def update(p, m, v):
    direction = m / (1 - 0.9**t) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return p - lr * (direction + 0.03 * p)

  return jax.tree.map(update, params, first, second)


@functools.cache
def plain_losses():
  """Losses of the plain path."""
  experiment, start = build(**WAYS['float32'][0]), start_params()
  params, first, second = (
    start,
    *[jax.tree.map(jnp.zeros_like, start) for _ in range(2)],
  )
  loss_fn, losses = jax.jit(jax.value_and_grad(plain_loss)), []
  for step, batch in enumerate(batches()):
    loss, grads = loss_fn(params, batch['image'], batch['label'])
    losses.append(float(loss))
    lr = float(experiment.trainer.schedule(step))
    first, second = moments(first, second, grads)
    params = adam(params, first, second, lr, step + 1)
  return losses


def build(**more):
  config = changed(overrides.load('configs/l16_i21k.py'), **(SMALL | more))
  devices = jax.devices() if 'mesh__data' in more else jax.devices()[:1]
  return Experiment.build(config, devices)


@pytest.mark.slow
@pytest.mark.parametrize('way', WAYS)
def test_losses_equal_the_plain_path(way):
  """Every way to run a step trains the same network."""
  more, tolerance = WAYS[way]
  expected = plain_losses()
  experiment = build(**more)
  assert bool(experiment.model.apart) == ('apart' in way or 'unrolled' in way)
  with jax.set_mesh(experiment.mesh):
    state = jax.jit(experiment.trainer.state_of)(start_params(), {})
    step = jax.jit(experiment.trainer.train_step)
    losses = []
    for batch in batches():
      state, metrics = step(state, batch, jax.random.key(0))
      losses.append(float(metrics['loss']))
  assert expected[-1] < 0.95 * expected[0]  # it learns: not all the same number
  np.testing.assert_allclose(losses, expected, rtol=tolerance)


def test_the_plain_path_uses_every_parameter():
  """Its gradient of each leaf is not zero."""
  moved = jax.tree.map(lambda p: p + 0.01, start_params())
  batch = next(batches())
  grads = jax.jit(jax.grad(plain_loss))(moved, batch['image'], batch['label'])
  for path, grad in tree.flatten(grads).items():
    assert jnp.abs(grad).max() > 0, path
