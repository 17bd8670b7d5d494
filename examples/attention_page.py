"""A self-contained, interactive HTML page of attention maps.

The page shows to which patches any patch, or the class token, attends: in each
layer and head, in the mean over heads, and in the rollout over all layers. It
also shows the similarity of each position embedding with the others.

python -m examples.attention_page WEIGHTS PAGE.html IMAGE…
"""

import base64
import io
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from vit_jax import load_pretrained
from vit_jax.analysis import figures
from vit_jax.arrays import tree
from vit_jax.data.images import channels
from vit_jax.errors import UserError

MAX_IMAGES = 4  # about 5 MB per image for B/16, 12 MB for L/16
_TEMPLATE = pathlib.Path(__file__).with_name('attention_page.html')


def render(
  images: UInt8[np.ndarray, 'n y x 3'],
  names: Sequence[str],
  attention: Float[np.ndarray, 'n l h t t'],
  grid: tuple[int, int],
  similarity: Float[np.ndarray, 'r c r c'] | None,
) -> str:
  """Renders the page as HTML.

  Args:
    images: images as the model receives them.
    names: a name for each image.
    attention: attention weights by image, layer, head, query and key; the
      tokens of patches come last, row by row.
    grid: rows and columns of patches.
    similarity: cosine similarity of learned position embeddings; None if the
      model has none.

  Returns:
    Content of the HTML file.
  """
  _, layers, heads, tokens, _ = attention.shape
  patches = grid[0] * grid[1]
  data: dict[str, Any] = {
    'about': 'The query is outlined; brighter patches have larger weights. '
    'Each map is scaled to its largest weight.',
    'grid': grid,
    'prefix': tokens - patches,
    'layers': layers,
    'heads': heads,
    'images': [],
    'similarity': None,
  }
  for image, name, weights in zip(images, names, attention, strict=True):
    # The mean over heads comes first, as if it were another head.
    mean = weights.mean(axis=1, keepdims=True)
    blocks = np.concatenate([mean, weights], axis=1)  # [l, 1 + h, t, t]
    rolled = figures.rollout(weights[None])[0]
    data['images'].append(
      {
        'name': name,
        'picture': _uri(image, 'JPEG'),
        'layers': [_uri(_rows(each, patches), 'PNG') for each in blocks],
        'rollout': _uri(_rows(rolled, patches), 'PNG'),
      }
    )
  if similarity is not None:
    low, high = float(similarity.min()), float(similarity.max())
    scaled = (similarity - low) / max(high - low, 1e-12)
    pixels = np.round(255 * scaled).astype(np.uint8)
    data['similarity'] = _uri(pixels.reshape(patches, patches), 'PNG')
  # '<' is escaped so that no name can end the script element.
  text = json.dumps(data).replace('<', '\\u003c')
  return _TEMPLATE.read_text().replace('@DATA@', text)


def _rows(
  weights: Float[np.ndarray, '*blocks t t'], patches: int
) -> UInt8[np.ndarray, 'queries patches']:
  """Returns the attention of every query to the patches as grey levels.

  Each row is divided by its maximum over the patches, so that weights on the
  class token and registers do not make the others invisible.
  """
  rows = weights[..., -patches:].reshape(-1, patches)
  return np.round(
    255 * rows / np.maximum(rows.max(axis=1, keepdims=True), 1e-30)
  ).astype(np.uint8)


def _uri(pixels: UInt8[np.ndarray, 'y x *channels'], kind: str) -> str:
  """Returns a data URI of an image file."""
  file = io.BytesIO()
  Image.fromarray(pixels).save(file, kind)
  encoded = base64.b64encode(file.getvalue()).decode()
  return f'data:image/{kind.lower()};base64,{encoded}'


def write(weights: str, page: str, files: Sequence[str]) -> None:
  """Writes the page of some images.

  Args:
    weights: workdir, step directory or weights of any format.
    page: path of the HTML file.
    files: image files.

  Raises:
    UserError: the model has no attention weights or no grid of patches.
  """
  loaded = load_pretrained(weights)
  model, params = loaded
  files = files[:MAX_IMAGES]
  images = np.stack(
    [loaded.preprocess(pathlib.Path(file).read_bytes()) for file in files]
  )

  def attend(params: Any, images: Any) -> Any:
    return model.apply(
      {'params': params}, images, method='predict', want=('attention',)
    )['attention']

  if 'attention' not in model.outputs or not hasattr(model, 'grid'):
    raise UserError(f'{weights} has no attention weights over a grid.')
  grid = model.grid(loaded.image_size)
  table = figures.positions(tree.flatten(params), grid)
  similar = None if table is None else figures.similarity(table, grid)
  attention = np.asarray(jax.jit(attend)(params, images))
  pixels = channels.rgb(np.round((images + 1) * 127.5).astype(np.uint8))
  text = render(pixels, files, attention, grid, similar)
  pathlib.Path(page).write_text(text)


if __name__ == '__main__':
  if len(sys.argv) < 4:
    sys.exit('give WEIGHTS PAGE.html IMAGE…')
  try:
    write(sys.argv[1], sys.argv[2], sys.argv[3:])
  except UserError as error:
    sys.exit(str(error))
