"""Zero-shot classification: the class whose texts are nearest to an image."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.arrays import sharding
from vit_jax.data.contract import require
from vit_jax.data.tokens import canonical
from vit_jax.errors import UserError
from vit_jax.evaluators import classification, contract
from vit_jax.evaluators.features import OnSplit, OtherSource
from vit_jax.objectives import contrastive

PyTree = Any


@dataclasses.dataclass(eq=False, kw_only=True)
class Evaluator(OnSplit):
  """Accuracy of the class whose mean text embedding is nearest to an image.

  The texts of a class are `prompts` with its name. Their embeddings of length
  1 are averaged, and the mean is scaled to length 1, as in CLIP and big_vision.

  Attributes:
    source: config section of other data; None for the data of the run.
    prompts: texts of a class, with {} for its name.
    names: names of the classes in the order of the labels; () for those of the
      data set.
    canonicalize: whether texts are used in lower case and without punctuation,
      as in the published results of SigLIP.

  Raises:
    UserError: the weights have no text tower or the preprocessing no tokenizer,
      the data has another number of classes than names, or a prompt has no {}.
  """

  higher_is_better = ('accuracy',)
  own_classes = True
  source: OtherSource = None
  prompts: tuple[str, ...] = ('a photo of a {}',)
  names: tuple[str, ...] = ()
  canonicalize: bool = True

  def __post_init__(self):
    require(self.setting.transform.spec, 'image', 'label', who='zero_shot')
    contract.check_results(self.setting, 'image', 'text', who='zero_shot')
    super().__post_init__()
    names = self.names or self._source.class_names
    count = self._source.num_classes
    has_prompts = self.prompts and all('{}' in p for p in self.prompts)
    if len(names) != count or not has_prompts:
      raise UserError(
        f'zero_shot has {len(names)} names and the prompts {self.prompts} for '
        f'{count} classes: give a name for each class, and {{}} in each prompt.'
      )
    texts = [p.replace('{}', name) for name in names for p in self.prompts]
    texts = [canonical(text) for text in texts] if self.canonicalize else texts
    objective, transform = self.setting.objective, self.setting.transform
    tokens = contrastive.tokens_of(objective, transform, texts)
    size = min(self.setting.batch_size, len(texts))
    shape = -(-len(texts) // size), size, tokens.shape[-1]
    # [texts, length] → [batches, size, length], filled up by repeated texts
    self._tokens: Any = {'tokens': np.resize(tokens, shape)}
    self._embed = self.setting.compiled(self._embed_classes)
    self._count = self.setting.compiled(self._count_batch)

  def _embed_classes(self, weights: PyTree, batch: contract.Batch) -> PyTree:
    """Returns the mean embedding of each class, float32 `[k, d]`."""

    def embed(tokens: jax.Array) -> jax.Array:
      part = {'tokens': sharding.constrain(tokens, sharding.BATCH, None)}
      return self.setting.predict(weights, part, ('text',))['text']

    texts = jax.lax.map(embed, batch['tokens'])  # [batches, size, d]
    shape = self._source.num_classes, len(self.prompts), texts.shape[-1]
    mean = jnp.resize(texts, shape).mean(1)  # without the repeated texts
    return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)

  def _count_batch(self, state: PyTree, batch: contract.Batch) -> PyTree:
    """Counts correct images; `state` is weights and embeddings of classes."""
    weights, texts = state
    images = self.setting.predict(weights, batch, ('image',))['image']
    return classification.correct(images @ texts.T, batch)

  def run(self, weights: PyTree) -> dict[str, float]:
    """Returns accuracy, in [0, 1], and count, the number of images.

    Raises:
      UserError: see `contract.Setting.sweep`, or no example could be used.
    """
    state = weights, self._embed(weights, self._tokens)
    swept = self.setting.sweep(state, self._source, self._count)
    return contract.averages(swept, self._source)
