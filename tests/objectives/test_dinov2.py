"""Tests of DINOv2 against an independent training in torch."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_dinov2
from tiny_vit import SIZES

from tests.faults.counts import further
from vit_jax.arrays import sharding, tree
from vit_jax.config import loading
from vit_jax.config.schema import build_section
from vit_jax.data.augment.block_masks import TrainTransform
from vit_jax.models.vit import Model
from vit_jax.objectives import dinov2
from vit_jax.objectives.contract import Inputs, Setting
from vit_jax.objectives.dinov2 import Objective
from vit_jax.optim import optimizers
from vit_jax.optim.schedule import make_schedule
from vit_jax.training.step import Trainer

SIZE, LOCAL, N, GROUP, TOTAL, EPOCH = (16, 16), (8, 12), 8, 4, 40, 4
SIDE, GRID = 4, (4, 4)
DEPTH, LR, WARMUP = 2, 1e-3, 2
CLIP = 0.5  # below the norms of all modules
MODEL = SIZES | dict(
  depth=DEPTH, width=16, patch_size=SIDE, gelu='exact', layer_scale=0.1
)
HEAD = dict(
  outputs=48, hidden=20, bottleneck=8, dtype='float32', norm_last_layer=False
)
PATCH_HEAD = HEAD | dict(outputs=32)
VARIANTS = [
  (centring, separate)
  for centring in dinov2.CENTRING
  for separate in (False, True)
]


def steps(duration):
  number, unit = duration.split(' ')
  scale = {'steps': 1, 'epochs': EPOCH, '%': TOTAL / 100}[unit]
  return round(float(number) * scale)


def transform(group=GROUP, n=N, parts=1):
  crops = dict(local_crops=3, local_size=LOCAL)
  of = TrainTransform(SIZE, patch_size=SIDE, group=group, **crops)
  return of.in_batches(n, parts)


def objective(centring='centre', separate=False, parts=1, **keys):
  setting = Setting(
    Model(0, **MODEL), SIZE, steps=steps, transform=transform(parts=parts)
  )
  keys = dict(temperature_warmup='2 epochs', momentum=0.9, head=HEAD) | keys
  patch_head = PATCH_HEAD if separate else None
  return Objective(setting, centring=centring, patch_head=patch_head, **keys)


def batch_of(seed, n=N):
  rng = np.random.default_rng(seed)
  patches = math.prod(GRID)
  masks = np.zeros((n // GROUP, 2 * GROUP, patches), bool)
  limits = transform().interval_ends[1:]
  for group in masks:
    chosen = rng.permutation(2 * GROUP)[:GROUP]
    for crop, limit in zip(chosen, limits, strict=True):
      count = rng.integers(int(patches * limit) + 1)
      group[crop, rng.permutation(patches)[:count]] = True
  return {
    'global': rng.integers(0, 256, (n, 2, *SIZE, 3)).astype(np.uint8),
    'local': rng.integers(0, 256, (n, 3, *LOCAL, 3)).astype(np.uint8),
    'masks': masks.reshape(n, 2, patches),
  }


def optimizer_of(of):
  """Builds the shipped config's optimizer for an objective and this epoch."""
  config = loading.load('configs/dinov2.py:recipe=short,model=S')
  with config.unlocked():
    *rules, (last, _) = config.optimizer.rules
    delay = last, dict(lr_after=f'{EPOCH} steps')
    config.optimizer.rules = (*rules, delay)
    config.optimizer.clip_norm = CLIP
  schedule = make_schedule(
    TOTAL, lambda _: WARMUP, base_lr=LR, decay='cosine', end_lr=1e-6
  )
  setting = optimizers.Setting(steps, of.layers_above)
  return build_section(config, 'optimizer', schedule, setting), schedule


def initial(of):
  """Returns random parameters, and the extra state of a new run."""
  shapes, _ = jax.eval_shape(of.init, jax.random.key(0), None)
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda leaf: jnp.array(rng.normal(0, 0.2, leaf.shape), jnp.float32), shapes
  )
  for head in ('head', 'patch_head'):
    if head in params:
      params[head]['last']['gain'] = np.abs(1 + params[head]['last']['gain'])
  return params, of.start_extra(params, {})


def reference(params, centring, batches):
  """Returns losses, student, teacher and centres after each step."""
  outputs = [
    params[head if head in params else 'head']['last']['kernel'].shape[1]
    for head in ('head', 'patch_head')
  ]
  training = torch_dinov2.Training(
    params,
    dict(
      centring=centring,
      outputs=outputs,
      side=SIDE,
      grid=GRID,
      depth=DEPTH,
      group=GROUP,
      lr=LR,
      warmup=WARMUP,
      total=TOTAL,
      frozen=EPOCH,
      temperature_warmup=2 * EPOCH,
      momentum=0.9,
      clip=CLIP,
    ),
  )
  for batch in batches:
    images = {
      name: torch.tensor(normalized(batch[name]))
      for name in ('global', 'local')
    }
    losses = training.step(images | {'masks': torch.tensor(batch['masks'])})
    yield losses, training


def normalized(images):
  return images.astype(np.float64) / 127.5 - 1


def assert_equal(state, metrics, expected, training, centring, tolerance=1e-5):
  """Compares losses, student, teacher and centres."""
  for ours, theirs in (
    ('loss', 'loss'),
    ('crop_loss', 'crop'),
    ('patch_loss', 'patch'),
    ('koleo', 'koleo'),
  ):
    assert float(metrics[ours]) == pytest.approx(
      expected[theirs], rel=tolerance, abs=tolerance
    ), ours
  for ours, theirs in (
    (state.params, training.student),
    (state.extra['teacher'], training.teacher),
  ):
    theirs = torch_dinov2.flat(theirs)
    for path, leaf in tree.flatten(ours).items():
      if path.endswith('key/bias'):
        # Its gradient is 0: the same number is added to all logits of a query.
        # Adam scales the rounding errors to steps of the learning rate.
        continue
      np.testing.assert_allclose(
        leaf,
        theirs[path].detach().numpy(),
        rtol=tolerance,
        atol=tolerance,
        err_msg=path,
      )
  if centring == 'centre':
    for name, mean in zip(
      ('centre', 'patch_centre'), training.centres, strict=True
    ):
      np.testing.assert_allclose(state.extra[name], mean, atol=tolerance)
  else:
    assert [*state.extra] == ['teacher']


def test_the_temperature_rises_by_step():
  """It is linear, and reaches its last value at the end of the warm-up."""
  of = objective(warmup_temperature=0.04, teacher_temperature=0.07)
  ramp = np.append(np.linspace(0.04, 0.07, 2 * EPOCH), [0.07, 0.07])
  found = [
    float(of.temperature_of_teacher(jnp.array(i))) for i in range(len(ramp))
  ]
  np.testing.assert_allclose(found, ramp, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
  'centring, separate, devices',
  [
    (*VARIANTS[3], 8),
    *further(*([*variant, 8] for variant in VARIANTS[:3])),
    *further(*([*variant, 1] for variant in VARIANTS)),
  ],
)
def test_ten_steps_equal_an_independent_training(centring, separate, devices):
  """Losses, student, teacher and centres, also on eight devices.

  The steps are in and after the epoch in which the last layer is frozen.
  """
  of = objective(centring, separate)
  optimizer, schedule = optimizer_of(of)
  trainer = Trainer(of, optimizer, schedule, 1, None)
  params, extra = initial(of)
  batches = [batch_of(seed) for seed in range(10)]
  mesh = sharding.make_mesh(jax.devices()[:devices], data=devices)
  state = trainer.state_of(jax.tree.map(jnp.asarray, params), extra)
  with jax.set_mesh(mesh):
    shardings = sharding.shardings(state, mesh, of.sharding_rules)
    split = sharding.batch_sharding(mesh)
    state = jax.device_put(state, shardings)
    step = jax.jit(trainer.train_step, out_shardings=(shardings, None))
    key = jax.random.key(0)
    steps_ = zip(batches, reference(params, centring, batches), strict=True)
    for number, (batch, (expected, training)) in enumerate(steps_):
      state, metrics = step(state, jax.device_put(batch, split), key, {})
      assert_equal(state, metrics, expected, training, centring)
      last = state.params['head']['last']['kernel']
      assert (np.abs(last - params['head']['last']['kernel']).max() > 0) == (
        number >= EPOCH
      )


def gradients_of(of, params, extra, batch):
  trainer = Trainer(
    of, *optimizer_of(of), of.setting.transform.batches[1], None
  )
  state = trainer.state_of(params, extra)
  return jax.jit(trainer._gradients)(state, batch, jax.random.key(0), {})


@pytest.mark.slow
def test_a_mesh_and_micro_batches_use_the_same_groups():
  """Losses with centring are means over groups, and the centres as well."""
  batch = batch_of(3)
  params, extra = initial(objective())
  whole = gradients_of(objective(), params, extra, batch)
  # Rows i, i + 2, … are a micro-batch, so its groups are those of the whole.
  order = np.arange(N).reshape(2, -1).T.ravel()
  shuffled = {name: leaf[order] for name, leaf in batch.items()}
  parts = gradients_of(objective(parts=2), params, extra, shuffled)
  for name in ('crop_loss', 'patch_loss', 'koleo', 'teacher_kl'):
    assert float(parts[1][name]) == pytest.approx(float(whole[1][name]), 1e-5)
  of = objective()
  updated = [
    of.update_extra(params, extra, carry, jnp.array(1))
    for carry in (whole[2], parts[2])
  ]
  for name in ('centre', 'patch_centre'):
    assert np.abs(updated[0][name]).max() > 1e-3
    np.testing.assert_allclose(updated[0][name], updated[1][name], atol=1e-6)


@pytest.mark.slow
def test_sinkhorn_knopp_distributes_targets_equally():
  """Padding has no influence, and large logits do not overflow."""
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(24, 6)).astype(np.float32)
  expected = torch_dinov2.sinkhorn(torch.tensor(logits).double(), 1.0)
  included = np.arange(24) < 20
  ours = dinov2.sinkhorn_knopp(jnp.array(logits), jnp.ones(24, bool))
  np.testing.assert_allclose(ours, expected, rtol=1e-4)
  np.testing.assert_allclose(ours.sum(1), 1, rtol=1e-5)
  some = dinov2.sinkhorn_knopp(jnp.array(logits), jnp.array(included))
  expected = torch_dinov2.sinkhorn(torch.tensor(logits[:20]).double(), 1.0)
  np.testing.assert_allclose(some[:20], expected, rtol=1e-4)
  large = dinov2.sinkhorn_knopp(jnp.array(logits) + 300, jnp.array(included))
  np.testing.assert_allclose(large[:20], some[:20], rtol=1e-3)


@pytest.mark.slow
def test_koleo_of_equal_features_has_a_finite_gradient():
  """Images that occur twice in a batch have distance 0."""
  x = jnp.ones((4, 3)).at[2:].set(jnp.array([[1.0, -1, 0], [0.0, 1, 2]]))
  value, gradient = jax.value_and_grad(dinov2.koleo_loss)(x, 4)
  assert np.isfinite(value) and np.isfinite(gradient).all()
  expected = torch_dinov2.koleo(torch.tensor(np.asarray(x)).double())
  assert float(value) == pytest.approx(expected.item(), rel=0.05)


@pytest.mark.slow
def test_the_teacher_and_unmasked_crops_do_not_see_the_mask_token():
  """The token has a gradient, and only masked crops depend on it."""
  of = objective()
  params, _ = initial(of)
  images = jnp.array(normalized(batch_of(0)['global'][:2, 0]), jnp.float32)
  masks = jnp.zeros((2, 16), bool).at[0, 3].set(True)
  other = params | {'mask': -params['mask']}
  plain, masked, changed = (
    of._tokens(p, images, None, m)
    for p, m in ((params, None), (params, masks), (other, masks))
  )
  for a, b, c in zip(plain, masked, changed, strict=True):
    assert np.abs(a[0] - b[0]).max() > 1e-3 < np.abs(b[0] - c[0]).max()
    np.testing.assert_allclose(a[1], b[1], atol=1e-5)
    np.testing.assert_allclose(b[1], c[1], atol=1e-5)
  # The pixels of a masked patch have no influence.
  blind = of._tokens(params, images.at[0, :4, 12:].set(9.0), None, masks)
  np.testing.assert_allclose(blind[1], masked[1], atol=1e-5)


@pytest.mark.slow
def test_only_the_student_drops_paths(monkeypatch):
  """The keys of its global and local crops differ, and those of steps too."""
  of, passes = objective(), []
  params, extra = initial(of)

  def tokens(params, images, key, masks=None):
    passes.append(key)
    n = len(images)
    return jnp.eye(n, MODEL['width']), jnp.ones((n, 16, MODEL['width']))

  monkeypatch.setattr(of, '_tokens', tokens)
  monkeypatch.setattr(of, '_features', lambda *args: tokens(*args)[0])
  batch = {name: jnp.asarray(x) for name, x in batch_of(0).items()}
  for step_key in (0, 1):
    key = jax.random.key(step_key)
    of.loss(params, Inputs(extra, batch, key, jnp.array(0), {}))
  teacher, *_ = passes
  students = passes[1:3] + passes[4:6]
  assert teacher is None is passes[3]
  assert (
    len({tuple(jax.random.key_data(key).tolist()) for key in students}) == 4
  )


@pytest.mark.slow
def test_a_new_run_and_one_from_weights():
  """The mask token is 0, and the teacher starts from the student."""
  of = objective(separate=True)
  params, extra = jax.jit(of.init)(jax.random.key(0), None)
  assert not params['mask'].any() and params['mask'].shape == (1, 16)
  assert params['patch_head']['last']['kernel'].shape == (8, 32)
  assert extra['centre'].shape == (48,) and extra['patch_centre'].shape == (32,)
  given = jax.tree.map(lambda x: x + 1, params['model'])
  started = of.start_params(params, given)
  jax.tree.map(
    np.testing.assert_array_equal,
    of.start_extra(started, extra)['teacher'],
    started,
  )
