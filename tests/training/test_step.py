"""Tests of the training step against formulas."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from vit_jax.models import contract, layers
from vit_jax.objectives import contract as objective_contract
from vit_jax.objectives.contract import Setting
from vit_jax.objectives.supervised import Objective
from vit_jax.optim import optimizers
from vit_jax.training.step import SPIKE_WARMUP_STEPS, Trainer, accumulate

CLASSES, BATCH, SIDE, WIDTH, DEPTH = 5, 8, 2, 12, 2


class Network(contract.Model):
  """A model of stacked tanh layers, which compiles fast."""

  num_classes = CLASSES

  def init(self, key, images):
    raise NotImplementedError

  def apply(self, variables, images, key=None, *, method=None, **kwargs):
    assert method is None and not kwargs
    return self.logits(variables['params'], images, key)

  def logits(self, params, images, key):
    x = images.reshape(len(images), WIDTH)
    for kernel in params['layers']['kernel']:
      x = jnp.tanh(x @ kernel)
    return x @ params['head']


MODEL = Network()
SETTING = Setting(MODEL, (SIDE, SIDE))


def start_params():
  rng = np.random.default_rng(0)
  shapes = {
    'layers': {'kernel': (DEPTH, WIDTH, WIDTH)},
    'head': (WIDTH, CLASSES),
  }
  return jax.tree.map(
    lambda shape: jnp.array(rng.normal(0, 0.3, shape), jnp.float32),
    shapes,
    is_leaf=lambda node: isinstance(node, tuple),
  )


def trainer(objective, **settings):
  """Returns a Trainer with SGD, whose updates are proportional to gradients."""
  schedule = settings.pop('schedule', lambda step: 1.0)
  names = ('momentum', 'clip_norm', 'weight_decay', 'rules')
  chain = {k: settings.pop(k) for k in names if k in settings}
  optimizer = optimizers.sgd(schedule, **dict(momentum=0.0) | chain)
  common = dict(micro_batches=1, average_decay=None) | settings
  return Trainer(objective, optimizer, schedule, **common)


def examples(seed=0):
  rng = np.random.default_rng(seed)
  image = rng.integers(0, 256, (BATCH, SIDE, SIDE, 3)).astype(np.uint8)
  label = rng.integers(0, CLASSES, BATCH).astype(np.int32)
  return {'image': image, 'label': label}


@jax.jit
@jax.value_and_grad
def plain_loss(params, batch):
  """Computes the mean of −log p(label) over the whole batch."""
  images = batch['image'] / 127.5 - 1
  log_p = jax.nn.log_softmax(MODEL.apply({'params': params}, images))
  return -log_p[jnp.arange(BATCH), batch['label']].mean()


def flat(tree):
  return np.asarray(ravel_pytree(tree)[0], np.float64)


KEY = jax.random.key(0)


def run(of, batches, start=None):
  """Returns the states before and after each step, and the metrics.

  Args:
    of: a Trainer.
    batches: batches of the steps.
    start: parameters and extra state.
  """
  states, metrics = [of.state_of(*(start or (start_params(), {})))], []
  step = jax.jit(of.train_step)
  for batch in batches:
    state, values = step(states[-1], batch, KEY, {})
    states.append(state)
    metrics.append(jax.device_get(values))
  return states, metrics


# Gradients


@pytest.mark.parametrize(
  'clip, micro_batches, unstacked',
  [
    (0.5, 1, ()),
    (0.5, 4, ()),
    (0.5, 2, ('layers/kernel',)),
    (None, 2, ()),
    (2.0, 2, ()),
  ],
)
def test_a_step_equals_sgd_on_the_whole_batch(clip, micro_batches, unstacked):
  """θ ← θ − lr · g · min(1, clip / |g|), for any number of micro-batches."""
  batch = examples()
  loss, grads = plain_loss(start_params(), batch)
  norm = np.linalg.norm(flat(grads))
  model = Network()
  model.unstacked = unstacked
  of = trainer(
    Objective(Setting(model, (SIDE, SIDE))),
    clip_norm=None if clip is None else clip * norm,
    micro_batches=micro_batches,
  )
  (before, after), (values,) = run(of, [batch])
  moved = flat(before.params) - flat(after.params)
  expected = min(1, clip or 1) * flat(grads)
  # The loss sums to rounding; gradients are below 1, parameters of order one.
  np.testing.assert_allclose(moved, expected, rtol=1e-4, atol=1e-6)
  assert values['loss'] == pytest.approx(float(loss), rel=1e-5)
  assert values['grad_norm'] == pytest.approx(norm, rel=1e-5)


def test_steps_equal_the_formula_of_sgd():
  """With clipping, momentum, decay and a learning rate by step."""
  clip, momentum, decay, rates = 0.7, 0.9, 0.1, [0.0, 0.2, 0.5, 0.3]
  of = trainer(
    Objective(SETTING),
    clip_norm=clip,
    momentum=momentum,
    weight_decay=decay,
    schedule=lambda step: jnp.array(rates)[step],
    micro_batches=2,
  )
  batches = [examples(seed) for seed in range(4)]
  states, metrics = run(of, batches)
  theta, unravel = ravel_pytree(states[0].params)
  theta, trace = np.asarray(theta, np.float64), 0.0
  for step, batch in enumerate(batches):
    point = unravel(jnp.asarray(theta, jnp.float32))
    gradient = flat(plain_loss(point, batch)[1])
    norm = np.linalg.norm(gradient)
    trace = momentum * trace + gradient * min(1, clip / norm)
    theta = theta - rates[step] * (trace + decay * theta)
    # Four float32 steps; parameters are of order one
    np.testing.assert_allclose(
      flat(states[step + 1].params), theta, rtol=1e-4, atol=1e-5
    )
    assert metrics[step]['lr'] == pytest.approx(rates[step])
    assert int(states[step + 1].step) == step + 1


@pytest.mark.parametrize('micro_batches', [1, 2])
def test_frozen_parameters_have_no_gradients(micro_batches):
  """They cost a forward pass and do not change; others learn as before."""
  settings = dict(micro_batches=micro_batches, weight_decay=0.1)
  rules = (('layers/.*', dict(frozen=True)),)
  norm = np.linalg.norm(plain_loss(start_params(), examples())[1]['head'])
  of = trainer(Objective(SETTING), rules=rules, **settings)
  (before, after), (values,) = run(of, [examples()])
  for state in (before, after):
    np.testing.assert_array_equal(
      state.params['layers']['kernel'], start_params()['layers']['kernel']
    )
  (_, plain), _ = run(trainer(Objective(SETTING), **settings), [examples()])
  np.testing.assert_allclose(
    after.params['head'], plain.params['head'], rtol=1e-5
  )
  assert values['grad_norm'] == pytest.approx(norm, rel=1e-5)
  program = str(jax.make_jaxpr(of.train_step)(before, examples(), KEY, {}))
  # All matrices of the forward pass, and the gradient of the last one.
  assert program.count('dot_general') == DEPTH + 2


def test_the_average_weights_parameters_after_each_update():
  """The weights are d^age of θ₁ … θ_t; the initial parameters do not count."""
  decay = 0.6
  of = trainer(Objective(SETTING), average_decay=decay)
  states, _ = run(of, [examples(seed) for seed in range(4)])
  history = [flat(state.params) for state in states[1:]]
  for t in range(1, 5):
    weights = decay ** np.arange(t)[::-1]
    expected = np.average(history[:t], axis=0, weights=weights)
    average = states[t].average
    np.testing.assert_allclose(flat(average.mean), expected, atol=1e-5)
    assert int(average.count) == t
  assert np.abs(history[0] - history[3]).max() > 0.1


# Micro-batches


def test_micro_batches_are_strided():
  """Part i holds i, i + parts, …, and each part has its own key."""
  batch = {'x': jnp.arange(6.0)}
  seen = accumulate(
    lambda part, key: {'x': part['x'] ** 2, 'bits': jax.random.bits(key) * 1.0},
    batch,
    jax.random.key(0),
    2,
  )
  squares = np.arange(6.0) ** 2
  np.testing.assert_allclose(seen['x'], (squares[0::2] + squares[1::2]) / 2)


# Keys, from the step to the masks

SLOTS = 4096


class Masked(Network):
  """A model whose logits are its parameters behind a dropout mask.

  At zero, the gradient of slot k's sigmoid cross-entropy is 2 · ½ if it is
  kept, else 0, so SGD writes the mask into the parameters.
  """

  def logits(self, params, images, key):
    slots = jnp.broadcast_to(params, (len(images), SLOTS))
    return layers.dropout(slots, 0.5, key)


def kept(step=0, seed=0, examples=1, micro_batches=1):
  """Returns how many examples kept each slot in the step after `step`."""
  of = trainer(
    Objective(Setting(Masked(), (1, 1)), cross_entropy='sigmoid'),
    micro_batches=micro_batches,
  )
  state = dataclasses.replace(
    of.state_of(jnp.zeros(SLOTS), {}), step=jnp.int32(step)
  )
  batch = {
    'image': jnp.zeros((examples, 1, 1, 3), jnp.uint8),
    'label': jnp.zeros(examples, jnp.int32),
  }
  state, _ = of.train_step(state, batch, jax.random.key(seed), {})
  return -np.asarray(state.params)[1:] * examples  # slot 0 is the label


HALF = pytest.approx(0.5, abs=5 * np.sqrt(0.25 / SLOTS))  # five sigmas


def test_masks_depend_only_on_seed_and_step():
  """They have the rate; two different ones agree in half of the slots."""
  masks = [kept(step=s) for s in (0, 1, 2, 100_000)] + [kept(seed=1)]
  assert set(masks[0]) == {0.0, 1.0} and masks[0].mean() == HALF
  np.testing.assert_array_equal(masks[2], kept(step=2))
  for first, second in itertools.combinations(masks, 2):
    assert (first == second).mean() == HALF


@pytest.mark.parametrize('micro_batches', [1, 2])
def test_masks_differ_between_examples(micro_batches):
  """Of two examples, exactly one keeps half of the slots."""
  counts = kept(examples=2, micro_batches=micro_batches)
  assert set(counts) == {0.0, 1.0, 2.0}
  assert (counts == 1).mean() == HALF


# Bad steps


class Loss(objective_contract.Objective):
  """An objective without a loss."""

  sharding_rules, unstacked = (), ()

  def init(self, key, batch):
    raise NotImplementedError

  def predict(self, params, batch):
    raise NotImplementedError


class Poisoned(Loss):
  """The loss is the mean image with gradient 1; some batches are bad."""

  def loss(self, params, inputs):
    batch = inputs.batch
    bad = batch['label'][0] == 1  # an infinite slope, a finite loss
    room = jnp.where(bad, 0.0, 0.25)
    root = jnp.sqrt(params['w'] - jax.lax.stop_gradient(params['w']) + room)
    return batch['image'].mean() + root - jnp.sqrt(room), ({}, {})

  def update_extra(self, params, extra, carry, step):
    return {'seen': extra['seen'] + 1, 'w': params['w']}


# Parameters and extra state.
POISONED_START = {'w': jnp.ones(())}, {'seen': jnp.zeros(()), 'w': 0.0}


def poisoned_batch(loss=1.0, slope=False):
  return {
    'image': jnp.full((2,), loss, jnp.float32),
    'label': jnp.full((2,), slope, jnp.int32),
  }


@pytest.mark.parametrize(
  'bad', [dict(loss=np.nan), dict(loss=np.inf), dict(slope=True)]
)
def test_a_bad_step_changes_nothing_but_its_count(bad):
  """Parameters, momentum, average, extra state and schedule stay."""
  of = trainer(
    Poisoned(),
    momentum=0.9,
    average_decay=0.5,
    schedule=lambda step: 0.1 * (step + 1),
  )
  batches = [poisoned_batch(), poisoned_batch(**bad), poisoned_batch()]
  (_, good, skipped, after), metrics = run(of, batches, POISONED_START)
  for name in ('params', 'opt_state', 'average', 'extra'):
    jax.tree.map(
      np.testing.assert_array_equal,
      getattr(skipped, name),
      getattr(good, name),
    )
  assert int(skipped.step) == 2
  assert int(skipped.guard.skipped) == int(skipped.guard.streak) == 1
  rates = [float(values['lr']) for values in metrics]
  assert rates == pytest.approx([0.1, 0.2, 0.2])
  assert int(after.guard.skipped) == 1 and int(after.guard.streak) == 0
  assert [int(values['skipped']) for values in metrics] == [0, 1, 0]
  # w: 1 − 0.1 · 1, then − 0.2 · (1 + 0.9)
  assert float(after.params['w']) == pytest.approx(0.9 - 0.38)
  assert float(after.extra['seen']) == 2


def test_a_spike_exceeds_the_mean_of_good_losses():
  """It counts only after some steps, and does not raise the mean.

  The mean is that of all good losses as long as there are few.
  """
  losses = [7.0] + [1.0] * (SPIKE_WARMUP_STEPS - 1)  # the first: no spike yet
  mean = np.mean(losses)
  later = [3.01 * mean, 3.02 * mean, 2.99 * mean]
  batches = [poisoned_batch(loss) for loss in losses + later]
  of = trainer(Poisoned(), spike_factor=3.0)
  states, metrics = run(of, batches, POISONED_START)
  skipped = [int(values['skipped']) for values in metrics]
  assert skipped == [0] * SPIKE_WARMUP_STEPS + [1, 2, 0]
  before = states[SPIKE_WARMUP_STEPS].guard
  assert float(before.loss_mean) == pytest.approx(mean, rel=1e-5)
  assert int(states[-1].guard.good) == SPIKE_WARMUP_STEPS + 1


# Weights worth evaluating, and what an objective carries


class Teaching(Loss):
  """An objective that counts its carry, with a teacher as extra state."""

  def init(self, key, batch):
    return jnp.zeros(()), {'sum': jnp.zeros(()), 'teacher': jnp.ones(())}

  def loss(self, params, inputs):
    mean = inputs.batch['x'].mean()
    metrics = {'mean': mean, 'at': inputs.step * 1.0}
    return params * mean, (metrics, {'mean': mean})

  def update_extra(self, params, extra, carry, step):
    total = extra['sum'] + carry['mean'] * step
    return {'sum': total, 'teacher': 0.5 * (extra['teacher'] + params)}

  def weights(self, params, extra):
    return {'params': params, 'teacher': extra['teacher']}


@pytest.mark.parametrize('micro_batches', [1, 2])
def test_update_extra_receives_the_mean_carry(micro_batches):
  """It is the mean over micro-batches; the step is the new one."""
  of = trainer(Teaching(), micro_batches=micro_batches)
  batches = [{'x': jnp.arange(4.0) + step} for step in range(2)]
  (*_, state), metrics = run(of, batches, of.objective.init(None, None))
  assert [float(values['mean']) for values in metrics] == [1.5, 2.5]
  assert [float(values['at']) for values in metrics] == [0, 1]
  assert float(state.extra['sum']) == 1.5 * 1 + 2.5 * 2
  assert float(state.params) == -4  # SGD at a rate of 1
  assert float(state.extra['teacher']) == 0.5 * (0.5 * (1 - 1.5) - 4)


def test_weights_contain_those_of_the_objective_and_the_average():
  of = trainer(Teaching(), average_decay=0.5)
  start = of.objective.init(None, None)
  (*_, state), _ = run(of, [{'x': jnp.ones(4)}] * 2, start)
  weights = of.weights(state, {})
  assert list(weights) == ['params', 'teacher', 'ema']
  assert float(weights['params']) == -2
  assert float(weights['ema']) == pytest.approx((-2 - 0.5) / 1.5)
  assert float(weights['teacher']) == float(state.extra['teacher'])
  without = trainer(Teaching())
  state = without.state_of(*start)
  assert list(without.weights(state, {})) == ['params', 'teacher']
