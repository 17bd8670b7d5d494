"""Classes of pixels by a vote of the nearest patches of training images."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.errors import UserError, check_range
from vit_jax.evaluators import contract, miou
from vit_jax.evaluators.features import OtherSource, Spread
from vit_jax.models.dino_head import unit

PyTree = Any
_POSITIONS = 16  # patches of each image that are searched at once


@dataclasses.dataclass(eq=False, kw_only=True)
class OnPatches(miou.Evaluator):
  """Base class of evaluators that are fitted on patches of training images.

  The label of a patch is the distribution of the classes of its pixels that are
  not ignored; patches without such pixels are left out. Of each training image,
  the same number of patches is kept, so that `memory` is not exceeded: those
  with the lowest product of a random number and the number of the image's
  pixels with one of the patch's classes, so that patches with rare classes are
  favoured. Difference from Hummingbird (arXiv 2306.01667): training images
  are used once, without augmentation.

  Attributes:
    k: smallest number of patches.
    train_split: split of the patches; by default the run's own.
    source: section of another source; by default the run's own.
    memory: largest number of patches.
    seed: seed of the choice of patches.

  Raises:
    UserError: the data does not exist, the transform has no masks of the size
      of the images, or a value is out of range.
  """

  own_classes = True
  result = 'patches'
  k = 1  # not annotated, so that it is not a field
  train_split: str | None = None
  source: OtherSource = None
  memory: int = 20_000
  seed: int = 0

  def __post_init__(self):
    check_range('memory', self.memory, at_least=1)
    check_range('seed', self.seed, at_least=0)
    super().__post_init__()
    if len(self.setting.transform.spec['image'][0]) != 3:
      raise UserError(
        f'{self.who} needs masks of the size of the images: set '
        "preprocess.name='segments'."
      )
    train = self.open_train(self.train_split)
    self._train: Any = Spread(train, self.memory)
    self._per_image = self.memory // len(self._train)
    self._remember = self.setting.compiled(self._remember_batch)

  def _remember_batch(self, weights: PyTree, batch: contract.Batch) -> PyTree:
    """Returns the chosen patches of each image, and their labels."""
    maps = unit(self._maps(weights, batch['image']), axis=-1)
    n, rows, columns, width = maps.shape
    target, k = batch['segments'].astype(jnp.int32), self._classes
    miou.check_whole(target.shape[1:], (rows, columns))
    pixels = jax.nn.one_hot(target, k)  # 0 for ignored pixels
    # [n, y, x, k] → [n, rows, y of a patch, columns, x of a patch, k]
    pixels = pixels.reshape(n, rows, -1, columns, target.shape[2] // columns, k)
    counts = pixels.sum((2, 4)).reshape(n, -1, k)  # [n, patches, k]
    frequency = counts.sum(1, keepdims=True)  # of each class in the image
    scores = jnp.where(counts > 0, frequency, 0).sum(-1)  # [n, patches]
    # Random numbers depend on the image only, not on its batch.
    sums = batch['image'].astype(jnp.uint32).sum((1, 2, 3))
    key = jax.random.key(self.seed)

    def draw(image_sum: Any) -> Any:
      own = jax.random.fold_in(key, image_sum)
      return jax.random.uniform(own, scores.shape[1:])

    scores = jnp.where(scores > 0, scores * jax.vmap(draw)(sums), jnp.inf)
    size = min(self._per_image, rows * columns)
    negative, chosen = jax.lax.top_k(-scores, size)

    def of_chosen(x: Array) -> Array:
      return jnp.take_along_axis(x, chosen[..., None], 1)

    counts = of_chosen(counts)
    totals = counts.sum(-1, keepdims=True)
    return {
      'patches': of_chosen(maps.reshape(n, -1, width)),
      'labels': counts / jnp.maximum(totals, 1),
      # Patches without a class have the score inf. They are chosen only if an
      # image has fewer others.
      'kept': jnp.isfinite(negative),
      'mask': batch['mask'],
    }

  def fit(self, weights: PyTree) -> PyTree:
    """Returns the patches and their labels.

    Raises:
      UserError: there are fewer patches than neighbours, features are not
        finite, or there is a bad record and the reader's policy is to stop.
    """
    found = self.setting.examples(
      weights,
      self._train,
      self._remember,
      finite={'patches': 'the patches'},
    )
    kept = found.pop('kept')
    memory = {name: values[kept] for name, values in found.items()}
    if len(memory['labels']) < self.k:
      raise UserError(
        f'{self._train.name} has {len(memory["labels"])} patches with a class '
        f'in memory, but k is {self.k}: lower k, or raise memory.'
      )
    return memory


@dataclasses.dataclass(eq=False, kw_only=True)
class Evaluator(OnPatches):
  """Mean IoU of a weighted vote of the nearest patches, as in Hummingbird.

  The search is exact.

  Attributes:
    memory: largest number of patches to search.
    k: number of neighbours.
    temperature: temperature of the votes, above 0.

  Reference: Balažević et al., arXiv 2306.01667.
  """

  who = 'patch_neighbours'
  memory: int = 102_400
  k: int = 30
  temperature: float = 0.02

  def __post_init__(self):
    super().__post_init__()
    check_range('k', self.k, at_least=1, at_most=self.memory)
    check_range('temperature', self.temperature, above=0)

  def scores(
    self, fitted: PyTree, maps: Float[Array, 'n rows columns d']
  ) -> Float[Array, 'n rows columns k']:
    """Returns the mean label of the nearest patches, weighted."""
    n, rows, columns, width = maps.shape
    queries = unit(maps, axis=-1).reshape(n, -1, width)
    queries = jnp.moveaxis(queries, 1, 0)  # [positions, n, d]

    def vote(query: Any) -> Any:  # [n, d]
      similar = jnp.matmul(query, fitted['patches'].T, precision='highest')
      near, chosen = jax.lax.top_k(similar, self.k)
      weights = jax.nn.softmax(near / self.temperature)
      return jnp.einsum(
        'nk,nkc->nc', weights, fitted['labels'][chosen], precision='highest'
      )

    votes = jax.lax.map(vote, queries, batch_size=_POSITIONS)
    return jnp.moveaxis(votes, 0, 1).reshape(n, rows, columns, -1)
