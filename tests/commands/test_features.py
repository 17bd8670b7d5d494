"""Tests of the command `features`: exactness, resuming, file content."""

import dataclasses
import json
import os
import sys

import cv2
import jax
import numpy as np
import pytest
import tiny_vit
from etils import epath

from tests import cli
from tests.multiprocess import damaged
from vit_jax import features as features_lib
from vit_jax import load_pretrained
from vit_jax.cli import output_parts
from vit_jax.data.filters import Tail
from vit_jax.data.sources import tfds
from vit_jax.errors import UserError
from vit_jax.features import Request
from vit_jax.models.vit import Model
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


def plain(path, images):
  """Computes features without the code of the command."""
  source = pretrained.find(path)
  model, params = load_pretrained(path)
  transform = source.description.transform()
  pixels = np.stack([transform.pixels(each) for each in images])
  x = np.float32(pixels) / 127.5 - 1
  found = model.apply({'params': params}, x, method='predict')
  return np.asarray(found['features'])


def held(path):
  with np.load(path) as file:
    return dict(file)


@pytest.mark.slow
def test_a_split_of_odd_size_with_bad_records(weights, tmp_path):
  """The file contains every good example once and in order, with its label."""
  out = tmp_path / 'f.npz'
  request = Request(**DATA, settings=SETTINGS, part_examples=16)
  result = features_lib.run(weights, str(out), request)
  source = damaged.Source('train', num_examples=53, height=9, num_classes=3)
  good = [i for i in range(53) if i % 5]
  found = held(out)
  assert found['index'].tolist() == good and result['count'] == len(good)
  assert found['label'].tolist() == [source[i]['label'] for i in good]
  np.testing.assert_allclose(
    found['features'],
    plain(weights, [source[i]['image'] for i in good]),
    atol=1e-5,
  )
  assert found['class_names'].tolist() == source.class_names
  about = json.loads(str(found['about']))
  assert about == json.loads(json.dumps(result))
  assert about['preprocess']['resize'] == 'squash' and about['width'] == 16
  assert sorted(os.listdir(tmp_path)) == ['f.npz']


@pytest.mark.slow
def test_files_and_another_preset(weights, tmp_path):
  """Paths keep their order."""
  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, (5, 12, 10, 3), np.uint8)
  files = [str(tmp_path / f'{"x" * n}.png') for n in (3, 1, 20, 2, 4)]
  for path, image in zip(files, images, strict=True):
    cv2.imwrite(path, image[..., ::-1])
  request = Request(images=files, batch_size=2, part_examples=1)
  features_lib.run(weights, str(tmp_path / 'f.npz'), request)
  found = held(tmp_path / 'f.npz')
  assert found['path'].tolist() == files and 'label' not in found
  np.testing.assert_allclose(
    found['features'], plain(weights, images), atol=1e-5
  )
  other = dataclasses.replace(request, preprocess='dino')
  result = features_lib.run(weights, str(tmp_path / 'g.npz'), other)
  assert result['preprocess']['interpolation'] == 'bicubic'
  features = held(tmp_path / 'g.npz')['features']
  assert np.abs(features - found['features']).max() > 0.01
  missing = dataclasses.replace(request, images=[str(tmp_path / 'none.png')])
  with pytest.raises(UserError, match='none.png'):
    features_lib.run(weights, str(tmp_path / 'h.npz'), missing)


def written_parts(folder):
  """Writes two parts of 3 and 2 examples, one of which is left out."""
  parts = output_parts.Parts(epath.Path(folder / 'f.npz'))
  assert parts.open({}, 3, 5) == 0
  for number, (first, last) in enumerate([(0, 3), (3, 5)]):
    kept = np.arange(first, last - number)
    parts.write(number, [{'index': kept, 'x': kept / 2}], (first, last))
  return parts


def test_a_second_writer_is_refused(tmp_path):
  """Before it reads or writes a part, and if the first has just finished."""
  parts = output_parts.Parts(epath.Path(tmp_path / 'f.npz'))
  with parts.locked():
    with pytest.raises(
      UserError, match='another run uses .*f.npz.parts.*--out'
    ):
      with output_parts.Parts(parts.out).locked():
        pass
  assert not os.listdir(tmp_path)
  with parts.locked():
    written_parts(tmp_path)
  assert len(parts) == 2  # those of an interrupted command stay


@pytest.mark.parametrize(
  'change, words',
  [
    (dict(x=np.zeros(2)), '2 of 3 rows of x'),
    (dict(_examples=np.array([0, 2])), r'examples \[0, 2\], not \[0, 3\]'),
    (dict(_rows=np.array([3])), 'argument'),
  ],
)
def test_a_part_of_other_rows_is_refused(tmp_path, change, words):
  """It would be joined to a result that lacks examples, or has them twice."""
  parts = written_parts(tmp_path)
  assert parts.open({}, 3, 5) == 2
  assert [part.tolist() for part in parts.column('index')] == [[0, 1, 2], [3]]
  path = tmp_path / 'f.npz.parts/00000.npz'
  np.savez(path, **held(path) | change)
  with pytest.raises(UserError, match=f'00000.npz cannot be read.*{words}'):
    parts.open({}, 3, 5)
    parts.read(0)


@pytest.fixture
def interrupted(weights, tmp_path, monkeypatch):
  """Interrupts a computation; returns its request, path, and examples read."""
  request = Request(**DATA, settings=SETTINGS, part_examples=16)
  out, read = tmp_path / 'f.npz', []
  once = Tail.__getitem__

  def failing(self, index):
    read.append(self._start + index)
    if read[-1] == 41 and len(read) < 60:
      raise OSError('the disk is gone')
    return once(self, index)

  monkeypatch.setattr(Tail, '__getitem__', failing)
  with pytest.raises(OSError, match='the disk is gone'):
    features_lib.run(weights, str(out), request)
  read[:] = [-1] * 60  # no failure any more
  return request, out, read


@pytest.mark.slow
def test_an_interruption_changes_nothing(weights, tmp_path, interrupted):
  """The file has the same bytes, and completed parts are not read again."""
  request, out, read = interrupted
  whole = tmp_path / 'whole.npz'
  features_lib.run(weights, str(whole), request)
  parts = sorted({*os.listdir(tmp_path / 'f.npz.parts')} - {'.lock'})
  assert parts[0] == '00000.npz' and parts[-1] == 'about.json'
  del read[:]
  read += [-1] * 60
  # Without --batch_size, that of the interrupted computation is used.
  same = dataclasses.replace(request, batch_size=None)
  result = features_lib.run(weights, str(out), same)
  first = 16 * (len(parts) - 1)
  assert sorted(read[60:]) == list(range(first, 53))
  assert out.read_bytes() == whole.read_bytes()
  assert sorted(os.listdir(tmp_path)) == ['f.npz', 'whole.npz']
  del read[60:]
  assert features_lib.run(weights, str(out), request) == result
  assert result['count'] == 42 and not read[60:]
  with pytest.raises(UserError, match='f.npz .*split'):
    other = dataclasses.replace(request, split='test')
    features_lib.run(weights, str(out), other)


@pytest.mark.slow
def test_parts_of_another_computation_are_refused(
  weights, tmp_path, interrupted
):
  """So are damaged parts; descriptions of older versions have fewer keys."""
  request, out, _ = interrupted
  for changes, message in (
    (dict(preprocess='dino'), 'f.npz.parts .*preprocess.resize'),
    (dict(part_examples=24), 'part_examples: 16 before, 24 now'),
  ):
    with pytest.raises(UserError, match=message):
      other = dataclasses.replace(request, **changes)
      features_lib.run(weights, str(out), other)
  part, about = (
    tmp_path / 'f.npz.parts' / name for name in ('00000.npz', 'about.json')
  )
  older = json.loads(about.read_text())
  older['fingerprint'].popitem()
  about.write_text(json.dumps(older))
  result = features_lib.run(weights, str(out), request)
  assert result['count'] == 42 and '_rows' not in held(out)
  out.unlink()
  part.parent.mkdir()
  about.write_text(json.dumps(older))
  part.write_bytes(b'PK')
  with pytest.raises(UserError, match='00000.npz cannot be read'):
    features_lib.run(weights, str(out), request)


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
  """Blocks are in the given order, without the class token, in Parquet."""
  parquet = pytest.importorskip('pyarrow.parquet')
  images = np.random.default_rng(0).integers(0, 256, (3, *SIZE, 3), np.uint8)
  files = [str(tmp_path / f'{n}.png') for n in range(3)]
  for path, image in zip(files, images, strict=True):
    cv2.imwrite(path, image[..., ::-1])
  request = Request(images=files, batch_size=2, layers=(-1, 0), tokens=True)
  result = features_lib.run(weights, str(tmp_path / 'f.parquet'), request)
  assert result['shape'] == [3, 2, 4, 16] and result['width'] == 16
  table = parquet.read_table(tmp_path / 'f.parquet')
  assert table['path'].to_pylist() == files
  about = json.loads(table.schema.metadata[b'about'])
  assert output_parts.about_of(str(tmp_path / 'f.parquet')) == about
  column = table['features']
  expected = blocks(weights, images)[:, (2, 0), 1:]
  np.testing.assert_allclose(np.array(column.to_pylist()), expected, atol=1e-4)
  other = dataclasses.replace(request, layers=(-3, 2))
  with pytest.raises(UserError, match='layers'):
    features_lib.run(weights, str(tmp_path / 'f.parquet'), other)


@pytest.mark.slow
def test_killed_and_resumed(weights, tmp_path):
  """After SIGKILL, the same command completes the features of a config."""
  out = tmp_path / 'f.npz'
  arguments = cli.command(
    'features',
    f'--checkpoint={weights}',
    '--config=configs/quickstart.py',
    f'--out={out}',
    '--batch_size=8',
    '--part_examples=8',
    '--json',
  )
  parts = tmp_path / 'f.npz.parts'
  cli.kill_when(
    arguments, lambda: any(parts.glob('0000[1-9].npz')), 'features', 120
  )
  assert not out.exists()
  result = json.loads(cli.run(arguments)[0])
  assert result['count'] == 1438 and result['data'].startswith('digits')
  found = held(out)
  assert found['index'].tolist() == list(range(1438))
  source = tfds.Source('train', dataset='digits')
  labels = [source[i]['label'] for i in range(1438)]
  assert found['label'].tolist() == labels


@pytest.mark.slow
@pytest.mark.parametrize('folders', [('.',), ('cat', 'dog')])
def test_a_folder_of_images(weights, tmp_path, folders):
  """As a data set it has the labels of its folders, if any; or it has paths."""
  photos = tmp_path / 'photos'
  images = np.random.default_rng(0).integers(0, 256, (4, 12, 10, 3), np.uint8)
  names = [f'{folders[i * len(folders) // 4]}/{i}.png' for i in range(4)]
  for name, image in zip(names, images, strict=True):
    (photos / name).parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(photos / name), image[..., ::-1])
  data = dict(dataset='folder', split='train', data_dir=str(photos))
  as_data = Request(**data, batch_size=4)
  result = features_lib.run(weights, str(tmp_path / 'f.npz'), as_data)
  found = held(tmp_path / 'f.npz')
  assert result['class_names'] == ([] if folders == ('.',) else [*folders])
  labels = found['label'].tolist() if 'label' in found else None
  assert labels == (None if folders == ('.',) else [0, 0, 1, 1])
  as_files = Request(images=[str(photos)], batch_size=4)
  features_lib.run(weights, str(tmp_path / 'g.npz'), as_files)
  files = held(tmp_path / 'g.npz')
  for path, name in zip(files['path'], names, strict=True):
    assert os.path.relpath(path, photos) == os.path.normpath(name)
  np.testing.assert_array_equal(found['features'], files['features'])


def test_messages_of_invalid_requests(weights, tmp_path, monkeypatch):
  """Requests with unknown formats, splits or weights, or without pyarrow."""
  run, out = features_lib.run, str(tmp_path / 'f.npz')
  request = Request(**DATA, settings=SETTINGS)
  for path, changes, message in [
    (str(tmp_path / 'f.csv'), {}, r'f.csv.*\.npz or \.parquet'),
    ('gs://a/f.npz', {}, '--out=gs://a/f.npz'),
    (out, dict(split=None), '--split is missing'),
    (out, dict(weights='ema'), "'ema'.*params"),
    (out, dict(preprocess='moe'), "preset .*'moe'"),
    (out, dict(batch_size=0), '--batch_size is 0'),
    (out, dict(layers=(0, 3)), '--layers=0,3; allowed: -3 to 2'),
  ]:
    with pytest.raises(UserError, match=message):
      run(weights, path, dataclasses.replace(request, **changes))
  with pytest.raises(UserError, match='--layers=1,x'):
    features_lib.parse_layers(['1', 'x'])
  monkeypatch.setitem(sys.modules, 'pyarrow', None)
  monkeypatch.setitem(sys.modules, 'pyarrow.parquet', None)
  with pytest.raises(UserError, match="pip install 'pyarrow'"):
    run(weights, str(tmp_path / 'f.parquet'), request)
