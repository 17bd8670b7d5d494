"""Zero-shot classification: the class whose texts are nearest to an image."""

from typing import Any

import jax
import numpy as np

from vit_jax.arrays import sharding
from vit_jax.data.contract import require
from vit_jax.data.tokens import canonical
from vit_jax.errors import UserError
from vit_jax.evaluators import classification, contract
from vit_jax.evaluators.features import OtherSource, open_split

PyTree = Any


class Evaluator(contract.Evaluator):
  """Accuracy of the class whose mean text embedding is nearest to an image.

  The texts of a class are `prompts` with its name. Their embeddings of length
  1 are averaged, and the mean is scaled to length 1, as in CLIP and big_vision.
  """

  higher_is_better = ('accuracy',)
  own_classes = True

  def __init__(
    self,
    setting: contract.Setting,
    /,
    *,
    split: str,
    source: OtherSource = None,
    prompts: tuple[str, ...] = ('a photo of a {}',),
    names: tuple[str, ...] = (),
    canonicalize: bool = True,
  ):
    """Opens the split.

    Args:
      setting: setting of the run, whose preprocessing has a tokenizer.
      split: split to evaluate.
      source: config section of other data; None for the data of the run.
      prompts: texts of a class, with {} for its name.
      names: names of the classes in the order of the labels; () for those of
        the data set.
      canonicalize: whether texts are used in lower case and without
        punctuation, as in the published results of SigLIP.

    Raises:
      UserError: the preprocessing has no tokenizer, the data has another number
        of classes than names, or a prompt has no {}.
    """
    require(setting.transform.spec, 'image', 'label', who='zero_shot')
    contract.check_results(setting, 'image', 'text', who='zero_shot')
    self._setting = setting
    self._source = open_split(setting, split, source)
    names = names or tuple(self._source.class_names)
    tokens = getattr(setting.transform, 'tokens', None)
    fits = len(names) == self._source.num_classes
    if tokens is None or not fits or not all('{}' in p for p in prompts):
      raise UserError(
        f'zero_shot has {len(names)} names and the prompts {prompts} for '
        f'{self._source.num_classes} classes, and the preprocessing '
        f'{type(setting.transform).__module__}: give a name for each class, '
        "{} in each prompt, and preprocess.name='captions' with a tokenizer."
      )
    texts = [prompt.format(name) for name in names for prompt in prompts]
    texts = [canonical(text) for text in texts] if canonicalize else texts
    self._rows, self._num_prompts = texts, len(prompts)
    self._embed: Any = setting.compiled(self._embed_texts)
    self._count = setting.compiled(self._count_batch)

  def _embed_texts(self, weights: PyTree, batch: contract.Batch) -> PyTree:
    tokens = sharding.constrain(batch['tokens'], sharding.BATCH, None)
    return self._setting.predict(weights, {'tokens': tokens}, ('text',))['text']

  def _texts(self, weights: PyTree) -> np.ndarray:
    """Returns the mean embedding of each class, float32 `[k, d]`."""
    transform: Any = self._setting.transform
    tokens: Any = np.stack([transform.tokens(text) for text in self._rows])
    count = len(tokens)
    size = min(self._setting.batch_size, count)
    tokens = np.pad(tokens, ((0, -count % size), (0, 0)), mode='edge')
    parts = [
      jax.device_get(self._embed(weights, {'tokens': part}))
      for part in np.split(tokens, len(tokens) // size)
    ]
    texts = np.concatenate(parts)[:count]
    mean = texts.reshape(-1, self._num_prompts, texts.shape[-1]).mean(1)
    return mean / np.linalg.norm(mean, axis=-1, keepdims=True)

  def _count_batch(self, state: PyTree, batch: contract.Batch) -> PyTree:
    weights, texts = state
    images = self._setting.predict(weights, batch, ('image',))['image']
    return classification.correct(images @ texts.T, batch)

  def run(self, weights: PyTree) -> dict[str, float]:
    """Returns accuracy, in [0, 1], and count, the number of images.

    Raises:
      UserError: see `contract.Setting.sweep`, or no example could be used.
    """
    state = weights, self._texts(weights)
    swept = self._setting.sweep(state, self._source, self._count)
    return contract.averages(swept, self._source)
