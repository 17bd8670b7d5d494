"""Tests of the comparison of kernels with XLA; kernels are interpreted."""

import json
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
  """Computes a softmax that counts rows of padding."""

  def soft_max(scores, tokens):
    del tokens
    weights = jax.numpy.exp(scores - scores.max(axis=0, keepdims=True))
    return weights, weights.sum(axis=0, keepdims=True)

  return soft_max


@pytest.mark.slow
@pytest.mark.parametrize(
  'name, wrong',
  [
    ('_side_by_side', halved),  # only in the backward pass
    *further(['_soft_max', unmasked]),
  ],
)
def test_wrong_kernels_are_disabled(name, wrong, tmp_path, monkeypatch, caplog):
  """There is a warning and an event, and XLA computes the same model."""
  broken = wrong(getattr(tpu_kernels, name))
  monkeypatch.setattr(tpu_kernels, name, broken)
  experiment = build(**{'model.remat': 'dots'})
  after, [event] = check(experiment, tmp_path)
  assert not event['passed']
  assert event['difference'] is None or event['difference'] > event['tolerance']
  [line] = [r for r in caplog.records if r.levelno == logging.ERROR]
  assert (
    'KERNEL CHECK FAILED' in line.message and event['worst'] in line.message
  )
  assert after.model == experiment.model.replace(attention='xla')
  assert after.trainer.objective.setting.model == after.model
  assert after.model.remat == 'dots'


# Models whose kernels normalize queries and keys, and rotate those of each
# image by other angles
ROTATED = {
  'model.rope': 'centered',
  'model.rope_shift': 0.5,
  'model.qk_norm': True,
}


def of_first_image(function):
  """Returns sines or cosines of the first image for all images."""
  return lambda x, num_heads: function(x[:1], num_heads)


def backwards(function):
  """Returns rotations in the opposite direction."""
  return lambda *arguments: -function(*arguments)


def without_scales(function):
  """Returns a norm whose scales have no gradient."""
  return lambda x, heads, epsilon, *vectors: function(
    x, heads, epsilon, *map(jax.lax.stop_gradient, vectors)
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  'module, name, wrong, worst',
  [
    *further(
      [tpu, '_of_all_heads', of_first_image, 'attention/'],
      [tpu_kernels, '_turned', backwards, 'attention/'],
      [tpu_kernels, '_normalized', without_scales, '_norm/'],
    ),
  ],
)
def test_rotations_and_norms_are_compared(
  module, name, wrong, worst, tmp_path, monkeypatch
):
  """Kernels with wrong angles, or without gradients of scales, are noticed."""
  experiment = build(**ROTATED)
  _, [event] = check(experiment, tmp_path)
  assert event['passed']
  monkeypatch.setattr(module, name, wrong(getattr(module, name)))
  after, [_, event] = check(experiment, tmp_path)
  assert not event['passed'] and worst in event['worst']
  assert after.model.attention == 'xla'


def gradient_of_queries_doubled(y_of):
  """Returns attention whose gradient for queries is twice the correct one."""

  def attend(query, *arrays, **options):
    doubled = 2 * query - jax.lax.stop_gradient(query)
    return y_of(doubled, *arrays, **options)

  return attend


@pytest.mark.slow
@pytest.mark.parametrize('works', further(False, True))
def test_cudnn_is_compared_on_a_gpu(gpu, works, tmp_path, monkeypatch, caplog):
  """A wrong gradient is detected; the run continues with XLA's attention."""
  if not works:
    broken = gradient_of_queries_doubled(cudnn.attend)
    monkeypatch.setattr(cudnn, 'attend', broken)
  changes = {'model.attention': 'auto', 'model.dtype': 'bfloat16'}
  experiment = build(**changes)
  after, [event] = check(experiment, tmp_path)
  assert gpu and event['passed'] == works
  assert after.model.attention == ('auto' if works else 'xla')
  assert ('KERNEL CHECK FAILED' in caplog.text) != works


def test_without_cudnn_a_run_uses_xla(gpu, tmp_path, monkeypatch, caplog):
  """The library is missing or refuses the shapes; there is a warning."""

  def missing(*arrays, **options):
    raise RuntimeError('cuDNN is not detected.')

  monkeypatch.setattr(cudnn, 'attend', missing)
  changes = {'model.attention': 'auto', 'model.dtype': 'bfloat16'}
  after, [event] = check(build(**changes), tmp_path)
  assert not event['passed'] and after.model.attention == 'xla'
  assert 'cuDNN is not detected' in caplog.text


SMALL = dict(width=16, depth=1, num_heads=2, mlp_dim=16, dtype='float32')
CROPS = dict(name='multicrop', local_crops=1, local_size=(8,))
HEAD = dict(outputs=8, hidden=8, bottleneck=4, dtype='float32')
WITHOUT_LABELS = {
  'mae': {'objective': dict(name='mae', decoder=SMALL)},
  'dino': {'objective': dict(name='dino', head=HEAD), 'augment': CROPS},
}


@pytest.mark.slow
@pytest.mark.parametrize(
  'name, tokens',
  further(['mae', 1 + 2], ['dino', 1 + 4]),  # tokens, from nine patches
)
def test_every_size_of_a_training_is_compared(
  name, tokens, tmp_path, monkeypatch
):
  """The kernels are wrong only for visible patches, or for local crops."""
  right, seen = tpu_kernels._soft_max, set()

  def wrong(scores, count):
    seen.add(int(count))
    weights, total = right(scores, count)
    return (2 * weights, total) if count == tokens else (weights, total)

  monkeypatch.setattr(tpu_kernels, '_soft_max', wrong)
  changes = {'num_classes': 0, 'evals': {}} | WITHOUT_LABELS[name]
  after, [event] = check(build(**changes), tmp_path)
  assert seen == {10, tokens}
  assert not event['passed'] and after.model.attention == 'xla'
  sizes = {'mae': [4, 8], 'dino': [8, 8]}
  assert event['image_size'] == sizes[name]


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


def test_kernels_that_do_not_compile_are_disabled(
  tmp_path, monkeypatch, caplog
):
  """The compiler's message is in the log and in the event."""
  monkeypatch.setattr(tpu, 'forward', refused)
  after, [event] = check(build(), tmp_path)
  assert after.model.attention == 'xla' and not event['passed']
  assert (
    'no such instruction' in event['error'] and event['error'] in caplog.text
  )


def test_kernel_attention_with_unsuitable_heads_is_a_user_error(tmp_path):
  """Kernels that are requested by name are not replaced silently."""
  with pytest.raises(UserError, match="attention='kernel'"):
    check(build(**{'model.num_heads': 8}), tmp_path)


@pytest.mark.parametrize('attention', ['auto', 'xla'])
def test_without_kernels_nothing_is_checked(attention, tmp_path):
  """Kernels are not used on a CPU."""
  experiment = build(**{'model.attention': attention})
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
  lines = (workdir / 'events.jsonl').read_text().splitlines()
  return list(map(json.loads, lines)), cli.losses(workdir)


@pytest.mark.slow
def test_a_run_with_wrong_kernels_trains_with_xla(tmp_path, monkeypatch):
  """Its losses equal those of a run without kernels bit for bit."""
  (tmp_path / 'plain').mkdir()
  (tmp_path / 'broken').mkdir()
  events, expected = train(tmp_path / 'plain', 'xla')
  assert 'kernel_check' not in [event['event'] for event in events]
  monkeypatch.setattr(tpu, 'forward', refused)
  events, losses = train(tmp_path / 'broken', 'kernel')
  [event] = [event for event in events if event['event'] == 'kernel_check']
  assert not event['passed']
  assert losses == expected and np.isfinite(list(losses.values())).all()
