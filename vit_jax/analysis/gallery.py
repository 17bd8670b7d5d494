"""Draws the paper's figures, and attention on photographs, into a folder.

The folder also contains the arrays of the figures and a description.
"""

import io
import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath
from jaxtyping import Float, UInt8

from vit_jax.analysis import figures, plotting
from vit_jax.analysis.figures import Findings
from vit_jax.data.images import channels
from vit_jax.data.images.decode import resize
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
  'reconstructions': 'Masked patches and their predictions',
}
_MAX_HEADS = 12  # number of heads drawn for a layer
_MAX_COLUMNS = 8  # number of images drawn side by side
_MAX_ROWS = 8  # number of rows of a page
_MAX_NAME = 20  # number of characters below a photograph
_MAX_SIDE = 2048  # pixels; larger photographs are reduced, to save memory
_SHAPES = 1 / 3, 2  # smallest and largest height / width of a row's cells


class Photograph(NamedTuple):
  """A photograph and the part of it that the model receives.

  Attributes:
    pixels: the whole photograph.
    box: (y, x, height, width) of the part that the model receives, pixels.
    name: name of the file; '' if there is none.
  """

  pixels: UInt8[np.ndarray, 'y x 3']
  box: tuple[float, float, float, float]
  name: str = ''

  @classmethod
  def of_input(cls, image: UInt8[np.ndarray, 'y x 3']) -> 'Photograph':
    """Returns an input of the model, which receives it as a whole."""
    return cls(image, (0.0, 0.0, *image.shape[:2]))

  @property
  def shape(self) -> float:
    """Height / width of the cell in which the photograph is drawn."""
    return float(np.clip(self.pixels.shape[0] / self.pixels.shape[1], *_SHAPES))

  @property
  def whole(self) -> bool:
    """True if the model receives the whole photograph, resized or not."""
    whole = (0, 0, *self.pixels.shape[:2])
    return bool(np.allclose(self.box, whole, atol=0.5))

  @property
  def extent(self) -> tuple[float, float, float, float]:
    """(left, right, bottom, top) of the box, in Matplotlib's coordinates.

    The centres of pixels have integer coordinates.
    """
    y, x, height, width = self.box
    return x - 0.5, x + width - 0.5, y + height - 0.5, y - 0.5

  def masked(
    self, weights: Float[np.ndarray, 'r c']
  ) -> UInt8[np.ndarray, 'y x 3']:
    """Darkens the photograph where weights are small.

    Args:
      weights: weights of the patches of the model's input, see
        `figures.image_mask`.

    Returns:
      The photograph, white outside of the part that the model receives.
    """
    top, left, height, width = self.box
    y = slice(round(top), round(top + height))
    x = slice(round(left), round(left + width))
    inside = self.pixels[y, x]
    mask = figures.image_mask(weights, inside.shape[:2])
    result = np.full_like(self.pixels, 255)
    result[y, x] = mask[..., None] * inside
    return result


class Photographs(Sequence[Photograph]):
  """Photographs that are decoded when they are accessed, to save memory."""

  def __init__(
    self,
    images: Sequence[bytes | np.ndarray],
    transform: Any,
    names: Sequence[str] = (),
  ):
    """Stores encoded images.

    Args:
      images: encoded files, or pixels.
      transform: preprocessing of the images, a `data.contract.Preprocess`.
        Without a method `visible`, the photographs are the results of `pixels`.
      names: name of each file; empty if there are none.
    """
    self._images, self._transform, self._names = images, transform, names

  def __len__(self) -> int:
    return len(self._images)

  def __getitem__(self, index: Any) -> Any:
    """Decodes one photograph; raises DecodeError."""
    image = self._images[index]
    name = str(self._names[index]) if self._names else ''
    visible = getattr(self._transform, 'visible', None)
    if visible is None:
      pixels = channels.rgb(self._transform.pixels(image))
      return Photograph.of_input(pixels)._replace(name=name)
    pixels = channels.rgb(self._transform.decode(image))
    box = visible(*pixels.shape[:2])
    scale = min(1, _MAX_SIDE / max(pixels.shape))
    y, x = (max(1, round(scale * side)) for side in pixels.shape[:2])
    box = tuple(scale * value for value in box)
    return Photograph(resize(pixels, y, x, 'area'), box, name)


def filters(
  components: Float[np.ndarray, 'n y x 3'], fractions: Float[np.ndarray, ' n']
) -> Any:
  """Draws filters, each scaled to its own range (Figure 7, left).

  Args:
    components: principal components of the filters.
    fractions: fraction of the variance that each component explains.
  """
  columns = min(7, len(components))
  rows = -(-len(components) // columns)
  figure = plotting.new_figure(0.85 * columns + 0.4, 0.98 * rows + 0.8)
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
  return figure


def similarity(values: Float[np.ndarray, 'r c r c']) -> Any:
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
    centres = np.arange(count) * (side + gap) + (side - 1) / 2
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


# Title of a column of cells, and function that draws a cell into Matplotlib
# axes, from the index of an image and its photograph.
Column = tuple[str, Callable[[Any, int, Photograph], None]]


def rollouts(
  findings: Findings, photographs: Sequence[Photograph]
) -> Iterator[Any]:
  """Draws photographs, masked ones and rollout maps (Figures 6 and 14)."""
  maps = findings.arrays['rollout']

  def masked(axes: Any, index: int, photograph: Photograph) -> None:
    axes.imshow(photograph.masked(maps[index]))

  title = f'Attention rollout, from {findings.query}'
  plain = findings.arrays['rollout_plain']
  columns = [
    ('masked image', masked),
    _of_maps('rollout', maps, with_maximum=True),
    _of_maps('without identity', plain, with_maximum=True),
  ]
  return _pages(photographs, len(maps), title, [_PHOTOGRAPH, *columns])


def heads(
  findings: Findings, photographs: Sequence[Photograph]
) -> Iterator[Any]:
  """Draws the attention of the last layer's heads.

  Reference: DINO, arXiv 2104.14294, Figures 1 and 3.
  """
  maps = findings.arrays['heads']
  total = maps.shape[1]
  count = min(_MAX_HEADS, total)
  shown = '' if count == total else f', {count} of {total} heads'
  title = (
    f'Attention of {findings.query} in the last layer{shown}\n'
    '(each map scaled separately)'
  )
  columns = [_of_maps(f'head {h + 1}', maps[:, h]) for h in range(count)]
  return _pages(photographs, len(maps), title, [_PHOTOGRAPH, *columns])


def components(
  findings: Findings, photographs: Sequence[Photograph]
) -> Iterator[Any]:
  """Draws photographs and the principal components of their patches.

  Reference: DINOv2, arXiv 2304.07193, Figure 1.
  """
  maps = findings.arrays['components']
  title = 'Patch tokens: the first three principal components as RGB'
  columns = [_PHOTOGRAPH, _of_maps('components', maps)]
  return _pages(photographs, len(maps), title, columns)


def reconstructions(findings: Findings) -> Iterator[Any]:
  """Draws inputs, visible patches and predictions.

  Reference: arXiv 2111.06377, Figure 2.
  """

  def of(title: str, name: str) -> Column:
    def draw(axes: Any, index: int, photograph: Photograph) -> None:
      del photograph  # the arrays are those of the model's inputs
      axes.imshow(findings.arrays[name][index])

    return title, draw

  lines = textwrap.wrap(f'({findings.reconstructs})', 62)
  title = '\n'.join(['Masked patches and their predictions', *lines])
  columns = [
    of('image', 'images'),
    of('visible patches', 'seen'),
    of('prediction', 'predicted'),
    of('visible and predicted', 'completed'),
  ]
  images = inputs(findings)
  return _pages(images, len(images), title, columns)


def inputs(findings: Findings) -> list[Photograph]:
  """Returns the images as the model receives them."""
  return [Photograph.of_input(image) for image in findings.arrays['images']]


def _photograph(axes: Any, index: int, photograph: Photograph) -> None:
  """Draws a photograph, and a frame around the part that the model receives."""
  del index
  axes.imshow(photograph.pixels)
  name = photograph.name
  if len(name) > _MAX_NAME:
    name = '…' + name[1 - _MAX_NAME :]
  axes.set_xlabel(name, fontsize=6, parse_math=False)
  if not photograph.whole:
    left, right, bottom, top = photograph.extent
    axes.plot(
      (left, right, right, left, left),
      (top, top, bottom, bottom, top),
      color=plotting.COLOURS[4],
      linewidth=0.8,
    )
    _limit(axes, photograph)


_PHOTOGRAPH: Column = ('image', _photograph)


def _of_maps(
  title: str,
  maps: Float[np.ndarray, 'n r c'] | Float[np.ndarray, 'n r c 3'],
  with_maximum: bool = False,
) -> Column:
  """Returns a column of weights or colours of patches at their positions."""

  def draw(axes: Any, index: int, photograph: Photograph) -> None:
    axes.imshow(
      maps[index],
      vmin=0,
      cmap='viridis',
      interpolation='nearest',
      extent=photograph.extent,
    )
    if with_maximum:
      percent = 100 * float(maps[index].max())
      axes.set_xlabel(f'maximum {percent:.1f} %', fontsize=7)
    _limit(axes, photograph)

  return title, draw


def _limit(axes: Any, photograph: Photograph) -> None:
  """Sets the limits of the axes to those of the photograph."""
  rows, columns = photograph.pixels.shape[:2]
  axes.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5))


def _pages(
  photographs: Sequence[Photograph],
  count: int,
  title: str,
  columns: Sequence[Column],
) -> Iterator[Any]:
  """Draws a group of cells for each photograph, on one page or several.

  Args:
    photographs: photographs, which are accessed page by page.
    count: number of photographs to draw.
    title: title of each page.
    columns: columns of the cells of a group.

  Yields:
    The Matplotlib figure of each page.
  """
  width = len(columns)
  side = 1.5 if width <= 5 else 1.05  # width of a cell, inches
  groups = max(1, min(count, _MAX_COLUMNS // width))  # side by side
  page_size = groups * _MAX_ROWS
  for start in range(0, count, page_size):
    stop = min(start + page_size, count)
    shown = [photographs[i] for i in range(start, stop)]
    rows = [shown[i : i + groups] for i in range(0, len(shown), groups)]
    # A row is as high as its tallest photograph.
    shapes = [max(photograph.shape for photograph in row) for row in rows]
    height = sum(side * shape + 0.25 for shape in shapes)
    height += 0.5 + 0.16 * title.count('\n')
    figure = plotting.new_figure(side * groups * width + 0.2, height)
    page = '' if count <= page_size else f', page {start // page_size + 1}'
    figure.suptitle(f'{title}{page}', fontsize=10)
    grid = figure.subplots(
      len(rows), groups * width, squeeze=False, height_ratios=shapes
    )
    for axes in grid.flat:
      axes.set_axis_off()  # until a photograph is drawn
    for column, axes in enumerate(grid[0]):
      axes.set_title(columns[column % width][0], fontsize=8)
    cells = grid.reshape(-1, width)
    for i, photograph in enumerate(shown):
      for axes, (_, draw) in zip(cells[i], columns, strict=True):
        axes.set_axis_on()
        axes.set(xticks=[], yticks=[], anchor='N')
        draw(axes, start + i, photograph)
    yield figure


def all_figures(
  findings: Findings, photographs: Sequence[Photograph]
) -> dict[str, Iterable[Any]]:
  """Draws every figure for which arrays exist.

  Args:
    findings: arrays of the figures.
    photographs: photographs on which attention is drawn, at least as many as
      `images`; see `inputs`.

  Returns:
    Pages of each figure by name, Matplotlib figures. They are drawn when they
    are accessed.
  """
  arrays = findings.arrays
  drawn: dict[str, Iterable[Any]] = {}
  if 'filters' in arrays:
    drawn['filters'] = [filters(arrays['filters'], arrays['filter_shares'])]
  if 'similarity' in arrays:
    drawn['positions'] = [similarity(arrays['similarity'])]
  if 'distance' in arrays:
    size = arrays['images'].shape[1:3]
    drawn['attention_distance'] = [distances(arrays['distance'], size)]
    drawn['rollout'] = rollouts(findings, photographs)
    drawn['heads'] = heads(findings, photographs)
  if 'components' in arrays:
    drawn['components'] = components(findings, photographs)
  if 'predicted' in arrays:
    drawn['reconstructions'] = reconstructions(findings)
  return drawn


def save(
  folder: epath.Path,
  findings: Findings,
  about: dict[str, str],
  photographs: Sequence[Photograph],
  form: plotting.Format = plotting.PNG,
) -> list[epath.Path]:
  """Draws the figures and writes them with their arrays.

  Args:
    folder: folder of the files, which is created if it does not exist.
    findings: arrays of the figures.
    about: texts that describe the weights and the images, with the keys
      'weights' and 'images'.
    photographs: photographs on which attention is drawn, in the order of the
      images.
    form: format of the figures. The HTML report of a run shows only PNG files.

  Returns:
    Written files, in the order of writing.

  Raises:
    OSError: a file cannot be written.
    UserError: Matplotlib is not installed.
  """
  drawn = all_figures(findings, photographs)
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
