"""Choice of the activations that the backward pass recomputes."""

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
  """Returns a layer class whose activations are recomputed as `remat` says.

  Args:
    layer: class of a layer.
    remat: 'none', 'full' (recompute everything) or 'dots' (keep the arrays
      that are named in `saved`).
    saved: names given by `checkpoint_name`.
    prevent_cse: whether XLA is kept from merging both computations again. A
      layer under a scan does not need it, because forward and backward pass are
      separate loops.
  """
  if remat == 'none':
    return layer
  policy = jax.checkpoint_policies.nothing_saveable
  if remat == 'dots':
    policy = jax.checkpoint_policies.save_only_these_names(*saved)
  return nn.remat(layer, prevent_cse=prevent_cse, policy=policy)
