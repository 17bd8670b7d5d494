"""Tests of the page on which attention can be explored."""

import base64
import io
import json
import re

import numpy as np
import pytest
from PIL import Image
from test_browser import CHROMIUM, run_page

from vit_jax.analysis import attention_page
from vit_jax.analysis.figures import rollout

GRID = (2, 3)
PATCHES, PREFIX, LAYERS, HEADS = 6, 1, 2, 2
TOKENS = PATCHES + PREFIX
EVIL = '</script><script>document.title = "evil"</script>'


def weights(seed=0, images=2):
  rng = np.random.default_rng(seed)
  found = rng.random((images, LAYERS, HEADS, TOKENS, TOKENS), np.float32)
  return found / found.sum(-1, keepdims=True)


def render(names=('a', 'b'), similarity=True):
  images = np.random.default_rng(1).integers(0, 256, (2, 8, 12, 3))
  table = np.random.default_rng(2).uniform(-1, 1, (*GRID, *GRID))
  return attention_page.render(
    images.astype(np.uint8),
    names,
    weights(),
    GRID,
    table if similarity else None,
  )


def data_of(page):
  [text] = re.findall('id="data">(.*?)</script>', page, re.S)
  return json.loads(text)


def pixels_of(uri):
  data = base64.b64decode(uri.partition('base64,')[2])
  return np.asarray(Image.open(io.BytesIO(data)))


def scaled(rows):
  rows = rows[..., PREFIX:].reshape(-1, PATCHES)
  return np.round(255 * rows / rows.max(1, keepdims=True))


def test_data_are_the_attention_weights():
  """Each row is scaled to its largest weight on a patch."""
  data, attention = data_of(render()), weights()
  assert (data['prefix'], data['layers'], data['heads']) == (1, 2, 2)
  for image, expected in zip(data['images'], attention, strict=True):
    for uri, layer in zip(image['layers'], expected, strict=True):
      blocks = np.concatenate([layer.mean(0, keepdims=True), layer])
      np.testing.assert_allclose(pixels_of(uri), scaled(blocks), atol=1)
    rolled = rollout(expected[None])[0]
    np.testing.assert_allclose(
      pixels_of(image['rollout']), scaled(rolled), atol=1
    )
    assert pixels_of(image['picture']).shape == (8, 12, 3)
  assert pixels_of(data['similarity']).shape == (PATCHES, PATCHES)
  assert data_of(render(similarity=False))['similarity'] is None


def test_names_are_escaped():
  page = render(names=(EVIL, 'b'))
  assert page.count('<script') == render().count('<script')
  assert data_of(page)['images'][0]['name'] == EVIL


# Moves the pointer over patches, uses the controls and reports what is shown.
PROBE = """<pre id="probe"></pre><script>
const wait = ms => new Promise(resolve => setTimeout(resolve, ms));
async function probe() {
  const found = [], status = () => found.push(
    document.getElementById('status').textContent);
  const stage = document.getElementById('stage');
  const point = (row, column) => {
    const box = stage.getBoundingClientRect();
    stage.dispatchEvent(new PointerEvent('pointermove', {
      clientX: box.left + (column + .5) * box.width / 3,
      clientY: box.top + (row + .5) * box.height / 2 }));
  };
  const set = (id, value, type) => {
    const element = document.getElementById(id);
    element.value = value;
    element.dispatchEvent(new Event(type));
  };
  await wait(300); status();
  point(1, 2); await wait(300); status();
  set('layer', 1, 'input'); set('head', 2, 'change'); await wait(300); status();
  const pixels = document.getElementById('overlay').getContext('2d')
    .getImageData(0, 0, 72, 48).data;  // patches of 24x24 pixels
  const alpha = [0, 1, 2, 3, 4, 5].map(i =>
    pixels[4 * (72 * (24 * Math.floor(i / 3) + 12) + 24 * (i % 3) + 12) + 3]);
  set('kind', 'rollout', 'change'); await wait(300); status();
  stage.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowUp' }));
  await wait(300); status();
  document.getElementById('token').click(); await wait(300); status();
  document.getElementById('probe').textContent = JSON.stringify({
    found, alpha, title: document.title,
    has: innerWidth, needs: document.documentElement.scrollWidth,
    requests: performance.getEntriesByType('resource')
      .map(e => e.name).filter(name => !name.startsWith('data:')) });
}
probe();
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason='Chromium not installed')
@pytest.mark.parametrize('width', [400, 1400])
def test_the_page_reacts_to_pointer_controls_and_keys(tmp_path, width):
  """They choose the weights that are drawn."""
  file = tmp_path / 'page.html'
  text = render(names=(EVIL, 'b'))
  file.write_text(text.replace('</html>', f'{PROBE}</html>'))
  seen, console = run_page(
    file, f'--window-size={width},900', '--virtual-time-budget=60000'
  )
  assert seen['found'] == [
    'Layer 2 of 2, mean of the heads: the class token',
    'Layer 2 of 2, mean of the heads: the patch in row 2, column 3',
    'Layer 1 of 2, head 2 of 2: the patch in row 2, column 3',
    'Rollout: the patch in row 2, column 3',
    'Rollout: the patch in row 1, column 3',
    'Rollout: the class token',
  ]
  # Layer 1, head 2, last patch: dark where the weight is small.
  expected = 0.8 * (255 - scaled(weights()[0, 0, 1])[-1])
  np.testing.assert_allclose(seen['alpha'], expected, atol=2)
  assert seen['title'] == 'Attention' and seen['requests'] == []
  assert seen['needs'] <= seen['has']
  assert not console
