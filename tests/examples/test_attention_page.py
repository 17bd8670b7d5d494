"""Tests of the page on which attention can be explored."""

import base64
import io
import json
import re

import numpy as np
import pytest
from PIL import Image
from tiny_vit import noise_params, save_classifier

from examples import attention_page
from vit_jax import load_pretrained
from vit_jax.analysis.figures import rollout
from vit_jax.errors import UserError
from vit_jax.models import resnet
from vit_jax.weights.formats import npz

GRID = (2, 3)
PATCHES, PREFIX = 6, 1
TABLE = np.eye(PATCHES).reshape(*GRID, *GRID)
TOKENS = PATCHES + PREFIX
EVIL = '</script><script>document.title = "evil"</script>'


def weights():
  found = np.random.default_rng(0).random((2, 2, 2, TOKENS, TOKENS), np.float32)
  return found / found.sum(-1, keepdims=True)  # [images, layers, heads, t, t]


def render(names=('a', 'b'), table=TABLE):
  images = np.random.default_rng(1).integers(0, 256, (2, 8, 12, 3), np.uint8)
  return attention_page.render(images, names, weights(), GRID, table)


def data_of(page):
  [text] = re.findall('id="data">(.*?)</script>', page, re.S)
  return json.loads(text)


def pixels_of(uri):
  data = base64.b64decode(uri.partition('base64,')[2])
  return np.asarray(Image.open(io.BytesIO(data)))


def scaled(rows, patches=PATCHES):
  """Scales each row of attention to its largest weight on a patch."""
  rows = rows[..., -patches:].reshape(-1, patches)
  return np.round(255 * rows / rows.max(1, keepdims=True))


def test_data_are_the_attention_weights():
  """Each row is scaled to its largest weight on a patch."""
  data, attention = data_of(render()), weights()
  assert (data['prefix'], data['layers'], data['heads']) == (1, 2, 2)
  for image, expected in zip(data['images'], attention, strict=True):
    for uri, layer in zip(image['layers'], expected, strict=True):
      blocks = np.concatenate([layer.mean(0, keepdims=True), layer])
      np.testing.assert_allclose(pixels_of(uri), scaled(blocks), atol=1)
    rolled = scaled(rollout(expected[None])[0])
    np.testing.assert_allclose(pixels_of(image['rollout']), rolled, atol=1)
    assert pixels_of(image['picture']).shape == (8, 12, 3)
  assert pixels_of(data['similarity']).shape == (PATCHES, PATCHES)
  assert data_of(render(table=None))['similarity'] is None


def test_names_are_escaped():
  page = render(names=(EVIL, 'b'))
  assert page.count('<script') == render().count('<script')
  assert data_of(page)['images'][0]['name'] == EVIL


def test_the_page_of_weights(tmp_path):
  """It has the attention of the model for the images in the files."""
  path, page = str(tmp_path / 'a.npz'), tmp_path / 'page.html'
  save_classifier(path)
  model, params = loaded = load_pretrained(path)
  rng, files, images = np.random.default_rng(0), [], []
  for number in range(5):
    files.append(str(tmp_path / f'{number}.png'))
    pixels = rng.integers(0, 256, (40, 50, 3), np.uint8)
    Image.fromarray(pixels).save(files[-1])
    images.append(loaded.preprocess(pixels))
  attention_page.write(path, str(page), files)
  data = data_of(page.read_text())
  assert [image['name'] for image in data['images']] == files[:4]
  options = dict(method='predict', want=('attention',))
  outputs = model.apply({'params': params}, np.stack(images[:4]), **options)
  attention = np.asarray(outputs['attention'])  # [images, layers, heads, t, t]
  patches = data['grid'][0] * data['grid'][1]
  for image, expected in zip(data['images'], attention, strict=True):
    rows = scaled(expected[0].mean(0), patches)
    shown = pixels_of(image['layers'][0])[: len(rows)]
    np.testing.assert_allclose(shown, rows, atol=1)
  assert pixels_of(data['similarity']).shape == (patches, patches)


def test_models_without_attention_are_refused(tmp_path):
  path = str(tmp_path / 'a.npz')
  model = resnet.Model(3, depths=(1,), width_factor=1)
  npz.save(path, noise_params(model, (32, 32)), None)
  file = tmp_path / 'a.png'
  Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(file)
  with pytest.raises(UserError, match='a.npz has no attention'):
    attention_page.write(path, str(tmp_path / 'page.html'), [str(file)])
