"""Tests of mixing and erasing on a mesh."""

import jax
import numpy as np
import optax
import pytest
import tiny_vit

from tests.faults.counts import further
from vit_jax.arrays import sharding
from vit_jax.models import vit
from vit_jax.objectives.contract import Setting
from vit_jax.objectives.mixing import DeviceAugment
from vit_jax.objectives.supervised import Objective
from vit_jax.training import step

CLASSES = 10
ALL = dict(mixup=0.8, cutmix=1.0, erasing=0.5)
MIXES = [dict(mixup=0.8), dict(cutmix=1.0), ALL]


def batch(n=16, height=12, width=20):
  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, (n, height, width, 3)).astype(np.uint8)
  return {'image': images, 'label': np.arange(n, dtype=np.int32) % CLASSES}


def train(objective, mesh, steps=4):
  """Returns the losses of some steps on a mesh."""
  trainer = step.Trainer(
    objective=objective,
    optimizer=optax.sgd(0.1, momentum=0.9),
    schedule=lambda _: 0.1,
    micro_batches=2,
    average_decay=None,
  )
  examples = batch(n=32, height=16, width=16)
  examples = jax.device_put(examples, sharding.batch_sharding(mesh))
  key = jax.device_put(jax.random.key(0), sharding.replicated(mesh))
  with jax.set_mesh(mesh):
    abstract = jax.eval_shape(trainer.init_state, key, examples)
    places = sharding.shardings(abstract, mesh, objective.sharding_rules)
    state = jax.jit(trainer.init_state, out_shardings=places)(key, examples)
    train_step = jax.jit(trainer.train_step)
    results = []
    for _ in range(steps):
      state, metrics = train_step(state, examples, key, {})
      results.append(float(metrics['loss']))
  return results


@pytest.mark.slow
@pytest.mark.parametrize('settings', [ALL, *further(*MIXES[:2])])
def test_mixing_is_the_same_on_any_mesh(settings):
  """One device, data=8 and data=2 fsdp=2 model=2: the same bits."""
  results = []
  for sizes in (dict(data=1), dict(data=8), dict(data=2, fsdp=2, model=2)):
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = sharding.make_mesh(devices, **sizes)
    split = sharding.batch_sharding(mesh)
    augment = jax.jit(DeviceAugment(CLASSES, **settings), out_shardings=split)
    examples = jax.device_put(batch(), split)
    key = jax.device_put(jax.random.key(7), sharding.replicated(mesh))
    outputs = [augment(examples, jax.random.fold_in(key, i)) for i in range(4)]
    results.append(jax.device_get(outputs))
  for other in results[1:]:
    for expected, got in zip(
      jax.tree.leaves(results[0]), jax.tree.leaves(other), strict=True
    ):
      np.testing.assert_array_equal(got, expected)


def test_mixing_moves_one_example_between_devices():
  """One uint8 image is sent to the next device."""
  mesh = sharding.make_mesh(jax.devices(), data=8)
  split = sharding.batch_sharding(mesh)
  augment = jax.jit(DeviceAugment(CLASSES, **ALL), out_shardings=split)
  arguments = jax.device_put(batch(), split), jax.random.key(0)
  text = augment.lower(*arguments).compile().as_text()
  for collective in ('all-gather', 'all-reduce', 'all-to-all'):
    assert f' {collective}(' not in text
  moved = [line for line in text.splitlines() if 'collective-permute(' in line]
  assert len(moved) == 2
  assert any('= u8[1,12,20,3]' in line for line in moved)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.filterwarnings('ignore:optax.global_norm:DeprecationWarning')
def test_training_with_mixing_is_the_same_on_any_mesh():
  """Steps of a whole trainer in two micro-batches have equal losses."""
  model = vit.Model(CLASSES, **tiny_vit.SIZES)
  mix = DeviceAugment(CLASSES, mixup=0.8, cutmix=1.0)
  objective = Objective(Setting(model, (16, 16), mix))
  one = train(objective, sharding.make_mesh(jax.devices()[:1]))
  mesh = sharding.make_mesh(jax.devices(), data=2, fsdp=2, model=2)
  np.testing.assert_allclose(train(objective, mesh), one, rtol=1e-5)
