"""Zero-shot classification: the class whose texts are nearest to an image."""

import dataclasses
from typing import Any

import jax
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
    names, count = (
      self.names or self._source.class_names,
      self._source.num_classes,
    )
    if len(names) != count or not all('{}' in p for p in self.prompts):
      raise UserError(
        f'zero_shot has {len(names)} names and the prompts {self.prompts} for '
        f'{count} classes: give a name for each class, and {{}} in each prompt.'
      )
    texts = [prompt.format(name) for name in names for prompt in self.prompts]
    texts = [canonical(text) for text in texts] if self.canonicalize else texts
    objective, transform = self.setting.objective, self.setting.transform
    self._tokens = contrastive.tokens_of(objective, transform, texts)
    self._embed: Any = self.setting.compiled(self._embed_texts)
    self._count = self.setting.compiled(self._count_batch)

  def _embed_texts(self, weights: PyTree, batch: contract.Batch) -> PyTree:
    tokens = sharding.constrain(batch['tokens'], sharding.BATCH, None)
    return self.setting.predict(weights, {'tokens': tokens}, ('text',))['text']

  def _texts(self, weights: PyTree) -> np.ndarray:
    """Returns the mean embedding of each class, float32 `[k, d]`."""
    count = len(self._tokens)
    size = min(self.setting.batch_size, count)
    tokens = np.pad(self._tokens, ((0, -count % size), (0, 0)), mode='edge')
    parts = [
      jax.device_get(self._embed(weights, {'tokens': part}))
      for part in np.split(tokens, len(tokens) // size)
    ]
    texts = np.concatenate(parts)[:count]
    mean = texts.reshape(-1, len(self.prompts), texts.shape[-1]).mean(1)
    return mean / np.linalg.norm(mean, axis=-1, keepdims=True)

  def _count_batch(self, state: PyTree, batch: contract.Batch) -> PyTree:
    weights, texts = state
    images = self.setting.predict(weights, batch, ('image',))['image']
    return classification.correct(images @ texts.T, batch)

  def run(self, weights: PyTree) -> dict[str, float]:
    """Returns accuracy, in [0, 1], and count, the number of images.

    Raises:
      UserError: see `contract.Setting.sweep`, or no example could be used.
    """
    state = weights, self._texts(weights)
    swept = self.setting.sweep(state, self._source, self._count)
    return contract.averages(swept, self._source)
