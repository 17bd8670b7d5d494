"""Tests of DINO against the original's equations in torch."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_dinov2
import torch_vit
from tiny_vit import SIZES

from tests.faults.counts import further
from tests.objectives.tiny import (
  EPOCH,
  TOTAL,
  images_of,
  inputs,
  noise_like,
  steps,
)
from vit_jax.arrays import sharding, tree
from vit_jax.models.dino_head import Head
from vit_jax.models.vit import Model
from vit_jax.objectives.contract import Setting
from vit_jax.objectives.dino import Objective, cross_entropies
from vit_jax.optim import optimizers
from vit_jax.training.step import Trainer

SIZE, LOCAL, N = (16, 16), (8, 12), 8
MODEL = SIZES | dict(depth=2, width=8)
HEAD = dict(outputs=48, hidden=20, bottleneck=8, dtype='float32')


def objective(model=None, **settings):
  head = HEAD | settings.pop('head', {})
  setting = Setting(model or Model(0, **MODEL), SIZE, steps=steps)
  return Objective(setting, head=head, **settings)


def shapes(of):
  return jax.eval_shape(of.init, jax.random.key(0), None)


@functools.cache
def state(**head):
  """Returns random parameters, and an unrelated extra state."""
  params, extra = shapes(objective(head=head))
  return noise_like(params, 0), noise_like(extra, 1)


def batch_of(crops=8):
  batch = {'global': images_of(N, 2, *SIZE)}
  if crops:
    batch['local'] = images_of(N, crops, *LOCAL, seed=1)
  return batch


# The reference. Features come from the model, which has its own tests. The loss
# of them is the original's, view by view and in torch.


@jax.jit
def features_of(params, images):
  """Returns features `[n, d]` of images of one size; gradients use jax."""
  model = Model(0, **MODEL)
  if images.shape[1:3] != SIZE:
    model = model.at_sizes(SIZE, 0.1)
  images = images.astype(jnp.float32) / 127.5 - 1
  return model.apply({'params': params['model']}, images)


def all_features(params, batch):
  """Returns a list with features of every example's first crop, second, …."""
  views = []
  for crops in batch.values():
    count = crops.shape[1]
    images = jnp.concatenate([crops[:, i] for i in range(count)])
    views += jnp.split(features_of(params, images), count)
  return views


def reference(student, teacher, centre, heads, temperatures):
  """Computes the original's loss; the first two features are the teacher's."""
  head = functools.partial(torch_dinov2.head, gain=torch.ones(1, 48).double())
  student_logits = [head(x, heads[0]) / temperatures[0] for x in student]
  logits = [head(x, heads[1]) for x in teacher]
  probs = [F.softmax((x - centre) / temperatures[1], dim=-1) for x in logits]
  terms = [
    (-q.detach() * F.log_softmax(z, dim=-1)).sum(-1).mean()
    for i, q in enumerate(probs)
    for v, z in enumerate(student_logits)
    if v != i
  ]
  entropy = -torch.cat(probs).mul(torch.cat(probs).log()).sum(-1).mean()
  loss = sum(terms) / len(terms)
  return loss, len(terms), torch.cat(logits).mean(0), entropy


@pytest.mark.slow
@pytest.mark.parametrize(
  'crops, head',
  [(8, {}), *further([0, {}], [3, dict(norm_last_layer=False)])],
)
def test_loss_and_gradients_equal_the_original(crops, head):
  """All pairs but the same view twice: 18 with eight local crops."""
  of = objective(head=head, teacher_temperature=0.05)
  (params, extra), batch = state(**head), batch_of(crops)

  loss_of = jax.value_and_grad(of.loss, has_aux=True)
  (loss, (metrics, carry)), grads = jax.jit(loss_of)(
    params, inputs(batch, extra)
  )

  seen, back = jax.vjp(lambda p: all_features(p, batch), params)
  teacher = all_features(extra['teacher'], {'global': batch['global']})
  student, taught = ([*map(torch_vit.leaves, x)] for x in (seen, teacher))
  heads = [torch_vit.leaves(p['head']) for p in (params, extra['teacher'])]
  centre = torch_vit.leaves(extra['centre'])
  expected, terms, mean, entropy = reference(
    student, taught, centre, heads, (0.1, 0.05)
  )
  expected.backward()
  assert terms == {8: 18, 0: 2, 3: 8}[crops]
  assert float(loss) == pytest.approx(expected.item(), rel=1e-5)
  np.testing.assert_allclose(carry['centre'], mean.detach(), atol=1e-6)
  for name, value in (
    ('teacher_entropy', entropy),
    ('entropy_share', entropy / math.log(48)),
    ('teacher_kl', expected - entropy),
  ):
    near = pytest.approx(value.item(), rel=1e-4)
    assert float(metrics[name]) == near, name
  (of_model,) = back([jnp.float32(x.grad.numpy()) for x in student])
  head = torch_vit.gradients(heads[0])
  for ours, theirs in zip(
    *map(jax.tree.leaves, (grads, {'head': head, 'model': of_model['model']})),
    strict=True,
  ):
    # The bias of a layer's keys has a gradient of zero up to rounding.
    near = dict(rtol=1e-3, atol=1e-4 * max(np.abs(theirs).max(), 1e-3))
    np.testing.assert_allclose(ours, theirs, **near)


def test_cross_entropy_of_every_pair():
  """−Σ p log q, for large logits as well."""
  rng = np.random.default_rng(0)
  teacher_probs = rng.dirichlet(np.ones(7), (3, 2)).astype(np.float32)
  student_logits = (50 * rng.normal(size=(3, 5, 7))).astype(np.float32)
  logs = F.log_softmax(torch.tensor(student_logits).double(), -1).numpy()
  expected = -(teacher_probs[:, :, None] * logs[:, None]).sum(-1)
  ours = cross_entropies(jnp.array(teacher_probs), jnp.array(student_logits))
  np.testing.assert_allclose(ours, expected, rtol=1e-4)


# Teacher and centre


def test_schedules_equal_the_original():
  """Momentum changes by step, and temperature by epoch."""
  of = objective(
    momentum=0.99,
    teacher_temperature=0.07,
    warmup_temperature=0.04,
    temperature_warmup='3 epochs',
  )
  kept = 1 + 0.5 * (0.99 - 1) * (1 + np.cos(np.pi * np.arange(TOTAL) / TOTAL))
  epochs = np.concatenate([np.linspace(0.04, 0.07, 3), np.full(7, 0.07)])
  for step in (0, EPOCH - 1, EPOCH, 2 * EPOCH + 1, TOTAL - 1):
    share = of.student_weight(jnp.array(step + 1))
    assert float(share) == pytest.approx(1 - kept[step], rel=1e-4, abs=1e-7)
    temperature = of.temperature_of_teacher(jnp.array(step))
    assert float(temperature) == pytest.approx(epochs[step // EPOCH], rel=1e-6)
  constant = objective(teacher_temperature=0.05, warmup_temperature=0.01)
  assert float(constant.temperature_of_teacher(jnp.array(0))) == np.float32(
    0.05
  )


@pytest.mark.slow
def test_a_new_teacher_equals_its_student():
  """At the start, and when a training starts from given weights."""
  of = objective()
  params, extra = jax.jit(of.init)(jax.random.key(0), None)
  assert not extra['centre'].any() and extra['centre'].shape == (48,)
  jax.tree.map(np.testing.assert_array_equal, params, extra['teacher'])
  given = noise_like(params['model'])
  started = of.start_params(params, given)
  assert started['model'] is given and of.backbone(started) is given
  taught = of.start_extra(started, extra)['teacher']
  jax.tree.map(np.testing.assert_array_equal, started, taught)
  assert [*of.weights(params, extra)] == ['params', 'teacher']
  assert of.weights(params, extra)['teacher'] is extra['teacher']


@pytest.mark.slow
def test_only_the_student_drops_paths(monkeypatch):
  """The keys of its global and of its local crops differ."""
  of, keys = objective(), []
  (params, extra), batch = state(), batch_of(2)

  def features(params, images, key):
    keys.append(key if key is None else jax.random.key_data(key).tolist())
    return jnp.eye(len(images), MODEL['width'])

  monkeypatch.setattr(of, '_features', features)
  of.loss(params, inputs(batch, extra))
  teacher, of_global, of_local = keys
  assert teacher is None and of_global != of_local


# The head


@pytest.mark.slow
def test_initial_values_of_the_head():
  """N(0, .02), and uniform within 1/√inputs for the prototypes."""
  head = Head(outputs=500, hidden=256, bottleneck=64)
  params = jax.jit(head.init)(jax.random.key(0), jnp.zeros((1, 128)))['params']
  flat = tree.flatten(params)
  for name, shape in dict(
    fc1=(128, 256), fc2=(256, 256), fc3=(256, 64)
  ).items():
    kernel = flat[f'{name}/kernel']
    assert kernel.shape == shape
    assert np.std(kernel) == pytest.approx(0.02, rel=0.05)
    assert not flat[f'{name}/bias'].any()
  assert 'last/gain' not in flat
  last = np.abs(flat['last/kernel'])
  assert last.shape == (64, 500)
  assert last.max() <= 1 / 8 and last.mean() == pytest.approx(1 / 16, rel=0.05)
  free = Head(outputs=5, hidden=4, bottleneck=3, norm_last_layer=False)
  params = jax.jit(free.init)(jax.random.key(0), jnp.zeros((1, 2)))['params']
  np.testing.assert_array_equal(params['last']['gain'], np.ones((1, 5)))


def test_zero_features_give_no_nan():
  """Their gradient is finite, too."""
  head = Head(**HEAD)
  zeros = jnp.zeros((2, 6))
  shapes = jax.eval_shape(head.init, jax.random.key(0), zeros)
  sums = jax.value_and_grad(lambda p: head.apply(p, zeros).sum())
  value, grads = jax.jit(sums)(noise_like(shapes, scale=0))
  assert value == 0
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


# Shardings on a mesh


def test_the_last_layer_is_split_over_model_and_fsdp():
  """The teacher's and the moments are split the same way."""
  of = objective(head=dict(outputs=65_536, bottleneck=256))
  mesh = sharding.make_mesh(jax.devices(), data=2, fsdp=2, model=2)
  optimizer = optimizers.sgd(lambda _: 0.1)
  trainer = Trainer(of, optimizer, lambda _: 0.1, 1, None)
  abstract_state = jax.eval_shape(trainer.state_of, *shapes(of))
  specs = tree.flatten(
    sharding.shardings(abstract_state, mesh, of.sharding_rules)
  )
  for start in ('params', 'extra/teacher'):
    assert specs[f'{start}/head/last/kernel'].spec[:] == ('fsdp', 'model')
  assert specs['extra/centre'].spec[0] == 'model'
