"""Tests of clipping by tensor against torch's norms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from vit_jax.arrays import tree
from vit_jax.errors import UserError
from vit_jax.optim import optimizers

SHAPES = {
  'encoder/layers/attention/query/kernel': (3, 4, 2, 2),
  'encoder/layers/attention/key/kernel': (3, 4, 2, 2),
  'encoder/layers/attention/value/kernel': (3, 4, 2, 2),
  'encoder/layers/attention/query/bias': (3, 2, 2),
  'encoder/layers/norm1/scale': (3, 4),
  'embedding/kernel': (2, 2, 3, 4),
  'head/bias': (4,),
  'scalar': (),
}
QKV = 'query|key|value'


def gradients(seed=0):
  """Returns gradients of very different sizes, some below the limit."""
  rng = np.random.default_rng(seed)
  made = {}
  for path, shape in SHAPES.items():
    sizes = 3.0 ** rng.integers(-3, 4, shape[:1] + (1,) * (len(shape) - 1))
    made[path] = jnp.array(rng.normal(size=shape) * sizes, jnp.float32)
  return tree.unflatten(made)


def theirs(grads, limit, joined):
  """Applies the original's `clip_gradients` to each of its tensors."""
  tensors = {}  # (name, layer) → the leaves of one tensor
  for path, leaf in tree.flatten(grads).items():
    name = path
    for part in ('query', 'key', 'value'):
      name = name.replace(part, 'qkv') if joined else name
    layers = range(3) if 'layers/' in path else [None]
    for layer in layers:
      part = torch.tensor(np.array(leaf if layer is None else leaf[layer]))
      tensors.setdefault((name, layer), []).append((path, part))
  result = {}
  for (_, layer), parts in tensors.items():
    norm = torch.cat([part.flatten() for _, part in parts]).norm(2)
    factor = limit / (norm + 1e-6)
    for path, part in parts:
      part = part * factor if factor < 1 else part
      result.setdefault(path, []).append(part.numpy())
      if layer is None:
        result[path] = part.numpy()
  return {k: np.stack(v) if type(v) is list else v for k, v in result.items()}


@pytest.mark.parametrize('joined', [(), (QKV,)])
def test_clip_by_tensor_handles_each_layer_separately(joined):
  """A stack of layers is clipped as separate layers would be."""
  grads = gradients()
  transformation = optimizers.clipping(3.0, 'tensor', joined)
  ours, _ = jax.jit(transformation.update)(grads, transformation.init(grads))
  expected, changed = theirs(grads, 3.0, joined), 0
  for path, leaf in tree.flatten(ours).items():
    np.testing.assert_allclose(leaf, expected[path], rtol=1e-5)
    changed += np.any(leaf != tree.flatten(grads)[path])
  assert 3 < changed < len(SHAPES)


def test_the_epsilon_counts_for_small_norms():
  """A norm of 1e-6 is halved at the limit 1e-6, as in the original."""
  grads = {'scalar': jnp.array(1e-6, jnp.float32)}
  transformation = optimizers.clipping(1e-6, 'tensor')
  updates, _ = transformation.update(grads, transformation.init(grads))
  np.testing.assert_allclose(updates['scalar'], 0.5e-6, rtol=1e-5)


@pytest.mark.parametrize(
  'settings, message',
  [
    (dict(clip='layer'), 'global, module, tensor'),
    (dict(clip='tensor', clip_joined=('(',)), 'regular expressions'),
    (dict(clip_joined=(QKV,)), "clip to 'tensor'"),
  ],
)
def test_messages_of_wrong_settings(settings, message):
  """They are raised before a step is built."""
  with pytest.raises(UserError, match=message):
    optimizers.adam(lambda _: 0.1, clip_norm=1.0, **settings)


def test_clip_by_module_equals_clip_grad_norm_of_each_module():
  """All layers of a stack count together, and the mask with the model."""
  rng = np.random.default_rng(0)
  flat = {
    path: jnp.array(rng.normal(size=shape) * scale, jnp.float32)
    for path, shape, scale in (
      ('mask', (1, 4), 9.0),
      ('model/encoder/layers/norm1/scale', (3, 4), 2.0),
      ('model/embedding/kernel', (2, 4), 0.1),
      ('head/fc1/kernel', (4, 4), 0.01),
      ('patch_head/fc1/kernel', (4, 4), 5.0),
    )
  }
  clip = optimizers.clipping(3.0, 'module', ('model|mask',))
  ours, _ = clip.update(tree.unflatten(flat), clip.init(None))
  ours = tree.flatten(ours)
  for module in (('mask', 'model'), ('head',), ('patch_head',)):
    paths = [path for path in flat if path.split('/')[0] in module]
    leaves = [
      torch.nn.Parameter(torch.tensor(np.array(flat[p]))) for p in paths
    ]
    for leaf in leaves:
      leaf.grad = leaf.detach().clone()
    torch.nn.utils.clip_grad_norm_(leaves, 3.0)
    for path, leaf in zip(paths, leaves, strict=True):
      np.testing.assert_allclose(ours[path], leaf.grad, rtol=1e-5)
