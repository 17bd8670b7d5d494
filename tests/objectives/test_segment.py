"""Tests of the objective `segment` against PyTorch."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_vit import SIZES, noise_params

from tests.faults.counts import further
from vit_jax.errors import UserError
from vit_jax.models.vit import Model
from vit_jax.objectives.contract import Inputs, Setting
from vit_jax.objectives.segment import Objective
from vit_jax.optim import optimizers
from vit_jax.training.step import Trainer

SIZE, CLASSES, N, RATE = (8, 12), 3, 8, 0.05
MODEL = Model(0, **SIZES, dropout=0.5, drop_path=0.5, registers=2)
RULES = (('model/.*', dict(frozen=True)),)


def batch_of(seed):
  rng = np.random.default_rng(seed)
  images = rng.integers(0, 256, (N, *SIZE, 3)).astype(np.uint8)
  segments = rng.integers(-1, CLASSES, (N, *SIZE)).astype(np.int16)
  for row in range(N):  # very different numbers of pixels
    segments[row, : row % 4 * 2] = -1
  return {'image': jnp.array(images), 'segments': jnp.array(segments)}


@functools.cache
def backbone():
  return noise_params(MODEL, SIZE)


@jax.jit
def layers_of(images):
  """Returns the tokens after every block, `[n, layers, t, d]`."""
  images = images.astype(jnp.float32) / 127.5 - 1
  variables, want = {'params': backbone()}, ('layers',)
  found = MODEL.apply(variables, images, method='predict', want=want)
  return found['layers']


def tokens_of(images, last_blocks):
  """Computes normed patch tokens of blocks, `[n, rows, columns, d]`."""
  norm = backbone()['encoder']['norm']
  scale, bias = (torch.tensor(np.asarray(norm[k])) for k in ('scale', 'bias'))
  layers = torch.tensor(np.asarray(layers_of(images)))[:, -last_blocks:, 3:]
  tokens = F.layer_norm(layers, scale.shape, scale, bias, eps=1e-6)
  tokens = torch.cat([*tokens.movedim(1, 0)], -1)
  return tokens.reshape(N, *MODEL.grid(SIZE), -1)


def trained(steps, micro_batches=1, **keys):
  """Returns objective, states before and after steps, and their metrics."""
  setting = Setting(MODEL, SIZE)
  objective = Objective(setting, classes=CLASSES, **keys)
  optimizer = optimizers.sgd(lambda _: RATE, momentum=0.9, rules=RULES)
  trainer = Trainer(objective, optimizer, lambda _: RATE, micro_batches, None)
  params, extra = jax.jit(objective.init)(jax.random.key(0), None)
  params = objective.start_params(params, backbone())
  states, logged = [trainer.state_of(params, extra)], []
  step = jax.jit(trainer.train_step)
  for seed in range(steps):
    state, metrics = step(states[-1], batch_of(seed), jax.random.key(7), {})
    states.append(state)
    logged.append(jax.device_get(metrics))
  return objective, states, logged


@pytest.mark.slow
@pytest.mark.parametrize(
  'last_blocks, count_ignored', [(2, False), *further([1, True])]
)
def test_three_steps_equal_torch(last_blocks, count_ignored):
  """Losses, parameters, running statistics, and logits of an evaluation."""
  keys = dict(last_blocks=last_blocks, count_ignored=count_ignored)
  objective, states, logged = trained(3, **keys)
  first = jax.device_get(states[0].params)
  width = len(first['norm']['scale'])
  norm, head = torch.nn.BatchNorm2d(width), torch.nn.Conv2d(width, CLASSES, 1)
  with torch.no_grad():
    kernel = torch.tensor(first['head']['kernel'])
    head.weight.copy_(kernel.T[..., None, None])
    head.bias.zero_()
  assert kernel.std() == pytest.approx(0.01, rel=0.3)
  moving = [*norm.parameters(), *head.parameters()]
  optimizer = torch.optim.SGD(moving, lr=RATE, momentum=0.9)
  for seed, metrics in enumerate(logged):
    batch = batch_of(seed)
    x = tokens_of(batch['image'], last_blocks).movedim(-1, 1)
    logits = F.interpolate(head(norm(x)), SIZE, mode='bilinear')
    target = torch.tensor(np.asarray(batch['segments'])).long()
    loss = F.cross_entropy(logits, target, ignore_index=-1, reduction='sum')
    used = (target >= 0).sum()
    loss = loss / (target.numel() if count_ignored else used)
    correct = (logits.argmax(1) == target).sum() / used
    assert metrics['loss'] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics['pixel_accuracy'] == pytest.approx(correct.item(), rel=1e-5)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
  last = jax.device_get(states[-1])
  near = dict(rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(
    last.params['head']['kernel'], head.weight[..., 0, 0].T.detach(), **near
  )
  np.testing.assert_allclose(
    last.params['norm']['scale'], norm.weight.detach(), **near
  )
  np.testing.assert_allclose(last.extra['mean'], norm.running_mean, **near)
  np.testing.assert_allclose(last.extra['variance'], norm.running_var, **near)
  jax.tree.map(
    np.testing.assert_array_equal, last.params['model'], first['model']
  )
  weights = objective.weights(last.params, last.extra)['params']
  predict = jax.jit(objective.predict, static_argnums=2)
  found = predict(weights, batch, ('classes', 'tokens'))
  with torch.no_grad():
    expected = head(norm.eval()(x)).movedim(1, -1)
  np.testing.assert_allclose(found['classes'], expected, rtol=1e-4, atol=1e-5)
  assert found.keys() == {'features', 'logits', 'tokens', 'classes'}


@pytest.mark.slow
def test_dropout_and_training_of_the_model():
  """Features are dropped by key; a model that is not frozen has gradients."""
  inputs = Inputs({}, batch_of(0), jax.random.key(1), jnp.array(0), {})

  def gradients(**keys):
    objective, (state,), _ = trained(0, **keys)
    loss = lambda params: objective.loss(params, inputs)[0].value()  # noqa: E731
    return jax.device_get(jax.jit(jax.grad(loss))(state.params))

  plain, dropped = gradients(), gradients(dropout=0.4)
  assert not np.allclose(plain['head']['kernel'], dropped['head']['kernel'])
  assert not any(map(np.any, jax.tree.leaves(plain['model'])))
  moving = gradients(frozen=False)['model']['encoder']['layers']['mlp']
  assert all(map(np.any, jax.tree.leaves(moving)))


@pytest.mark.slow
def test_micro_batches_differ_by_their_statistics_only():
  """The loss is a mean over all pixels, however they are distributed."""
  one, two = (trained(1, micro_batches=n)[2][0] for n in (1, 2))
  assert two['loss'] == pytest.approx(one['loss'], rel=0.02)
  assert two['loss'] != one['loss']


def test_messages():
  kinds = np.dtype(np.uint8), np.dtype(np.int16)
  spec = {'image': ((*SIZE, 3), kinds[0]), 'segments': (SIZE, kinds[1])}
  setting = Setting(MODEL, SIZE)
  with pytest.raises(UserError, match='segments'):
    Objective(setting, classes=3).check({'image': spec['image']})
  with pytest.raises(UserError, match='last_blocks=9'):
    Objective(setting, classes=3, last_blocks=9).check(spec)
  other = setting._replace(transform=types.SimpleNamespace(classes=4))
  with pytest.raises(UserError, match=r'3.*4'):
    Objective(other, classes=3).check(spec)
  Objective(setting, classes=3, last_blocks=2).check(spec)
