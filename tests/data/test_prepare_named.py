"""Tests of preparing TFDS datasets by name."""

import json
import os
import subprocess
import sys
import tarfile
import textwrap

import pytest

from tests import archives, cli
from tests.data.test_prepare_folder import fill
from vit_jax.data.sources import tfds
from vit_jax.errors import UserError
from vit_jax.prepare import folder, named

# Writes the tfrecord files of a data set from its array_record files.
TO_TFRECORD = """
  import pathlib, sys
  import tensorflow as tf
  from array_record.python.array_record_module import ArrayRecordReader

  for path in pathlib.Path(sys.argv[1]).glob('*.array_record-*'):
    other = str(path).replace('.array_record-', '.tfrecord-')
    with tf.io.TFRecordWriter(other) as writer:
      for record in ArrayRecordReader(str(path)).read_all():
        writer.write(record)
    path.unlink()
"""


@pytest.fixture(scope='module')
def as_tfrecord(tmp_path_factory):
  """Prepares a dataset named cifar10 as tfrecord; returns its directory."""
  return _prepared(tmp_path_factory.mktemp('named'), 'cifar10')


def _prepared(root, name):
  for split in ('train', 'test'):
    fill(root / 'in' / split, ['a', 'b'], 10, len(split))
  folder.prepare(root / 'in', root / 'tfds', name, shard_bytes=2_000)
  version = root / 'tfds' / name / '1.0.0'
  subprocess.run(
    [sys.executable, '-c', textwrap.dedent(TO_TFRECORD), version], check=True
  )
  path = version / 'dataset_info.json'
  info = json.loads(path.read_text()) | {'fileFormat': 'tfrecord'}
  path.write_text(json.dumps(info))
  return version


def contents(data_dir, split, name='cifar10'):
  source = tfds.Source(split, dataset=name, data_dir=str(data_dir))
  return [(source[i]['image'], source[i]['label']) for i in range(len(source))]


@pytest.mark.slow
@pytest.mark.long
def test_tfrecord_datasets_are_converted(tmp_path, as_tfrecord):
  """To another directory and in place; the old files do not change."""
  expected = {s: contents(as_tfrecord.parents[1], s) for s in ('train', 'test')}
  before = archives.tree(as_tfrecord)
  command = cli.command(
    'prepare',
    'cifar10',
    f'--source={as_tfrecord.parents[1]}',
    f'--data_dir={tmp_path}',
    '--workers=2',
  )
  cli.run(command)
  assert archives.tree(as_tfrecord) == before
  copied = tmp_path / 'cifar10/1.0.0'
  assert named.formats(copied) == ['array_record']
  assert not list(copied.glob('*tfrecord*'))
  assert {s: contents(tmp_path, s) for s in expected} == expected

  named.prepare('cifar10', as_tfrecord.parents[1])
  after = archives.tree(as_tfrecord)
  assert {k: after[k] for k in before if k != 'dataset_info.json'} == {
    k: v for k, v in before.items() if k != 'dataset_info.json'
  }
  assert named.formats(as_tfrecord) == ['tfrecord', 'array_record']
  for name in ('cifar10-train', 'cifar10-test'):
    first = f'{name}.array_record-00000-of-'
    pair = [
      next(p for k, p in archives.tree(d).items() if k.startswith(first))
      for d in (copied, as_tfrecord)
    ]
    assert pair[0] == pair[1]
  before = archives.tree(as_tfrecord)
  named.prepare('cifar10', as_tfrecord.parents[1])  # already done
  assert archives.tree(as_tfrecord) == before


@pytest.mark.slow
def test_datasets_of_own_builders_are_converted(tmp_path):
  """From elsewhere and in place, with a name that TFDS does not know."""
  version = _prepared(tmp_path, 'mine')
  expected = contents(tmp_path / 'tfds', 'train', 'mine')
  for number, source in enumerate((version, version.parents[1])):
    target = tmp_path / f'new{number}'
    named.prepare('mine', target, source=source)
    assert named.formats(target / 'mine/1.0.0') == ['array_record']
    assert contents(target, 'train', 'mine') == expected
  for source in (version, version.parents[1]):
    with pytest.raises(UserError, match='--source.* min;'):
      named.prepare('min', tmp_path / 'new', source=source)
  named.prepare('mine', tmp_path / 'tfds')
  assert named.formats(version) == ['tfrecord', 'array_record']


@pytest.mark.slow
def test_damaged_tfrecord_files_are_refused(tmp_path, as_tfrecord):
  """Checksums are compared, records counted, missing shards named."""
  copy = tmp_path / 'cifar10/1.0.0'
  copy.mkdir(parents=True)
  for name, content in archives.tree(as_tfrecord).items():
    if 'array_record' not in name and '/' not in name:
      (copy / name).write_bytes(content)
  info = json.loads((copy / 'dataset_info.json').read_text())
  info.pop('alternativeFileFormats', None)
  (copy / 'dataset_info.json').write_text(json.dumps(info))
  shard = sorted(copy.glob('*test.tfrecord*'))[0]
  whole = shard.read_bytes()
  flipped = bytearray(whole)
  flipped[len(whole) // 2] ^= 1
  length = int.from_bytes(whole[:8], 'little')
  for content, message in (
    (bytes(flipped), 'cannot be read'),
    (whole[: length + 16], r'\d+ whole records, not'),
    (None, 'cannot be read'),
  ):
    shard.write_bytes(content) if content else shard.unlink()
    with pytest.raises(UserError, match=message):
      named.prepare('cifar10', tmp_path)
  assert named.formats(copy) == ['tfrecord']
  shard.write_bytes(whole)
  named.prepare('cifar10', tmp_path)
  assert contents(tmp_path, 'test') == contents(as_tfrecord.parents[1], 'test')


@pytest.mark.slow
def test_imagenet2012_needs_downloaded_archives(tmp_path):
  """Missing archives are named; with them the dataset is prepared."""
  manual = tmp_path / 'downloads/manual'
  message = 'ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar'
  with pytest.raises(UserError, match=f'{manual}: {message}.*image-net'):
    named.prepare('imagenet2012', tmp_path)
  assert not manual.exists()
  manual.mkdir(parents=True)
  train = archives.synsets(0) | {
    wnid: archives.synset_files(wnid, 3, seed)
    for seed, wnid in enumerate(['n01440764', 'n01443537'])
  }
  archives.write(manual / 'ILSVRC2012_img_train.tar', train)
  with pytest.raises(UserError, match='manual: ILSVRC2012_img_val.tar'):
    named.prepare('imagenet2012', tmp_path)
  images = {
    f'ILSVRC2012_val_{i:08d}.JPEG': archives.photograph(i) for i in (1, 2)
  }
  (manual / 'ILSVRC2012_img_val.tar').write_bytes(archives.tar(images))
  assert tarfile.is_tarfile(manual / 'ILSVRC2012_img_val.tar')
  named.prepare('imagenet2012', tmp_path)
  for split, content in (
    ('train', [image for files in train.values() for image in files.values()]),
    ('validation', list(images.values())),
  ):
    source = tfds.Source(split, dataset='imagenet2012', data_dir=str(tmp_path))
    found = [source[i]['image'] for i in range(len(source))]
    assert sorted(found) == sorted(content) and source.num_classes == 1000


@pytest.mark.parametrize(
  'name, message',
  [
    ('cifr10', "did you mean 'cifar10'"),
    ('imagnet21k', "did you mean 'imagenet21k'"),
    ('huggingface:mnist', 'is not a known data set'),
    ('../cifar10', 'is not a known data set'),
    ('cifar10:9.9.9', 'only: 3.0.2'),
    ('sun397/small', 'has the configs tfds, standard-part1'),
    ('imagenet2012_real', 'manual: ILSVRC2012_img_val.tar'),
    ('resisc45', 'NWPU-RESISC45.*1drv.ms'),
    ('diabetic_retinopathy_detection/btgraham-300', 'kaggle.com'),
    ('imagenet_lt', 'manual: the files that TFDS requires'),
  ],
)
def test_messages_of_wrong_names(tmp_path, name, message):
  """Unknown names, and datasets that a person has to download."""
  with pytest.raises(UserError, match=message):
    named.prepare(name, tmp_path)
  assert not os.listdir(tmp_path)


# Hides TensorFlow.
WITHOUT_TENSORFLOW = """
  import importlib.machinery, pathlib, sys
  finder = importlib.machinery.PathFinder
  find = finder.find_spec
  finder.find_spec = classmethod(
    lambda cls, name, *rest: find(name, *rest)
    if name.split('.')[0] != 'tensorflow' else None
  )
  from vit_jax.prepare import __main__ as prepare
  from vit_jax.errors import UserError
  source, target = sys.argv[1:]
  prepare.run('imagenet21k', source=source, data_dir=target, workers=1)
  prepare.run('imagenet21k', source=source, data_dir=target, workers=1)
  for name in ('cifar10', 'digits'):
    try:
      prepare.run(name, data_dir=target)
    except UserError as error:
      print(error)
"""


@pytest.mark.slow
def test_own_builders_do_not_need_tensorflow(tmp_path):
  """TFDS's builders say what they need."""
  source = archives.write(tmp_path / 'fall11_whole.tar', archives.synsets(2))
  done = subprocess.run(
    [
      sys.executable,
      '-c',
      textwrap.dedent(WITHOUT_TENSORFLOW),
      source,
      tmp_path / 'tfds',
    ],
    cwd=cli.ROOT,
    env=cli.environment(),
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert done.stdout.count("pip install 'vit_jax[tensorflow]'") == 1
  assert (tmp_path / 'tfds/digits/1.0.0/dataset_info.json').exists()
