"""Retrieval of the captions of an image, and of the image of a caption."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Int

from vit_jax.data.contract import require
from vit_jax.evaluators import contract
from vit_jax.evaluators.features import Labelled, OnSplit, OtherSource

PyTree = Any
_RANKS = (1, 5, 10)
_MADE_BY = "'captions', with captions_per_image, as in configs/lit.py"
_ROWS = 256  # images or captions whose similarities exist at once


@dataclasses.dataclass(eq=False, kw_only=True)
class Evaluator(OnSplit):
  """Recall at 1, 5 and 10 in both directions.

  An image counts if any of its captions is among the k nearest captions of all
  images. Each caption counts if its image is among the k nearest images. An
  equal similarity to another image or caption counts as farther away, so that
  weights with the same embedding for everything have a recall of 0.

  Attributes:
    source: config section of other data; None for the data of the run.

  Raises:
    UserError: batches have no captions (`captions_per_image` of the
      preprocessing is 0), or the objective has no texts.
  """

  higher_is_better = ('image_to_text@*', 'text_to_image@*')

  source: OtherSource = None

  def __post_init__(self):
    contract.check_results(self.setting, 'image', 'text', who='retrieval')
    spec = self.setting.transform.spec
    require(
      spec, 'image', 'tokens', 'captions', who='retrieval', made_by=_MADE_BY
    )
    super().__post_init__()
    self._embed = self.setting.compiled(self._embed_batch)

  def _embed_batch(self, weights: PyTree, batch: contract.Batch) -> PyTree:
    """Returns embeddings, number of captions and mask of each image."""
    found = batch | self.setting.predict(weights, batch, ('image', 'text'))
    return {key: found[key] for key in ('image', 'text', 'captions', 'mask')}

  def run(self, weights: PyTree) -> dict[str, float]:
    """Returns the fractions 'image_to_text@1' and so on, in [0, 1].

    Raises:
      UserError: see `contract.Setting.examples`, or embeddings are not finite.
    """
    found = self.setting.examples(
      weights,
      self._source,
      self._embed,
      finite={'image': 'the embeddings', 'text': 'the embeddings'},
    )
    images, texts = found['image'], found['text']
    is_caption = np.arange(texts.shape[1]) < found['captions'][:, None]
    owner = np.nonzero(is_caption)[0]
    # [n, captions, d] → [all captions, d], labelled by their images
    texts = Labelled(texts[is_caption], owner)
    images = Labelled(images, np.arange(len(images)))
    ranks = {
      'image_to_text': _ranks(images, texts),
      'text_to_image': _ranks(texts, images),
    }
    return {
      f'{name}@{k}': float((rank < k).mean())
      for name, rank in ranks.items()
      for k in _RANKS
    }


def _ranks(queries: Labelled, keys: Labelled) -> Int[np.ndarray, ' queries']:
  """Returns how many keys of other owners are as near as the nearest own one.

  Args:
    queries: embeddings of length 1, and the number of the image of each.
    keys: the same for what is searched.
  """
  ranks = []
  for start in range(0, len(queries.labels), _ROWS):
    rows = slice(start, start + _ROWS)
    similar = queries.features[rows] @ keys.features.T  # [rows, keys]
    own = queries.labels[rows, None] == keys.labels
    nearest = np.where(own, similar, -np.inf).max(1, keepdims=True)
    ranks.append((~own & (similar >= nearest)).sum(1))
  return np.concatenate(ranks)
