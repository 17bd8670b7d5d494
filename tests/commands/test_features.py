"""Tests of the command `features`: exactness, resuming, file content."""

import dataclasses
import errno
import json
import os

import cv2
import jax
import numpy as np
import pytest
import tiny_vit
from etils import epath

from tests import cli
from tests.faults.counts import further
from tests.multiprocess import damaged
from vit_jax import features as features_lib
from vit_jax import load_pretrained, read_features
from vit_jax.data.filters import Chosen
from vit_jax.data.sources import tfds
from vit_jax.data.storage import parts as parts_lib
from vit_jax.errors import StorageError, UserError
from vit_jax.features import Request
from vit_jax.files import paths
from vit_jax.models.vit import Model
from vit_jax.run import lock
from vit_jax.weights import pretrained
from vit_jax.weights.formats import npz

SIZE = (8, 8)
DATA = dict(dataset='tests.multiprocess.damaged', split='train', batch_size=8)
SETTINGS = (
  '--config.source.num_examples=53',
  '--config.source.height=9',
  '--config.source.num_classes=3',
  '--config.reader.on_bad_record=skip',
  '--config.reader.max_bad_share=1',
)


@pytest.fixture(scope='module')
def weights(tmp_path_factory):
  """Returns the path of the weights of a small model with random parameters."""
  path = str(tmp_path_factory.mktemp('weights') / 'small.npz')
  model = Model(3, **tiny_vit.SIZES)
  params = tiny_vit.noise_params(model, SIZE)
  npz.save(path, params, None)
  return path


def write_images(folder, names, shape=(12, 10)):
  """Writes random images; returns their paths and their pixels."""
  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, (len(names), *shape, 3), np.uint8)
  files = [folder / f'{name}.png' for name in names]
  for file, image in zip(files, images, strict=True):
    file.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(file), image[..., ::-1])
  return [str(file) for file in files], images


def plain(path, images):
  """Computes features without the code of the command."""
  source = pretrained.find(path)
  model, params = load_pretrained(path)
  transform = source.description.transform()
  pixels = np.stack([transform.pixels(each) for each in images])
  x = np.float32(pixels) / 127.5 - 1
  found = model.apply({'params': params}, x, method='predict')
  return np.asarray(found['features'])


@pytest.mark.slow
def test_a_split_of_odd_size_with_bad_records(weights, tmp_path):
  """The file contains every good example once and in order, with its label."""
  out = tmp_path / 'f'
  request = Request(**DATA, settings=SETTINGS, part_examples=16)
  result = features_lib.run(weights, str(out), request)
  source = damaged.Source('train', num_examples=53, height=9, num_classes=3)
  good = [i for i in range(53) if i % 5]
  found = read_features(str(out))
  assert found['index'].tolist() == good and result['count'] == len(good)
  assert found['label'].tolist() == [source[i]['label'] for i in good]
  expected = plain(weights, [source[i]['image'] for i in good])
  np.testing.assert_allclose(found['features'], expected, atol=1e-5)
  about = json.loads((out / 'description.json').read_text())
  assert about['class_names'] == source.class_names
  assert about.items() <= {**result, 'settings': about['settings']}.items()
  assert about['preprocess']['resize'] == 'squash' and result['width'] == 16
  names = [f'0000{i}.npz' for i in range(4)]
  assert sorted(os.listdir(out)) == ['.lock', *names, 'description.json']


COMPUTATION = parts_lib.Computation(
  checkpoint='w.npz',
  weights='params',
  digest='0',
  data='digits',
  source={},
  split='train',
  fingerprint={},
  class_names=[],
  examples=5,
  on_bad_record='skip',
  preprocess={},
  batch_size=3,
  part_examples=3,
  settings={},
)


@pytest.fixture
def written(tmp_path):
  """Returns a result of two parts, one of which lacks an example."""
  parts = parts_lib.Parts.begin(epath.Path(tmp_path / 'f'), COMPUTATION)
  assert parts.missing() == [0, 1]
  for number in (1, 0):
    kept = parts.indices(number)[number:]
    parts.write(number, {'index': kept, 'x': kept / 2})
  assert parts.missing() == []
  return parts


def test_parts_are_read_in_order(written, monkeypatch):
  """Missing ones are named. A full disk leaves existing ones as they are."""
  path = str(written.folder)
  assert parts_lib.Parts.open(path) == written

  def full(path, content):
    raise OSError(errno.ENOSPC, 'No space left on device')

  with monkeypatch.context() as patch:
    patch.setattr(paths, 'write', full)
    with pytest.raises(StorageError, match='00000.npz .*Free some space'):
      written.write(0, {'x': np.zeros(3)})
  assert read_features(path)['x'].tolist() == [0, 0.5, 1, 2]
  written.path(0).unlink()
  assert written.missing() == [0]
  with pytest.raises(UserError, match='1 of 2 parts of .*/f are missing'):
    read_features(path)
  with pytest.raises(UserError, match='/f/g is not a directory'):
    read_features(f'{path}/g')


def _changed(path, **changes):
  with np.load(path) as file:
    np.savez(path, **{**file} | changes)


def _flipped(path):
  content = bytearray(path.read_bytes())
  with np.load(path) as file:
    content[content.index(file['x'].tobytes()) + 7] ^= 1
  path.write_bytes(content)


def _unknown_compression(path):
  """Writes 99, which no program uses, as the method of all members."""
  content = bytearray(path.read_bytes())
  for signature, offset in ((b'PK\x03\x04', 8), (b'PK\x01\x02', 10)):
    at = content.find(signature)
    while at >= 0:
      content[at + offset : at + offset + 2] = b'\x63\0'
      at = content.find(signature, at + 4)
  path.write_bytes(content)


def _exchanged(path):
  path.write_bytes(path.with_name('00001.npz').read_bytes())


@pytest.mark.parametrize(
  'change, words',
  [
    (_flipped, 'CRC'),
    (lambda path: _changed(path, x=np.zeros(2)), 'checksum'),
    (lambda path: path.write_bytes(b''), ''),
    (_unknown_compression, 'compression'),
    (_exchanged, r'\[3 5\], not \[0 3\]'),
  ],
)
def test_a_damaged_part_is_refused(written, change, words):
  """So is one of other examples, which would be twice in the result."""
  change(written.path(0))
  message = f'00000.npz cannot be read .*{words}.*delete it'
  for read in (written.missing, lambda: read_features(str(written.folder))):
    with pytest.raises(UserError, match=message):
      read()


def test_a_directory_of_other_files_is_refused(tmp_path):
  """So are a damaged description and one of another computation."""
  folder, file = epath.Path(tmp_path), tmp_path / 'description.json'
  begin = parts_lib.Parts.begin
  for name in ('.lock', 'photo.png'):
    (tmp_path / name).touch()
  with pytest.raises(UserError, match='other files, such as photo.png.*--out'):
    begin(folder, COMPUTATION)
  (tmp_path / 'photo.png').unlink()
  begin(folder, COMPUTATION)
  other = dataclasses.replace(COMPUTATION, split='test', settings={'a': 1})
  words = "settings.a: None before, 1 now.*|split: 'train' before, 'test' now"
  with pytest.raises(UserError, match=words):
    begin(folder, other)
  for text in ('', '[1]', '{"count": 2}'):
    file.write_text(text)
    with pytest.raises(UserError, match='description.json is damaged'):
      begin(folder, COMPUTATION)


def test_a_second_writer_is_refused(weights, tmp_path):
  """It does not read or write a part."""
  request = Request(**DATA, settings=SETTINGS)
  folder = epath.Path(tmp_path / 'f')
  folder.mkdir()
  with lock.hold(folder):
    with pytest.raises(UserError, match='another run uses .*/f:.*--out'):
      features_lib.run(weights, str(folder), request)
  assert os.listdir(folder) == ['.lock']


@pytest.fixture
def interrupted(weights, tmp_path, monkeypatch):
  """Interrupts a computation; returns its request, path, and examples read."""
  request = Request(**DATA, settings=SETTINGS, part_examples=16)
  out, read = tmp_path / 'f', []
  once = Chosen.__getitem__

  def failing(self, index):
    read.append(self._find(index))
    if read[-1] == 41 and len(read) < 60:
      raise OSError('the disk is gone')
    return once(self, index)

  monkeypatch.setattr(Chosen, '__getitem__', failing)
  with pytest.raises(OSError, match='the disk is gone'):
    features_lib.run(weights, str(out), request)
  read[:] = [-1] * 60  # no failure any more
  return request, out, read


def contents(folder):
  return {file.name: file.read_bytes() for file in folder.glob('[0-9d]*')}


@pytest.mark.slow
def test_an_interruption_changes_nothing(weights, tmp_path, interrupted):
  """Parts have the same bytes, and only missing ones are read, in any order."""
  request, out, read = interrupted
  whole = tmp_path / 'whole'
  features_lib.run(weights, str(whole), request)
  parts = sorted({*os.listdir(out)} - {'.lock', 'description.json'})
  assert parts[0] == '00000.npz' and len(parts) < 3
  (whole / '00000.npz').unlink()
  (whole / '00002.npz').unlink()
  del read[60:]
  # Without --batch_size, that of the interrupted computation is used.
  same = dataclasses.replace(request, batch_size=None)
  result = features_lib.run(weights, str(out), same)
  first = 16 * len(parts)
  assert sorted(read[60:]) == list(range(first, 53))
  del read[60:]
  features_lib.run(weights, str(whole), request)
  assert sorted(read[60:]) == [*range(16), *range(32, 48)]
  assert contents(out) == contents(whole)
  del read[60:]
  assert features_lib.run(weights, str(out), request) == result
  assert result['count'] == 42 and not read[60:]


@pytest.mark.slow
def test_parts_of_another_computation_are_refused(weights, interrupted):
  """The message names what differs."""
  request, out, _ = interrupted
  for changes, message in (
    (dict(preprocess='dino'), '/f .*preprocess.resize'),
    (dict(part_examples=24), 'part_examples: 16 before, 24 now'),
    (dict(split='test'), '/f .*split'),
    (dict(tokens=True), 'settings.tokens: False before, True now'),
  ):
    with pytest.raises(UserError, match=message):
      other = dataclasses.replace(request, **changes)
      features_lib.run(weights, str(out), other)


def blocks(path, images):
  """Computes the outputs of all blocks without the code of the command.

  Returns:
    Outputs after the last LayerNorm, `[n, depth, t, d]`, class token first.
  """
  model, params = load_pretrained(path)

  @jax.jit
  def run(params, images):
    x = images.astype(np.float32) / 127.5 - 1
    out = model.apply({'params': params}, x, method='predict', want=('layers',))
    layers, norm = out['layers'], params['encoder']['norm']
    centred = layers - layers.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    return centred / (variance + 1e-6) ** 0.5 * norm['scale'] + norm['bias']

  return np.asarray(run(params, images))


@pytest.mark.slow
def test_patch_tokens_of_blocks(weights, tmp_path):
  """Blocks are in the given order, without the class token."""
  files, images = write_images(tmp_path, range(3), SIZE)
  request = Request(images=files, batch_size=2, layers=(-1, 0), tokens=True)
  result = features_lib.run(weights, str(tmp_path / 'f'), request)
  assert result['shape'] == [3, 2, 4, 16] and result['width'] == 16
  found = read_features(str(tmp_path / 'f'))
  assert found['path'].tolist() == files
  expected = blocks(weights, images)[:, (2, 0), 1:]
  np.testing.assert_allclose(found['features'], expected, atol=1e-4)


@pytest.mark.slow
def test_killed_and_resumed(weights, tmp_path):
  """After SIGKILL, the same command completes the features of a config."""
  out = tmp_path / 'f'
  arguments = cli.command(
    'features',
    f'--checkpoint={weights}',
    '--config=configs/quickstart.py',
    f'--out={out}',
    *('--batch_size=8', '--part_examples=8', '--json'),
  )
  seen = lambda: any(out.glob('0000[1-9].npz'))  # noqa: E731
  cli.kill_when(arguments, seen, 'features', 120)
  with pytest.raises(UserError, match='of 180 parts'):
    read_features(str(out))
  result = json.loads(cli.run(arguments)[0])
  assert result['count'] == 1438 and result['data'].startswith('digits')
  found = read_features(str(out))
  assert found['index'].tolist() == list(range(1438))
  source = tfds.Source('train', dataset='digits')
  labels = [source[i]['label'] for i in range(1438)]
  assert found['label'].tolist() == labels


@pytest.mark.slow
@pytest.mark.parametrize('folders', [('.',), *further([('cat', 'dog')])])
def test_a_folder_of_images(weights, tmp_path, folders):
  """As a data set it has the labels of its folders, if any; or it has paths."""
  photos = tmp_path / 'photos'
  names = [f'{folders[i * len(folders) // 4]}/{i}' for i in range(4)]
  paths_of_images, _ = write_images(photos, names)
  data = dict(dataset='folder', split='train', data_dir=str(photos))
  as_data = Request(**data, batch_size=4)
  result = features_lib.run(weights, str(tmp_path / 'f'), as_data)
  found = read_features(str(tmp_path / 'f'))
  assert result['class_names'] == ([] if folders == ('.',) else [*folders])
  labels = found['label'].tolist() if 'label' in found else None
  assert labels == (None if folders == ('.',) else [0, 0, 1, 1])
  as_files = Request(images=[str(photos)], batch_size=4)
  features_lib.run(weights, str(tmp_path / 'g'), as_files)
  files = read_features(str(tmp_path / 'g'))
  assert files['path'].tolist() == paths_of_images
  np.testing.assert_array_equal(found['features'], files['features'])


@pytest.mark.parametrize(
  'out, changes, message',
  [
    ('f.npz', {}, r'f.npz.*a directory'),
    ('f.parquet', {}, r'f.parquet.*a directory'),
    ('gs://a/f', {}, '--out=gs://a/f '),
    ('f', dict(split=None), '--split is missing'),
    ('f', dict(weights='ema'), "'ema'.*params"),
    ('f', dict(preprocess='moe'), "preset .*'moe'"),
    ('f', dict(batch_size=0), '--batch_size is 0'),
    ('f', dict(layers=(0, 3)), '--layers=0,3; allowed: -3 to 2'),
    ('f', dict(layers=(-4, 1)), '--layers=-4,1; allowed: -3 to 2'),
    ('f', dict(images=['none.png'], settings=()), 'none.png'),
  ],
)
def test_invalid_requests_are_refused(
  weights, tmp_path, monkeypatch, out, changes, message
):
  monkeypatch.chdir(tmp_path)
  request = Request(**DATA, settings=SETTINGS)
  with pytest.raises(UserError, match=message):
    changed = dataclasses.replace(request, **changes)
    features_lib.run(weights, out, changed)


def test_layers_are_integers():
  with pytest.raises(UserError, match='--layers=1,x'):
    features_lib.parse_layers(['1', 'x'])
