"""Tests of predict: files, directories and patterns; text, JSON and CSV."""

import csv
import dataclasses
import functools
import io
import json
import os
import shutil
import subprocess

import jax
import numpy as np
import pytest
import scipy.special
from absl import flags
from PIL import Image
from tiny_vit import save_classifier

from tests import cli
from tests.command_line import own_flags
from vit_jax import predict
from vit_jax.arrays import sharding
from vit_jax.cli import inputs
from vit_jax.errors import UserError
from vit_jax.weights import artefacts, resizing
from vit_jax.weights.contract import Pretrained
from vit_jax.weights.description import Description


@pytest.fixture
def photos(tmp_path):
  """Writes forty images into two directories; one image is damaged."""
  rng = np.random.default_rng(0)
  for i in range(40):
    file = tmp_path / 'photos' / 'ab'[i % 2] / f'{i:02d}.PNG'
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file)
  (tmp_path / 'photos' / 'a' / '38.PNG').write_bytes(b'not an image')
  (tmp_path / 'photos' / 'notes.txt').write_text('')
  return tmp_path / 'photos'


@pytest.fixture
def command(tmp_path, capsys):
  """Returns a function: arguments → (output, error)."""
  path = str(tmp_path / 'tiny.npz')
  save_classifier(path)

  def run(*arguments):
    rest = flags.FLAGS(['predict', f'--checkpoint={path}', *arguments])[1:]
    error = ''
    try:
      predict.main(rest)
    except UserError as raised:
      error = str(raised)
    return capsys.readouterr().out, error

  with own_flags():
    predict.define_flags()
    yield run


SIZES = dict(patch_size=8, width=16, depth=2, mlp_dim=8, num_heads=2)


def classifier(objective, num_classes):
  """Returns weights of an objective, with random numbers as arrays."""
  description = Description(
    model=dict(name='vit', dtype='float32', **SIZES),
    objective=objective,
    preprocess=dict(resize='squash'),
    num_classes=num_classes,
    image_size=(16, 16),
    class_names=('ant', 'bee', 'cow'),
  )

  def load(abstract):
    rng = np.random.default_rng(1)

    def random(leaf):
      values = rng.uniform(0, 0.5, leaf.shape).astype(leaf.dtype)
      return jax.device_put(values, leaf.sharding)

    return jax.tree.map(random, abstract)

  return Pretrained('PATH', description, load, load, load)


PROBE = dict(name='linear_probe', num_classes=3, batch_norm=True)


@pytest.mark.slow
@pytest.mark.parametrize(
  'objective, num_classes, probabilities',
  [
    (dict(name='supervised', cross_entropy='sigmoid'), 3, scipy.special.expit),
    (
      PROBE | dict(last_blocks=2, patch_mean=True),
      0,
      functools.partial(scipy.special.softmax, axis=-1),
    ),
  ],
)
def test_the_trained_classifier_is_applied(
  photos, objective, num_classes, probabilities, monkeypatch, tmp_path
):
  """A probe has its own head, and running statistics of the features."""
  source = classifier(objective, num_classes)
  monkeypatch.setattr(inputs, 'open_weights', lambda *_: source)
  path = f'{photos}/b/01.PNG'
  transform = source.description.transform()
  pixels = transform.pixels((photos / 'b/01.PNG').read_bytes())
  image = jax.numpy.array(pixels)[None]
  mesh = sharding.make_mesh(jax.devices()[:1])
  params = source.weights(mesh)['params']
  found = jax.jit(source.objective().predict)(params, {'image': image})
  logits = np.asarray(found['logits'])
  assert logits.shape == (1, 3) and np.ptp(logits) > 1e-3
  artefacts.write(source, str(tmp_path / 'served'), 'stablehlo')
  program = (tmp_path / 'served/model.stablehlo').read_bytes()
  exported = jax.export.deserialize(bytearray(program)).call(image)
  np.testing.assert_allclose(exported, logits, rtol=1e-5)
  [found] = predict.run('PATH', [path], predict.Request())
  names = source.description.class_names
  expected = dict(zip(names, probabilities(logits)[0], strict=True))
  assert dict(found.top) == pytest.approx(expected, rel=1e-5)
  other = resizing.resized(source, (24, 24))
  adapted = other.load_weights(mesh)
  assert jax.tree.structure(adapted) == jax.tree.structure(params)


def test_a_probe_without_its_running_statistics_is_refused():
  """`convert` to a directory writes parameters only."""
  source = dataclasses.replace(classifier(PROBE, 0), load_extra=None)
  mesh = sharding.make_mesh(jax.devices()[:1])
  for load in (source.load_weights, source.weights):
    with pytest.raises(UserError, match='PATH.*statistics.*workdir'):
      load(mesh)


def test_images_of_files_directories_and_patterns(photos):
  """They are sorted within each argument; other extensions are left out."""
  everything = inputs.image_paths([str(photos)])
  assert len(everything) == 40 and everything == sorted(everything)
  matching = [f'{photos}/b/{i:02d}.PNG' for i in (1, 3, 5, 7, 9)]
  assert inputs.image_paths([f'{photos}/b/0*']) == matching
  (photos / 'x[1].png').write_bytes(b'')
  files = [f'{photos}/x[1].png', 'gs://b/y.png']
  assert inputs.image_paths(files) == files
  with pytest.raises(UserError, match=r'\*\.jpg matches no image'):
    inputs.image_paths([f'{photos}/*.jpg'])


@pytest.mark.slow
def test_predict_continues_after_a_bad_file(photos, command):
  """The other images have the results that they have alone."""
  out, error = command('--json', '--top=2', str(photos))
  lines = [json.loads(line) for line in out.splitlines()]
  bad = f'{photos}/a/38.PNG'
  expected = [path for path in inputs.image_paths([str(photos)]) if path != bad]
  assert [line['image'] for line in lines] == expected
  assert '1 of 40 images' in error and f'{bad} is not an image' in error
  for i in (0, 17, 38):
    alone, error = command('--json', '--top=2', expected[i])
    found = json.loads(alone)
    assert not error and found['image'] == expected[i]
    for one, other in zip(found['top'], lines[i]['top'], strict=True):
      assert one['class'] == other['class']
      np.testing.assert_allclose(one['probability'], other['probability'], 1e-5)


@pytest.mark.slow
def test_csv_has_a_row_per_image_and_class(photos, command):
  out, error = command('--csv', '--top=3', f'{photos}/b/*1.PNG')
  rows = list(csv.DictReader(io.StringIO(out)))
  assert not error and len(rows) == 3 * 4
  assert list(rows[0]) == ['image', 'class', 'probability']
  assert all(0 <= float(row['probability']) <= 1 for row in rows)
  other = '--preprocess=dino', f'{photos}/b/*1.PNG'
  assert command('--csv', '--top=3', *other)[0] != out
  _, error = command('--csv', '--json', str(photos))
  assert 'usage' in error


@pytest.mark.parametrize('flag', ['--csv', '--text=cat,dog'])
def test_masks_have_neither_rows_nor_texts(photos, command, flag):
  out, error = command(flag, '--out=masks', str(photos))
  assert not out and '--out' in error and flag.partition('=')[0] in error


@pytest.mark.slow
def test_names_that_the_output_cannot_encode_are_escaped(photos, tmp_path):
  """The names of files and classes may have any characters, or other bytes."""
  save_classifier(str(tmp_path / 'tiny.npz'))
  files = [photos / '猫.png', photos / os.fsdecode(b'\xff.png')]
  for file in files:
    shutil.copy(photos / 'b/01.PNG', file)
  words = [f'--checkpoint={tmp_path}/tiny.npz', *map(str, files)]
  env = cli.environment() | {'PYTHONIOENCODING': 'cp1252'}
  command = cli.command('predict', *words)
  done = subprocess.run(command, env=env, cwd=cli.ROOT, capture_output=True)
  out = done.stdout.decode('cp1252')
  assert done.returncode == 0, done.stderr
  assert r'\u732b.png' in out and r'\udcff.png' in out
  assert out.count('%') == 2 * 3
