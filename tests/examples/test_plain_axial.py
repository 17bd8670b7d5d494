"""Losses and gradients of the axial models against plain jax.numpy.

Images are wider than high, so that exchanging rows and columns would change the
result.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.training import plain_layers as plain
from tests.training import plain_steps
from vit_jax.arrays import tree
from vit_jax.objectives.contract import Inputs
from vit_jax.objectives.mixing import normalize

VIT = dict(width=32, depth=2, mlp_dim=64, num_heads=2, patch_size=4)
KINDS = {
  'axial_vit': ('examples/axial.py:variant=B/16', VIT),
  'axial_resnet': (
    'examples/axial.py:variant=R50',
    dict(depths=(2, 1), num_heads=2),
  ),
}
EPSILON = 1e-4  # epsilon of the AxialResNet's norms


def vit_loss(params, image, label):
  """Computes attention along rows, then along columns, line by line."""
  x = plain.patches(normalize(jnp.asarray(image)), 4)
  x = plain.dense(x, params['embedding'], axes=3)  # [n, rows, columns, d]
  rows, columns = (params['position'][name] for name in ('rows', 'columns'))
  rows = jnp.repeat(rows[:, None], len(columns), 1)
  x += jnp.concatenate([rows, jnp.stack([columns] * len(rows))], axis=-1)
  for i in range(2):
    pair = plain.layer(params['encoder']['layers'], i)
    for axis, name in ((1, 'row'), (2, 'column')):  # line by line
      x = jax.vmap(plain.block, (axis, None), axis)(x, pair[name])
  x = plain.norm(x, params['encoder']['norm']).mean((1, 2))
  return plain.sigmoid_cross_entropy(plain.dense(x, params['head']), label)


def attend(x, p):
  """Computes attention within lines `[n, positions, channels]`."""
  n, places, channels = x.shape

  def norm(x, name):
    return plain.group_norm(x[:, :, None], p[name], EPSILON)[:, :, 0]

  qkv = norm(x @ p['qkv'].reshape(channels, -1), 'gn_qkv')
  # Column `places - 1 + k - q` belongs to the key at k and the query at q.
  relative = jnp.stack(
    [p['relative'][:, places - 1 - q :][:, :places] for q in range(places)]
  )  # [q, c, k]
  parts, out = (channels // 4, channels // 2), []
  for each in jnp.split(qkv, 2, axis=-1):  # heads
    query, key, value = jnp.split(each, parts, axis=-1)
    of_query, of_key, of_value = jnp.split(relative, parts, axis=1)
    logits = jnp.einsum('nqc,nkc->nqk', query, key)
    logits += jnp.einsum('nqc,qck->nqk', query, of_query)
    logits += jnp.einsum('nkc,qck->nqk', key, of_key)
    weights = jax.nn.softmax(logits)
    out.append(
      jnp.einsum('nqk,nkc->nqc', weights, value)
      + jnp.einsum('nqk,qck->nqc', weights, of_value)
    )
  return norm(jnp.concatenate(out, -1), 'gn_out')


def unit(x, p, stride=1):
  """Computes a bottleneck unit with axial attention instead of the 3x3."""
  relu = jax.nn.relu
  y = relu(plain.group_norm(plain.conv(x, p['conv1']), p['gn1'], EPSILON))
  for axis, name in ((1, 'row'), (2, 'column')):
    y = jax.vmap(attend, (axis, None), axis)(y, p[name])
  if stride > 1:
    y = plain.patches(y, stride).mean((3, 4))
  y = plain.group_norm(plain.conv(relu(y), p['conv3']), p['gn3'], EPSILON)
  if 'conv_proj' in p:
    x = plain.conv(x, p['conv_proj'], stride=stride)
    x = plain.group_norm(x, p['gn_proj'], EPSILON)
  return relu(x + y)


def resnet_loss(params, image, label):
  x = plain.conv(normalize(jnp.asarray(image)), params['conv_root'], stride=2)
  x = jax.nn.relu(plain.group_norm(x, params['gn_root'], EPSILON))
  x = unit(plain.window_maximum(x), params['block1']['unit1'])
  x = unit(x, plain.layer(params['block1']['layers'], 0))
  x = unit(x, params['block2']['unit1'], stride=2).mean((1, 2))
  return plain.sigmoid_cross_entropy(plain.dense(x, params['head']), label)


@pytest.mark.long
@pytest.mark.parametrize('kind', ['axial_vit', 'axial_resnet'])
def test_loss_and_gradients_equal_the_plain_path(kind):
  """They are compared for every parameter, none of which is at its start."""
  path, sizes = KINDS[kind]
  sizes = {f'model__{key}': value for key, value in sizes.items()}
  experiment = plain_steps.build(path, **sizes, image_size=(8, 16))
  # With other seeds, a ReLU can be at its kink, where rounding decides.
  rng = np.random.default_rng(1)
  params = jax.tree.map(
    lambda leaf: leaf + rng.normal(0, 0.05, leaf.shape).astype(np.float32),
    plain_steps.start_of(experiment),
  )
  batch = next(plain_steps.batches(experiment.config))
  batch = jax.tree.map(jnp.asarray, batch)
  loss = {'axial_vit': vit_loss, 'axial_resnet': resnet_loss}[kind]
  expected = jax.jit(jax.value_and_grad(loss))(params, **batch)

  @jax.jit
  @jax.value_and_grad
  def ours(params):
    inputs = Inputs({}, batch, jax.random.key(0), jnp.int32(0), {})
    return experiment.objective.loss(params, inputs)[0]

  for (path, found), leaf in zip(
    tree.flatten(ours(params)).items(),
    tree.flatten(expected).values(),
    strict=True,
  ):
    scale = max(np.abs(leaf).max(), 1e-3)
    # Float32: sums over maps in another order.
    np.testing.assert_allclose(found, leaf, atol=1e-3 * scale, err_msg=path)
