"""Tests that a stored config does not depend on the working directory."""

import os

import pytest
from minimal_config import completed

from vit_jax.config import identity, loading

FOLDER = dict(name='folder', path='photos', class_map='lists/names.txt')


@pytest.mark.parametrize(
  'given, stored',
  [
    ('photos/{a,b}-*.tar', '/home/ann/photos/{a,b}-*.tar'),
    ('../photos', '/home/photos'),
    ('/data/photos', '/data/photos'),
    ('~/photos', '~/photos'),
    ('gs://bucket/photos', 'gs://bucket/photos'),
  ],
)
def test_paths_of_data_are_absolute(monkeypatch, given, stored):
  monkeypatch.setattr(os, 'getcwd', lambda: '/home/ann')
  config = completed(source=dict(name='tar', path=given))
  assert identity.absolute(config).source.path == stored
  assert config.source.path == given  # unchanged


def test_paths_in_all_sections_of_data_are_absolute(monkeypatch):
  """Members, evaluators' data and lists; other keys are not paths."""
  monkeypatch.setattr(os, 'getcwd', lambda: '/home/ann')
  other = dict(name='tfds', dataset='cifar10', data_dir='tfds', weight=1.0)
  config = completed(
    source=dict(
      name='mixture', members=dict(a=FOLDER | {'weight': 1.0}, b=other)
    ),
    evals=dict(
      knn=dict(name='neighbours', split='test', source=FOLDER),
      draw=dict(name='figures', split='test'),
    ),
    **{'train.leave_out': 'same.jsonl'},
  )
  found = identity.absolute(config)
  members = found.source.members
  assert members.a.path == '/home/ann/photos'
  assert members.a.class_map == '/home/ann/lists/names.txt'
  assert members.b.data_dir == '/home/ann/tfds'
  assert members.b.dataset == 'cifar10'
  assert found.evals.knn.source.path == '/home/ann/photos'
  assert found.evals.draw == config.evals.draw
  assert found.train.leave_out == '/home/ann/same.jsonl'


def test_a_tokenizer_has_an_absolute_path_that_may_change(monkeypatch):
  """Also that of an evaluator; it does not belong to a run's identity."""
  monkeypatch.setattr(os, 'getcwd', lambda: '/home/ann')
  config = loading.load('configs/lit.py:data=coco')
  found = identity.absolute(config)
  for section in (found.augment, found.evals.retrieval.preprocess):
    assert section.tokenizer == '/home/ann/sentencepiece.model'
  assert identity.identity(found) == identity.identity(config)
