"""Tests of evaluate: data, readers and evaluators."""

import json
import shutil

import cv2
import jax
import numpy as np
import pytest
import tiny_vit

from vit_jax import checkpoint, evaluate
from vit_jax.arrays import sharding
from vit_jax.data import filters
from vit_jax.data.sources import folder as folder_source
from vit_jax.errors import UserError
from vit_jax.models.vit import Model
from vit_jax.weights import pretrained
from vit_jax.weights.formats import npz

CLASSES = ('cat', 'dog')
SKIP = {'on_bad_record': 'skip', 'max_bad_share': 0.5}


def _write(folder, count, classes=CLASSES, ranges=((0, 256), (0, 256))):
  """Writes images into one folder per class, with values in its range."""
  rng = np.random.default_rng(0)
  for name, values in zip(classes, ranges, strict=True):
    (folder / name).mkdir(parents=True)
    for number in range(count):
      pixels = rng.integers(*values, (8, 8, 3), np.uint8)
      cv2.imwrite(str(folder / name / f'{number}.png'), pixels)
  return folder


@pytest.fixture(scope='module')
def weights(tmp_path_factory):
  """Returns a function: config → path of weights of a run with it."""
  folder = tmp_path_factory.mktemp('weights')
  model = Model(len(CLASSES), **tiny_vit.SIZES)
  params = tiny_vit.noise_params(model, (8, 8))
  npz.save(str(folder / 'plain.npz'), params, None)
  about = pretrained.find(str(folder / 'plain.npz')).description.to_json()
  mesh = sharding.make_mesh(jax.devices()[:1])
  places = sharding.with_shardings(jax.eval_shape(lambda: params), mesh, ())
  placed = jax.tree.map(sharding.place, jax.device_get(params), places)

  def export(name, source, **config):
    own = dict(class_names=list(CLASSES), source=source)
    own['config'] = {'source': source, **config}
    checkpoint.export_params(folder / name, placed, about | own)
    return str(folder / name)

  return export


@pytest.fixture(scope='module')
def trained(weights, tmp_path_factory):
  """Returns weights of a run that skips bad records; val has a bad image."""
  pets = tmp_path_factory.mktemp('pets')
  _write(pets / 'train', 2)
  _write(pets / 'val', 5)
  (pets / 'val/dog/3.png').write_bytes(b'no image at all')
  (pets / 'val/cat/1.png').write_bytes(b'\x89PNG\r\n\x1a\n')
  return weights(
    'trained',
    {'name': 'folder', 'path': str(pets)},
    reader=SKIP | {'threads': 7, 'of_another_version': 1},
    evals={
      'val': {'name': 'classification', 'split': 'val', 'batch_size': 3},
      'again': {'name': 'classification', 'split': 'train'},
    },
  )


def _run(path, *settings, **keywords):
  request = evaluate.Request(settings=settings, batch_size=8, **keywords)
  return evaluate.run(path, request)


@pytest.mark.slow
def test_bad_records_follow_the_policy_of_the_run(trained):
  """Flags take precedence."""
  result = _run(trained, evaluator='val')
  assert result['count'] == 8 and result['data'].endswith('/val')
  for setting, words in (
    ('on_bad_record=error', r'val/.*/(1|3)\.png'),
    ('max_bad_share=0.1', 'reader.max_bad_share'),
    ('thread=2', "reader.thread is not a key.*'threads'"),
  ):
    with pytest.raises(UserError, match=words):
      _run(trained, f'--config.reader.{setting}')


@pytest.mark.slow
def test_evaluators_of_the_run(trained):
  """By default all, each with its own split, as in metrics.jsonl."""
  result = _run(trained)
  assert not {'count', 'loss', 'data'} & result.keys()
  for name, split, count in (('val', 'val', 8), ('again', 'train', 4)):
    one = _run(trained, evaluator=name)
    assert one['count'] == result[f'{name}/count'] == count
    assert one['data'] == result[f'{name}/data']
    assert one['data'].endswith(f'/{split}')
    assert result[f'{name}/loss'] == one['loss']
  # With --split, evaluators that differ only in their split are run once.
  half = dict(split='train[:50%]')
  assert _run(trained, evaluator='classification', **half)['count'] == 2
  assert _run(trained, **half)['count'] == 2
  setting = '--config.evals.val.cross_entropy=sigmoid'
  both = _run(trained, setting, **half)
  assert both['val/count'] == both['again/count'] == 2
  assert both['val/loss'] != both['again/loss']
  # An evaluator that the run does not have uses the split of those it has.
  assert _run(trained, evaluator='classification')['data'].endswith('/val')
  with pytest.raises(UserError, match='agian.*again'):
    _run(trained, evaluator='agian')


def test_only_classification_runs_on_other_data(weights, tmp_path):
  """Neighbours would come from the training split of the run."""
  path = weights(
    'two_kinds',
    {'name': 'folder', 'path': str(_write(tmp_path / 'own', 4))},
    evals={
      'knn': {'name': 'neighbours', 'split': 'train', 'ks': (3,)},
      'val': {'name': 'classification', 'split': 'train'},
    },
  )
  other = str(_write(tmp_path / 'other', 3))
  result = _run(path, data_dir=other, split='train')
  assert result['count'] == 6 and '3nn' not in result


@pytest.mark.slow
def test_examples_that_training_leaves_out_are_not_fitted(weights, tmp_path):
  """This holds for moved data, too; a list that is missing is an error."""
  _write(tmp_path / 'data/train', 4)
  _write(tmp_path / 'data/val', 2)
  source = folder_source.Source('train', path=str(tmp_path / 'data'))
  lines = filters.list_entries(source, np.array([0, 5]))
  listed = tmp_path / 'list.jsonl'
  listed.write_text('\n'.join(map(json.dumps, lines)))
  path = weights(
    'leaving_out',
    {'name': 'folder', 'path': str(tmp_path / 'data')},
    train={'split': 'train', 'num_examples': 6, 'leave_out': str(listed)},
    evals={'knn': {'name': 'neighbours', 'split': 'val', 'ks': (6,)}},
  )
  assert '6nn' in _run(path)
  # All 8 examples have 7 neighbours, the 6 remaining ones do not.
  seven = '--config.evals.knn.ks=(7,)'
  with pytest.raises(UserError, match='6 usable.*7'):
    _run(path, seven)
  shutil.move(tmp_path / 'data', tmp_path / 'moved')
  moved = dict(data_dir=str(tmp_path / 'moved'), split='val', evaluator='knn')
  with pytest.raises(UserError, match='6 usable.*7'):
    _run(path, seven, **moved)
  listed.rename(tmp_path / 'moved.jsonl')
  given = f'--config.train.leave_out={tmp_path}/moved.jsonl'
  with pytest.raises(UserError, match='6 usable.*7'):
    _run(path, seven, given, **moved)
  shutil.move(tmp_path / 'moved', tmp_path / 'data')
  with pytest.raises(UserError, match='list.jsonl.*config.train.leave_out'):
    _run(path)


@pytest.mark.slow
def test_data_dir_selects_other_data(trained, weights, tmp_path):
  """It needs a --split."""
  other = _write(tmp_path / 'other', 3)
  words = "--split is missing.*again of the run uses 'train'"
  with pytest.raises(UserError, match=words):
    _run(trained, data_dir=str(other))
  assert _run(trained, data_dir=str(other), split='train')['count'] == 6
  digits = weights('digits', {'name': 'tfds', 'dataset': 'digits'})
  for path in (trained, digits):
    given = dict(dataset='folder', split='train')
    assert _run(path, data_dir=str(other), **given)['count'] == 6
    flags = (f'--config.source.path={other}', '--config.source.allow_empty')
    assert _run(path, *flags, **given)['data'] == f'{other}/train'
  with pytest.raises(UserError, match='config.source.path is missing'):
    _run(digits, dataset='folder', split='train')
  with pytest.raises(UserError, match='--data_dir=.*members'):
    _run(digits, dataset='mixture', data_dir='x')


def test_fewshot_accepts_other_classes(trained, tmp_path):
  """Evaluators that use the head refuse them."""
  ranges = (0, 30), (80, 110), (160, 190)  # so all have neighbours of their own
  for split in ('train', 'val'):
    _write(tmp_path / split, 3, ('ant', 'bee', 'crow'), ranges)
  (tmp_path / 'val/ant/0.png').unlink()  # otherwise, all examples are the same
  given = dict(dataset='folder', data_dir=str(tmp_path), split='val')
  few = [
    f'--config.evals.fewshot.{x}' for x in ('train_split=train', 'shots=(3,)')
  ]
  found = _run(trained, *few, evaluator='fewshot', **given)
  assert found['3shot'] == 1 and found['data'] == f'{tmp_path}/val'
  with pytest.raises(UserError, match='3 classes.*head has 2'):
    _run(trained, **given)


@pytest.mark.slow
def test_preprocessing_flags(trained):
  """The default is the preprocessing of the weights."""
  val = {'evaluator': 'val'}
  plain = _run(trained, **val)
  same = _run(trained, '--config.preprocess.resize=squash', **val)
  keys = 'resize=central', 'central_fraction=0.5'
  other = _run(trained, *(f'--config.preprocess.{key}' for key in keys), **val)
  assert plain == same
  assert plain['loss'] != other['loss']
  assert plain['preprocess']['interpolation'] == 'bilinear'
  half = '--config.preprocess.central_fraction=.5'
  preset = _run(trained, half, preprocess='mae', **val)
  assert preset['loss'] not in (plain['loss'], other['loss'])
  described = dict(resize='torchvision', interpolation='bicubic')
  described |= dict(central_fraction=0.5, image_size=[8, 8])
  described |= dict(mean=[0.5] * 3, std=[0.5] * 3)
  assert described.items() <= preset['preprocess'].items()
