"""Tests of the comparison of kernels with XLA; kernels are interpreted."""

import logging

import jax
import numpy as np
import pytest
from etils import epath
from minimal_config import completed

from tests import cli
from tests.faults.counts import further
from tests.traced_for_gpu import gpu as gpu
from vit_jax.arrays import sharding
from vit_jax.config import loading
from vit_jax.errors import UserError
from vit_jax.models.attention import cudnn, tpu, tpu_kernels
from vit_jax.run.ledger import Ledger, read
from vit_jax.training import kernel_check, loop
from vit_jax.training.experiment import Experiment

KERNELS = {
  'model.attention': 'kernel',
  'model.width': 128,
  'model.depth': 1,
  'model.dtype': 'float32',
  'image_size': (12, 12),  # ten tokens fill a register and a quarter
}


def build(devices=1, **changes):
  config = completed(**KERNELS | changes)
  return Experiment.build(config, jax.devices()[:devices])


def check(experiment, tmp_path):
  """Returns the experiment after the check, and the events."""
  ledger = Ledger(epath.Path(tmp_path) / 'events.jsonl')
  with jax.set_mesh(experiment.mesh):
    key = sharding.random_key(experiment.config.seed, experiment.mesh)
    after = kernel_check.checked(experiment, key, ledger)
  return after, read(ledger.path)


@pytest.mark.slow
def test_correct_kernels_are_used(tmp_path):
  """In bfloat16, the difference is well below the tolerance."""
  experiment = build(**{'model.dtype': 'bfloat16'})
  after, [event] = check(experiment, tmp_path)
  assert after is experiment
  assert event['event'] == 'kernel_check' and event['passed']
  assert event['difference'] < kernel_check.TOLERANCE / 2


def halved(function):
  return lambda *arguments: jax.tree.map(lambda x: x / 2, function(*arguments))


def unmasked(_):
  """Returns a softmax that counts rows of padding."""

  def soft_max(scores, tokens):
    del tokens
    weights = jax.numpy.exp(scores - scores.max(axis=0, keepdims=True))
    return weights, weights.sum(axis=0, keepdims=True)

  return soft_max


def of_first_image(function):
  """Returns sines or cosines of the first image for all images."""
  return lambda x, num_heads: function(x[:1], num_heads)


def without_scales(function):
  """Returns a norm whose scales have no gradient."""
  return lambda x, heads, epsilon, *vectors: function(
    x, heads, epsilon, *map(jax.lax.stop_gradient, vectors)
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  'module, name, wrong, worst',
  [
    (tpu_kernels, '_side_by_side', halved, ''),  # only in the backward pass
    *further(
      [tpu_kernels, '_soft_max', unmasked, ''],
      [tpu, '_of_all_heads', of_first_image, 'attention/'],
      [tpu_kernels, '_normalized', without_scales, '_norm/'],
    ),
  ],
)
def test_wrong_kernels_are_disabled(
  module, name, wrong, worst, tmp_path, monkeypatch, caplog
):
  """There is a warning and an event, and XLA computes the same model."""
  changes = {'model.remat': 'dots'}
  if worst:  # kernels that rotate and normalize queries and keys
    changes |= {'model.rope': 'centered', 'model.rope_shift': 0.5}
    changes |= {'model.qk_norm': True}
  monkeypatch.setattr(module, name, wrong(getattr(module, name)))
  experiment = build(**changes)
  after, [event] = check(experiment, tmp_path)
  assert not event['passed'] and worst in event['worst']
  assert event['difference'] is None or event['difference'] > event['tolerance']
  [line] = [r for r in caplog.records if r.levelno == logging.ERROR]
  assert 'KERNEL CHECK FAILED' in line.message
  assert event['worst'] in line.message
  assert after.model == experiment.model.replace(attention='xla')
  assert after.trainer.objective.setting.model == after.model
  assert after.model.remat == 'dots'


def gradient_of_queries_doubled(attend):
  """Returns attention whose gradient for queries is twice the correct one."""

  def wrong(query, *arrays, **options):
    doubled = 2 * query - jax.lax.stop_gradient(query)
    return attend(doubled, *arrays, **options)

  return wrong


def missing(_):
  """Returns attention of a machine without cuDNN."""

  def attend(*arrays, **options):
    raise RuntimeError('cuDNN is not detected.')

  return attend


@pytest.mark.parametrize(
  'wrong, words',
  [
    (missing, 'cuDNN is not detected'),
    *further(
      [gradient_of_queries_doubled, 'KERNEL CHECK FAILED'],
      [lambda attend: attend, ''],  # it is correct
    ),
  ],
)
def test_cudnn_is_compared_on_a_gpu(
  gpu, wrong, words, tmp_path, monkeypatch, caplog
):
  """If cuDNN is wrong or missing, a run continues with XLA's attention."""
  monkeypatch.setattr(cudnn, 'attend', wrong(cudnn.attend))
  changes = {'model.attention': 'auto', 'model.dtype': 'bfloat16'}
  after, [event] = check(build(**changes), tmp_path)
  assert bool(gpu) == (wrong is not missing)
  assert event['passed'] == (not words)
  assert after.model.attention == ('xla' if words else 'auto')
  assert words in caplog.text


@pytest.mark.long
def test_every_size_of_a_training_is_compared(tmp_path, monkeypatch):
  """The kernels are wrong only for MAE's visible patches, two of nine."""
  right, seen, tokens = tpu_kernels._soft_max, set(), 1 + 2

  def wrong(scores, count):
    seen.add(int(count))
    weights, total = right(scores, count)
    return (2 * weights, total) if count == tokens else (weights, total)

  monkeypatch.setattr(tpu_kernels, '_soft_max', wrong)
  small = dict(width=16, depth=1, num_heads=2, mlp_dim=16, dtype='float32')
  objective = {'objective': dict(name='mae', decoder=small)}
  changes = {'num_classes': 0, 'evals': {}} | objective
  after, [event] = check(build(**changes), tmp_path)
  assert seen == {10, tokens}
  assert not event['passed'] and after.model.attention == 'xla'
  assert event['image_size'] == [4, 8]


def test_sizes_that_shipped_recipes_compare():
  """MAE's encoder uses 49 patches of 196; DINO's local crops have 36."""
  for config, expected in (
    ('configs/mae.py:model=B', [(16, 16 * 49), (14, 14)]),
    ('configs/dino.py', [(96, 96)]),
  ):
    experiment = Experiment.build(loading.load(config), jax.devices()[:1])
    passes = experiment.objective.other_passes(experiment.augment.spec)
    assert [size for _, size in passes] == expected


def refused(*refs, **settings):
  raise NotImplementedError('no such instruction')


def test_kernel_attention_with_unsuitable_heads_is_a_user_error(tmp_path):
  """Kernels that are requested by name are not replaced silently."""
  with pytest.raises(UserError, match="attention='kernel'"):
    check(build(**{'model.num_heads': 8}), tmp_path)


def test_without_kernels_nothing_is_checked(tmp_path):
  """Kernels are not used on a CPU."""
  experiment = build(**{'model.attention': 'auto'})
  after, events = check(experiment, tmp_path)
  assert after is experiment and events == []


def train(workdir, attention):
  """Returns events and losses of a run of two steps."""
  small = {'name': 'synthetic', 'num_examples': 64, 'num_classes': 10}
  config = completed(
    **KERNELS
    | {'model.attention': attention, 'source': small, 'total': '2 steps'}
    | {'augment.crop': 'none', 'log.tensorboard': False, 'evals': {}}
    | {'train.split': 'train[51200:]', 'log.every': '1 steps'}
  )
  loop.run(config, epath.Path(workdir))
  return cli.events(workdir, 'kernel_check'), cli.losses(workdir)


@pytest.mark.slow
def test_a_run_with_wrong_kernels_trains_with_xla(tmp_path, monkeypatch):
  """Its losses equal those of a run without kernels bit for bit."""
  events, expected = train(tmp_path / 'plain', 'xla')
  assert not events
  monkeypatch.setattr(tpu, 'forward', refused)
  [event], losses = train(tmp_path / 'broken', 'kernel')
  assert not event['passed'] and 'no such instruction' in event['error']
  assert losses == expected and np.isfinite(list(losses.values())).all()
