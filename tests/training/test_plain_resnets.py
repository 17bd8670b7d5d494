"""Twenty training steps of a ResNet and a hybrid against plain jax.numpy.

As in test_plain_path: the plain path has no scan, rematerialization or
sharding. Ours runs on eight devices with every axis of the mesh, and in
micro-batches.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.faults.counts import further
from tests.training import plain_layers as plain
from tests.training import plain_steps
from vit_jax.objectives.mixing import normalize

# name: (config, changes); the hybrid's variant determines the kind of stem
KINDS = {
  'resnet': (
    'configs/resnet.py',
    dict(model__depths=(2,), model__width_factor=1),
  ),
  'hybrid': (
    'configs/vit.py:variant=R50+B/16,data=jft',
    dict(model__width=64, model__depth=2, model__mlp_dim=64)
    | dict(model__num_heads=2, model__patch_size=2)
    | dict(model__stem=dict(name='resnet', depths=(2,), width_factor=1)),
  ),
}


def unit(x, p, before):
  """Computes a bottleneck unit with stride 1."""
  epsilon = 1e-5 if before else 1e-6
  norms, convs = (
    [functools.partial(function, p=p[f'{name}{i}']) for i in (1, 2, 3)]
    for function, name in (
      (functools.partial(plain.group_norm, epsilon=epsilon), 'gn'),
      (functools.partial(plain.conv, before=before), 'conv'),
    )
  )
  relu, shortcut = jax.nn.relu, x
  if before:
    y = x
    for i, (norm, convolve) in enumerate(zip(norms, convs, strict=True)):
      y = relu(norm(y))
      if i == 0 and 'conv_proj' in p:
        shortcut = plain.conv(y, p['conv_proj'], True)
      y = convolve(y)
    return shortcut + y
  if 'conv_proj' in p:
    shortcut = plain.conv(x, p['conv_proj'])
    shortcut = plain.group_norm(shortcut, p['gn_proj'], epsilon)
  y = relu(norms[0](convs[0](x)))
  y = relu(norms[1](convs[1](y)))
  return relu(shortcut + norms[2](convs[2](y)))


def stage(x, p, before):
  """Computes two units."""
  return unit(unit(x, p['unit1'], before), plain.layer(p['layers'], 0), before)


def resnet_loss(params, image, label):
  x = normalize(jnp.asarray(image))
  x = plain.conv(x, params['conv_root'], True, 2)
  x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
  x = stage(plain.window_maximum(x, 'VALID'), params['block1'], True)
  x = jax.nn.relu(plain.group_norm(x, params['norm'], 1e-5)).mean((1, 2))
  return plain.sigmoid_cross_entropy(plain.dense(x, params['head']), label)


def hybrid_loss(params, image, label):
  stem = params['stem']
  x = plain.conv(normalize(jnp.asarray(image)), stem['conv_root'], stride=2)
  x = jax.nn.relu(plain.group_norm(x, stem['gn_root'], 1e-6))
  x = stage(plain.window_maximum(x), stem['block1'], False)
  x = plain.patches(x, 2).reshape(len(x), -1, 2, 2, 256)
  x = plain.dense(x, params['embedding'], axes=3)
  cls = jnp.broadcast_to(params['cls'], (len(x), 1, x.shape[-1]))
  x = jnp.concatenate([cls, x], 1) + params['position']['embedding']
  for i in range(2):
    x = plain.block(x, plain.layer(params['encoder']['layers'], i))
  x = plain.norm(x, params['encoder']['norm'])[:, 0]
  x = jnp.tanh(plain.dense(x, params['pre_logits']))
  return plain.sigmoid_cross_entropy(plain.dense(x, params['head']), label)


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['hybrid', *further('resnet')])
def test_steps_equal_the_plain_path(kind):
  """The mesh is data=2, fsdp=2, model=2, with two micro-batches."""
  path, more = KINDS[kind]
  size = dict(image_size=(8, 16))
  experiment = plain_steps.build(path, **(more | size | plain_steps.MESH))
  loss = {'resnet': resnet_loss, 'hybrid': hybrid_loss}[kind]
  gradient = jax.jit(jax.value_and_grad(loss))
  plain_steps.check(experiment, gradient)
