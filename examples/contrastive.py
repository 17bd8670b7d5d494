"""Images and texts: an objective with a text tower, as a plug-in.

The loss is that of SigLIP (arXiv 2303.15343, Algorithm 1): each pair of an
image and a text of the batch is classified as belonging together or not. The
words of the captions are looked up in a list; a real training needs a
tokenizer.

Try it (about a minute on two CPU cores; zero-shot accuracy above .3, where
chance is .17):

  python -m vit_jax.train --config=examples/contrastive.py
"""

import dataclasses
import math
import re
import types
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from vit_jax.config import complete, schema
from vit_jax.config.schema import Nested, Section
from vit_jax.data.augment import transforms
from vit_jax.data.contract import require
from vit_jax.evaluators import contract
from vit_jax.models import vit
from vit_jax.objectives.contract import AroundModel
from vit_jax.objectives.mixing import normalize

WORDS = ('a', 'red', 'green', 'blue', 'circle', 'square')
_END = 1  # the end of a text, and padding, as in SigLIP; 0 is an unknown word


class Words:
  """Adds the words of a caption to a transform, as numbers."""

  @property
  def spec(self):
    base: Any = super()
    return base.spec | {'tokens': ((self.length,), np.dtype(np.int32))}

  def arrays(self, example, view):
    base: Any = super()
    tokens = self.tokens(example['caption'])
    return base.arrays(example, view) | {'tokens': tokens}

  def tokens(self, text):
    """Returns the numbers of the words of a text, int32 `[length]`."""
    words = re.findall(r'\w+', text.lower())[: self.length - 1]
    number = {word: index for index, word in enumerate(self.words, 2)}
    row = np.full(self.length, _END, np.int32)
    row[: len(words)] = [number.get(word, 0) for word in words]
    return row


@dataclasses.dataclass(frozen=True)
class TrainTransform(Words, transforms.TrainTransform):
  """`transforms.TrainTransform` with `tokens`."""

  _: dataclasses.KW_ONLY
  words: tuple[str, ...]
  length: int = 8


@dataclasses.dataclass(frozen=True)
class EvalTransform(Words, transforms.EvalTransform):
  """`transforms.EvalTransform` with `tokens`."""

  _: dataclasses.KW_ONLY
  words: tuple[str, ...]
  length: int = 8


class Text(nn.Module):
  """A Vision Transformer's encoder of words; the last token is the result."""

  outputs: int
  vocabulary: int
  config: vit.Config

  @nn.compact
  def __call__(self, tokens):
    width, length = self.config.width, tokens.shape[1]
    normal = nn.initializers.normal(1 / math.sqrt(width))
    table = self.param('embedding', normal, (self.vocabulary, width))
    x = table[tokens] + self.param('positions', normal, (length, width))
    x, _ = vit.Encoder(self.config, name='encoder')(x, None)
    return nn.Dense(self.outputs, name='project')(x[:, -1])


def tower(
  outputs: int,
  /,
  *,
  vocabulary: int,
  width: int = 64,
  depth: int = 2,
  mlp_dim: int = 128,
  num_heads: int = 2,
) -> Text:
  """Returns the module that the section `objective.text` describes."""
  config = vit.Config(
    patch_size=1,
    position='none',
    width=width,
    depth=depth,
    mlp_dim=mlp_dim,
    num_heads=num_heads,
    dtype='float32',
  )
  return Text(outputs, vocabulary, config)


_TEXT = Nested('examples.contrastive:tower')


class Objective(AroundModel):
  """Sigmoid loss over all pairs of an image and a text of the batch.

  With micro-batches, the pairs are those within a micro-batch. Parameters:
  `model/…`, `text/…`, `temperature` (its logarithm) and `bias`. `predict` has
  the further results `image` and `text`, embeddings of length 1.
  """

  def __init__(
    self,
    setting,
    /,
    *,
    text: Annotated[Section, _TEXT] = types.MappingProxyType({}),
    temperature: float = 10.0,
    bias: float = -10.0,
  ):
    """Returns the objective.

    Args:
      setting: setting of the run.
      text: keys of `tower`.
      temperature: initial factor of the similarities.
      bias: initial value that is added to them.
    """
    self.setting, self._text = setting, text
    self._start = math.log(temperature), bias

  def check(self, spec):
    require(spec, 'image', 'tokens', who='the objective')

  def init(self, key, batch):
    key, text_key = jax.random.split(key)
    model = self.setting.init_model(key)
    images = self.setting.zero_images()
    width = jax.eval_shape(self._features, model, images, None).shape[-1]
    tokens = jnp.zeros((1, batch['tokens'].shape[1]), jnp.int32)
    text = self._tower(width).init(text_key, tokens)['params']
    temperature, bias = map(jnp.float32, self._start)
    params = {'model': model, 'text': text}
    return params | {'temperature': temperature, 'bias': bias}, {}

  def _tower(self, width):
    return schema.construct(_TEXT.constructor(''), self._text, width)

  def _features(self, params, images, key):
    return self.setting.model.apply(
      {'params': params}, images, key, method='predict'
    )['features']

  def _texts(self, params, tokens):
    width = params['text']['project']['bias'].shape[0]
    found = self._tower(width).apply({'params': params['text']}, tokens)
    return _unit(found)

  def loss(self, params, inputs):
    pixels = normalize(inputs.batch['image'])
    images = _unit(self._features(params['model'], pixels, inputs.key))
    logits = images @ self._texts(params, inputs.batch['tokens']).T  # [n, n]
    logits = logits * jnp.exp(params['temperature']) + params['bias']
    signs = 2 * jnp.eye(len(logits)) - 1
    loss = -jax.nn.log_sigmoid(signs * logits).sum() / len(logits)
    return loss, ({'temperature': jnp.exp(params['temperature'])}, {})

  @property
  def results(self):
    return (*super().results, 'image', 'text')

  def predict(self, params, batch, want=()):
    others = tuple(name for name in want if name not in ('image', 'text'))
    found = {}
    if 'image' in batch:
      found = super().predict(params, batch, others)
      found['image'] = _unit(found['features'])
    if 'text' in want:
      found['text'] = self._texts(params, batch['tokens'])
    return found


def _unit(x):
  return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


class Evaluator(contract.Evaluator):
  """Zero-shot accuracy: the text of a class that is nearest to an image."""

  higher_is_better = ('accuracy',)
  own_classes = True

  def __init__(self, setting, /, *, split: str, prompt: str = 'a {}'):
    """Opens the split.

    Args:
      setting: setting of the run.
      split: split of the run's source, whose classes have names.
      prompt: text of a class, with {} for its name.
    """
    require(setting.transform.spec, 'image', 'label', who='zero-shot')
    contract.check_results(setting, 'image', 'text', who='zero-shot')
    self._setting, self._source = setting, setting.open_source(split)
    texts = [prompt.format(name) for name in self._source.class_names]
    self._prompts = np.stack([setting.transform.tokens(t) for t in texts])
    self._count = setting.compiled(self._count_correct)

  def _count_correct(self, weights, batch):
    prompts = {'tokens': jnp.asarray(self._prompts)}
    texts = self._setting.predict(weights, prompts, ('text',))['text']
    images = self._setting.predict(weights, batch, ('image',))['image']
    correct = ((images @ texts.T).argmax(-1) == batch['label']) & batch['mask']
    return {'correct': correct.sum(), 'count': batch['mask'].sum()}

  def run(self, weights):
    swept = self._setting.sweep(weights, self._source, self._count)
    sums = contract.total(swept)
    return {'accuracy': sums['correct'] / sums['count']}


def get_config() -> ConfigDict:
  """Returns a config of 160 steps on captions of coloured shapes."""
  config = ConfigDict()
  config.total, config.batch_size = '160 steps', 32
  config.image_size, config.num_classes = (64, 64), 0
  config.source = dict(name='examples.shapes')
  config.train = dict(split='train', num_examples=512)
  words = dict(name='examples.contrastive', words=WORDS)
  config.augment = dict(min_area=0.8, **words)
  config.preprocess = words
  config.model = dict(
    name='vit',
    patch_size=8,
    width=64,
    depth=2,
    mlp_dim=128,
    num_heads=2,
    pool='gap',
    dtype='float32',
  )
  text = dict(vocabulary=len(WORDS) + 2)
  config.objective = dict(name='examples.contrastive', text=text)
  config.optimizer = dict(name='adam', weight_decay=0.03, clip_norm=1.0)
  config.schedule = dict(base_lr=2e-3, decay='cosine', warmup='10 steps')
  zero = dict(name='examples.contrastive', split='test', every='80 steps')
  config.evals = dict(zero=zero)
  config.checkpoint = dict(every='80 steps', best='zero/accuracy')
  config.log = dict(every='10 steps')
  return complete(config)
