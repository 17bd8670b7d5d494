"""Tests that buffers, shapes and batches follow from a transform's spec."""

import dataclasses

import jax
import numpy as np
import pytest
from indexed_source import Numbered, mesh_of, train
from minimal_config import completed

from tests.plugins import unlabelled
from vit_jax.arrays import sharding
from vit_jax.data import contract
from vit_jax.data.pipeline import order, stream
from vit_jax.data.pipeline.workers import Reader
from vit_jax.errors import UserError
from vit_jax.training import data
from vit_jax.training.experiment import Experiment

CROPS = unlabelled.TrainTransform((8, 6))
IMAGES = {
  'augment.name': 'tests.plugins.unlabelled',
  'source': dict(name='tests.plugins.unlabelled', num_examples=64),
  'objective.name': 'tests.plugins.unlabelled',
  'evals': {},
}


@dataclasses.dataclass(frozen=True)
class Made:
  """A transform that returns given values under a given spec."""

  spec: contract.Spec
  values: dict

  def __call__(self, example, rng):
    del example, rng
    return self.values


def declared(key, shape=(), dtype=np.int32):
  return {key: (shape, np.dtype(dtype))}


# Crops without labels


@pytest.mark.parametrize('processes', [0, 1])
def test_two_crops_without_a_label(processes):
  """Row i contains the crops drawn by the generator of its position."""
  source = unlabelled.Source('train', num_examples=16)
  reader = Reader(processes=processes)
  batches = train(source, 16, 2, transform=CROPS, reader=reader)
  positions = np.arange(32)
  indices = order.shuffled(positions, 16, 0).tolist()
  crops = np.concatenate([batch['crops'] for batch in batches])
  assert [batch.keys() for batch in batches] == [{'crops'}] * 2
  for row, position, index in zip(crops, positions, indices, strict=True):
    bits = np.random.Philox(key=[0, position], counter=[0, 0, 0, 0])
    expected = CROPS(source[index], np.random.Generator(bits))['crops']
    np.testing.assert_array_equal(row, expected)
    assert (row[0] != row[1]).any()


@pytest.mark.slow
def test_a_step_without_labels_is_trained():
  """Batches have the compiled shapes; the loss decreases on eight devices."""
  changes = IMAGES | {'reader.on_bad_record': 'skip', 'schedule.base_lr': 0.01}
  experiment = Experiment.build(completed(**changes), jax.devices())
  abstract = experiment.abstract_batch()
  assert abstract.keys() == {'crops', 'replaced'}
  assert abstract['crops'].shape == (8, 2, 8, 8, 3)
  source = data.open_train(experiment)
  run_key = sharding.random_key(0, experiment.mesh)
  state = jax.jit(experiment.init_state)(run_key)
  step, losses = jax.jit(experiment.trainer.train_step), []
  with (
    jax.set_mesh(experiment.mesh),
    data.train_batches(experiment, source, 0) as batches,
  ):
    for _ in range(8):
      batch = next(batches)
      for key, leaf in abstract.items():
        assert batch[key].sharding == leaf.sharding
        assert batch[key].shape == leaf.shape
        assert batch[key].dtype == leaf.dtype
      state, metrics = step(state, batch, run_key, {})
      losses.append(float(metrics['loss']))
  assert 0 < losses[-1] < losses[0]


# Uses of the spec


def test_all_keys_are_padded():
  """Evaluation pads every key with zeros; `mask` is False there."""
  source = unlabelled.Source('test', num_examples=3)
  transform = Made(
    declared('shares', (4,), np.float32) | declared('place'),
    {'shares': np.full(4, 0.25, np.float32), 'place': 7},
  )
  with stream.eval_batches(source, transform, 8, mesh_of(data=8)) as batches:
    [batch] = jax.device_get(list(batches))
  expected = np.arange(8) < 3
  np.testing.assert_array_equal(batch['mask'], expected)
  np.testing.assert_array_equal(batch['place'], 7 * expected)
  np.testing.assert_array_equal(batch['shares'].sum(axis=1), expected)


@pytest.mark.parametrize(
  'spec, text',
  [
    (declared('mask'), "'mask'.*replaced"),
    (declared('replaced'), "'replaced'.*keys other"),
    (declared('place', dtype=np.int64), 'int64 .*32 bits'),
    (declared('name', dtype='S8'), r'\|S8 .*32 bits'),
    (declared('crops', (0, 4, 4, 3)), r'\[0, 4, 4, 3\].*at least 1'),
  ],
)
def test_invalid_specs(spec, text):
  """The message names the transform, and is raised when a run is built."""
  with pytest.raises(UserError, match=f'Made declares .*{text}'):
    contract.train_spec(Made(spec, {}), 'error')
  with pytest.raises(UserError, match='Made declares'):
    stream.train_batches(Numbered(8), Made(spec, {}), 8, 0, 0, mesh_of())


@pytest.mark.parametrize(
  'values, text',
  [
    ({}, "{}; its spec is {'place': "),
    ({'place': np.zeros(1, np.int32)}, r'int32 \[1\].*its spec .*int32 \[4\]'),
    ({'place': np.zeros(4)}, r'float64 \[4\].*its spec'),
    # Only the value that differs is named.
    ({'place': np.zeros(4, np.int32), 'more': 1}, "'more'.*its spec is {}: "),
  ],
)
def test_values_that_differ_from_the_spec_are_refused(values, text):
  """Values are not broadcast or rounded silently."""
  transform = Made(declared('place', (4,)), values)
  with pytest.raises(UserError, match=f'Made returned .*{text}'):
    train(Numbered(8), 8, 1, transform=transform)


@pytest.mark.parametrize('label', [-1, 8, [0, 8], [-1, 3]])
def test_labels_out_of_range_are_bad_records(label):
  """The labels of an example can be one integer or an array."""
  values = {'label': np.array(label, np.int32)}
  transform = Made(declared('label', np.shape(label)), values)
  with pytest.raises(UserError, match='label .*; allowed: 0 to 7'):
    train(Numbered(8), 8, 1, transform=transform)


def test_an_objective_without_its_keys_is_refused():
  """The message names the missing keys; it is raised before compilation."""
  changes = IMAGES | {'objective.name': 'supervised'}
  with pytest.raises(UserError, match='image, label .* crops'):
    Experiment.build(completed(**changes), jax.devices())
