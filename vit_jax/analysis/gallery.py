"""Draws the paper's figures, and attention on photographs, into a folder.

The folder also contains the arrays of the figures and a description.
"""

import io
import itertools
import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath
from jaxtyping import Float

from vit_jax.analysis import figures, plotting
from vit_jax.analysis.figures import Findings
from vit_jax.files import jsonl, paths

FOLDER = 'figures'  # name of the folder in a workdir
_ABOUT = 'figures.json'
# Captions of the figures of trained weights, by file name.
FIGURES = {
  'filters': 'Filters of the first layer (the paper’s Figure 7, left)',
  'positions': 'Similarity of position embeddings (Figure 7, centre)',
  'attention_distance': 'Attention distance (Figures 7, right, and 11)',
  'rollout': 'Attention rollout (Figures 6 and 14)',
  'heads': 'Single heads of the last layer',
  'components': 'Principal components of patch tokens (DINOv2, Figure 1)',
  'segments': 'Classes of pixels, and errors (white)',
  'reconstructions': 'Masked patches and their predictions',
}
_MAX_HEADS = 12  # number of heads drawn for a layer
_MAX_ROWS = 8  # number of images on a page
_LETTERS_PER_INCH = 15  # below a cell


class Column(NamedTuple):
  """A column of a grid.

  Attributes:
    title: title of the column.
    cells: pixels or colours `[y, x, 3]`, or weights of patches `[r, c]`, of
      each cell.
    captions: text below each cell; empty if there are none.
  """

  title: str
  cells: np.ndarray | Sequence[np.ndarray]
  captions: Sequence[str] = ()


Columns = Sequence[Column]


def filters(
  components: Float[np.ndarray, 'n y x 3'], fractions: Float[np.ndarray, ' n']
) -> Iterator[Any]:
  """Draws filters, each scaled to its own range (Figure 7, left).

  Args:
    components: principal components of the filters.
    fractions: fraction of the variance that each component explains.
  """
  sizes = np.abs(components).max(axis=(1, 2, 3), keepdims=True)
  cells = components / np.maximum(sizes, 1e-30) / 2 + 0.5
  captions = [f'{100 * fraction:.1f} %' for fraction in fractions]
  count = min(7, len(cells))
  return grid(
    'Filters of the first layer: principal components\n'
    f'(RGB, each scaled separately; {100 * fractions.sum():.0f} % of the '
    'variance)',
    [Column('', cells[i::count], captions[i::count]) for i in range(count)],
  )


def similarity(values: Float[np.ndarray, 'r c r c']) -> Any:
  """Draws a similarity map for the position of each patch (Figure 7, centre).

  If the grid has more than 16 patches per side, only every second (third, …)
  patch is shown.
  """
  rows, columns = values.shape[:2]
  step = -(-max(rows, columns) // 16)
  shown = values[::step, ::step]  # [r, c, rows, columns]
  # Maps are separated by empty pixels, a tenth of their size.
  gap = max(1, round(max(rows, columns) / 10))
  padded = np.pad(
    shown, ((0, 0), (0, 0), (0, gap), (0, gap)), constant_values=np.nan
  )
  height, width = (padded.shape[i] * padded.shape[i + 2] for i in (0, 1))
  # [r, c, y, x] → [r, y, c, x] → [r·y, c·x]
  sheet = padded.transpose(0, 2, 1, 3).reshape(height, width)
  figure = plotting.new_figure(6.2, 5.4 * height / width + 0.8)
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
    centres = np.arange(count) * (side + gap) + (side - 1) / 2  # of the maps
    axis.set_ticks(centres, (1 + step * np.arange(count)).tolist())
  axes.tick_params(labelsize=7, length=0)
  for spine in axes.spines.values():
    spine.set_visible(False)
  bar = figure.colorbar(picture, shrink=0.6, pad=0.02)
  bar.set_label('cosine similarity', fontsize=8)
  bar.ax.tick_params(labelsize=7)
  return figure


def distances(values: Float[np.ndarray, 'n l h'], size: Sequence[int]) -> Any:
  """Draws a dot for each head of each layer (Figures 7, right, and 11).

  Args:
    values: distances by image, layer and head, in pixels.
    size: (height, width) of the images.
  """
  mean = values.mean(axis=0)
  depth, heads = mean.shape
  figure = plotting.new_figure(5.2, 4)
  axes = figure.add_subplot()
  style = dict(linestyle='', marker='o', markersize=5)
  style |= dict(markeredgecolor='white', markeredgewidth=0.4)
  for head in range(heads):
    points = np.arange(1, depth + 1), mean[:, head]
    plotting.line(axes, points, head, f'head {head + 1}', **style)
  axes.set_ylim(0, 1.06 * max(float(mean.max()), 1e-30))
  axes.set_xlabel('layer')
  axes.set_ylabel('mean attention distance (pixels)')
  axes.set_title(
    f'Attention distance, {len(values)} images of {size[0]}x{size[1]} px',
    fontsize=10,
  )
  axes.xaxis.get_major_locator().set_params(integer=True)
  axes.grid(alpha=0.3)
  if heads <= len(plotting.COLOURS):
    axes.legend(fontsize=7, ncols=2)
  return figure


def rollouts(arrays: Mapping[str, np.ndarray], names: Sequence[str]) -> Columns:
  """Returns images, masked ones and rollout maps (Figures 6 and 14)."""
  images, maps = arrays['images'], arrays['rollout']
  masks = [figures.image_mask(each, images.shape[1:3]) for each in maps]
  masked = (images * np.stack(masks)[..., None]).astype(np.uint8)
  columns = [Column('image', images, names), Column('masked image', masked)]
  titles = {'rollout': 'rollout', 'rollout_plain': 'without identity'}
  for name, title in titles.items():
    maxima = [f'maximum {100 * each.max():.1f} %' for each in arrays[name]]
    columns.append(Column(title, arrays[name], maxima))
  return columns


def segments(arrays: Mapping[str, np.ndarray], names: Sequence[str]) -> Columns:
  """Returns images, masks, predicted classes and errors.

  Ignored pixels are grey in masks and errors.
  """
  found, colours = arrays['classes'], plotting.class_colours()
  predicted = Column('prediction', colours[found % len(colours)])
  if 'segments' not in arrays:
    return [Column('image', arrays['images'], names), predicted]
  true = arrays['segments']
  ignored, wrong = (true < 0)[..., None], (true != found)[..., None]
  fractions = [
    f'{100 * (t == p).sum() / max((t >= 0).sum(), 1):.1f} % correct'
    for t, p in zip(true, found, strict=True)
  ]
  errors = np.where(ignored, 128, 255 * wrong).repeat(3, -1)
  return [
    Column('image', arrays['images'], names),
    Column('mask', np.where(ignored, 128, colours[true % len(colours)])),
    predicted,
    Column('errors', errors, fractions),
  ]


def grid(
  title: str,
  columns: Columns,
  side: float | None = None,
  rows_of_page: int = _MAX_ROWS,
) -> Iterator[Any]:
  """Draws columns of cells, on one page or several.

  Args:
    title: title of each page.
    columns: columns; the first one has the most cells.
    side: width of a cell, inches; None to depend on the number of columns.
    rows_of_page: maximum number of rows on a page.

  Yields:
    The Matplotlib figure of each page.
  """
  count, (height, width) = len(columns[0].cells), columns[0].cells[0].shape[:2]
  side = side or (1.6 if len(columns) <= 5 else 1.1)
  letters = int(_LETTERS_PER_INCH * side)
  captions = [each for column in columns for each in column.captions]
  lines = 1 + max([0, *(each.count('\n') for each in captions)])
  for start in range(0, count, rows_of_page):
    rows = range(start, min(start + rows_of_page, count))
    page = (
      '' if count <= rows_of_page else f', page {start // rows_of_page + 1}'
    )
    # Sizes in inches: a cell with its caption, and the title.
    row_height = side * height / width + 0.13 + 0.12 * lines
    title_height = 0.5 + 0.2 * title.count('\n')
    figure = plotting.new_figure(
      side * len(columns) + 0.2, row_height * len(rows) + title_height
    )
    figure.suptitle(f'{title}{page}', fontsize=10)
    axes_of = figure.subplots(len(rows), len(columns), squeeze=False)
    for (row, index), (number, column) in itertools.product(
      enumerate(rows), enumerate(columns)
    ):
      axes = axes_of[row, number]
      if index >= len(column.cells):
        axes.set_axis_off()
        continue
      # Patches have sharp edges; larger images are filtered.
      is_image = column.cells[index].shape[:2] == (height, width)
      axes.imshow(
        column.cells[index],
        vmin=0,
        cmap='viridis',
        interpolation=None if is_image else 'nearest',
      )
      axes.set(xticks=[], yticks=[])
      caption = column.captions[index] if column.captions else ''
      # Of a long name of a file, the end is shown.
      if '\n' not in caption and len(caption) > letters:
        caption = f'…{caption[1 - letters :]}'
      axes.set_xlabel(caption, fontsize=7, parse_math=False)
      if not row:
        axes.set_title(column.title, fontsize=8)
    yield figure


def all_figures(
  findings: Findings, names: Sequence[str] = ()
) -> dict[str, Iterable[Any]]:
  """Draws every figure for which arrays exist.

  References of heads: DINO, arXiv 2104.14294, Figures 1 and 3; of components:
  DINOv2, arXiv 2304.07193, Figure 1; of reconstructions: MAE, arXiv 2111.06377,
  Figure 2.

  Args:
    findings: arrays of the figures.
    names: names of the images; empty if there are none.

  Returns:
    Pages of each figure by name, Matplotlib figures. They are drawn when they
    are accessed.
  """
  arrays = findings.arrays
  image = Column('image', arrays['images'], names)
  drawn: dict[str, Iterable[Any]] = {}
  if 'filters' in arrays:
    drawn['filters'] = filters(arrays['filters'], arrays['filter_shares'])
  if 'similarity' in arrays:
    drawn['positions'] = [similarity(arrays['similarity'])]
  if 'distance' in arrays:
    size = arrays['images'].shape[1:3]
    drawn['attention_distance'] = [distances(arrays['distance'], size)]
    drawn['rollout'] = grid(
      f'Attention rollout, from {findings.query}', rollouts(arrays, names)
    )
    maps = arrays['heads'].swapaxes(0, 1)  # [heads, n, r, c]
    shown = maps[:_MAX_HEADS]
    some = (
      '' if len(shown) == len(maps) else f', {len(shown)} of {len(maps)} heads'
    )
    drawn['heads'] = grid(
      f'Attention of {findings.query} in the last layer{some}\n'
      '(each map scaled separately)',
      [image, *(Column(f'head {i}', each) for i, each in enumerate(shown, 1))],
    )
  if 'components' in arrays:
    drawn['components'] = grid(
      'Patch tokens: the first three principal components as RGB',
      [image, Column('components', arrays['components'])],
    )
  if 'classes' in arrays:
    drawn['segments'] = grid('Classes of pixels', segments(arrays, names))
  if 'predicted' in arrays:
    target = textwrap.wrap(f'({findings.reconstructs})', 62)
    titles = {
      'seen': 'visible patches',
      'predicted': 'prediction',
      'completed': 'visible and predicted',
    }
    drawn['reconstructions'] = grid(
      '\n'.join(['Masked patches and their predictions', *target]),
      [image, *(Column(titles[key], arrays[key]) for key in titles)],
    )
  return drawn


def save(
  folder: epath.Path,
  findings: Findings,
  about: dict[str, str],
  names: Sequence[str] = (),
  form: plotting.Format = plotting.PNG,
) -> list[epath.Path]:
  """Draws the figures and writes them with their arrays.

  Args:
    folder: folder of the files, which is created if it does not exist.
    findings: arrays of the figures.
    about: texts that describe the weights and the images, with the keys
      'weights' and 'images'.
    names: names of the images; empty if there are none.
    form: format of the figures. The HTML report of a run shows only PNG files.

  Returns:
    Written files, in the order of writing.

  Raises:
    OSError: a file cannot be written.
    UserError: Matplotlib is not installed.
  """
  drawn = all_figures(findings, names)
  files: dict[str, str | bytes] = {}
  for name, pages in drawn.items():
    for number, content in enumerate(plotting.encode(pages, form)):
      suffix = f'_{number + 1}' if number else ''
      files[f'{name}{suffix}.{form.name}'] = content
  files['figures.npz'] = archive(findings.arrays)
  if form.name == 'png':  # the description of the figures of the report
    files[_ABOUT] = json.dumps(about | {'figures': sorted(drawn)})
  folder.mkdir(parents=True, exist_ok=True)
  for name, content in files.items():
    paths.write(folder / name, content)
  return [folder / name for name in files]


def about(folder: epath.Path) -> dict[str, Any]:
  """Returns the description that `save` wrote, or {} if there is none."""
  description = jsonl.read_object(folder / _ABOUT)
  return description if isinstance(description.get('figures'), list) else {}


def archive(arrays: dict[str, np.ndarray]) -> bytes:
  """Returns the content of an .npz file with these arrays."""
  file = io.BytesIO()
  np.savez_compressed(file, **arrays)  # pyright: ignore[reportArgumentType]
  return file.getvalue()
