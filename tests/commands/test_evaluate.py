"""Tests of evaluate: data, readers and evaluators."""

import json
import shutil

import cv2
import jax
import numpy as np
import pytest
import tiny_vit

from vit_jax import checkpoint, evaluate, predict
from vit_jax.arrays import sharding
from vit_jax.data import filters
from vit_jax.data.sources import folder as folder_source
from vit_jax.data.sources import objectnet
from vit_jax.errors import UserError
from vit_jax.models.vit import Model
from vit_jax.weights import pretrained
from vit_jax.weights.formats import npz

CLASSES = ('cat', 'dog')


def _write(folder, count):
  """Writes images into one folder per class."""
  rng = np.random.default_rng(0)
  for name in CLASSES:
    (folder / name).mkdir(parents=True)
    for number in range(count):
      pixels = rng.integers(0, 256, (8, 8, 3), np.uint8)
      cv2.imwrite(str(folder / name / f'{number}.png'), pixels)
  return folder


@pytest.fixture(scope='module')
def weights(tmp_path_factory):
  """Returns a function: config → path of weights of a run with it."""
  folder = tmp_path_factory.mktemp('weights')
  model = Model(len(CLASSES), **tiny_vit.SIZES)
  params = tiny_vit.noise_params(model, (8, 8))
  npz.save(str(folder / 'plain.npz'), params, {})
  about = pretrained.find(str(folder / 'plain.npz')).about
  mesh = sharding.make_mesh(jax.devices()[:1])
  places = sharding.with_shardings(jax.eval_shape(lambda: params), mesh, ())
  placed = jax.tree.map(sharding.place, jax.device_get(params), places)

  def export(name, source, **config):
    about_it = about | {
      'class_names': list(CLASSES),
      'source': source,
      'config': {'source': source, **config},
    }
    path = str(folder / name)
    checkpoint.export_params(folder / name, placed, about_it)
    return path

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
    reader={
      'on_bad_record': 'skip',
      'max_bad_share': 0.5,
      'threads': 7,
      'of_another_version': 1,
    },
    evals={
      'val': {'name': 'classification', 'split': 'val', 'batch_size': 3},
      'again': {'name': 'classification', 'split': 'train'},
    },
  )


def _run(path, *settings, **keywords):
  request = evaluate.Request(settings=settings, batch_size=8, **keywords)
  return evaluate.run(path, request)


def _predict(path, image, **keywords):
  return list(predict.run(path, [image], predict.Request(**keywords)))


def test_bad_records_follow_the_policy_of_the_run(trained):
  """Flags take precedence."""
  result = _run(trained, evaluator='val')
  assert result['count'] == 8 and result['data'].endswith('/val')
  with pytest.raises(UserError, match=r'val/.*/(1|3)\.png'):
    _run(trained, '--config.reader.on_bad_record=error')
  with pytest.raises(UserError, match='reader.max_bad_share.*the log'):
    _run(trained, '--config.reader.max_bad_share=0.1')
  with pytest.raises(UserError, match="reader.thread is not a key.*'threads'"):
    _run(trained, '--config.reader.thread=2')


def test_a_split_without_usable_examples_is_refused(weights, tmp_path):
  """The accuracy of no examples is undefined."""
  for path in _write(tmp_path / 'train', 2).rglob('*.png'):
    path.write_bytes(b'no image at all')
  path = weights(
    'none',
    {'name': 'folder', 'path': str(tmp_path)},
    reader={'on_bad_record': 'skip', 'max_bad_share': 1.0},
    evals={'val': {'name': 'classification', 'split': 'train'}},
  )
  with pytest.raises(UserError, match='none of its 4 examples could be used'):
    _run(path)


def test_evaluator_flag_selects_by_name_or_kind(trained):
  """By default, a kind uses the split of the evaluators of the run."""
  assert _run(trained, evaluator='again')['count'] == 4
  kind = _run(trained, evaluator='classification', split='train[:50%]')
  assert kind['count'] == 2
  setting = '--config.evals.val.cross_entropy=sigmoid'
  sigmoid = _run(trained, setting, evaluator='val')
  assert sigmoid['loss'] != _run(trained, evaluator='val')['loss']
  # An evaluator that the run does not have uses the split of those it has.
  assert _run(trained, evaluator='classification')['data'].endswith('/val')
  with pytest.raises(UserError, match='agian.*again'):
    _run(trained, evaluator='agian')


def test_all_evaluators_of_the_run_by_default(trained):
  """Each uses its own split; the names are those of metrics.jsonl."""
  result = _run(trained)
  assert result['val/count'] == 8 and result['val/data'].endswith('/val')
  assert result['again/count'] == 4
  assert result['again/data'].endswith('/train')
  for name in ('val', 'again'):
    one = _run(trained, evaluator=name)
    assert result[f'{name}/loss'] == one['loss']
  assert not {'count', 'loss', 'data'} & result.keys()


def test_split_flag_merges_evaluators_that_differ_only_in_split(
  trained, tmp_path
):
  """Evaluators that differ in other keys are all run."""
  assert _run(trained, split='train[:50%]')['count'] == 2
  setting = '--config.evals.val.cross_entropy=sigmoid'
  both = _run(trained, setting, split='train[:50%]')
  assert both['val/count'] == both['again/count'] == 2
  assert both['val/loss'] != both['again/loss']


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


def test_frozen_features_are_fitted_on_the_training_split(weights, tmp_path):
  """The held-out part of a folder shares no image with the fitted part."""
  photos = _write(tmp_path / 'photos', 10)
  path = weights(
    'held_out',
    {'name': 'folder', 'path': str(photos)},
    train={'split': 'train[:50%]'},
    evals={'val': {'name': 'classification', 'split': 'train[50%:]'}},
  )
  few = '--config.evals.neighbours.ks=(3,)'
  result = _run(path, few, evaluator='neighbours')
  assert result['data'].endswith('/train[50%:]')
  assert 0 <= result['3nn'] <= 1
  whole = '--config.evals.neighbours.train_split=train'
  with pytest.raises(UserError, match=r"10 of the 10.*train_split='train'"):
    _run(path, few, whole, evaluator='neighbours')


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
  """Folders, manifests and TFDS datasets are accepted, and need a --split."""
  other = _write(tmp_path / 'other', 3)
  with pytest.raises(
    UserError, match="--split is missing.*again of the run uses 'train'"
  ):
    _run(trained, data_dir=str(other))
  assert _run(trained, data_dir=str(other), split='train')['count'] == 6
  lines = [
    json.dumps({'image': str(path), 'label': path.parent.name})
    for path in sorted(other.rglob('*.png'))
  ]
  listed = tmp_path / 'list.jsonl'
  listed.write_text('\n'.join(lines))
  given = dict(dataset='manifest', data_dir=str(listed), split='train')
  assert _run(trained, **given)['count'] == 6
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
  other = tmp_path / 'other'
  rng = np.random.default_rng(0)
  for number, name in enumerate(('ant', 'bee', 'crow')):
    (other / 'train' / name).mkdir(parents=True)
    for each in range(6):
      pixels = rng.integers(80 * number, 80 * number + 30, (8, 8, 3), np.uint8)
      folder = other / ('train' if each < 3 else 'val') / name
      folder.mkdir(parents=True, exist_ok=True)
      cv2.imwrite(str(folder / f'{each}.png'), pixels)
  given = dict(dataset='folder', data_dir=str(other), split='val')
  few = (
    '--config.evals.fewshot.train_split=train',
    '--config.evals.fewshot.shots=(3,)',
  )
  found = _run(trained, *few, evaluator='fewshot', **given)
  assert found['3shot'] == 1  # the classes differ only in brightness
  assert found['data'] == f'{other}/val'
  with pytest.raises(UserError, match='3 classes.*head has 2'):
    _run(trained, **given)


@pytest.mark.slow
def test_preprocessing_flags(trained, tmp_path):
  """The default is the preprocessing of the weights, in `predict` as well."""
  val = {'evaluator': 'val'}
  plain = _run(trained, **val)
  same = _run(trained, '--config.preprocess.resize=squash', **val)
  other = _run(
    trained,
    '--config.preprocess.resize=central',
    '--config.preprocess.central_fraction=0.5',
    **val,
  )
  assert plain == same
  assert plain['loss'] != other['loss']
  assert plain['preprocess']['interpolation'] == 'bilinear'
  preset = _run(
    trained,
    '--config.preprocess.central_fraction=.5',
    preprocess='mae',
    **val,
  )
  assert preset['loss'] not in (plain['loss'], other['loss'])
  assert preset['preprocess'] == {
    'name': 'transforms',
    'resize': 'torchvision',
    'central_fraction': 0.5,
    'interpolation': 'bicubic',
    'scaled_decoding': False,
    'channels': 3,
    'bits': 8,
    'image_size': [8, 8],
    'mean': [0.5] * 3,
    'std': [0.5] * 3,
  }
  image = str(_write(tmp_path, 1) / 'cat' / '0.png')
  (first,) = _predict(trained, image)
  setting = '--config.preprocess.resize=central'
  (second,) = _predict(trained, image, settings=[setting])
  assert first != second
  (third,) = _predict(trained, image, preprocess='dino')
  assert third not in (first, second)
  with pytest.raises(UserError, match="not a key; did you mean 'resize'"):
    _predict(trained, image, settings=['--config.preprocess.resiz=1'])


def test_objectnet_counts_any_of_the_corresponding_classes(tmp_path):
  """The head always prefers a folding chair, then a mountain bike."""
  for name in objectnet.IMAGENET_CLASSES:
    folder = tmp_path / 'objectnet-1.0/images' / name
    folder.mkdir(parents=True)
    cv2.imwrite(str(folder / '1.png'), np.full((10, 10, 3), 90, np.uint8))
  model = Model(1_000, **tiny_vit.SIZES | {'depth': 1})
  params = tiny_vit.noise_params(model, (8, 8))
  bias = np.zeros(1_000, np.float32)
  bias[[559, 671, 1, 2, 3]] = 9, 8, 7, 7, 7  # n03376595, n03792782, no class
  params['head'] = jax.tree.map(np.zeros_like, params['head']) | {'bias': bias}
  npz.save(str(tmp_path / 'head.npz'), params, {})
  given = dict(dataset='objectnet', data_dir=str(tmp_path), split='test')
  path, kind = str(tmp_path / 'head.npz'), dict(evaluator='calibration')
  labels = '--config.evals.calibration.labels=imagenet_labels'
  found = _run(path, labels, **kind, **given)
  assert found['data'] == 'objectnet/test' and found['count'] == 113
  assert found['accuracy'] == pytest.approx(1 / 113)  # chairs
  assert found['top5'] == pytest.approx(2 / 113)  # and bicycles
  with pytest.raises(UserError, match="labels.*'imagenet_labels'"):
    _run(path, labels[:-1], **kind, **given)
