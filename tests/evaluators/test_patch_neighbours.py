"""Tests of the nearest patches against a search in NumPy."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from indexed_source import mesh_of
from masked_source import Masked
from sklearn.linear_model import LogisticRegression

from vit_jax.data.augment import segments
from vit_jax.data.pipeline.workers import Reader
from vit_jax.errors import UserError
from vit_jax.evaluators import miou, patch_neighbours, patch_probe
from vit_jax.evaluators.contract import Setting

CLASSES, SIDE, PATCH, K = 3, 36, 9, 4
TRANSFORM = segments.EvalTransform((SIDE, SIDE), classes=CLASSES)


def patches_of(images):
  """Returns the mean colour of each patch, and a constant."""
  n = len(images)
  x = images.reshape(n, SIDE // PATCH, PATCH, SIDE // PATCH, PATCH, 3)
  return x.astype('float32').mean((2, 4)) / 255 - 0.4


TRAIN = Masked([(SIDE, SIDE)] * 7, CLASSES, seed=5)
TEST = Masked([(SIDE, SIDE)] * 5, CLASSES, seed=4)


def evaluator(
  batch_size=4, devices=1, train=TRAIN, kind=patch_neighbours, **keys
):
  def predict(weights, batch, want):
    return {'patches': patches_of(batch['image'])}

  objective = types.SimpleNamespace(predict=predict, results=('patches',))
  setting = Setting(
    open_source=lambda split: train if split == 'train' else TEST,
    transform=TRANSFORM,
    objective=objective,  # pyright: ignore[reportArgumentType]
    mesh=mesh_of(data=devices),
    batch_size=batch_size,
    reader=Reader(threads=2),
  )
  if kind is patch_neighbours:
    keys['k'] = K
  return kind.Evaluator(setting, split='test', **keys)


def unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


def test_votes_equal_a_search_in_numpy():
  """All patches are in memory; ignored pixels do not count in their labels."""
  found = evaluator()
  memory = found.fit({})
  assert len(memory['patches']) == 7 * 16
  np.testing.assert_allclose(memory['labels'].sum(-1), 1, rtol=1e-6)
  features, labels = [], []
  for index in range(7):
    batch = TRANSFORM(TRAIN[index])
    features += [*unit(patches_of(batch['image'][None])).reshape(-1, 3)]
    for y in range(0, SIDE, PATCH):
      for x in range(0, SIDE, PATCH):
        part = batch['segments'][y : y + PATCH, x : x + PATCH]
        counts = np.bincount(part[part >= 0], minlength=CLASSES)
        labels.append(counts / counts.sum())
  features, labels = np.array(features), np.array(labels)
  query = TRANSFORM(Masked([(36, 36)], CLASSES, seed=9)[0])['image'][None]
  expected = []
  for x in unit(patches_of(query)).reshape(-1, 3):
    similar = features @ x
    near = np.argsort(-similar, kind='stable')[:K]
    votes = np.exp((similar[near] - similar[near[0]]) / 0.02)
    expected.append(votes @ labels[near] / votes.sum())
  on_device = jax.tree.map(jnp.array, memory)
  scores = np.asarray(found.scores(on_device, jnp.array(patches_of(query))))
  np.testing.assert_allclose(
    scores.reshape(-1, CLASSES), expected, rtol=1e-3, atol=1e-4
  )
  # Colours show the classes, but the interpolation blurs edges; chance is .2.
  assert found.run({})['miou'] > 0.6


def test_memory_does_not_depend_on_batches_or_devices():
  """It is bounded, and rare classes are favoured."""
  small = evaluator(memory=28, batch_size=3)
  one = small.fit({})
  two = evaluator(memory=28, batch_size=8, devices=4).fit({})
  np.testing.assert_array_equal(one['labels'], two['labels'])
  np.testing.assert_allclose(one['patches'], two['patches'], rtol=1e-6)
  assert len(one['patches']) == 28
  other = evaluator(memory=28, seed=1).fit({})
  assert not np.array_equal(one['labels'], other['labels'])


def test_sizes_that_are_not_whole_patches():
  with pytest.raises(UserError, match=r'50.*patch'):
    miou.check_whole((48, 50), (4, 4))


class OnePatch(Masked):
  """Class 0, but one of 16 patches has class 1, and one is ignored."""

  def mask(self, index):
    mask = np.zeros((SIDE, SIDE), np.uint8)
    y, x = (PATCH * int(i) for i in divmod(index % 14, SIDE // PATCH))
    mask[y : y + PATCH, x : x + PATCH] = 1
    mask[-PATCH:, -PATCH:] = 255
    return mask


def test_patches_are_chosen_by_rarity():
  """The patch of the rare class is kept more often than 1 of 15.

  One patch of each image is kept: that with the lowest product of the number of
  pixels and U(0, 1). The rare one is kept if its number is below 14 times the
  lowest of 14 others, which has the probability ∫ (1 - u/14)^14 du.
  """
  images = 300
  source = OnePatch([(SIDE, SIDE)] * images, CLASSES)
  found = evaluator(20, train=source, memory=images).fit({})
  assert len(found['labels']) == images  # never the ignored patch
  rare = 14 / 15 * (1 - (1 - 1 / 14) ** 15)
  error = (rare * (1 - rare) / images) ** 0.5
  assert found['labels'][:, 1].mean() == pytest.approx(rare, abs=3 * error)
  assert set(found['labels'][:, 1].tolist()) == {0, 1}


def test_probe_equals_scikit_learn():
  """On standardized patches, each with its most frequent class."""
  l2 = 1e-3
  memory = evaluator(memory=28).fit({})
  x, labels = memory['patches'], memory['labels'].argmax(-1)
  mean, std = x.mean(0), x.std(0)
  inputs = (x - mean) / std
  solver = LogisticRegression(C=1 / (len(x) * l2), tol=1e-10, max_iter=10_000)
  solver.fit(inputs, labels)
  found = evaluator(kind=patch_probe, memory=28, l2=l2)
  queries = patches_of(TRANSFORM(Masked([(36, 36)], CLASSES)[0])['image'][None])
  scores = np.asarray(found.scores(found.fit({}), jnp.array(queries)))
  expected = solver.decision_function(
    (unit(queries).reshape(-1, 3) - mean) / std
  )
  scores = scores.reshape(expected.shape)
  np.testing.assert_allclose(scores, expected, rtol=1e-2, atol=2e-2)
  assert found.run({})['miou'] > 0.4  # chance is .2
