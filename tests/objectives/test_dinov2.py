"""Tests of DINOv2, DINOv3 and Gram anchoring against trainings in torch."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_dinov2
from tiny_vit import SIZES

from tests.faults.counts import further
from tests.objectives.tiny import (
  EPOCH,
  TOTAL,
  images_of,
  inputs,
  noise_like,
  noisy,
  steps,
)
from vit_jax.arrays import sharding, tree
from vit_jax.config import loading
from vit_jax.config.schema import build_section
from vit_jax.data.augment.block_masks import TrainTransform
from vit_jax.models import vit
from vit_jax.objectives import dinov2
from vit_jax.objectives.contract import Setting
from vit_jax.optim import optimizers
from vit_jax.optim.schedule import make_schedule
from vit_jax.training.step import Trainer

SIZE, LOCAL, N, GROUP, CROPS = (16, 16), (8, 12), 8, 4, 3
SIDE, GRID, DEPTH, LR, WARMUP = 4, (4, 4), 2, 1e-3, 2
CLIP = 0.5  # below the norms of all modules
MODEL = SIZES | dict(
  depth=DEPTH, width=16, patch_size=SIDE, gelu='exact', layer_scale=0.1
)
ROTARY = dict(position='none', rope='centered', qkv_bias='query_value')
ROPE = dict(rope_shift=0.2, rope_jitter=1.3, rope_rescale=2.0)
MODELS = {
  'short': {},
  'im1k': ROTARY,
  'gram': ROTARY | ROPE | dict(registers=2),
}
# Values of the shipped recipes, with small sizes, for the training in torch.
RECIPES = {
  'short': dict(registers=0, local_weight=1, end=1, constant=False),
  'im1k': dict(registers=0, local_weight=1, end=1, constant=False),
  'gram': dict(registers=2, local_weight=0.5, end=0.9, constant=True),
}
VARIANTS = [
  dict(centring=centring, separate=separate)
  for centring in dinov2.CENTRING
  for separate in (False, True)
]


def transform(recipe='short', parts=1):
  of = TrainTransform(
    SIZE,
    patch_size=SIDE,
    group=GROUP,
    exact=recipe != 'short',
    gram_scale=2 if recipe == 'gram' else 0,
    local_crops=CROPS,
    local_size=LOCAL,
  )
  return of.in_batches(N, parts)


def model_of(recipe):
  return vit.Model(0, **MODEL | MODELS[recipe])


def built(recipe='short', parts=1, separate=True, **keys):
  """Returns objective and trainer of a shipped recipe with small sizes.

  In recipes without Gram anchoring, the last layer is frozen for an epoch.
  """
  version = 'dinov2' if recipe == 'short' else 'dinov3'
  config = loading.load(f'configs/{version}.py:recipe={recipe},model=S')
  with config.unlocked():
    objective = config.objective
    sizes = dict(hidden=20, bottleneck=8, dtype='float32')
    objective.head.update(outputs=48, norm_last_layer=False, **sizes)
    patch_head = objective.head.to_dict() | dict(outputs=32)
    objective.patch_head = patch_head if separate else None
    objective.momentum = 0.9
    objective.momentum_end = RECIPES[recipe]['end']
    if recipe == 'gram':
      objective.gram_warmup = '4 steps'
      objective.gram_replace = ('3 steps', '6 steps')
    else:
      objective.temperature_warmup = '2 epochs'
      *rules, (last, _) = config.optimizer.rules
      delay = last, dict(lr_after=f'{EPOCH} steps')
      config.optimizer.rules = (*rules, delay)
    objective.update(keys)
    config.optimizer.clip_norm = CLIP
  setting = Setting(
    model_of(recipe), SIZE, steps=steps, transform=transform(recipe, parts)
  )
  of = build_section(config, 'objective', setting)
  decay = {key: config.schedule[key] for key in ('decay', 'end_lr')}
  schedule = make_schedule(TOTAL, lambda _: WARMUP, base_lr=LR, **decay)
  of_run = optimizers.Setting(steps, of.layers_above)
  optimizer = build_section(config, 'optimizer', schedule, of_run)
  return of, Trainer(of, optimizer, schedule, parts, None)


def batch_of(seed, recipe='short', parts=1):
  rng = np.random.default_rng(seed)
  patches = math.prod(GRID)
  masks = np.zeros((N // GROUP, 2 * GROUP, patches), bool)
  limits = transform().interval_ends[1:]
  for group in masks:
    chosen = rng.permutation(2 * GROUP)[:GROUP]
    for crop, limit in zip(chosen, limits, strict=True):
      count = rng.integers(int(patches * limit) + 1)
      group[crop, rng.permutation(patches)[:count]] = True
  batch = {
    'global': images_of(N, 2, *SIZE, seed=seed),
    'local': images_of(N, CROPS, *LOCAL, seed=100 + seed),
    'masks': jnp.array(masks.reshape(N, 2, patches)),
  }
  if recipe == 'gram':
    large = (2 * side for side in SIZE)
    batch['gram'] = images_of(N, 2, *large, seed=200 + seed)
  # Rows i, i + parts, … are a micro-batch, which consists of whole groups.
  order = np.arange(N).reshape(parts, -1).T.ravel()
  return {name: leaf[order] for name, leaf in batch.items()}


def random_params(of, seed=0):
  params = noisy(of, seed)
  for head in ('head', 'patch_head'):
    last = params.get(head, {}).get('last', {})
    if 'gain' in last:
      last['gain'] = jnp.abs(1 + last['gain'])
  return params


def draws_of(key, n):
  """Returns the shift, jitter and rescaling of each layer of one pass."""
  _, encoder = jax.random.split(key)
  limits = (2, ROPE['rope_shift']), (2, math.log(1.3)), (1, math.log(2))
  found = []
  for layer in jax.random.split(encoder, DEPTH):
    own = jax.random.fold_in(layer, vit._ROPE)
    draws = [
      jax.random.uniform(
        jax.random.fold_in(own, i), (n, 1, axes), minval=-limit, maxval=limit
      )
      for i, (axes, limit) in enumerate(limits)
    ]
    found.append([torch.tensor(np.asarray(draw)).double() for draw in draws])
  return found


def draws_of_step(recipe, step, parts):
  """Returns the draws for the global and local crops of each micro-batch."""
  if recipe != 'gram':
    return [(None, None)] * parts
  key = jax.random.fold_in(jax.random.key(0), step)
  result = []
  for each in jax.random.split(key, parts) if parts > 1 else [key]:
    passes = jax.random.split(jax.random.fold_in(each, dinov2._STREAM))
    counts = [N // parts * crops for crops in (2, CROPS)]
    result.append([*map(draws_of, passes, counts)])
  return result


def in_torch(batch, draws):
  tensors = {name: torch.tensor(np.asarray(x)) for name, x in batch.items()}
  images = {
    name: tensors[name].double() / 127.5 - 1
    for name in ('global', 'local', 'gram')
    if name in batch
  }
  return images | {'masks': tensors['masks'], 'draws': draws}


def assert_equal(state, metrics, expected, training, tolerance=1e-5):
  """Compares losses, student, teacher and centres."""
  names = dict(loss='loss', crop_loss='crop', patch_loss='patch', koleo='koleo')
  for ours, theirs in (names | {k: k for k in metrics if k == 'gram'}).items():
    near = pytest.approx(expected[theirs], rel=tolerance, abs=tolerance)
    assert float(metrics[ours]) == near, ours
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
      other, near = theirs[path].detach(), dict(rtol=tolerance, atol=tolerance)
      np.testing.assert_allclose(leaf, other, **near, err_msg=path)
  names = 'centre', 'patch_centre'
  assert (names[0] in state.extra) == (
    training.settings['centring'] == 'centre'
  )
  for name, mean in zip(names, training.centres, strict=True):
    if name in state.extra:
      np.testing.assert_allclose(state.extra[name], mean, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
  'recipe, keys, devices, parts',
  [
    ('short', VARIANTS[3], 8, 1),
    ('gram', dict(gram='early'), 8, 1),
    *further(*(['short', variant, 8, 1] for variant in VARIANTS[:3])),
    *further(*(['short', variant, 1, 1] for variant in VARIANTS)),
    *further(['im1k', {}, 1, 2], ['im1k', {}, 8, 1], ['gram', {}, 1, 2]),
  ],
)
def test_ten_steps_equal_an_independent_training(recipe, keys, devices, parts):
  """Losses, student, teachers and centres; Gram teachers are replaced twice.

  The steps are in and after the epoch in which the last layer is frozen.
  """
  of, trainer = built(recipe, parts, **keys)
  params, is_gram = random_params(of), recipe == 'gram'
  early = random_params(of, 1)['model']
  settings = RECIPES[recipe] | dict(
    centring=of.centring,
    side=SIDE,
    grid=GRID,
    depth=DEPTH,
    group=GROUP,
    lr=LR,
    warmup=WARMUP,
    total=TOTAL,
    frozen=0 if is_gram else EPOCH,
    temperature_warmup=0 if is_gram else 2 * EPOCH,
    gram_warmup=4,
    gram_at=(3, 6),
    momentum=0.9,
    clip=CLIP,
    parts=parts,
  )
  first = early if 'gram' in keys else params['model']
  training = torch_dinov2.Training(params, settings, first if is_gram else None)
  frozen = {'gram': early} if 'gram' in keys else {}
  mesh = sharding.make_mesh(jax.devices()[:devices], data=devices)
  state = trainer.state_of(params, of.start_extra(params, {}))
  start = np.asarray(params['head']['last']['kernel'])
  with jax.set_mesh(mesh):
    shardings = sharding.shardings(state, mesh, of.sharding_rules)
    split = sharding.batch_sharding(mesh)
    state = jax.device_put(state, shardings)
    step = jax.jit(trainer.train_step, out_shardings=(shardings, None))
    for number in range(10):
      batch = batch_of(number, recipe, parts)
      draws = draws_of_step(recipe, number, parts)
      expected = training.step(in_torch(batch, draws))
      state, metrics = step(
        state, jax.device_put(batch, split), jax.random.key(0), frozen
      )
      assert_equal(state, metrics, expected, training)
      last = state.params['head']['last']['kernel']
      # The learning rate of the first step is 0.
      moves = number >= max(settings['frozen'], 1)
      assert (np.abs(last - start).max() > 0) == moves
      if is_gram:
        assert state.extra['gram_number'] == (number >= 2) + (number >= 5)


def test_the_temperature_rises_by_step():
  """It is linear, and reaches its last value at the end of the warm-up."""
  of, _ = built(warmup_temperature=0.04, teacher_temperature=0.07)
  ramp = np.append(np.linspace(0.04, 0.07, 2 * EPOCH), [0.07, 0.07])
  found = [
    float(of.temperature_of_teacher(jnp.array(i))) for i in range(len(ramp))
  ]
  np.testing.assert_allclose(found, ramp, rtol=1e-6)


@pytest.mark.slow
def test_a_mesh_and_micro_batches_use_the_same_groups():
  """Losses with centring are means over groups, and the centres as well."""
  results, centres = [], []
  for parts in (1, 2):
    of, trainer = built(parts=parts, **VARIANTS[0])
    params = random_params(of)
    extra = of.start_extra(params, {})
    gradients = jax.jit(trainer._gradients)
    state, batch = trainer.state_of(params, extra), batch_of(3, parts=parts)
    results.append(gradients(state, batch, jax.random.key(0), {}))
    carry = results[-1][2]
    centres.append(of.update_extra(params, extra, carry, jnp.array(1)))
  whole, parts = (metrics for _, metrics, *_ in results)
  for name in ('crop_loss', 'patch_loss', 'koleo', 'teacher_kl'):
    assert float(parts[name]) == pytest.approx(float(whole[name]), 1e-5)
  for name in ('centre', 'patch_centre'):
    assert np.abs(centres[0][name]).max() > 1e-3
    np.testing.assert_allclose(centres[0][name], centres[1][name], atol=1e-6)


@pytest.mark.slow
def test_sinkhorn_knopp_distributes_targets_equally():
  """Padding has no influence, and large logits do not overflow."""
  logits = np.random.default_rng(0).normal(size=(24, 6)).astype(np.float32)
  included = np.arange(24) < 20

  def in_torch(rows):
    return torch_dinov2.sinkhorn(torch.tensor(logits[rows]).double(), 1.0)

  ours = dinov2.sinkhorn_knopp(jnp.array(logits), jnp.ones(24, bool))
  np.testing.assert_allclose(ours, in_torch(slice(None)), rtol=1e-4)
  some = dinov2.sinkhorn_knopp(jnp.array(logits), jnp.array(included))
  np.testing.assert_allclose(some[:20], in_torch(included), rtol=1e-4)
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
  of, _ = built()
  params = random_params(of)
  images = batch_of(0)['global'][:2, 0] / 127.5 - 1
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
  (of, _), passes = built(), []
  params = random_params(of)
  extra = of.start_extra(params, {})

  def tokens(params, images, key, masks=None):
    passes.append(key)
    n = len(images)
    return jnp.eye(n, MODEL['width']), jnp.ones((n, 16, MODEL['width']))

  monkeypatch.setattr(of, '_tokens', tokens)
  monkeypatch.setattr(of, '_features', lambda *args: tokens(*args)[0])
  for step in (0, 1):
    of.loss(params, inputs(batch_of(0), extra, key=jax.random.key(step)))
  assert passes[0] is None is passes[3]
  students = passes[1:3] + passes[4:6]
  assert len({str(jax.random.key_data(key)) for key in students}) == 4


@pytest.mark.slow
def test_a_new_run_and_one_from_weights():
  """The mask token is 0, and the teacher starts from the student."""
  of, _ = built(centring='centre')
  params, extra = jax.jit(of.init)(jax.random.key(0), None)
  assert not params['mask'].any() and params['mask'].shape == (1, 16)
  assert params['patch_head']['last']['kernel'].shape == (8, 32)
  assert extra['centre'].shape == (48,) and extra['patch_centre'].shape == (32,)
  started = of.start_params(params, noise_like(params['model']))
  teacher = of.start_extra(started, extra)['teacher']
  jax.tree.map(np.testing.assert_array_equal, teacher, started)
