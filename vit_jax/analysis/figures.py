"""Computes the arrays from which the figures of trained weights are drawn.

They include attention rollout and mean attention distance.
"""

import collections
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Integer
from PIL import Image, ImageFilter

from vit_jax.arrays import tree
from vit_jax.data.images import channels
from vit_jax.errors import UserError
from vit_jax.objectives.contract import Objective

PyTree = Any
Grid = tuple[int, int]
FILTERS = 28  # principal components in Figure 7
SHOWN = 8  # number of images of an evaluation split that are drawn


class Findings(NamedTuple):
  """Arrays of the figures, and the reasons why some figures are missing.

  Attributes:
    arrays: `images` uint8 `[n, y, x, 3]`, RGB (see `channels.rgb`), and those
      of the following that the model supports: `filters` `[k, y, x, 3]` (for
      RGB images), principal components of the first layer, and `filter_shares`
      `[k]`, their fractions of the variance; `similarity` `[r, c, r, c]`,
      cosine similarity of the learned position embeddings; `distance`
      `[n, layers, heads]`, attention distance in pixels; `rollout` and
      `rollout_plain` `[n, r, c]`, attention rollout with and without the
      identity; `heads` `[n, heads, r, c]`, attention of the last layer's heads
      to the patches; `components` `[n, r, c, 3]`, see `patch_components`; and
      `classes` and `segments` `[n, y, x]`, predictions and masks.
    missing: one line for each figure that this model does not support.
    by_token: whether the query of the attention maps is the class token;
      otherwise they are means over the queries of all patches.
    reconstructs: description of the target that a masked objective predicts
      for hidden patches; '' without one. If it is not empty, `arrays` also
      contains `seen`, `predicted` and `completed` `[n, y, x, 3]`, in [0, 1].
  """

  arrays: dict[str, np.ndarray]
  missing: list[str]
  by_token: bool
  reconstructs: str = ''

  @property
  def query(self) -> str:
    """Name of the query of the attention maps."""
    return 'the class token' if self.by_token else 'the mean of all patches'


def examine(
  objective: Objective,
  weights: PyTree,
  images: Integer[np.ndarray, 'n y x c'],
  shown: int = SHOWN,
  masks: Integer[np.ndarray, 'n y x'] | None = None,
) -> Findings:
  """Computes the arrays from which the figures of the paper are drawn.

  Fused attention kernels do not return attention weights; these are computed
  separately from the same parameters (`models.contract.Model`).

  Args:
    objective: objective for images of this size. If it hides patches, they are
      reconstructed, and if it has classes of pixels, they are predicted.
    weights: one of the values of `Objective.weights`.
    images: images preprocessed as for evaluation; attention distance is
      computed for all of them.
    shown: number of images for which rollout, maps of single heads, components
      of patches and reconstructions are kept.
    masks: class of each pixel; negative numbers are ignored.
  """
  model: Any = objective.setting.model
  leaves = tree.flatten(objective.backbone(weights))
  pictures = images[:shown]
  findings = Findings(
    {'images': channels.rgb(pictures)},
    [],
    'cls' in leaves,
    objective.reconstructs,
  )
  if (kernel := first_kernel(leaves)) is None:
    findings.missing.append(
      'filters: this model does not have a convolution of RGB pixels'
    )
  else:
    filters, fractions = components(kernel)
    findings.arrays.update(filters=filters, filter_shares=fractions)
  grid = model.grid(images.shape[1:3]) if hasattr(model, 'grid') else None
  table = positions(leaves, grid) if grid else None
  if grid is None or table is None:
    findings.missing.append(
      'position similarity: this model adds no learned positions to tokens in '
      'a grid'
    )
  else:
    findings.arrays['similarity'] = similarity(table, grid)
  _attention(findings, objective, weights, images, grid, shown)
  if 'rollout' in findings.arrays:  # so the tokens are those of a grid
    patches = _result(objective, 'patches')
    maps = [np.asarray(patches(weights, image[None])) for image in pictures]
    findings.arrays['components'] = patch_components(np.concatenate(maps))
  if objective.reconstructs:
    # The same patches are hidden in every call.
    drawn = jax.jit(objective.reconstruct)(
      weights, {'image': jnp.asarray(pictures)}, jax.random.key(0)
    )
    for name in ('seen', 'predicted', 'completed'):
      findings.arrays[name] = np.asarray(getattr(drawn, name))
  if 'classes' in objective.results:
    maps = _result(objective, 'classes')(weights, pictures)
    shape = (*pictures.shape[:3], maps.shape[-1])
    classes = jax.image.resize(maps, shape, 'linear').argmax(-1)
    findings.arrays['classes'] = np.asarray(classes)
    if masks is not None:
      findings.arrays['segments'] = masks[:shown]
  return findings


def _attention(
  findings: Findings,
  objective: Objective,
  weights: PyTree,
  images: Integer[np.ndarray, 'n y x c'],
  grid: Grid | None,
  shown: int,
) -> None:
  """Adds rollout, maps of heads and distances, one image at a time."""
  model: Any = objective.setting.model
  attend = _result(objective, 'attention')
  try:
    jax.eval_shape(attend, weights, images[:1])
  except UserError as error:
    findings.missing.append(f'rollout, heads and attention distance: {error}')
    return
  if grid is None or not hasattr(model, 'patch_pixels'):
    findings.missing.append(
      'rollout, heads and attention distance: the positions of the tokens of '
      'this model are not known; see `grid` and `patch_pixels` of '
      'models.contract.Model'
    )
    return
  found = collections.defaultdict(list)
  for index, image in enumerate(images):
    attention = np.asarray(attend(weights, image[None]))
    distances = head_distances(attention, grid, model.patch_pixels)
    found['distance'].append(distances)
    if index >= shown:
      continue
    for name, maps in (
      ('rollout', rollout(attention)),
      ('rollout_plain', rollout(attention, residual=False)),
      ('heads', attention[:, -1].astype(np.float64)),
    ):
      found[name].append(on_patches(maps, grid, findings.by_token))
  findings.arrays.update({k: np.concatenate(v) for k, v in found.items()})


def _result(objective: Objective, name: str) -> Callable[[PyTree, Any], Any]:
  """Returns a compiled function of weights and images to one result."""

  @jax.jit
  def compute(weights: PyTree, images: Any) -> Any:
    return objective.predict(weights, {'image': images}, (name,))[name]

  return compute


def patch_components(
  tokens: Float[np.ndarray, 'n r c d'],
) -> Float[np.ndarray, 'n r c 3']:
  """Computes the first three principal components of tokens of patches.

  The components are those of the patches of all images together, so that
  similar patches have similar values in all of them. Each component is mapped
  to [0, 1]; one without variance, because there are few patches, is 0.

  Reference: arXiv 2304.07193, Figure 1, without its removal of backgrounds.
  """
  flat = tokens.reshape(-1, tokens.shape[-1]).astype(np.float64)
  directions, _ = _principal(flat)
  values = (flat - flat.mean(0)) @ directions[:3].T
  values = np.pad(values, ((0, 0), (0, 3 - values.shape[1])))
  low, high = values.min(0), values.max(0)
  least = 1e-9 * (high - low).max() + 1e-30  # differences by rounding are less
  scaled = (values - low) / np.maximum(high - low, least)
  return scaled.reshape(*tokens.shape[:-1], -1)


def components(
  kernel: Float[np.ndarray, 'y x 3 d'],
) -> tuple[Float[np.ndarray, 'n y x 3'], Float[np.ndarray, ' n']]:
  """Computes the principal components of d centred filters of RGB pixels.

  Args:
    kernel: kernel of the first layer.

  Returns:
    Up to 28 filters of norm 1, in descending order of variance, whose entry
    with the largest magnitude is positive; and the fraction of the variance
    that each of them explains.

  Reference: arXiv 2010.11929, Figure 7 (left).
  """
  *shape, width = kernel.shape
  rows = kernel.reshape(-1, width).T.astype(np.float64)  # [d, y x 3]
  directions, variances = _principal(rows)
  fractions = variances / max(variances.sum(), 1e-300)
  filters = directions[:FILTERS].reshape(-1, *shape)
  return filters, fractions[:FILTERS]


def _principal(
  rows: Float[np.ndarray, 'n d'],
) -> tuple[Float[np.ndarray, 'k d'], Float[np.ndarray, ' k']]:
  """Returns the principal directions of rows, and variances times n.

  Directions have norm 1 and are in descending order of variance; the entry of
  each with the largest magnitude is positive.
  """
  _, sizes, vectors = np.linalg.svd(rows - rows.mean(0), full_matrices=False)
  largest = np.abs(vectors).argmax(axis=1)
  signs = np.sign(vectors[np.arange(len(vectors)), largest])
  return vectors * signs[:, None], sizes**2


def first_kernel(
  leaves: Mapping[str, Any],
) -> Float[np.ndarray, 'y x 3 d'] | None:
  """Finds the filters that are applied to RGB pixels (patch embedding or stem).

  Args:
    leaves: parameters by path.

  Returns:
    The kernel `[y, x, 3, d]`, or None if the model does not have one that is
    larger than 1 x 1 pixel.
  """
  for path in sorted(leaves, key=lambda path: path.count('/')):
    shape = leaves[path].shape
    is_filter = len(shape) == 4 and shape[2] == 3 and shape[0] * shape[1] > 1
    if is_filter and path.endswith('kernel') and '/layers/' not in path:
      return np.asarray(leaves[path], np.float32)
  return None


def positions(
  leaves: Mapping[str, Any], grid: Grid
) -> Float[np.ndarray, 'p d'] | None:
  """Returns the learned position embeddings of the patches, row by row.

  If every layer has its own embeddings, those of the first layer are returned.

  Args:
    leaves: parameters by path.
    grid: rows and columns of patches.

  Returns:
    The embeddings, or None if the model does not learn any.
  """
  count = grid[0] * grid[1]
  of_model, of_layers = 'position/', 'encoder/layers/position/'
  for start in (of_model, of_layers):
    tables = {
      path.removeprefix(start): np.asarray(leaf, np.float64)
      for path, leaf in leaves.items()
      if path.startswith(start)
    }
    if start == of_layers:  # stacked over the layers
      tables = {name: leaf[0] for name, leaf in tables.items()}
    if 'embedding' in tables:  # [1, other tokens + patches, d]
      return tables['embedding'][0, -count:]
    if {'rows', 'columns'} <= tables.keys():
      rows, columns = tables['rows'], tables['columns']
      rows = np.broadcast_to(rows[:, None], (*grid, rows.shape[-1]))
      columns = np.broadcast_to(columns, (*grid, columns.shape[-1]))
      return np.concatenate([rows, columns], axis=-1).reshape(count, -1)
  return None


def similarity(
  table: Float[np.ndarray, 'p d'], grid: Grid
) -> Float[np.ndarray, 'r c r c']:
  """Computes the cosine similarity of all pairs of position embeddings.

  Args:
    table: position embeddings, patches numbered row by row.
    grid: rows and columns of patches.

  Reference: arXiv 2010.11929, Figure 7 (centre).
  """
  lengths = np.linalg.norm(table, axis=1, keepdims=True)
  unit = table / np.maximum(lengths, 1e-30)
  return (unit @ unit.T).reshape(*grid, *grid)


def rollout(
  attention: Float[np.ndarray, 'n l h t t'], residual: bool = True
) -> Float[np.ndarray, 'n t t']:
  """Multiplies the attention of all layers, the last layer on the left.

  Args:
    attention: weights by image, layer, head, query and key; rows sum to 1.
    residual: whether to add the identity, which represents the residual
      connections, to each layer's mean over heads, and to renormalize.

  Returns:
    Weights by image, token after the last layer and input token; rows sum to 1.

  Reference: arXiv 2010.11929, appendix D.8 (Figures 6 and 14), after arXiv
  2005.00928. The paper does not mention the identity; its authors do.
  """
  layers = attention.mean(axis=2, dtype=np.float64)  # [n, l, t, t]
  if residual:
    layers = layers + np.eye(layers.shape[-1])
  layers = layers / layers.sum(axis=-1, keepdims=True)
  rolled = layers[:, 0]
  for index in range(1, layers.shape[1]):
    rolled = layers[:, index] @ rolled
  return rolled


def on_patches(
  weights: Float[np.ndarray, '*n t t'], grid: Grid, by_token: bool
) -> Float[np.ndarray, '*n r c']:
  """Returns the attention to the patches, of the class token or on average.

  Args:
    weights: weights by query and key; the tokens of patches come last, row by
      row.
    grid: rows and columns of patches.
    by_token: whether the query is the first token (a class token); otherwise,
      the mean over the queries of all patches is returned.
  """
  prefix = weights.shape[-1] - grid[0] * grid[1]
  queries = weights[..., :1, :] if by_token else weights[..., prefix:, :]
  patches = queries.mean(axis=-2)[..., prefix:]
  return patches.reshape(*patches.shape[:-1], *grid)


def image_mask(
  weights: Float[np.ndarray, 'r c'], size: Grid
) -> Float[np.ndarray, 'y x']:
  """Resizes a map of patches to a smooth mask of the image, from 0 to 1.

  The map is divided by its maximum, resized by Lanczos, blurred by a Gaussian
  whose σ is the size of a patch along each axis, and stretched to [0, 1]. A
  constant map gives ones.

  Args:
    weights: weights of the patches, at least 0.
    size: (height, width) of the image in pixels.

  Reference: google-research/vision_transformer, issue 27, where the authors
  describe how they drew Figure 6.
  """
  height, width = size
  scaled = weights / max(float(weights.max()), 1e-30)
  picture = Image.fromarray((255 * scaled).astype(np.float32))
  picture = picture.resize((width, height), Image.Resampling.LANCZOS)
  pixels = np.clip(np.asarray(picture), 0, 255).astype(np.uint8)
  rows, columns = weights.shape
  blur = ImageFilter.GaussianBlur((width / columns, height / rows))
  smooth = np.asarray(Image.fromarray(pixels).filter(blur), np.float64)
  low, high = smooth.min(), smooth.max()
  if high == low:
    return np.ones(size)
  return (smooth - low) / (high - low)


def patch_distances(grid: Grid, patch_pixels: int) -> Float[np.ndarray, 'p p']:
  """Returns the distances between the centres of all patches, in pixels.

  Patches are numbered row by row.

  Args:
    grid: rows and columns of patches.
    patch_pixels: side length of a patch, pixels.
  """
  rows, columns = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
  return patch_pixels * np.hypot(
    rows[:, None] - rows, columns[:, None] - columns
  )


def head_distances(
  attention: Float[np.ndarray, 'n l h t t'], grid: Grid, patch_pixels: int
) -> Float[np.ndarray, 'n l h']:
  """Returns the mean over queries i of Σ_j A_ij · distance(i, j) per head.

  Tokens that precede the patch tokens (a class token) are ignored, both as
  queries and as keys. The rows are not renormalised afterwards, so attention to
  such tokens contributes a distance of 0. The paper does not state whether its
  authors renormalised.

  Args:
    attention: weights by image, layer, head, query and key.
    grid: rows and columns of patches, whose tokens come last.
    patch_pixels: side length of a patch, pixels.

  Reference: arXiv 2010.11929, section 4.5, Figures 7 (right) and 11.
  """
  distances = patch_distances(grid, patch_pixels)
  prefix = attention.shape[-1] - len(distances)
  patches = attention[..., prefix:, prefix:]
  total = np.einsum('nlhqk,qk->nlh', patches, distances, dtype=np.float64)
  return total / len(distances)
