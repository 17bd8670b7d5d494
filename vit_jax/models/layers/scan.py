"""Stacks of equal layers, and rematerialization of their activations."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax

REMAT = ('none', 'full', 'dots')


def rematerialized(
  layer: type[nn.Module],
  remat: str,
  saved: Sequence[str],
  *,
  prevent_cse: bool = False,
) -> Any:
  """Returns a layer class whose backward pass recomputes activations.

  Args:
    layer: class of a layer.
    remat: 'none', 'full' (recompute everything) or 'dots' (keep the arrays
      that are named in `saved`).
    saved: names given by `checkpoint_name`.
    prevent_cse: whether to prevent XLA from merging the recomputation with the
      forward pass. This is not needed under a scan, whose forward and backward
      passes are separate loops.
  """
  if remat == 'none':
    return layer
  policy = jax.checkpoint_policies.nothing_saveable
  if remat == 'dots':
    policy = jax.checkpoint_policies.save_only_these_names(*saved)
  return nn.remat(layer, prevent_cse=prevent_cse, policy=policy)


def scanned(
  layer: type[nn.Module],
  length: int,
  *,
  remat: str,
  saved: Sequence[str],
  unroll: int,
  in_axes: Any = 0,
) -> Any:
  """Returns a class that applies several layers of the same kind.

  The parameters of the layers are stacked along a new first axis.

  Args:
    layer: class of a layer, whose first argument and first result are the
      activations.
    length: number of layers.
    remat: see `rematerialized`.
    saved: see `rematerialized`.
    unroll: number of layers that are unrolled in each step of the scan.
    in_axes: axes along which further arguments are split, see `nn.scan`.
  """
  return nn.scan(
    rematerialized(layer, remat, saved),
    variable_axes={'params': 0},
    split_rngs={'params': True},
    in_axes=in_axes,
    length=length,
    unroll=min(unroll, length),
  )
