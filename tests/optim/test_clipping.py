"""Tests of clipping by tensor against torch's norms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from updates import QKV, stacks, tensors

from vit_jax.arrays import tree
from vit_jax.errors import UserError
from vit_jax.optim import optimizers


@pytest.mark.parametrize('joined', [(), (QKV,)])
def test_clip_by_tensor_handles_each_layer_separately(joined):
  """A stack of layers is clipped as DINO's code clips separate layers."""
  grads, limit = stacks(0), 10.0
  clip = optimizers.clipping(limit, 'tensor', joined)
  ours, _ = jax.jit(clip.update)(grads, clip.init(grads))
  ours, given = tensors(ours, bool(joined)), tensors(grads, bool(joined))
  factors = set()
  for name, vector in given.items():
    factor = limit / (torch.tensor(vector).norm(2).item() + 1e-6)
    factors.add(min(factor, 1.0))
    expected = vector * factor if factor < 1 else vector
    np.testing.assert_allclose(ours[name], expected, rtol=1e-5)
  assert 1.0 in factors and len(factors) > 3


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
def test_wrong_settings_are_refused(settings, message):
  """The error is raised before a step is built."""
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
    leaves = [torch.nn.Parameter(torch.zeros(flat[p].shape)) for p in paths]
    for leaf, path in zip(leaves, paths, strict=True):
      leaf.grad = torch.tensor(np.array(flat[path]))
    torch.nn.utils.clip_grad_norm_(leaves, 3.0)
    for leaf, path in zip(leaves, paths, strict=True):
      np.testing.assert_allclose(ours[path], leaf.grad, rtol=1e-5)
