"""Tests of linear probing and segmentation against PyTorch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_vit import SIZES, noise_params

from tests.faults.counts import further
from tests.objectives.tiny import images_of, inputs, labelled
from vit_jax.arrays import tree
from vit_jax.models import contract
from vit_jax.models.vit import Model
from vit_jax.objectives import linear_probe, segment
from vit_jax.objectives.contract import Setting
from vit_jax.optim import optimizers
from vit_jax.training.step import Trainer

SIZE, CLASSES, N = (8, 12), 5, 16
MODEL = Model(0, **SIZES, dropout=0.5, drop_path=0.5, registers=2)
SETTING = Setting(MODEL, SIZE)
RULES = (('model/.*', dict(frozen=True)),)
NEAR = dict(rtol=1e-4, atol=1e-6)
MAE = dict(batch_norm=True)
DINO_S = dict(last_blocks=2)
DINO_B = dict(patch_mean=True)


def probe_of(**keys):
  return linear_probe.Objective(SETTING, num_classes=CLASSES, **keys)


def segment_of(**keys):
  return segment.Objective(SETTING, classes=CLASSES, **keys)


def label_batch(seed):
  return labelled(N, SIZE, CLASSES, seed)


def segment_batch(seed):
  rng = np.random.default_rng(seed)
  segments = rng.integers(-1, CLASSES, (N, *SIZE)).astype(np.int16)
  for row in range(N):  # very different numbers of pixels
    segments[row, : row % 4 * 2] = -1
  images = images_of(N, *SIZE, seed=seed)
  return {'image': images, 'segments': jnp.array(segments)}


@functools.cache
def backbone():
  return noise_params(MODEL, SIZE)


@jax.jit
def layers_of(images):
  variables, want = {'params': backbone()}, ('layers',)
  images = images.astype(jnp.float32) / 127.5 - 1
  found = MODEL.apply(variables, images, method='predict', want=want)
  return found['layers']


def tokens_of(images, last_blocks):
  """Returns the tokens of blocks after the last norm, `[n, layers, t, d]`."""
  norm = backbone()['encoder']['norm']
  scale, bias = (torch.tensor(np.asarray(norm[k])) for k in ('scale', 'bias'))
  layers = torch.tensor(np.asarray(layers_of(images)))[:, -last_blocks:]
  return F.layer_norm(layers, scale.shape, scale, bias, eps=1e-6)


def features_of(batch, last_blocks=1, patch_mean=False, batch_norm=False):
  """Computes the features of DINO's `get_intermediate_layers` and `avgpool`."""
  del batch_norm
  tokens = tokens_of(batch['image'], last_blocks)
  parts = [tokens[:, i, 0] for i in range(last_blocks)]
  if patch_mean:
    parts.append(tokens[:, -1, 3:].mean(1))  # without class token and registers
  return torch.cat(parts, -1)


def maps_of(batch, last_blocks):
  """Computes maps of patch tokens of blocks, `[n, d, rows, columns]`."""
  tokens = tokens_of(batch['image'], last_blocks)[:, :, 3:]
  maps = torch.cat([*tokens.movedim(1, 0)], -1)
  return maps.reshape(N, *MODEL.grid(SIZE), -1).movedim(-1, 1)


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


def trained(of, batches, optimizer=optimizers.sgd, rate=0.05, micro_batches=1):
  """Returns states before and after each batch, and the metrics."""
  trainer = Trainer(
    of,
    optimizer(lambda _: rate, momentum=0.9, rules=RULES),
    lambda _: rate,
    micro_batches,
    None,
  )
  params, extra = jax.jit(of.init)(jax.random.key(0), None)
  states = [trainer.state_of(of.start_params(params, backbone()), extra)]
  step, logged = jax.jit(trainer.train_step), []
  for batch in batches:
    state, metrics = step(states[-1], batch, jax.random.key(7), {})
    states.append(state)
    logged.append(jax.device_get(metrics))
  return jax.device_get(states), logged


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
def test_three_steps_of_a_probe_equal_torch(keys, ours, theirs):
  """Losses, parameters, running statistics, and logits of an evaluation."""
  of, batches = probe_of(**keys), [*map(label_batch, range(3))]
  assert of.num_classes == CLASSES
  (first, *_, last), logged = trained(of, batches, ours, rate=3.0)
  start = first.params['head']['kernel']
  linear = torch.nn.Linear(len(start), CLASSES)
  norm = torch.nn.BatchNorm1d(len(start), affine=False, eps=1e-6)
  peer = torch.nn.Sequential(*[norm] if of.batch_norm else [], linear)
  with torch.no_grad():
    linear.weight.copy_(torch.tensor(start.T))
    linear.bias.zero_()
  optimizer = theirs(linear.parameters(), lr=3.0)
  for batch, metrics in zip(batches, logged, strict=True):
    logits = peer(features_of(batch, **keys))
    labels = torch.tensor(np.asarray(batch['label'])).long()
    loss = F.cross_entropy(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    assert metrics['loss'] == pytest.approx(loss.item(), rel=1e-4)
    right = (logits.argmax(-1) == labels).float().mean()
    assert metrics['accuracy'] == pytest.approx(right.item())
  kernel, bias = linear.weight.detach().T.numpy(), linear.bias.detach()
  moved = np.abs(kernel - start).max()
  assert moved > 1e-4
  head = last.params['head']
  np.testing.assert_allclose(head['kernel'], kernel, atol=1e-3 * moved)
  np.testing.assert_allclose(head['bias'], bias, rtol=1e-3, atol=1e-5)
  weights = of.weights(last.params, last.extra)['params']
  if of.batch_norm:
    found = weights['statistics']
    np.testing.assert_allclose(found['mean'], norm.running_mean, **NEAR)
    np.testing.assert_allclose(found['variance'], norm.running_var, **NEAR)
  else:
    assert last.extra == {} and 'statistics' not in weights
  other = label_batch(9)
  expected = peer.eval()(features_of(other, **keys)).detach().numpy()
  found = jax.jit(of.predict)(weights, {'image': other['image']})
  scale = np.abs(expected).max()
  np.testing.assert_allclose(found['logits'], expected, atol=1e-4 * scale)
  features = features_of(other, **keys)
  np.testing.assert_allclose(found['features'], features, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
  'last_blocks, count_ignored', [(2, False), *further([1, True])]
)
def test_three_steps_of_segmentation_equal_torch(last_blocks, count_ignored):
  """Losses, parameters, running statistics, and logits of an evaluation."""
  of = segment_of(last_blocks=last_blocks, count_ignored=count_ignored)
  batches = [*map(segment_batch, range(3))]
  (first, *_, last), logged = trained(of, batches)
  width = len(first.params['norm']['scale'])
  norm, head = torch.nn.BatchNorm2d(width), torch.nn.Conv2d(width, CLASSES, 1)
  kernel = torch.tensor(first.params['head']['kernel'])
  assert kernel.std() == pytest.approx(0.01, rel=0.3)
  with torch.no_grad():
    head.weight.copy_(kernel.T[..., None, None])
    head.bias.zero_()
  optimizer = MOMENTUM([*norm.parameters(), *head.parameters()], lr=0.05)
  for batch, metrics in zip(batches, logged, strict=True):
    x = maps_of(batch, last_blocks)
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
  for ours, theirs in (
    (last.params['head']['kernel'], head.weight[..., 0, 0].T.detach()),
    (last.params['norm']['scale'], norm.weight.detach()),
    (last.extra['mean'], norm.running_mean),
    (last.extra['variance'], norm.running_var),
  ):
    np.testing.assert_allclose(ours, theirs, **NEAR)
  weights = of.weights(last.params, last.extra)['params']
  predict = jax.jit(of.predict, static_argnums=2)
  found = predict(weights, batch, ('classes', 'tokens'))
  expected = head(norm.eval()(x)).movedim(1, -1).detach()
  np.testing.assert_allclose(found['classes'], expected, rtol=1e-4, atol=1e-5)
  assert found.keys() == {'features', 'logits', 'tokens', 'classes'}


@pytest.mark.slow
@pytest.mark.parametrize(
  'of, batch',
  [(probe_of(**MAE), label_batch(0)), (segment_of(), segment_batch(0))],
)
def test_the_backbone_is_not_trained(of, batch):
  """It has no gradient, optimizer state or dropout."""
  (first, last), _ = trained(of, [batch])
  jax.tree.map(np.testing.assert_array_equal, last.params['model'], backbone())
  assert of.backbone(last.params) is last.params['model']
  momenta = tree.flatten(last.opt_state).values()
  heads = {k: v for k, v in last.params.items() if k != 'model'}
  sizes = sorted(leaf.size for leaf in momenta if leaf.ndim)
  assert sizes == sorted(leaf.size for leaf in jax.tree.leaves(heads))

  def loss_of(params, key):
    loss = of.loss(params, inputs(batch, key=key))[0]
    return loss if isinstance(of, linear_probe.Objective) else loss.value()

  compiled = jax.jit(jax.value_and_grad(loss_of))
  loss, grads = compiled(first.params, jax.random.key(0))
  assert not any(leaf.any() for leaf in jax.tree.leaves(grads.pop('model')))
  assert all(leaf.any() for leaf in jax.tree.leaves(grads['head']))
  assert loss == compiled(first.params, jax.random.key(1))[0]


class Pixels(contract.Model):
  """A model whose features are the pixels."""

  num_classes, channels = 0, 3

  def apply(self, variables, images, key=None, *, method='predict', want=()):
    return {'features': images.reshape(len(images), -1)}


def test_running_statistics_equal_torch():
  """Their variance is unbiased, unlike that of the normalization."""
  setting, width = Setting(Pixels(), SIZE), 3 * SIZE[0] * SIZE[1]
  of = linear_probe.Objective(setting, num_classes=CLASSES, **MAE)
  head = {'kernel': jnp.zeros((width, CLASSES)), 'bias': jnp.zeros(CLASSES)}
  params = {'model': {}, 'head': head}
  extra = {'mean': jnp.zeros(width), 'variance': jnp.ones(width)}
  norm = torch.nn.BatchNorm1d(width, affine=False, eps=1e-6)
  for seed in range(3):
    batch = label_batch(seed)
    _, (_, carry) = of.loss(params, inputs(batch, extra))
    extra = of.update_extra(params, extra, carry, jnp.array(seed + 1))
    pixels = np.asarray(batch['image'], np.float32) / 127.5 - 1
    norm(torch.tensor(pixels.reshape(N, -1)))
  np.testing.assert_allclose(extra['mean'], norm.running_mean, **NEAR)
  np.testing.assert_allclose(extra['variance'], norm.running_var, **NEAR)


@pytest.mark.slow
def test_segmentation_can_drop_features_and_train_the_model():
  """Features are dropped by key; a model that is not frozen has gradients."""

  def gradients(**keys):
    of = segment_of(**keys)
    (state,), _ = trained(of, [])
    loss_of = jax.grad(
      lambda p: of.loss(p, inputs(segment_batch(0)))[0].value()
    )
    return jax.device_get(jax.jit(loss_of)(state.params))

  plain, dropped = gradients(), gradients(dropout=0.4)
  assert not np.allclose(plain['head']['kernel'], dropped['head']['kernel'])
  moving = gradients(frozen=False)['model']['encoder']['layers']['mlp']
  assert all(map(np.any, jax.tree.leaves(moving)))


@pytest.mark.slow
def test_micro_batches_of_segmentation_differ_by_their_statistics_only():
  """The loss is a mean over all pixels, however they are distributed."""
  one, two = (
    trained(segment_of(), [segment_batch(0)], micro_batches=n)[1][0]
    for n in (1, 2)
  )
  assert two['loss'] == pytest.approx(one['loss'], rel=0.02)
  assert two['loss'] != one['loss']
