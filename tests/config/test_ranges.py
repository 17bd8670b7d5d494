"""Tests that constructors refuse numbers out of range."""

import contextlib
import math

import jax
import pytest
from indexed_source import Computed
from minimal_config import completed, sections

from vit_jax.arrays import sharding
from vit_jax.checkpoint import Checkpointer
from vit_jax.config import schema
from vit_jax.config.schema import SECTIONS
from vit_jax.data.augment.transforms import EvalTransform
from vit_jax.data.pipeline import stream
from vit_jax.errors import UserError, check_range
from vit_jax.evaluators.classification import Evaluator
from vit_jax.evaluators.contract import Setting
from vit_jax.training.experiment import Experiment

# Numbers that may be negative: -1 is the remaining devices, or a bias.
NEGATIVE = {'mesh.data', 'mesh.fsdp', 'mesh.model', 'model.head_bias'}
# Sections by another name than the minimal config's.
OTHERS = [('optimizer', 'sgd'), ('source', 'synthetic')]


def build(tmp_path, key, value, **changes):
  """Builds the objects that take a key, as a run does before it compiles."""
  section, _, leaf = key.rpartition('.')
  if section == 'checkpoint' and leaf != 'best':
    return Checkpointer(tmp_path / 'c', {}, **{leaf: value})
  if section.startswith('evals.'):
    setting = Setting(
      open_source=lambda split: None,
      transform=EvalTransform((8, 8)),
      objective=Computed(lambda params, batch: {}, 3),
      mesh=sharding.make_mesh(jax.devices()[:1]),
      batch_size=8,
      reader=stream.Reader(),
    )
    section = {'every': '1 epochs', 'batch_size': None, leaf: value}
    return Evaluator(setting.for_section(section), split='test')
  if section == 'source':
    constructor = schema.resolve(SECTIONS['source'], 'synthetic')
    return constructor('train', **{leaf: value})
  config = completed(**changes, **{key: value})
  return Experiment.build(config, jax.devices()[:1])


def numeric_keys():
  """Yields (key, type, changes) of the numbers of all constructors."""
  top = schema.config_keys(schema.resolve('vit_jax.config.keys:top_level'))
  for changes in ({}, *({s: dict(name=name)} for s, name in OTHERS)):
    config = completed(**changes, **{'checkpoint.best': 'test/accuracy'})
    named = dict(config) | {f'evals.{k}': v for k, v in config.evals.items()}
    for values, keys in [({}, top), *sections(config)]:
      names = [f'{name}.' for name, each in named.items() if each is values]
      for leaf, parameter in keys.items():
        kind, _, _ = schema.value_type(parameter.annotation)
        if kind in (int, float):
          yield ''.join(names) + leaf, kind, changes


NUMERIC = {key: rest for key, *rest in numeric_keys()}


@pytest.mark.parametrize('key', sorted(NUMERIC))
def test_negative_and_infinite_numbers_are_refused(tmp_path, key):
  """Keys that may be negative are listed above."""
  kind, changes = NUMERIC[key]
  wrong = [math.nan, math.inf] if kind is float else []
  for value in wrong + ([] if key in NEGATIVE else [kind(-1)]):
    with pytest.raises(UserError, match=key.rpartition('.')[2]):
      build(tmp_path, key, value, **changes)


SIGMOID = {'objective.cross_entropy': 'sigmoid'}


@pytest.mark.parametrize(
  'key, refused, allowed, changes',
  [
    ('optimizer.b1', [1.0], [0.0], {}),
    ('optimizer.clip_norm', [], [0.0], {}),
    ('optimizer.layer_decay', [1.01], [], {}),
    ('schedule.base_lr', [], [0.0], {}),
    ('batch_size', [0, 10**20], [], {}),
    ('micro_batches', [0], [], {}),
    ('seed', [2**32], [2**32 - 1], {}),
    ('average_decay', [1.0], [], {}),
    ('num_classes', [0], [], {}),
    ('total', ['0 steps'], ['1 step'], {}),
    ('log.every', ['0 steps'], ['0.1 steps'], {}),
    ('checkpoint.every', ['never'], ['0 steps'], {}),
    ('evals.test.batch_size', [0], [], {}),
    ('evals.test.every', ['-1 steps'], [], {}),
    ('recovery.slow_hosts_every', ['5'], ['0 %'], {}),
    ('recovery.spike_factor', [1.0], [], {}),
    ('recovery.max_rollbacks', [], [0], {}),
    ('model.dropout', [1.0], [], {}),
    ('model.width', [10**20], [], {}),
    ('model.unroll', [10**20], [], {}),
    ('mesh.data', [], [-1], {}),
    ('train.num_examples', [0], [], {}),
    ('objective.label_smoothing', [1.0], [0.99], {}),
    # From 0.5 on, targets of a sigmoid would point away from the label.
    ('objective.label_smoothing', [0.5], [0.49], SIGMOID),
    ('source.num_examples', [0], [], {}),
    ('preprocess.central_fraction', [1e-9, 1.5], [], {}),
    ('preprocess.resize', ['crop'], [], {}),
    ('preprocess.interpolation', ['nearest'], [], {}),
    ('augment.crop', ['center'], [], {}),
    ('augment.min_area', [0.0, 1.5], [], {}),
    ('augment.min_aspect', [2.0], [], {}),
    ('augment.interpolation', ['cubic'], [], {}),
    ('augment.randaugment_magnitude', [11.0], [], {}),
    ('augment.randaugment_policy', ['mine'], [], {}),
    ('mix.erasing', [1.5], [], {}),
    ('reader.max_bad_share', [40.0], [1.0], {}),
    ('reader.prefetch', [0], [], {}),
    ('position_resize', ['cubic'], [], {}),
  ],
)
def test_limits_of_values(tmp_path, key, refused, allowed, changes):
  """The message about a value just outside of the limits names the key."""
  for value in refused:
    with pytest.raises(UserError, match=key.rpartition('.')[2]):
      build(tmp_path, key, value, **changes)
  for value in allowed:
    build(tmp_path, key, value, **changes)


def test_message_of_check_range():
  """It contains the key, the value and each limit."""
  with pytest.raises(UserError, match='b2 is 2.0; .*at least 0 and below 1'):
    check_range('optimizer.b2', 2.0, at_least=0, below=1)
  check_range('optimizer.clip_norm', None, at_least=0)
  check_range('x', 10**400)  # of any size where there is no limit


@pytest.mark.parametrize(
  'best, changes, message',
  [
    ('test/accuracy', {'early_stop_patience': 3}, None),
    ('test_ema/accuracy', {'average_decay': 0.9}, None),
    (None, {}, None),
    ('test/loss', {}, None),  # the lowest
    # Otherwise, a run would save no best step and not report it.
    ('val/accuracy', {}, 'allowed: test/accuracy'),
    ('test', {}, 'allowed: test/accuracy'),
    ('test_ema/accuracy', {}, 'allowed: test/accuracy'),
    ('test/count', {}, "checkpoint.best is 'test/count'.*test/accuracy"),
    # There is no default metric.
    (None, {'early_stop_patience': 3}, 'patience.*checkpoint.best'),
  ],
)
def test_metrics_that_a_checkpoint_is_the_best_by(
  tmp_path, best, changes, message
):
  """They are metrics that evaluators list as better if higher or lower."""
  raised = contextlib.nullcontext()
  if message:
    raised = pytest.raises(UserError, match=message)
  with raised:
    build(tmp_path, 'checkpoint.best', best, **changes)
