"""Tests of DINOv3 and of Gram anchoring against an independent training."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_dinov3
from test_dinov2 import (
  CLIP,
  DEPTH,
  EPOCH,
  GRID,
  GROUP,
  LOCAL,
  LR,
  MODEL,
  SIDE,
  SIZE,
  TOTAL,
  WARMUP,
  assert_equal,
  batch_of,
  normalized,
  steps,
)

from tests.faults.counts import further
from vit_jax.arrays import sharding
from vit_jax.config import loading
from vit_jax.config.schema import build_section
from vit_jax.data.augment.block_masks import TrainTransform
from vit_jax.errors import UserError
from vit_jax.models import positions, vit
from vit_jax.objectives import dinov2, gram
from vit_jax.objectives.contract import Frozen, Setting
from vit_jax.optim import optimizers
from vit_jax.optim.schedule import make_schedule
from vit_jax.training.step import Trainer

N, CROPS = 8, 3
ROPE = dict(rope_shift=0.2, rope_jitter=1.3, rope_rescale=2.0)
# The keys of the shipped recipes, with small sizes.
RECIPES = {
  'im1k': dict(registers=0, local_weight=1, end=1, constant=False, gram_at=()),
  'gram': dict(
    registers=2, local_weight=0.5, end=0.9, constant=True, gram_at=(3, 6)
  ),
}


def transform(recipe, parts=1):
  scale = 2 if recipe == 'gram' else 0
  crops = dict(local_crops=CROPS, local_size=LOCAL)
  of = TrainTransform(
    SIZE, patch_size=SIDE, group=GROUP, exact=True, gram_scale=scale, **crops
  )
  return of.in_batches(N, parts)


def model_of(recipe):
  own = ROPE | dict(registers=2) if recipe == 'gram' else {}
  rotary = dict(position='none', rope='centered', qkv_bias='query_value')
  return vit.Model(0, **MODEL | rotary | own)


def built(recipe, parts=1, **keys):
  """Returns the objective, trainer and config of a shipped recipe, small."""
  config = loading.load(f'configs/dinov3.py:recipe={recipe},model=S')
  with config.unlocked():
    objective = config.objective
    objective.update(keys)
    objective.momentum = 0.9
    objective.momentum_end = RECIPES[recipe]['end']
    sizes = dict(hidden=20, bottleneck=8, dtype='float32')
    objective.head.update(outputs=48, **sizes)
    objective.patch_head.update(outputs=32, **sizes)
    if recipe == 'gram':
      objective.gram_warmup = '4 steps'
      objective.gram_replace = ('3 steps', '6 steps')
    else:
      objective.temperature_warmup = '2 epochs'
      *rules, (last, _) = config.optimizer.rules
      delay = last, dict(lr_after=f'{EPOCH} steps')
      config.optimizer.rules = (*rules, delay)
    config.optimizer.clip_norm = CLIP
  setting = Setting(
    model_of(recipe), SIZE, steps=steps, transform=transform(recipe, parts)
  )
  of = build_section(config, 'objective', setting)
  schedule = make_schedule(
    TOTAL,
    lambda _: WARMUP,
    base_lr=LR,
    decay=config.schedule.decay,
    end_lr=config.schedule.end_lr,
  )
  of_run = optimizers.Setting(steps, of.layers_above)
  optimizer = build_section(config, 'optimizer', schedule, of_run)
  return of, Trainer(of, optimizer, schedule, parts, None)


def random_params(of, seed=0):
  shapes, _ = jax.eval_shape(of.init, jax.random.key(0), None)
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda leaf: jnp.array(rng.normal(0, 0.2, leaf.shape), jnp.float32), shapes
  )


def draws_of(key, n):
  """Returns the shift, jitter and rescaling of each layer of one pass."""
  _, encoder = jax.random.split(key)
  found = []
  for layer in jax.random.split(encoder, DEPTH):
    own = jax.random.fold_in(layer, vit._ROPE)
    limits = (2, ROPE['rope_shift']), (2, math.log(1.3)), (1, math.log(2))
    found.append(
      [
        torch.tensor(
          np.asarray(
            jax.random.uniform(
              jax.random.fold_in(own, i),
              (n, 1, axes),
              minval=-limit,
              maxval=limit,
            )
          )
        ).double()
        for i, (axes, limit) in enumerate(limits)
      ]
    )
  return found


def draws_of_step(recipe, step, parts):
  """Returns the draws for the global and local crops of each micro-batch."""
  if recipe == 'im1k':
    return [(None, None)] * parts
  key = jax.random.fold_in(jax.random.key(0), step)
  keys = jax.random.split(key, parts) if parts > 1 else [key]
  result = []
  for each in keys:
    passes = jax.random.split(jax.random.fold_in(each, dinov2._STREAM))
    n = N // parts
    result.append(
      [
        draws_of(own, n * crops)
        for own, crops in zip(passes, (2, CROPS), strict=True)
      ]
    )
  return result


def as_tensors(batch, draws):
  images = {
    name: torch.tensor(normalized(batch[name]))
    for name in ('global', 'local', 'gram')
    if name in batch
  }
  return images | {'masks': torch.tensor(batch['masks']), 'draws': draws}


def reference(recipe, params, first, parts):
  """Returns the independent training; `first` is its first Gram teacher."""
  training = torch_dinov3.Training(
    params,
    dict(
      RECIPES[recipe],
      outputs=(48, 32),
      momentum_end=RECIPES[recipe]['end'],
      side=SIDE,
      grid=GRID,
      depth=DEPTH,
      group=GROUP,
      lr=LR,
      warmup=WARMUP,
      total=TOTAL,
      frozen=0 if recipe == 'gram' else EPOCH,
      temperature_warmup=0 if recipe == 'gram' else 2 * EPOCH,
      gram_warmup=4,
      momentum=0.9,
      clip=CLIP,
      parts=parts,
    ),
  )
  if first is not None:
    training.gram_teacher = torch_dinov3.copied(
      torch_dinov3.torch_vit.leaves(first)
    )
  return training


def batch_for(recipe, seed, parts):
  # Rows i, i + parts, … are a micro-batch, which consists of whole groups.
  order = np.arange(N).reshape(parts, -1).T.ravel()
  batch = {name: leaf[order] for name, leaf in batch_of(seed).items()}
  if recipe == 'gram':
    rng = np.random.default_rng(100 + seed)
    sides = [2 * side for side in SIZE]
    crops = rng.integers(0, 256, (N, 2, *sides, 3)).astype(np.uint8)
    batch |= {'gram': crops}
  return batch


@pytest.mark.slow
@pytest.mark.parametrize(
  'recipe, path, devices, parts',
  [
    ('gram', 'early', 8, 1),
    *further(['im1k', '', 1, 2], ['im1k', '', 8, 1], ['gram', '', 1, 2]),
  ],
)
def test_ten_steps_equal_an_independent_training(recipe, path, devices, parts):
  """Losses, student and teachers; the Gram teacher is replaced twice."""
  keys = dict(gram=path) if recipe == 'gram' else {}
  of, trainer = built(recipe, parts, **keys)
  params = random_params(of)
  first, frozen = None, {}
  if recipe == 'gram':
    first = random_params(of, 1)['model'] if path else params['model']
    frozen = {'gram': first} if path else {}
  mesh = sharding.make_mesh(jax.devices()[:devices], data=devices)
  training = reference(recipe, params, first, parts)
  state = trainer.state_of(params, of.start_extra(params, {}))
  with jax.set_mesh(mesh):
    shardings = sharding.shardings(state, mesh, of.sharding_rules)
    split = sharding.batch_sharding(mesh)
    state = jax.device_put(state, shardings)
    step = jax.jit(trainer.train_step, out_shardings=(shardings, None))
    for number in range(10):
      batch = batch_for(recipe, number, parts)
      draws = draws_of_step(recipe, number, parts)
      expected = training.step(as_tensors(batch, draws))
      state, metrics = step(
        state, jax.device_put(batch, split), jax.random.key(0), frozen
      )
      if recipe == 'gram':
        assert float(metrics['gram']) == pytest.approx(expected['gram'], 1e-5)
        assert state.extra['gram_number'] == (number >= 2) + (number >= 5)
      of_dinov2 = dataclasses.replace(
        state, extra={'teacher': state.extra['teacher']}
      )
      assert_equal(of_dinov2, metrics, expected, training, 'sinkhorn_knopp')


def test_masks_are_topped_up():
  """Masked crop i has the upper end of its interval; others have none."""
  of = transform('im1k').in_batches(2 * GROUP, 1)
  example = {'image': np.full((40, 50, 3), 9, np.uint8), 'run_seed': 0}
  counts = [
    of(example | {'run_position': i}, np.random.default_rng(i))['masks'].sum(1)
    for i in range(2 * GROUP)
  ]
  for group in np.reshape(counts, (2, -1)):
    exact = [int(16 * ratio) for ratio in (0.2, 0.3, 0.4, 0.5)]
    assert sorted(group) == [0] * GROUP + exact


def test_crops_of_the_gram_teacher_show_the_same_pixels():
  """They are larger, and their colours are not changed."""
  y, x = np.mgrid[:120, :150]
  image = np.uint8(99 + x / 2 + 40 * np.sin(y / 20))[..., None].repeat(3, 2)
  of = dataclasses.replace(transform('gram'), solarize=0.0)
  example = {'image': image, 'run_seed': 0, 'run_position': 0}
  for seed in range(4):
    crops = of(example, np.random.default_rng(seed))
    assert crops['gram'].shape == (2, 32, 32, 3) == of.spec['gram'][0]
    small = crops['gram'].reshape(2, 16, 2, 16, 2, 3).mean((2, 4))
    for large, own in zip(small, crops['global'], strict=True):
      assert np.corrcoef(large.ravel(), own.ravel())[0, 1] > 0.98
      assert np.ptp(large, axis=-1).max() < 1e-6  # grey, as the image


def test_rotations_are_random():
  """Each image and each key has its own, and class tokens have none."""
  model = model_of('gram')
  found = []
  for key in (0, 1):
    position = positions.rotary(
      model.config, positions.Patches(GRID), random=True
    )
    found += positions.random_rotation(
      model.config, position.coordinates, 2, jax.random.key(key)
    )
  sines, cosines, others, _ = found
  assert not sines[:, :3].any() and (cosines[:, :3] == 1).all()
  assert np.abs(sines[0] - sines[1]).max() > 0.1 < np.abs(sines - others).max()


def test_the_norm_of_local_crops_starts_from_the_norm_of_the_weights():
  """It becomes a copy, unless the weights contain their own."""
  of, _ = built('gram')
  params = random_params(of)
  initial = {'scale': jnp.ones(16), 'bias': jnp.zeros(16)}
  params |= {'local_norm': initial}
  weights = random_params(of, 1)
  started = of.start_params(params, weights['model'])
  norm = weights['model']['encoder']['norm']
  jax.tree.map(np.testing.assert_array_equal, started['local_norm'], norm)
  own = params | {'local_norm': weights['local_norm']}
  kept = of.start_params(own, weights['model'])['local_norm']
  jax.tree.map(np.testing.assert_array_equal, kept, weights['local_norm'])


@pytest.mark.parametrize(
  'keys, message',
  [
    (dict(gram_replace=('2 steps', '1 steps')), 'gram_replace.*ascending'),
    (dict(gram_weight=-1), 'gram_weight'),
    (dict(gram_warmup='soon'), 'gram_warmup'),
    (dict(local_weight=-1), 'local_weight'),
    (dict(momentum_end=2), 'momentum_end'),
    (dict(head=dict(weight_norm=False)), 'norm_last_layer'),
  ],
)
def test_bad_values_are_refused(keys, message):
  setting = Setting(
    model_of('gram'), SIZE, steps=steps, transform=transform('gram')
  )
  with pytest.raises(UserError, match=message):
    gram.Objective(setting, **keys)


def test_a_gram_teacher_of_another_model_is_refused():
  of, _ = built('gram', gram='early')
  other = model_of('im1k')
  of.setting = of.setting._replace(
    open_frozen=lambda path: Frozen(other, SIZE, lambda mesh: None)
  )
  with pytest.raises(UserError, match='early.*registers'):
    of.frozen()
  with pytest.raises(UserError, match='gram_scale'):
    of.check(transform('im1k').spec)
