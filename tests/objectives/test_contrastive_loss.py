"""Tests of the loss of images and texts, whole and in parts."""

import importlib.util
import pathlib
import re
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.faults.counts import further, slow
from tests.objectives.tiny import images_of, noise_like
from vit_jax.arrays import sharding
from vit_jax.errors import UserError
from vit_jax.models import vit
from vit_jax.objectives import contrastive
from vit_jax.objectives.contract import Setting
from vit_jax.optim import optimizers
from vit_jax.training.step import Trainer

N, LENGTH, WIDTH = 32, 6, 16
SIZES = dict(width=WIDTH, depth=1, mlp_dim=16, num_heads=2, dtype='float32')
TEXT = dict(vocabulary=20, length=LENGTH, variant=None, **SIZES)
KEY = jax.random.key(0)


def objective_of(loss, **keys):
  model = vit.Model(0, patch_size=4, pool='gap', **SIZES)
  start = dict(temperature=5.0, bias=-2.0) | keys
  return contrastive.Objective(
    Setting(model, (8, 8)), loss=loss, text=TEXT, **start
  )


def batch_of():
  tokens = np.random.default_rng(0).integers(0, 20, (N, LENGTH))
  return {'image': images_of(N, 8, 8), 'tokens': jnp.array(tokens, jnp.int32)}


def embeddings(n=N):
  pair = noise_like(jax.ShapeDtypeStruct((2, n, WIDTH), jnp.float32))
  return pair / jnp.linalg.norm(pair, axis=-1, keepdims=True)


def assert_close(grads, expected):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(
      a, b, rtol=1e-6, atol=1e-6 * max(1, np.abs(b).max())
    ),
    grads,
    expected,
  )


def in_torch(loss, images, texts, log_scale, bias):
  """Computes the loss of the whole matrix in PyTorch, as published."""
  logits = images @ texts.T * log_scale.exp()
  if loss == 'softmax':  # CLIP, Figure 3
    labels, cross = torch.arange(len(logits)), torch.nn.functional.cross_entropy
    return (cross(logits, labels) + cross(logits.T, labels)) / 2
  logits = logits + bias  # SigLIP, Algorithm 1
  signs = 2 * torch.eye(len(logits)) - 1
  return -torch.nn.functional.logsigmoid(signs * logits).sum() / len(logits)


def by_open_clip(loss, images, texts, log_scale, bias):
  """Computes the same by open_clip; only one file of the package is run."""
  package = importlib.util.find_spec('open_clip')
  if package is None:
    pytest.skip('open_clip_torch is not installed')
  file = pathlib.Path(package.submodule_search_locations[0]) / 'loss.py'
  losses = runpy.run_path(str(file))
  if loss == 'softmax':
    return losses['ClipLoss']()(images, texts, log_scale.exp())
  return losses['SigLipLoss']()(images, texts, log_scale.exp(), bias)


@pytest.mark.parametrize('theirs', [in_torch, by_open_clip])
@pytest.mark.parametrize('n, chunk', [(N, 8), (N, 1024), (6, 4), (7, 4)])
@pytest.mark.parametrize('loss', contrastive.LOSSES)
def test_loss_and_gradients_are_those_of_pytorch(
  loss, n, chunk, theirs, monkeypatch
):
  """The number of pairs need not be a multiple of those computed at once."""
  monkeypatch.setattr(contrastive, 'CHUNK', chunk)
  objective, pair = objective_of(loss), embeddings(n)
  params = {'temperature': jnp.float32(1.5), 'bias': jnp.float32(-2)}
  if loss == 'softmax':
    del params['bias']

  def ours(pair, params):
    return objective.joint_loss(params, (pair[0], pair[1]))[0]

  value, (slopes, own) = jax.value_and_grad(ours, (0, 1))(pair, params)
  images, texts = (torch.tensor(np.array(x), requires_grad=True) for x in pair)
  start = params['temperature'], params.get('bias', 0.0)
  scale, bias = (torch.tensor(float(x), requires_grad=True) for x in start)
  expected = theirs(loss, images, texts, scale, bias)
  expected.backward()
  np.testing.assert_allclose(value, expected.item(), rtol=1e-6)
  np.testing.assert_allclose(slopes[0], images.grad, atol=1e-6)
  np.testing.assert_allclose(slopes[1], texts.grad, atol=1e-6)
  np.testing.assert_allclose(own['temperature'], scale.grad, rtol=2e-6)
  if loss == 'sigmoid':
    np.testing.assert_allclose(own['bias'], bias.grad, rtol=1e-6)


def gradients(objective, parts, mesh, params, locked=False):
  """Returns loss, metrics and gradients of a `Trainer` on a mesh."""
  frozen = (('model/.*', dict(frozen=True)),) if locked else ()
  rules = dict(momentum=0.0, rules=frozen)
  optimizer = optimizers.sgd(lambda step: 1.0, **rules)
  trainer = Trainer(objective, optimizer, lambda step: 1.0, parts, None)

  def compute(params, batch):
    state = trainer.state_of(params, {})
    loss, metrics, _, grads = trainer._gradients(state, batch, KEY, {})
    return loss, metrics, grads

  with jax.set_mesh(mesh):
    shardings = sharding.shardings(params, mesh, objective.sharding_rules)
    placed = jax.device_put(params, shardings)
    split = sharding.batch_sharding(mesh)
    batch = jax.device_put(batch_of(), split)
    return jax.device_get(jax.jit(compute)(placed, batch))


MESHES = (4, {}), (8, dict(fsdp=2, model=2))


@pytest.mark.parametrize(
  'loss, meshes',
  [('sigmoid', ()), *slow(['sigmoid', MESHES]), *further(['softmax', MESHES])],
)
def test_every_mesh_and_number_of_micro_batches_is_exact(
  loss, meshes, monkeypatch
):
  """All pairs of the batch are used; also the projection has their gradient.

  Gradients may differ by 1e-6 of their largest value, because the sums over
  pairs are in another order.
  """
  monkeypatch.setattr(contrastive, 'CHUNK', 8)
  objective = objective_of(loss, outputs=12)
  params, _ = objective.init(KEY, None)
  one = sharding.make_mesh(jax.devices()[:1])
  expected, _, slopes = gradients(objective, 1, one, params)
  ways = [(one, 4)]
  for count, axes in meshes:
    mesh = sharding.make_mesh(jax.devices()[:count], **axes)
    ways += (mesh, 1), (mesh, 4)
  for mesh, parts in ways:
    value, metrics, grads = gradients(objective, parts, mesh, params)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert_close(grads, slopes)
    assert metrics['temperature'] == pytest.approx(5, rel=1e-6)


def test_a_locked_tower_has_no_gradient_and_the_text_has_the_same():
  objective = objective_of('softmax')
  params, _ = objective.init(KEY, None)
  mesh = sharding.make_mesh(jax.devices()[:1])
  _, _, free = gradients(objective, 2, mesh, params)
  locked = objective_of('softmax', locked=True)
  _, _, grads = gradients(locked, 2, mesh, params, locked=True)
  assert not jax.tree.leaves(grads['model'])
  assert_close(grads['text'], free['text'])


def test_no_device_has_the_matrix_of_all_pairs(monkeypatch):
  """The gradient of 512 pairs has blocks of 64 rows and 32 columns."""
  monkeypatch.setattr(contrastive, 'CHUNK', 32)
  objective, mesh = objective_of('softmax'), sharding.make_mesh(jax.devices())
  split = sharding.batch_sharding(mesh)
  shape = jax.ShapeDtypeStruct((512, WIDTH), jnp.float32, sharding=split)

  def compute(images, texts):
    params = {'temperature': jnp.float32(1)}
    return objective.joint_loss(params, (images, texts))[0]

  with jax.set_mesh(mesh):
    program = jax.jit(jax.grad(compute, (0, 1))).lower(shape, shape).compile()
  shapes = re.findall(r'f32\[([\d,]+)\]', program.as_text())
  sizes = [np.prod([*map(int, shape.split(','))]) for shape in shapes]
  assert 64 * 32 in sizes
  assert max(sizes) < 512 * 64


def test_accuracy_counts_the_nearest_text_only_if_it_is_alone():
  objective, pair = objective_of('sigmoid'), embeddings()
  params = {'temperature': jnp.float32(0), 'bias': jnp.float32(0)}
  for images, expected in ((pair[1], 1.0), (jnp.ones_like(pair[0]), 0.0)):
    texts = pair[1] if expected else jnp.ones_like(pair[1])
    _, (metrics, _) = objective.joint_loss(params, (images, texts))
    assert metrics['accuracy'] == expected


def test_tokens_that_do_not_fit_the_tower_are_refused():
  spec = {
    'image': ((8, 8, 3), np.dtype('u1')),
    'tokens': ((LENGTH + 1,), np.dtype('i4')),
  }
  with pytest.raises(UserError, match=r'length=6'):
    objective_of('sigmoid').check(spec)
