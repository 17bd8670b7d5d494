"""Tests that different spellings of one value compare as equal."""

import json
import math

import pytest
from minimal_config import completed

from vit_jax.config import schema
from vit_jax.run import resume


@pytest.mark.parametrize(
  'key, values',
  [
    ('total', ['200 steps', '200 step', '200steps', '2e2 steps', '2_00 steps']),
    ('schedule.warmup', ['5 %', '5%', '5.0 %']),
    ('schedule.warmup', ['0.5 epochs', '0.5 epoch']),
    ('image_size', [[16], [16, 16]]),
    ('mine.threshold', [math.nan, float('nan')]),
  ],
)
def test_equal_spellings(key, values):
  """Units in the singular, one number for both sides, NaN and NaN."""
  for value in values:
    assert not resume.differences({key: values[0]}, {key: value})


@pytest.mark.parametrize(
  'key, one, other',
  [
    ('total', '200 steps', '201 steps'),
    ('total', '200 steps', '200 epochs'),
    ('schedule.warmup', '5 %', '5 steps'),
    ('total', '0.1 epochs', '0.10000000000000002 epochs'),
    ('image_size', [16], [16, 17]),
    ('mine.sizes', [16], [16, 16]),
    ('mine.threshold', math.nan, 0.0),
    ('source.dataset', 'cifar10', 'cifar100'),
    ('seed', 1, 2),
  ],
)
def test_different_values_stay_different(key, one, other):
  assert resume.differences({key: one}, {key: other})


def test_identity_does_not_depend_on_the_spelling():
  """A run resumes if values are only written differently."""
  one = completed(total='200 steps', image_size=8)
  other = completed(total='200 step', image_size=(8, 8))
  written = json.loads(schema.to_json(one))
  assert not resume.config_changes(written, other)
  assert resume.config_changes(written, completed(total='201 steps'))
