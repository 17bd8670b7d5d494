"""Tests of DINO against the original's equations in torch."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_vit import SIZES

from tests.faults.counts import further
from vit_jax.arrays import sharding, tree
from vit_jax.models.dino_head import Head
from vit_jax.models.vit import Model
from vit_jax.objectives.contract import Inputs, Setting
from vit_jax.objectives.dino import Objective, cross_entropies
from vit_jax.optim import optimizers
from vit_jax.training.step import Trainer

SIZE, LOCAL, N, TOTAL, EPOCH = (16, 16), (8, 12), 8, 40, 4
MODEL = SIZES | dict(depth=2, width=8)
HEAD = dict(outputs=48, hidden=20, bottleneck=8, dtype='float32')


def steps(duration):
  number, unit = duration.split(' ')
  scale = {'steps': 1, 'epochs': EPOCH, '%': TOTAL / 100}[unit]
  return round(float(number) * scale)


def objective(model=None, **settings):
  head = HEAD | settings.pop('head', {})
  setting = Setting(model or Model(0, **MODEL), SIZE, steps=steps)
  return Objective(setting, head=head, **settings)


def noise(like, seed, scale=0.2):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda leaf: jnp.array(rng.normal(0, scale, leaf.shape), jnp.float32), like
  )


def shapes(of):
  return jax.eval_shape(of.init, jax.random.key(0), None)


@functools.cache
def state(seed=0, **head):
  """Returns random parameters, and an unrelated extra state."""
  params, extra = shapes(objective(head=head))
  return noise(params, seed), noise(extra, seed + 1)


def batch_of(crops=8, seed=0, n=N):
  rng = np.random.default_rng(seed)

  def images(*shape):
    return jnp.array(rng.integers(0, 256, (n, *shape, 3)), jnp.uint8)

  locals_ = {'local': images(crops, *LOCAL)} if crops else {}
  return {'global': images(2, *SIZE)} | locals_


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


def head_of(head, x):
  """Computes the head in torch: an MLP, F.normalize and weight norm."""
  for i in (1, 2, 3):
    x = F.linear(x, head[f'fc{i}/kernel'].T, head[f'fc{i}/bias'])
    x = F.gelu(x) if i < 3 else x
  x = F.normalize(x, dim=-1, p=2)
  v = head['last/kernel'].T  # [k, bottleneck]
  g = head['last/gain'].T if 'last/gain' in head else torch.ones(len(v), 1)
  # torch.nn.utils.weight_norm, dim=0
  return F.linear(x, torch._weight_norm(v, g, 0))


def reference(student, teacher, centre, heads, temperatures):
  """Computes the original's loss; the first two features are the teacher's."""
  student_logits = [head_of(heads[0], x) / temperatures[0] for x in student]
  logits = [head_of(heads[1], x) for x in teacher]
  teacher_probs = [
    F.softmax((x - centre) / temperatures[1], dim=-1) for x in logits
  ]
  total, terms = 0, 0
  for i, q in enumerate(teacher_probs):
    for v, z in enumerate(student_logits):
      if v != i:
        total = total + (-q.detach() * F.log_softmax(z, dim=-1)).sum(-1).mean()
        terms += 1
  entropy = (
    -torch.cat(teacher_probs).mul(torch.cat(teacher_probs).log()).sum(-1).mean()
  )
  return total / terms, terms, torch.cat(logits).mean(0), entropy


def tensors(params):
  return {
    path: torch.tensor(np.asarray(leaf), requires_grad=True)
    for path, leaf in tree.flatten(params['head']).items()
  }


@pytest.mark.slow
@pytest.mark.parametrize(
  'crops, head',
  [(8, {}), *further([0, {}], [3, dict(norm_last_layer=False)])],
)
def test_loss_and_gradients_equal_the_original(crops, head):
  """All pairs but the same view twice: 18 with eight local crops."""
  of = objective(head=head, teacher_temperature=0.05)
  (params, extra), batch = state(**head), batch_of(crops)

  def loss_of(params):
    inputs = Inputs(extra, batch, jax.random.key(0), jnp.array(0), {})
    return of.loss(params, inputs)

  (loss, (metrics, carry)), grads = jax.jit(
    jax.value_and_grad(loss_of, has_aux=True)
  )(params)

  seen, back = jax.vjp(lambda p: all_features(p, batch), params)
  student = [torch.tensor(np.asarray(x), requires_grad=True) for x in seen]
  teacher = all_features(extra['teacher'], {'global': batch['global']})
  taught = [torch.tensor(np.asarray(x)) for x in teacher]
  centre = torch.tensor(np.asarray(extra['centre']))
  heads = tensors(params), tensors(extra['teacher'])
  expected, terms, mean, entropy = reference(
    student, taught, centre, heads, (0.1, 0.05)
  )
  expected.backward()
  assert terms == {8: 18, 0: 2, 3: 8}[crops]
  assert float(loss) == pytest.approx(expected.item(), rel=1e-5)
  np.testing.assert_allclose(carry['centre'], mean.detach(), atol=1e-6)
  assert float(metrics['teacher_entropy']) == pytest.approx(
    entropy.item(), rel=1e-5
  )
  assert float(metrics['entropy_share']) == pytest.approx(
    entropy.item() / math.log(48), rel=1e-5
  )
  assert float(metrics['teacher_kl']) == pytest.approx(
    (expected - entropy).item(), rel=1e-4
  )
  for path, leaf in tree.flatten(grads['head']).items():
    gradient = heads[0][path].grad
    scale = float(gradient.abs().max())
    np.testing.assert_allclose(leaf, gradient, rtol=1e-3, atol=1e-4 * scale)
  (of_model,) = back([jnp.asarray(x.grad.numpy()) for x in student])
  # The bias of a layer's keys has a gradient of zero up to rounding.
  scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(of_model))
  for ours, theirs in zip(
    *map(jax.tree.leaves, (grads['model'], of_model['model'])), strict=True
  ):
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5 * scale)


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


def trainer(of, micro_batches=1, average_decay=None):
  optimizer = optimizers.sgd(lambda _: 0.1, momentum=0.0)
  return Trainer(of, optimizer, lambda _: 0.1, micro_batches, average_decay)


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
  given = noise(params['model'], 5)
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
  of.loss(params, Inputs(extra, batch, jax.random.key(0), jnp.array(0), {}))
  teacher, of_global, of_local = keys
  assert teacher is None and of_global != of_local


# The head


@pytest.mark.slow
def test_initial_values_of_the_head():
  """N(0, .02), and uniform within 1/√inputs for the prototypes."""
  head = Head(outputs=500, hidden=256, bottleneck=64)
  params = jax.jit(head.init)(jax.random.key(0), jnp.zeros((1, 128)))['params']
  flat = tree.flatten(params)
  assert {k: v.shape for k, v in flat.items() if k.endswith('kernel')} == {
    'fc1/kernel': (128, 256),
    'fc2/kernel': (256, 256),
    'fc3/kernel': (256, 64),
    'last/kernel': (64, 500),
  }
  for name in ('fc1', 'fc2', 'fc3'):
    assert np.std(flat[f'{name}/kernel']) == pytest.approx(0.02, rel=0.05)
    assert not flat[f'{name}/bias'].any()
  assert 'last/gain' not in flat
  last = np.abs(flat['last/kernel'])
  assert last.max() <= 1 / 8 and last.mean() == pytest.approx(1 / 16, rel=0.05)
  free = Head(outputs=5, hidden=4, bottleneck=3, norm_last_layer=False)
  params = jax.jit(free.init)(jax.random.key(0), jnp.zeros((1, 2)))['params']
  np.testing.assert_array_equal(params['last']['gain'], np.ones((1, 5)))


def test_zero_features_give_no_nan():
  """Their gradient is finite, too."""
  head = Head(**HEAD)
  zeros = jnp.zeros((2, 6))
  params = jax.eval_shape(head.init, jax.random.key(0), zeros)
  none = jax.tree.map(lambda s: jnp.zeros(s.shape), params)
  sums = jax.value_and_grad(lambda p: head.apply(p, zeros).sum())
  value, grads = jax.jit(sums)(none)
  assert value == 0
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


# Shardings on a mesh


def test_the_last_layer_is_split_over_model_and_fsdp():
  """The teacher's and the moments are split the same way."""
  big = dict(outputs=65_536, bottleneck=256)
  of = objective(head=big)
  mesh = sharding.make_mesh(jax.devices(), data=2, fsdp=2, model=2)
  abstract_state = jax.eval_shape(trainer(of).state_of, *shapes(of))
  specs = tree.flatten(
    sharding.shardings(abstract_state, mesh, of.sharding_rules)
  )
  for start in ('params', 'extra/teacher'):
    assert specs[f'{start}/head/last/kernel'].spec[:] == ('fsdp', 'model')
  assert specs['extra/centre'].spec[0] == 'model'
