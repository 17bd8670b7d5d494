"""Tests that the values of a config reach the objects of an experiment."""

import operator

import jax
import numpy as np
import pytest
from minimal_config import completed

from vit_jax.arrays import sharding, tree
from vit_jax.errors import UserError
from vit_jax.training.experiment import Experiment


def build(devices=1, **changes):
  return Experiment.build(completed(**changes), jax.devices()[:devices])


@pytest.mark.parametrize(
  'place, key, value',
  [
    ('trainer', 'micro_batches', 2),
    ('trainer', 'average_decay', 0.9),
    ('trainer', 'recovery.spike_factor', 5.0),
    ('objective', 'objective.label_smoothing', 0.1),
    ('objective', 'objective.cross_entropy', 'sigmoid'),
    ('setting.mix', 'mix.mixup', 0.3),
    ('model', 'model.drop_path', 0.2),
    ('setting', 'image_size', (12, 16)),
  ],
)
def test_a_value_of_the_config_reaches_its_object(place, key, value):
  """The default has another value."""
  get = operator.attrgetter(f'{place}.{key.rpartition(".")[2]}')
  assert get(build(**{key: value})) == value
  assert get(build()) != value


@pytest.mark.parametrize(
  'key, value',
  [('batch_size', 30), ('micro_batches', 7), ('schedule.warmup', '5 stps')],
)
def test_wrong_values_are_refused(key, value):
  """Devices and micro-batches must divide the batch."""
  with pytest.raises(UserError, match=rf'{key}\W+(is )?{value}\b'):
    build(8, **{key: value})


@pytest.mark.slow
def test_keys_and_initial_parameters_depend_on_the_seed():
  """The same seed gives the same bits, and another seed gives others."""
  bits, starts = [], []
  for seed in (0, 0, 1):
    experiment = build(seed=seed)
    key = sharding.random_key(seed, experiment.mesh)
    bits.append(np.asarray(jax.random.bits(key, (4,))))
    state = jax.jit(experiment.init_state)(key)
    starts.append(np.asarray(state.params['embedding']['kernel']))
  for first, again, other in (bits, starts):
    np.testing.assert_array_equal(first, again)
    assert not np.any(first == other)


def test_the_schedule_has_the_length_of_the_training():
  """Two epochs of eight batches, of which a quarter is warm-up."""
  experiment = build(
    **{
      'total': '2 epochs',
      'schedule.warmup': '25 %',
      'schedule.decay': 'linear',
      'schedule.base_lr': 0.1,
    }
  )
  rates = [float(experiment.trainer.schedule(step)) for step in range(17)]
  np.testing.assert_allclose(rates[:5], 0.1 * np.arange(5) / 4, rtol=1e-6)
  assert rates[10] == pytest.approx(0.05) and rates[16] == pytest.approx(0)


def test_shardings_of_batch_and_zero1():
  """Shapes and shardings of the inputs of a step are checked."""
  experiment = build(8, **{'mesh.zero1': True, 'model.mlp_dim': 512})
  batch = experiment.abstract_batch()
  assert batch['image'].shape == (8, 8, 8, 3)
  assert batch['image'].sharding.shard_shape((8, 8, 8, 3)) == (1, 8, 8, 3)
  state = tree.flatten(experiment.abstract_state)
  split = {
    path: np.prod(leaf.sharding.shard_shape(leaf.shape)) * 8 == leaf.size
    for path, leaf in state.items()
    if path.endswith('mlp/fc1/kernel')
  }
  assert {path.split('/')[0]: part for path, part in split.items()} == {
    'params': False,
    'opt_state': True,
  }


KIND = {
  f'{section}.{key}': value
  for section in ('augment', 'preprocess')
  for key, value in (('channels', 5), ('bits', 16))
}


def test_the_kind_of_images_reaches_batches_and_model():
  """Five channels of 16 bits are five channels of uint16 on the devices."""
  experiment = build(**KIND, **{'model.channels': 5})
  image = experiment.abstract_batch()['image']
  assert (image.shape, image.dtype) == ((8, 8, 8, 5), np.uint16)
  params = tree.flatten(experiment.abstract_state.params)
  assert params['embedding/kernel'].shape == (4, 4, 5, 8)
  assert experiment.image_flops > build().image_flops


def test_frozen_parameters_have_no_backward_flops():
  """Training only the head is a forward pass and the head's two products."""
  rules = (('(?!head/).*', dict(frozen=True)),)
  experiment = build(**{'optimizer.rules': rules})
  head = 2 * experiment.abstract_state.params['head']['kernel'].size
  assert experiment.image_flops == build().image_flops / 3 + 2 * head


@pytest.mark.parametrize(
  'changes, words',
  [
    ({}, r'model\.channels is 3'),
    ({'model.channels': 5, 'preprocess.channels': 4}, r'preprocess.*\(4, '),
    ({'model.channels': 5, 'preprocess.bits': 8}, r'uint16.*uint8.*\.bits'),
    ({'model.channels': 5, 'mix.erasing': 0.5}, r'mix\.erasing is 0\.5'),
    (
      {'model.channels': 5, 'augment.color_jitter': 0.5},
      r'augment\.color_jitter',
    ),
    (
      {'model.channels': 5, 'num_classes': 0}
      | {'objective.name': 'masked_patch'},
      'masked_patch.*uint16',
    ),
  ],
)
def test_kinds_of_images_must_agree(changes, words):
  """The message names the keys that differ, before any data is opened."""
  with pytest.raises(UserError, match=words):
    build(**KIND | changes)
