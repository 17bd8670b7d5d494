"""Tests of linear probing against PyTorch and the authors' optimizers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_vit import SIZES, noise_params

from tests.faults.counts import further
from vit_jax.arrays import tree
from vit_jax.models import contract
from vit_jax.models.vit import Model
from vit_jax.objectives.contract import Inputs, Setting
from vit_jax.objectives.linear_probe import Objective
from vit_jax.optim import optimizers
from vit_jax.training.step import Trainer

SIZE, CLASSES, N, RATE = (8, 12), 5, 16, 3.0
MODEL = Model(0, **SIZES, dropout=0.5, drop_path=0.5, registers=2)
RULES = (('model/.*', dict(frozen=True)),)
MAE = dict(batch_norm=True)
DINO_S = dict(last_blocks=2)
DINO_B = dict(patch_mean=True)


def objective(model=MODEL, **keys):
  return Objective(Setting(model, SIZE), num_classes=CLASSES, **keys)


@functools.cache
def backbone():
  return noise_params(MODEL, SIZE)


def batch_of(seed):
  rng = np.random.default_rng(seed)
  images = rng.integers(0, 256, (N, *SIZE, 3)).astype(np.uint8)
  labels = rng.integers(0, CLASSES, N).astype(np.int32)
  return {'image': jnp.array(images), 'label': jnp.array(labels)}


@jax.jit
def layers_of(images):
  """Returns the tokens after every block, `[n, layers, t, d]`."""
  found = MODEL.apply(
    {'params': backbone()},
    images.astype(jnp.float32) / 127.5 - 1,
    method='predict',
    want=('layers',),
  )
  return found['layers']


def features_of(batch, last_blocks=1, patch_mean=False, batch_norm=False):
  """Computes the features of DINO's `get_intermediate_layers` and `avgpool`."""
  del batch_norm
  layers = layers_of(batch['image'])
  norm = backbone()['encoder']['norm']
  scale, bias = (torch.tensor(np.asarray(norm[k])) for k in ('scale', 'bias'))
  layers = torch.tensor(np.asarray(layers))[:, -last_blocks:]
  tokens = F.layer_norm(layers, scale.shape, scale, bias, eps=1e-6)
  parts = [tokens[:, i, 0] for i in range(last_blocks)]
  if patch_mean:
    parts.append(tokens[:, -1, 3:].mean(1))  # without class token and registers
  return torch.cat(parts, -1)


class Lars(torch.optim.Optimizer):
  """LARS of MAE's `util/lars.py`, without weight decay."""

  def __init__(self, params, lr):
    super().__init__(params, dict(lr=lr, momentum=0.9, trust_coefficient=1e-3))

  @torch.no_grad()
  def step(self):
    (group,) = self.param_groups
    for p in group['params']:
      update = p.grad
      if p.ndim > 1:
        weight_norm, update_norm = torch.norm(p), torch.norm(update)
        update = update * (group['trust_coefficient'] * weight_norm)
        update = update / update_norm
      state = self.state[p]
      if 'mu' not in state:
        state['mu'] = torch.zeros_like(p)
      state['mu'].mul_(group['momentum']).add_(update)
      p.add_(state['mu'], alpha=-group['lr'])


def trained(keys, optimizer, steps=3):
  """Returns states before and after some steps, and their metrics."""
  of = objective(**keys)
  trainer = Trainer(
    of, optimizer(lambda _: RATE, rules=RULES), lambda _: RATE, 1, None
  )
  params, extra = jax.jit(of.init)(jax.random.key(0), None)
  states = [trainer.state_of(of.start_params(params, backbone()), extra)]
  step, logged = jax.jit(trainer.train_step), []
  for seed in range(steps):
    state, metrics = step(states[-1], batch_of(seed), jax.random.key(7), {})
    states.append(state)
    logged.append(metrics)
  return of, states, logged


MOMENTUM = functools.partial(torch.optim.SGD, momentum=0.9)


@pytest.mark.slow
@pytest.mark.parametrize(
  'keys, ours, theirs',
  [
    (MAE, optimizers.lars, Lars),
    (DINO_B, optimizers.sgd, MOMENTUM),
    *further([DINO_S, optimizers.sgd, MOMENTUM]),
  ],
  ids=['mae', 'dino_b', 'dino_s'],
)
def test_three_steps_equal_torch(keys, ours, theirs):
  """Losses, parameters, running statistics, and logits of an evaluation."""
  of, states, logged = trained(keys, ours)
  start = states[0].params['head']
  width = start['kernel'].shape[0]
  linear = torch.nn.Linear(width, CLASSES)
  norm = torch.nn.BatchNorm1d(width, affine=False, eps=1e-6)
  peer = torch.nn.Sequential(*[norm] if of.batch_norm else [], linear)
  with torch.no_grad():
    linear.weight.copy_(torch.tensor(np.asarray(start['kernel']).T))
    linear.bias.copy_(torch.tensor(np.asarray(start['bias'])))
  optimizer = theirs(linear.parameters(), lr=RATE)
  for seed, metrics in enumerate(logged):
    batch = batch_of(seed)
    logits = peer(features_of(batch, **keys))
    labels = torch.tensor(np.asarray(batch['label'])).long()
    loss = F.cross_entropy(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    assert float(metrics['loss']) == pytest.approx(loss.item(), rel=1e-4)
    right = (logits.argmax(-1) == labels).float().mean()
    assert float(metrics['accuracy']) == pytest.approx(right.item())
  last = states[-1]
  kernel = linear.weight.detach().numpy().T
  moved = np.abs(kernel - np.asarray(start['kernel'])).max()
  assert moved > 1e-4
  np.testing.assert_allclose(
    last.params['head']['kernel'], kernel, rtol=0, atol=1e-3 * moved
  )
  np.testing.assert_allclose(
    last.params['head']['bias'], linear.bias.detach(), rtol=1e-3, atol=1e-5
  )
  weights = of.weights(last.params, last.extra)['params']
  if of.batch_norm:
    close = dict(rtol=1e-5, atol=1e-6)
    found = weights['statistics']
    np.testing.assert_allclose(found['mean'], norm.running_mean, **close)
    np.testing.assert_allclose(found['variance'], norm.running_var, **close)
  else:
    assert last.extra == {} and 'statistics' not in weights
  other = batch_of(9)
  peer.eval()
  expected = peer(features_of(other, **keys)).detach().numpy()
  found = jax.jit(of.predict)(weights, {'image': other['image']})
  scale = np.abs(expected).max()
  np.testing.assert_allclose(found['logits'], expected, atol=1e-4 * scale)
  np.testing.assert_allclose(
    found['features'], features_of(other, **keys), rtol=1e-4, atol=1e-4
  )


@pytest.mark.slow
def test_the_backbone_is_not_trained():
  """It has no gradient, optimizer state or dropout."""
  of, states, _ = trained(MAE, optimizers.lars, steps=1)
  jax.tree.map(
    np.testing.assert_array_equal, states[1].params['model'], backbone()
  )
  assert of.backbone(states[1].params) is states[1].params['model']
  momenta = tree.flatten(states[1].opt_state)
  sizes = sorted(leaf.size for leaf in momenta.values() if leaf.ndim)
  assert sizes == [CLASSES, 16 * CLASSES]

  def loss_of(params, key):
    inputs = Inputs({}, batch_of(0), key, jnp.array(0), {})
    return of.loss(params, inputs)[0]

  grads = jax.jit(jax.grad(loss_of))(states[0].params, jax.random.key(0))
  assert not any(leaf.any() for leaf in jax.tree.leaves(grads['model']))
  assert all(leaf.any() for leaf in jax.tree.leaves(grads['head']))
  loss = jax.jit(loss_of)
  assert loss(states[0].params, jax.random.key(0)) == loss(
    states[0].params, jax.random.key(1)
  )


@pytest.mark.slow
def test_initial_values_of_the_classifier():
  """The kernel is from N(0, .01), the bias is 0."""
  of = objective(Model(0, **SIZES | dict(width=512)), **MAE)
  params, extra = jax.jit(of.init)(jax.random.key(1), None)
  assert params['head']['kernel'].std() == pytest.approx(0.01, rel=0.1)
  assert not params['head']['bias'].any()
  assert not extra['mean'].any() and (extra['variance'] == 1).all()
  assert of.num_classes == CLASSES


class Pixels(contract.Model):
  """A model whose features are the pixels."""

  num_classes, channels = 0, 3

  def apply(self, variables, images, key=None, *, method='predict', want=()):
    return {'features': images.reshape(len(images), -1)}


def test_running_statistics_equal_torch():
  """Their variance is unbiased, unlike that of the normalization."""
  of = Objective(Setting(Pixels(), SIZE), num_classes=CLASSES, batch_norm=True)
  width = 3 * SIZE[0] * SIZE[1]
  head = {'kernel': jnp.zeros((width, CLASSES)), 'bias': jnp.zeros(CLASSES)}
  params = {'model': {}, 'head': head}
  extra = {'mean': jnp.zeros(width), 'variance': jnp.ones(width)}
  norm = torch.nn.BatchNorm1d(width, affine=False, eps=1e-6)
  for seed in range(3):
    batch = batch_of(seed)
    inputs = Inputs(extra, batch, jax.random.key(0), jnp.array(seed), {})
    _, (_, carry) = of.loss(params, inputs)
    extra = of.update_extra(params, extra, carry, jnp.array(seed + 1))
    pixels = np.asarray(batch['image'], np.float32) / 127.5 - 1
    norm(torch.tensor(pixels.reshape(N, -1)))
  close = dict(rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(extra['mean'], norm.running_mean, **close)
  np.testing.assert_allclose(extra['variance'], norm.running_var, **close)
