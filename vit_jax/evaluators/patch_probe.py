"""Classes of pixels by logistic regression on frozen patch tokens."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.errors import check_range
from vit_jax.evaluators import linear_probe, patch_neighbours
from vit_jax.evaluators.features import Labelled
from vit_jax.models.dino_head import unit

PyTree = Any
_NEVER = -1e9  # score of a class that is never predicted


@dataclasses.dataclass(eq=False, kw_only=True)
class Evaluator(patch_neighbours.OnPatches):
  """Mean IoU of logistic regression on patches, a monitor of pre-training.

  The patches of training images are those of `patch_neighbours`, and the label
  of a patch is the most frequent class of its pixels. The classifier is that of
  `linear_probe`. The published protocols train on random crops instead, see
  the objective `segment`, so values do not compare.

  Attributes:
    l2: regularization, above 0, see `linear_probe.fit`.
  """

  who = 'patch_probe'
  l2: float = 1e-4

  def __post_init__(self):
    check_range('l2', self.l2, above=0)
    super().__post_init__()

  def fit(self, weights: PyTree) -> PyTree:
    """Returns kernel `[d, k]` and bias `[k]` for all k classes, float32."""
    memory = super().fit(weights)
    labels = memory['labels'].argmax(-1)
    found = linear_probe.fit(Labelled(memory['patches'], labels), self.l2)
    # `found` has scores only of the classes that are the label of a patch. The
    # others get a score below all of these, so they are never predicted.
    kernel = np.zeros((len(found.kernel), self._classes))
    bias = np.full(self._classes, _NEVER)
    kernel[:, found.classes], bias[found.classes] = found.kernel, found.bias
    # ((x - mean) / scale)·W + b = x·(W / scale) + (b - mean·(W / scale))
    kernel /= found.scale[:, None]
    bias -= found.mean @ kernel
    return {
      'kernel': kernel.astype(np.float32),
      'bias': bias.astype(np.float32),
    }

  def scores(
    self, fitted: PyTree, maps: Float[Array, 'n rows columns d']
  ) -> Float[Array, 'n rows columns k']:
    """Returns the scores of the classifier."""
    x = unit(maps, axis=-1)
    product = jnp.matmul(x, fitted['kernel'], precision='highest')
    return product + fitted['bias']
