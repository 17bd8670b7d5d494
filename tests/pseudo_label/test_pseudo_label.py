"""Tests of `pseudo_label` and of the source that reads its labels."""

import dataclasses
import json
import pickle
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import tiny_vit
from etils import epath
from minimal_config import completed

from tests import cli
from tests.multiprocess import damaged
from vit_jax import load_pretrained, pseudo_label
from vit_jax.cli import inputs
from vit_jax.data import filters
from vit_jax.data.sources import pseudo_labels
from vit_jax.data.storage import parts
from vit_jax.errors import UserError
from vit_jax.models.vit import Model
from vit_jax.pseudo_label import Request
from vit_jax.training import loop
from vit_jax.weights import pretrained
from vit_jax.weights.formats import npz

SIZE, CLASSES, EXAMPLES = (8, 8), 3, 53
SOURCE = dict(num_examples=EXAMPLES, num_classes=CLASSES, height=9)
SETTINGS = (
  *(f'--config.source.{key}={value}' for key, value in SOURCE.items()),
  '--config.reader.on_bad_record=skip',
  '--config.reader.max_bad_share=1',
)
REQUEST = Request(
  dataset='tests.multiprocess.damaged',
  split='train',
  batch_size=8,
  part_examples=16,
  settings=SETTINGS,
  per_class=9,
)


@pytest.fixture(scope='module')
def weights(tmp_path_factory):
  """Returns the path of the weights of a small random teacher."""
  path = str(tmp_path_factory.mktemp('weights') / 'small.npz')
  params = tiny_vit.noise_params(Model(CLASSES, **tiny_vit.SIZES), SIZE)
  npz.save(path, params, None)
  return path


@pytest.fixture(scope='module')
def plain(weights):
  """Returns indices of good images, and their probabilities by NumPy."""
  source = damaged.Source('train', **SOURCE)
  good = [i for i in range(EXAMPLES) if i % 5]
  model, params = load_pretrained(weights)
  resize = pretrained.find(weights).description.transform().pixels
  pixels = np.stack([resize(source[i]['image']) for i in good])
  logits = model.apply({'params': params}, np.float32(pixels) / 127.5 - 1)
  powers = np.exp(np.float64(logits) - np.max(logits, axis=1, keepdims=True))
  return good, powers / powers.sum(axis=1, keepdims=True)


@pytest.fixture(scope='module')
def threshold(plain):
  """Returns a value between two confidences, at a third of their ranking."""
  ranked = np.sort(plain[1].max(axis=1))
  return float(ranked[13:15].mean())


@pytest.fixture(scope='module')
def file(weights, threshold, tmp_path_factory):
  """Returns the path of labels, and the result of the command that wrote it."""
  path = str(tmp_path_factory.mktemp('result') / 'labels')
  request = dataclasses.replace(REQUEST, min_confidence=threshold)
  return path, pseudo_label.run(weights, path, request)


def columns(path):
  """Returns the columns of all parts, and `copies`."""
  found = parts.read_features(path)
  return found | {'copies': pseudo_labels.copies(path)}


def opened(path, **images):
  return pseudo_labels.Source('train', path=path, **images)


@pytest.mark.slow
def test_labels_are_the_teachers_probabilities(file, plain, threshold):
  """42 of 53 images are good; the confident ones are balanced and counted."""
  path, result = file
  good, soft = plain
  sure = [n for n in range(len(good)) if soft[n].max() >= threshold]
  assert result['seen'] == len(good) == 42 and result['confident'] == len(sure)
  assert len(sure) == 42 - 14
  counts = np.bincount(soft[sure].argmax(axis=1), minlength=CLASSES)
  assert result['of_class'] == counts.tolist()
  assert result['count'] == 9 * (counts > 0).sum()
  held = columns(path)
  rows = [good.index(i) for i in held['index']]
  assert rows == sure
  np.testing.assert_allclose(held['soft'], soft[rows], atol=1e-5)
  sums = np.bincount(held['soft'].argmax(axis=1), held['copies'], CLASSES)
  assert sums.tolist() == [9 * bool(n) for n in counts]


@pytest.mark.slow
def test_source_returns_images_and_labels(file):
  """Examples occur once per copy, also after pickling and in sub-splits."""
  path, result = file
  source = opened(path)
  assert len(source) == result['count'] and source.num_classes == CLASSES
  images = damaged.Source('train', **SOURCE)
  assert source.class_names == images.class_names
  held = columns(path)
  expected = np.repeat(held['index'], held['copies'])
  soft = np.repeat(held['soft'], held['copies'], axis=0)
  sent = pickle.loads(pickle.dumps(source))
  for i, index in enumerate(expected.tolist()):
    example, image = sent[i], images[index]['image']
    np.testing.assert_array_equal(example['image'], image)
    np.testing.assert_array_equal(example['soft'], soft[i])
    assert example['label'] == soft[i].argmax()
    assert source.where(i) == images.where(index)
  assert len(pickle.dumps(source)) < 20_000
  first, rest = (
    pseudo_labels.Source(split, path=path)
    for split in ('train[:11]', 'train[11:]')
  )
  assert len(first) == 11 and len(rest) == len(source) - 11
  assert first.fingerprint != rest.fingerprint
  assert source.fingerprint == opened(path).fingerprint
  joined = pseudo_labels.Source('train[:3]+train[5:]', path=path)
  assert joined.fingerprint['size'] == len(source) - 2


@pytest.mark.slow
def test_examples_that_training_leaves_out_are_not_labelled(
  weights, tmp_path, monkeypatch
):
  """The others keep their indices, with which the images are opened again."""
  rows = lambda self: [('train', np.arange(len(self)))]  # noqa: E731
  monkeypatch.setattr(damaged.Source, 'rows', rows, raising=False)
  images = damaged.Source('train', **SOURCE)
  out = np.array([1, 17, 52])
  listed = tmp_path / 'list.jsonl'
  lines = filters.list_entries(images, out)
  listed.write_text('\n'.join(map(json.dumps, lines)))
  source = dict(name='tests.multiprocess.damaged', **SOURCE)
  config = completed(source=source, **{'train.leave_out': str(listed)})
  (tmp_path / 'c.json').write_text(config.to_json_best_effort())
  request = Request(
    config=str(tmp_path / 'c.json'),
    settings=SETTINGS[-2:],
    batch_size=8,
    min_confidence=0.0,
  )
  path = str(tmp_path / 'labels')
  result = pseudo_label.run(weights, path, request)
  good = [i for i in range(EXAMPLES) if i % 5 and i not in out]
  assert result['seen'] == result['count'] == len(good) == 39
  source = opened(path)
  for i, index in enumerate(good):
    np.testing.assert_array_equal(source[i]['image'], images[index]['image'])
  listed.write_text('\n'.join(map(json.dumps, lines[:2])))
  with pytest.raises(UserError, match='another command.*left_out'):
    pseudo_label.run(weights, path, request)


def test_other_images_are_refused(file, tmp_path):
  """The images must be those of the teacher, but their path may differ."""
  path, _ = file
  same = dict(name='tests.multiprocess.damaged', **SOURCE)
  assert len(opened(path, images=same)) == len(opened(path))
  with pytest.raises(UserError, match='labels of other images'):
    opened(path, images=same | dict(num_examples=54))
  with pytest.raises(UserError, match='none contains no selection.npz'):
    opened(str(tmp_path / 'none'))


@pytest.mark.parametrize('name', ['00001.npz', 'selection.npz'])
def test_damaged_files_are_refused(file, tmp_path, name):
  """One changed bit is noticed, and a missing part."""
  folder = tmp_path / 'labels'
  shutil.copytree(file[0], folder)
  content = bytearray((folder / name).read_bytes())
  content[400] ^= 1
  (folder / name).write_bytes(content)
  with pytest.raises(UserError, match=f'{name} cannot be read'):
    opened(str(folder))
  (folder / name).unlink()
  with pytest.raises(UserError, match=f'missing|no {name}'):
    opened(str(folder))


@pytest.mark.slow
def test_the_labels_of_a_sigmoid_are_sigmoids(weights, tmp_path, monkeypatch):
  """Probabilities are those for which the teacher's loss is."""
  source = pretrained.find(weights)
  objective = dict(name='supervised', cross_entropy='sigmoid')
  described = dataclasses.replace(source.description, objective=objective)
  teacher = dataclasses.replace(source, description=described)
  monkeypatch.setattr(inputs, 'open_weights', lambda *_: teacher)
  path, request = str(tmp_path / 'labels'), REQUEST
  pseudo_label.run(weights, path, dataclasses.replace(request, per_class=0))
  held = columns(path)
  image = damaged.Source('train', **SOURCE)[int(held['index'][0])]['image']
  pixels = source.description.transform().pixels(image)
  params = source.load(source.abstract_params())
  batch = {'image': jnp.asarray(pixels[None])}
  logits = source.objective().predict(params, batch)['logits'][0]
  expected = scipy.special.expit(np.asarray(logits))
  np.testing.assert_allclose(held['soft'][0], expected, atol=1e-5)


@pytest.mark.slow
def test_messages_of_invalid_requests(weights, tmp_path):
  """Flags out of range, missing data, and a teacher without a head."""
  headless, out = str(tmp_path / 'headless.npz'), str(tmp_path / 'f')
  params = tiny_vit.noise_params(Model(0, **tiny_vit.SIZES), SIZE)
  npz.save(headless, params, None)
  for path, changes, message in (
    (weights, dict(min_confidence=1.0), r'1\.0.*--min_confidence'),
    (weights, dict(min_confidence=1.5), '--min_confidence'),
    (weights, dict(per_class=-1), '--per_class'),
    (weights, dict(split=None), '--split is missing'),
    (headless, {}, 'headless.*no classes.*teacher'),
  ):
    with pytest.raises(UserError, match=message):
      request = dataclasses.replace(REQUEST, **changes)
      pseudo_label.run(path, out, request)


@pytest.mark.slow
def test_a_student_is_trained(file, tmp_path):
  """With both kinds of labels in a batch, the loss is finite and decreases."""
  path, result = file
  members = dict(  # as in configs/noisy_student.py
    labelled=dict(name='synthetic', weight=1.0, **SOURCE),
    unlabelled=dict(name='pseudo_labels', path=path, weight=3.0),
  )
  config = completed(
    **{
      'num_classes': CLASSES,
      'source': dict(name='mixture', members=members),
      'train.split': 'labelled/train,unlabelled/train',
      'train.num_examples': EXAMPLES + result['count'],
      'augment': dict(name='soft_labels', num_classes=CLASSES, crop='none'),
      'mix': dict(mixup=0.2),
      'total': '12 steps',
      'schedule.base_lr': 1e-2,
      'evals': {},
      'log.every': '1 steps',
      'log.tensorboard': False,
      'model.dtype': 'float32',
    }
  )
  loop.run(config, epath.Path(tmp_path))
  losses = [*cli.losses(tmp_path).values()]
  assert np.isfinite(losses).all() and len(losses) == 12
  assert np.mean(losses[-4:]) < np.mean(losses[:4])
