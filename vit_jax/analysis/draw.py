"""Draws the paper's figures with Matplotlib, as PNG."""

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from vit_jax.analysis import rollout
from vit_jax.analysis.figures import Findings
from vit_jax.analysis.plotting import new_figure, png
from vit_jax.analysis.style import COLOURS

_HEADS = 12  # maximum number of heads drawn for a layer
_ROWS = 4  # maximum number of images drawn


def filters(
  components: Float[np.ndarray, 'n y x 3'], fractions: Float[np.ndarray, ' n']
) -> bytes:
  """Draws filters, each scaled to its own range (Figure 7, left).

  Args:
    components: principal components of the filters.
    fractions: fraction of the variance that each component explains.
  """
  columns = min(7, len(components))
  rows = -(-len(components) // columns)
  figure = new_figure(0.85 * columns + 0.4, 0.98 * rows + 0.8)
  figure.suptitle(
    'Filters of the first layer: principal components\n'
    f'(RGB, each scaled separately; {100 * fractions.sum():.0f} % of the '
    'variance)',
    fontsize=9,
  )
  for index, component in enumerate(components):
    axes = figure.add_subplot(rows, columns, index + 1)
    size = max(float(np.abs(component).max()), 1e-30)
    axes.imshow(component / size / 2 + 0.5)
    axes.set_title(f'{100 * fractions[index]:.1f} %', fontsize=7, pad=2)
    axes.set_axis_off()
  return png(figure)


def similarity(values: Float[np.ndarray, 'r c r c']) -> bytes:
  """Draws a similarity map for the position of each patch (Figure 7, centre).

  If the grid has more than 16 patches per side, only every second (third, …)
  patch is shown.
  """
  rows, columns = values.shape[:2]
  step = -(-max(rows, columns) // 16)
  shown = values[::step, ::step]  # [r, c, rows, columns]
  gap = max(1, round(max(rows, columns) / 10))
  padded = np.pad(
    shown, ((0, 0), (0, 0), (0, gap), (0, gap)), constant_values=np.nan
  )
  height, width = (padded.shape[i] * padded.shape[i + 2] for i in (0, 1))
  sheet = padded.transpose(0, 2, 1, 3).reshape(height, width)
  figure = new_figure(6.2, 5.4 * height / width + 0.8)
  axes = figure.add_subplot()
  picture = axes.imshow(
    sheet[:-gap, :-gap], vmax=1, cmap='viridis', interpolation='nearest'
  )
  subsampled = '' if step == 1 else f', 1 of {step} rows and columns'
  axes.set_title(
    f'Similarity of position embeddings{subsampled}\n'
    '(one map per patch, placed at the row and column of the patch)',
    fontsize=9,
  )
  axes.set_xlabel('column of the input patch', fontsize=8)
  axes.set_ylabel('row of the input patch', fontsize=8)
  for axis, side, count in (
    (axes.xaxis, columns, shown.shape[1]),
    (axes.yaxis, rows, shown.shape[0]),
  ):
    centres = np.arange(count) * (side + gap) + (side - 1) / 2
    axis.set_ticks(centres, (1 + step * np.arange(count)).tolist())
  axes.tick_params(labelsize=7, length=0)
  for spine in axes.spines.values():
    spine.set_visible(False)
  bar = figure.colorbar(picture, shrink=0.6, pad=0.02)
  bar.set_label('cosine similarity', fontsize=8)
  bar.ax.tick_params(labelsize=7)
  return png(figure)


def distances(values: Float[np.ndarray, 'n l h'], size: Sequence[int]) -> bytes:
  """Draws a dot for each head of each layer (Figures 7, right, and 11).

  Args:
    values: distances by image, layer and head, in pixels.
    size: (height, width) of the images.
  """
  mean = values.mean(axis=0)
  depth, heads = mean.shape
  figure = new_figure(5.2, 4)
  axes = figure.add_subplot()
  for head in range(heads):
    axes.plot(
      np.arange(1, depth + 1),
      mean[:, head],
      linestyle='',
      marker='o',
      markersize=5,
      markeredgecolor='white',
      markeredgewidth=0.4,
      color=COLOURS[head % len(COLOURS)],
      label=f'head {head + 1}',
    )
  axes.set_ylim(0, 1.06 * max(float(mean.max()), 1e-30))
  axes.set_xlabel('layer')
  axes.set_ylabel('mean attention distance (pixels)')
  axes.set_title(
    f'Attention distance, {len(values)} images of {size[0]}x{size[1]} px',
    fontsize=10,
  )
  axes.xaxis.get_major_locator().set_params(integer=True)
  axes.grid(alpha=0.3)
  if heads <= len(COLOURS):
    axes.legend(fontsize=7, ncols=2)
  return png(figure)


def rollouts(findings: Findings) -> bytes:
  """Draws images, masked images and rollout maps (Figures 6 and 14)."""
  titles = ('image', 'masked image', 'rollout', 'without identity')
  rows = min(_ROWS, len(findings.arrays['images']))
  query = 'the class token' if findings.by_token else 'the mean of all patches'
  figure, axes_of = _sheet(
    rows, len(titles), f'Attention rollout, from {query}', titles
  )
  for row in range(rows):
    image = findings.arrays['images'][row]
    with_identity = findings.arrays['rollout'][row]
    mask = rollout.mask(with_identity, image.shape[:2])
    axes_of(row, 0).imshow(image)
    axes_of(row, 1).imshow((mask[..., None] * image).astype(np.uint8))
    for column, name in ((2, 'rollout'), (3, 'rollout_plain')):
      weights = findings.arrays[name][row]
      axes_of(row, column).imshow(weights, vmin=0, cmap='viridis')
      percent = 100 * float(weights.max())
      axes_of(row, column).set_xlabel(f'maximum {percent:.1f} %', fontsize=7)
  return png(figure)


def heads(findings: Findings) -> bytes:
  """Draws the attention of the last layer's heads.

  Reference: DINO, arXiv 2104.14294, Figures 1 and 3.
  """
  maps, images = findings.arrays['heads'], findings.arrays['images']
  rows, count = min(_ROWS, len(images)), min(_HEADS, maps.shape[1])
  query = 'the class token' if findings.by_token else 'the mean of all patches'
  shown = (
    '' if count == maps.shape[1] else f', {count} of {maps.shape[1]} heads'
  )
  titles = ('image', *(f'head {head + 1}' for head in range(count)))
  title = (
    f'Attention of {query} in the last layer{shown}\n'
    '(each map scaled separately)'
  )
  figure, axes_of = _sheet(rows, 1 + count, title, titles)
  for row in range(rows):
    axes_of(row, 0).imshow(images[row])
    for head in range(count):
      axes_of(row, 1 + head).imshow(maps[row, head], vmin=0, cmap='viridis')
  return png(figure)


def reconstructions(findings: Findings) -> bytes:
  """Draws images, visible patches and predictions.

  Reference: arXiv 2111.06377, Figure 2.
  """
  columns = {
    'image': 'images',
    'visible patches': 'seen',
    'prediction': 'predicted',
    'visible and predicted': 'completed',
  }
  rows = min(_ROWS, len(findings.arrays['images']))
  lines = textwrap.wrap(f'({findings.reconstructs})', 62)
  title = '\n'.join(['Masked patches and their predictions', *lines])
  figure, axes_of = _sheet(rows, len(columns), title, list(columns))
  for column, name in enumerate(columns.values()):
    for row in range(rows):
      axes_of(row, column).imshow(findings.arrays[name][row])
  return png(figure)


def _sheet(
  rows: int, columns: int, title: str, titles: Sequence[str]
) -> tuple[Any, Callable[[int, int], Any]]:
  """Creates a figure with a grid of pictures.

  Returns:
    The figure, and a function that returns the axes of a (row, column).
  """
  side = 1.5 if columns <= 5 else 1.05
  height = (side + 0.1) * rows + 0.6 + 0.16 * title.count('\n')
  figure = new_figure(side * columns + 0.2, height)
  figure.suptitle(title, fontsize=10)
  grid = figure.subplots(rows, columns, squeeze=False)
  for axes in grid.flat:
    axes.set(xticks=[], yticks=[])
  for column, text in enumerate(titles):
    grid[0, column].set_title(text, fontsize=8)
  return figure, lambda row, column: grid[row, column]


def all_figures(findings: Findings) -> dict[str, bytes]:
  """Draws every figure for which arrays exist; returns PNG files by name."""
  arrays, pictures = findings.arrays, {}
  if 'filters' in arrays:
    pictures['filters'] = filters(arrays['filters'], arrays['filter_shares'])
  if 'similarity' in arrays:
    pictures['positions'] = similarity(arrays['similarity'])
  if 'distance' in arrays:
    size = arrays['images'].shape[1:3]
    pictures['attention_distance'] = distances(arrays['distance'], size)
    pictures['rollout'] = rollouts(findings)
    pictures['heads'] = heads(findings)
  if 'predicted' in arrays:
    pictures['reconstructions'] = reconstructions(findings)
  return pictures
