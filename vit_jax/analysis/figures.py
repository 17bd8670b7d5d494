"""What weights have learnt, as arrays: the numbers behind the figures."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from vit_jax.analysis import distance, embeddings, rollout
from vit_jax.arrays import tree
from vit_jax.errors import UserError
from vit_jax.objectives.contract import Objective

PyTree = Any
_BYTES = 2**29  # of attention that is held at once


class Findings(NamedTuple):
  """What could be seen, and why the rest could not.

  Attributes:
    arrays: `images` uint8 `[n, y, x, 3]`, and what there is of
      `filters` `[k, y, x, 3]`, principal components of the first layer, with
      `filter_shares` `[k]` of the variance; `similarity` `[r, c, r, c]`, cosine
      of learned positions; `distance` `[n, layers, heads]`, in pixels;
      `rollout` and, without the identity, `rollout_plain` `[n, r, c]`, and
      `heads` `[n, heads, r, c]` of the last layer, on patches.
    missing: one line for each figure that the model cannot have.
    by_token: whether attention is that of the class token; else the mean over
      all patches, which are what is read out.
    reconstructs: what was predicted of hidden patches, in words; with it go the
      arrays `seen`, `predicted` and `completed` `[n, y, x, 3]`, 0 to 1.
  """

  arrays: dict[str, np.ndarray]
  missing: list[str]
  by_token: bool
  reconstructs: str = ''


class Masked(NamedTuple):
  """An objective that hides patches, with its parameters."""

  objective: Objective
  params: PyTree

  @classmethod
  def of(cls, objective: Objective, params: PyTree) -> 'Masked | None':
    """None where an objective hides nothing."""
    return cls(objective, params) if objective.reconstructs else None


def examine(
  model: Any,
  params: PyTree,
  images: UInt8[np.ndarray, 'n y x 3'],
  shown: int = 8,
  masked: Masked | None = None,
) -> Findings:
  """Everything that the figures of the paper are drawn from.

  Attention is computed beside the kernels, from the same parameters
  (`models.contract.Model`).

  Args:
    model: see `models.contract.Model`.
    params: its parameters.
    images: preprocessed as for evaluation; attention distance is of all.
    shown: of them rollout, the maps of single heads and reconstructions are
      kept.
    masked: what the model is trained by, if it hides patches; for images of
      this size.
  """
  leaves = tree.flatten(params)
  size = images.shape[1:3]
  said = masked.objective.reconstructs if masked else ''
  found = Findings({'images': images[:shown]}, [], 'cls' in leaves, said)
  _filters(found, leaves)
  grid = None
  if hasattr(model, 'grid'):
    grid = model.grid(size)
    _similarity(found, leaves, grid)
  else:
    found.missing.append(
      'position similarity: this model has no tokens with positions of their '
      'own'
    )
  _attention(found, model, params, images, grid, shown)
  if masked:
    found.arrays.update(reconstructed(masked, images[:shown]))
  return found


def reconstructed(
  masked: Masked, images: UInt8[np.ndarray, 'n y x 3']
) -> dict[str, Float[np.ndarray, 'n y x 3']]:
  """See `objectives.contract.Pictures`; always the same patches are hidden."""
  key = jax.random.key(0)
  pictures = jax.jit(masked.objective.reconstruct)(
    masked.params, {'image': jnp.asarray(images)}, key
  )
  arrays = {k: np.asarray(v) for k, v in pictures._asdict().items()}
  del arrays['image']  # those of `images`
  return arrays


def _filters(found: Findings, leaves: Mapping[str, Any]) -> None:
  kernel = embeddings.first_kernel(leaves)
  if kernel is None:
    found.missing.append('filters: no layer of this model looks at RGB pixels')
    return
  result = embeddings.components(kernel)
  found.arrays['filters'] = result.filters
  found.arrays['filter_shares'] = result.shares


def _similarity(
  found: Findings, leaves: Mapping[str, Any], grid: tuple[int, int]
) -> None:
  table = embeddings.positions(leaves, grid)
  if table is None:
    found.missing.append(
      'position similarity: this model adds no learned positions to its tokens'
    )
    return
  found.arrays['similarity'] = embeddings.similarity(table, grid)


def _attention(
  found: Findings,
  model: Any,
  params: PyTree,
  images: UInt8[np.ndarray, 'n y x 3'],
  grid: tuple[int, int] | None,
  shown: int,
) -> None:
  """Rollout, single heads and distances, a few images at a time."""
  attend = attention_of(model)
  try:
    one = jax.eval_shape(attend, params, images[:1])
  except UserError as error:
    found.missing.append(f'rollout, heads and attention distance: {error}')
    return
  if grid is None or not hasattr(model, 'patch_pixels'):
    found.missing.append(
      'rollout, heads and attention distance: this model does not say where '
      'its tokens are; see `grid` and `patch_pixels` of models.contract.Model'
    )
    return
  size = max(1, min(len(images), _BYTES // (4 * one.size)))
  compiled, parts = jax.jit(attend), []
  for start in range(0, len(images), size):
    batch = images[start : start + size]
    rows = len(batch)
    padded = np.concatenate([batch, np.repeat(batch[-1:], size - rows, 0)])
    attention = np.asarray(compiled(params, padded))[:rows]
    distances = distance.of_heads(attention, grid, model.patch_pixels)
    attention = attention[: max(0, shown - start)]
    parts.append(_maps(attention, grid, found.by_token))
    parts[-1]['distance'] = distances
  found.arrays.update(
    {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
  )


def _maps(
  attention: Float[np.ndarray, 'n l h t t'],
  grid: tuple[int, int],
  by_token: bool,
) -> dict[str, np.ndarray]:
  """Rollout with and without the identity, and the last layer's heads."""
  on_patches = functools.partial(
    rollout.on_patches, grid=grid, by_token=by_token
  )
  return {
    'rollout': on_patches(rollout.rollout(attention)),
    'rollout_plain': on_patches(rollout.rollout(attention, residual=False)),
    'heads': on_patches(attention[:, -1].astype(np.float64)),
  }


def attention_of(
  model: Any,
) -> Callable[[PyTree, Any], Float[Array, 'n l h t t']]:
  """(params, uint8 images) → attention of every layer and head, float32."""

  def attend(params: PyTree, images: Any) -> Float[Array, 'n l h t t']:
    pixels = jnp.asarray(images, jnp.float32) / 127.5 - 1
    found = model.apply(
      {'params': params}, pixels, method='predict', want=('attention',)
    )
    return found['attention']

  return attend
