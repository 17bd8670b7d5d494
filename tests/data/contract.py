"""Checks of the interface that every source must implement."""

import json
import pickle
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
import pytest


def png(number):
  """Returns a small PNG image that is different for each number."""
  pixels = np.random.default_rng(number).integers(0, 256, (3, 4, 3), np.uint8)
  return cv2.imencode('.png', pixels)[1].tobytes()


def check_parts(open_split, at):
  """Checks that a split is divided randomly and reproducibly.

  Args:
    open_split: split → source; its `where` identifies examples.
    at: position at which 'train' is cut.

  Returns:
    The indices, in the whole, of the first and of the second part.
  """
  whole, *parts = (
    [source.where(i) for i in range(len(source))]
    for source in map(open_split, ('train', f'train[:{at}]', f'train[{at}:]'))
  )
  rank = {place: i for i, place in enumerate(whole)}
  first, second = ([rank[place] for place in part] for part in parts)
  assert sorted(first + second) == list(range(len(whole)))
  assert first == sorted(first) and second == sorted(second)
  assert first[-1] > second[0], 'the list was cut'
  mixed = open_split(f'train[{at}:]+train[:{at}]')
  assert [mixed.where(i) for i in range(len(whole))] == parts[1] + parts[0]
  return first, second


def check(source, expected, places):
  """Checks all properties of a source on which the reader relies.

  Args:
    source: source to be checked.
    expected: (image bytes, label) of each example.
    places: part of the expected `where` of each example.
  """
  expected = [{'image': image, 'label': label} for image, label in expected]
  assert len(source) == len(expected)
  assert [source[i] for i in range(len(source))] == expected
  assert all(type(source[i]['label']) is int for i in range(len(source)))
  if hasattr(source, 'labels'):
    assert source.labels().tolist() == [each['label'] for each in expected]
  for i, place in enumerate(places):
    assert place in source.where(i)
  assert len(source.class_names) == source.num_classes
  for index in (-1, len(source)):
    with pytest.raises(IndexError):
      source[index]
  order = np.random.default_rng(0).integers(0, len(source), 200).tolist()
  reordered = [expected[i] for i in order]
  with ThreadPoolExecutor(8) as pool:
    assert list(pool.map(source.__getitem__, order)) == reordered
  copy = pickle.loads(pickle.dumps(source))  # as in a worker process
  assert [copy[i] for i in order[:20]] == reordered[:20]
  assert (copy.name, copy.class_names) == (source.name, source.class_names)
  print_of = source.fingerprint
  assert json.loads(json.dumps(print_of)) == print_of
  assert print_of == copy.fingerprint
  assert print_of['size'] == len(source)
  assert print_of['class_names'] == source.class_names
