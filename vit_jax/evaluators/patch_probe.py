"""Classes of pixels by a linear classifier of patches, fitted at once."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.errors import check_range
from vit_jax.evaluators import contract, linear_probe, patch_neighbours
from vit_jax.evaluators.features import Labelled, OtherSource

PyTree = Any


class Evaluator(patch_neighbours.Evaluator):
  """Mean IoU of logistic regression on patches, a monitor of pre-training.

  The patches of training images are those of `patch_neighbours`, and the label
  of a patch is the most frequent class of its pixels. The classifier is that of
  `linear_probe`. The published protocols train on random crops instead, see
  the objective `segment`, so values do not compare.
  """

  kind = 'patch_probe'

  def __init__(
    self,
    setting: contract.Setting,
    /,
    *,
    split: str,
    train_split: str | None = None,
    source: OtherSource = None,
    memory: int = 20_000,
    l2: float = 1e-4,
    seed: int = 0,
  ):
    """Opens both splits.

    Args:
      setting: setting of the run.
      split: split to evaluate.
      train_split: split to fit on; by default the run's own.
      source: section of another source; by default the run's own.
      memory: largest number of patches to fit on.
      l2: regularization, above 0, see `linear_probe.fit`.
      seed: seed of the choice of patches.

    Raises:
      UserError: see `patch_neighbours`.
    """
    check_range('l2', l2, above=0)
    super().__init__(
      setting,
      split=split,
      train_split=train_split,
      source=source,
      memory=memory,
      k=1,
      seed=seed,
    )
    self._l2 = l2

  def fit(self, weights: PyTree) -> PyTree:
    """Returns the classifier; classes without patches are never predicted."""
    memory = super().fit(weights)
    labels = memory['labels'].argmax(-1)
    found = linear_probe.fit(Labelled(memory['patches'], labels), self._l2)
    kernel = np.zeros((len(found.kernel), self._classes))
    bias = np.full(self._classes, -1e9)
    kernel[:, found.classes], bias[found.classes] = found.kernel, found.bias
    kernel = kernel / found.scale[:, None]
    values = {'kernel': kernel, 'bias': bias - found.mean @ kernel}
    return {name: x.astype(np.float32) for name, x in values.items()}

  def scores(
    self, fitted: PyTree, maps: Float[Array, 'n rows columns d']
  ) -> Float[Array, 'n rows columns k']:
    """Returns the scores of the classifier."""
    x = patch_neighbours.unit(maps)
    product = jnp.matmul(x, fitted['kernel'], precision='highest')
    return product + fitted['bias']
