"""Tests of accuracy and loss against NumPy over all examples at once."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from indexed_source import PLAIN, Numbered, eval_setting, mesh_of
from scipy import special

from vit_jax.evaluators.classification import Evaluator

SIZE = 21


def pixels_of(source, indices):
  """Returns the preprocessed pixels of images, one row per image."""
  return np.stack(
    [PLAIN.pixels(source[i]['image']).reshape(-1) for i in indices]
  )


@functools.cache
def weights():
  """Returns weights that classify every sixth example wrongly."""
  pixels = pixels_of(Numbered(SIZE), range(SIZE)) - 128.0
  known = np.linalg.lstsq(pixels, 5 * np.eye(SIZE), rcond=None)[0]
  known[:, ::6] = 0
  return known


def predict(params, batch):
  """Computes linear logits; a black image resembles class 0."""
  pixels = batch['image'].reshape(len(batch['image']), -1) / 1.0
  return {'logits': pixels @ params + 0.1 * jnp.eye(SIZE)[0]}


def setting(source, **more):
  return eval_setting(source, predict, num_classes=SIZE, **more)


def expected(kind, left_out=()):
  """Computes results of all examples except some, in float64."""
  kept = [i for i in range(SIZE) if i not in left_out]
  logits = pixels_of(Numbered(SIZE), kept) @ weights() + 0.1 * np.eye(SIZE)[0]
  targets = np.eye(SIZE)[kept]
  losses = {
    'softmax': special.logsumexp(logits, axis=-1) - logits[targets > 0],
    'sigmoid': (np.logaddexp(0, logits) - logits * targets).sum(-1),
  }[kind]
  accuracy = (logits.argmax(-1) == kept).mean()
  return dict(accuracy=accuracy, loss=losses.mean(), count=len(kept))


@pytest.mark.parametrize('key', ['softmax', None])
@pytest.mark.parametrize(
  'batch_size, sizes',
  [
    *((size, dict(data=1)) for size in (1, 7, 8, 32)),
    *((size, dict(data=4, fsdp=2)) for size in (5, 8, 24, 50)),
  ],
)
def test_results_equal_numpy_over_all_examples(key, batch_size, sizes):
  """They do not depend on the batch size, padding or mesh.

  The mesh does not have to divide the batch size. The loss is that of the
  objective, a sigmoid here, unless the evaluator has another.
  """
  source, params = Numbered(SIZE), jnp.asarray(weights(), jnp.float32)
  own = setting(source, batch_size=batch_size)._replace(mesh=mesh_of(**sizes))
  own.objective.cross_entropy = 'sigmoid'
  evaluator = Evaluator(own, split='test', cross_entropy=key)
  result = evaluator.run(params)
  assert result == pytest.approx(expected(key or 'sigmoid'), rel=1e-5)
  assert 0.3 < result['accuracy'] < 1
  assert evaluator.run(params) == result


def test_a_batch_is_not_larger_than_the_source():
  """A few large images do not need the memory of a whole batch."""
  shapes = []

  def recorded(params, batch):
    shapes.append(batch['image'].shape[0])
    return predict(params, batch)

  source, params = Numbered(SIZE), jnp.asarray(weights(), jnp.float32)
  sizes = dict(num_classes=SIZE, devices=2, batch_size=128)
  other = eval_setting(source, recorded, **sizes)
  result = Evaluator(other, split='test').run(params)
  assert result['count'] == SIZE
  assert set(shapes) == {SIZE + 1}  # the next multiple of the devices


def test_bad_records_are_left_out():
  """They are left out of sums and counts."""
  source = Numbered(SIZE, bad_label=3, undecodable=9)
  policy = dict(on_bad_record='skip', max_bad_share=0.5)
  evaluator = Evaluator(setting(source, **policy), split='test')
  result = evaluator.run(jnp.asarray(weights(), jnp.float32))
  assert result == pytest.approx(expected('softmax', (3, 9)), rel=1e-5)


def test_nan_logits_are_never_correct():
  """Otherwise, the class of a NaN would be predicted."""
  params = jnp.asarray(weights(), jnp.float32).at[0].set(jnp.nan)
  result = Evaluator(setting(Numbered(SIZE)), split='test').run(params)
  assert result['accuracy'] == 0 and np.isnan(result['loss'])
