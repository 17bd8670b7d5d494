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
OTHERS = (  # sections by another name than the minimal config's
  ('optimizer', 'sgd', {}),
  ('source', 'synthetic', {}),
)


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
  """Returns (key, type, changes) of the numbers of all constructors."""
  configs = [({}, completed(**{'checkpoint.best': 'test/accuracy'}))]
  for section, name, more in OTHERS:
    changes = {section: dict(name=name, **more)}
    configs.append((changes, completed(**changes)))
  found = {}
  for changes, config in configs:
    named = dict(config) | {f'evals.{k}': v for k, v in config.evals.items()}
    for values, keys in sections(config):
      prefix = next(name for name, each in named.items() if each is values)
      for leaf, parameter in keys.items():
        kind, _, _ = schema.value_type(parameter.annotation)
        if kind in (int, float):
          found[f'{prefix}.{leaf}'] = kind, changes
  top = schema.config_keys(schema.resolve('vit_jax.config.keys:top_level'))
  for leaf, parameter in top.items():
    kind, _, _ = schema.value_type(parameter.annotation)
    if kind in (int, float):
      found[leaf] = kind, {}
  return [(key, *rest) for key, rest in sorted(found.items())]


NUMERIC = numeric_keys()


@pytest.mark.parametrize('key, kind, changes', NUMERIC)
def test_negative_and_infinite_numbers_are_refused(
  tmp_path, key, kind, changes
):
  """Keys that may be negative are listed above."""
  wrong = [math.nan, math.inf] if kind is float else []
  for value in wrong + ([] if key in NEGATIVE else [kind(-1)]):
    with pytest.raises(UserError) as error:
      build(tmp_path, key, value, **changes)
    assert key.rpartition('.')[2] in str(error.value)


# Values just outside of a range, other than negative numbers, and names.
WRONG = [
  ('optimizer.b1', 1.0),
  ('optimizer.layer_decay', 1.01),
  ('batch_size', 0),
  ('batch_size', 10**20),
  ('micro_batches', 0),
  ('seed', 2**32),
  ('average_decay', 1.0),
  ('num_classes', 0),
  ('total', '0 steps'),
  ('log.every', '0 steps'),
  ('checkpoint.every', 'never'),
  ('evals.test.batch_size', 0),
  ('evals.test.every', '-1 steps'),
  ('recovery.slow_hosts_every', '5'),
  ('recovery.spike_factor', 1.0),
  ('model.dropout', 1.0),
  ('model.width', 10**20),
  ('model.unroll', 10**20),
  ('train.num_examples', 0),
  ('objective.label_smoothing', 1.0),
  ('source.num_examples', 0),
  ('preprocess.central_fraction', 1e-9),
  ('preprocess.central_fraction', 1.5),
  ('preprocess.resize', 'crop'),
  ('preprocess.interpolation', 'nearest'),
  ('augment.crop', 'center'),
  ('augment.min_area', 0.0),
  ('augment.min_area', 1.5),
  ('augment.min_aspect', 2.0),
  ('augment.interpolation', 'cubic'),
  ('augment.randaugment_magnitude', 11.0),
  ('augment.randaugment_policy', 'mine'),
  ('mix.erasing', 1.5),
  ('reader.max_bad_share', 40.0),
  ('reader.prefetch', 0),
  ('position_resize', 'cubic'),
]


@pytest.mark.parametrize('key, value', WRONG)
def test_messages_of_values_out_of_range(tmp_path, key, value):
  """The message names the key."""
  with pytest.raises(UserError) as error:
    build(tmp_path, key, value)
  assert key.rpartition('.')[2] in str(error.value)


@pytest.mark.parametrize(
  'key, value',
  [
    ('optimizer.b1', 0.0),
    ('optimizer.clip_norm', 0.0),
    ('schedule.base_lr', 0.0),
    ('objective.label_smoothing', 0.99),
    ('seed', 2**32 - 1),
    ('checkpoint.every', '0 steps'),
    ('mesh.data', -1),
    ('recovery.slow_hosts_every', '0 %'),
    ('recovery.max_rollbacks', 0),
    ('reader.max_bad_share', 1.0),
    ('total', '1 step'),
    ('log.every', '0.1 steps'),
  ],
)
def test_limits_that_are_allowed(tmp_path, key, value):
  build(tmp_path, key, value)


def test_label_smoothing_of_a_sigmoid_is_below_a_half(tmp_path):
  """From 0.5 on, targets would point away from the label."""
  sigmoid = {'objective.cross_entropy': 'sigmoid'}
  build(tmp_path, 'objective.label_smoothing', 0.49, **sigmoid)
  with pytest.raises(UserError, match=r'label_smoothing is 0\.5; .*below 0\.5'):
    build(tmp_path, 'objective.label_smoothing', 0.5, **sigmoid)


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
    # Otherwise, a run would save no best step and not report it.
    ('val/accuracy', {}, 'allowed: test/accuracy'),
    ('test/acuracy', {}, 'allowed: test/accuracy'),
    ('test', {}, 'allowed: test/accuracy'),
    ('test_ema/accuracy', {}, 'allowed: test/accuracy'),
    ('test/loss', {}, None),  # the lowest
    ('test/count', {}, "checkpoint.best is 'test/count'.*test/accuracy"),
    # There is no default metric.
    (
      None,
      {'early_stop_patience': 3},
      'early_stop_patience.*checkpoint.best',
    ),
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
