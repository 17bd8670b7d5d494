"""Twenty training steps against a plain ViT written with jax.numpy only.

The plain ViT has no scan, rematerialization, kernel, hand-written derivative or
sharding; Adam is that of its paper. Both start from the same parameters.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.faults.counts import further
from tests.training import plain_layers as plain
from tests.training import plain_steps
from vit_jax.arrays import tree
from vit_jax.objectives.mixing import normalize

SIZES = dict(
  model__width=128,
  model__depth=3,
  model__mlp_dim=256,
  model__num_heads=2,
  model__patch_size=8,
  model__dropout=0.0,
  image_size=(32, 32),
)


SPLIT = dict(mesh__data=8, micro_batches=2)
# Changes of the config.
WAYS = {
  'float32': {},
  'kernels on a mesh': dict(
    model__attention='kernel', mesh__data=4, mesh__fsdp=2, micro_batches=2
  ),
  'unrolled on a mesh': SPLIT | dict(model__unroll=3),
  'unrolled': dict(model__unroll=3, model__remat='full'),
  'bfloat16 on a mesh, unrolled': SPLIT
  | dict(model__dtype='bfloat16', model__unroll=3, model__remat='dots'),
  'bfloat16 kernels': dict(model__dtype='bfloat16', model__attention='kernel'),
}


def plain_loss(params, image, label):
  """Computes equations 1 to 4 of the paper and the sigmoid cross-entropy."""
  x = plain.patches(normalize(jnp.asarray(image)), 8)
  x = plain.dense(x.reshape(-1, 16, 8, 8, 3), params['embedding'], axes=3)
  cls = jnp.broadcast_to(params['cls'], (len(x), 1, x.shape[-1]))
  x = jnp.concatenate([cls, x], 1) + params['position']['embedding']
  for i in range(SIZES['model__depth']):
    x = plain.block(x, plain.layer(params['encoder']['layers'], i))
  x = plain.norm(x, params['encoder']['norm'])[:, 0]
  x = jnp.tanh(plain.dense(x, params['pre_logits']))
  return plain.sigmoid_cross_entropy(plain.dense(x, params['head']), label)


def build(**more):
  return plain_steps.build('configs/l16_i21k.py', **(SIZES | more))


@functools.cache
def start_params():
  """Returns the initial parameters of all ways, on the host."""
  return plain_steps.start_of(build())


@functools.cache
def plain_losses():
  """Returns the losses of the plain path."""
  experiment = build()
  gradient = jax.jit(jax.value_and_grad(plain_loss))
  return plain_steps.plainly(experiment, start_params(), gradient)


@pytest.mark.slow
@pytest.mark.parametrize('way', [*WAYS][:1] + further(*[*WAYS][1:]))
def test_losses_equal_the_plain_path(way):
  """Every way to run a step trains the same network."""
  expected = plain_losses()
  experiment = build(**WAYS[way])
  assert bool(experiment.model.unstacked) == ('unrolled' in way)
  losses = plain_steps.ours(experiment, start_params())
  assert expected[-1] < 0.95 * expected[0]  # it learns, so the losses differ
  tolerance = 4e-3 if 'bfloat16' in way else 1e-5
  np.testing.assert_allclose(losses, expected, rtol=tolerance)


@pytest.mark.slow
def test_the_plain_path_uses_every_parameter():
  """The gradient of each parameter of the plain path is not zero."""
  moved = jax.tree.map(lambda p: p + 0.01, start_params())
  batch = next(plain_steps.batches(build().config))
  grads = jax.jit(jax.grad(plain_loss))(moved, batch['image'], batch['label'])
  for path, grad in tree.flatten(grads).items():
    assert jnp.abs(grad).max() > 0, path
