"""Images and texts: a loss over all pairs of a batch (SigLIP, CLIP, LiT)."""

import math
import types
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from vit_jax.arrays import sharding
from vit_jax.config import schema
from vit_jax.config.schema import Nested, Section
from vit_jax.data.contract import Spec, require
from vit_jax.errors import UserError, check_choice, check_range
from vit_jax.models import text as text_lib
from vit_jax.models.contract import Model, Size
from vit_jax.models.dino_head import unit
from vit_jax.models.vit import ViT
from vit_jax.objectives.contract import AroundModel, Inputs, Loss, Setting
from vit_jax.objectives.mixing import normalize
from vit_jax.objectives.patches import check_headless

PyTree = Any
Embeddings = Float[Array, 'n d']
Pairs = tuple[Embeddings, Embeddings]  # of images and of their texts
LOSSES = ('sigmoid', 'softmax')
# Images whose similarities to the texts of a device exist at once.
CHUNK = 2_048
_TEXT = Nested('vit_jax.models.text:Config')


class Objective(AroundModel):
  """Finds the text of each image, and the image of each text, in the batch.

  It implements `objectives.contract.Objective`. Parameters: `model/…`, `text/…`
  (see `models.text`), `temperature`, the logarithm of the factor of
  similarities, `bias` for the sigmoid loss, and `projection/kernel` with
  `outputs`. A batch contains `image` `[n, y, x, channels]`, and `tokens`, int32
  `[n, length]`. The model has no head.

  `predict` has the further results `image` and `text`, embeddings of length 1;
  an evaluation batch may have several texts for each image, `[n, captions,
  length]`, or only tokens. If it has `text`, embeddings `[k, d]`, the logits
  are those of these texts for each image, `[n, k]`.

  References: SigLIP, arXiv 2303.15343, Algorithm 1 (sigmoid); CLIP, arXiv
  2103.00020, Figure 3 (softmax); LiT, arXiv 2111.07991 (`locked`).
  """

  joint = True

  def __init__(
    self,
    setting: Setting,
    /,
    *,
    loss: str = 'sigmoid',
    locked: bool = False,
    outputs: int | None = None,
    temperature: float = 10.0,
    bias: float = -10.0,
    text: Annotated[Section, _TEXT] = types.MappingProxyType({}),
  ):
    """Checks and stores the config keys.

    Args:
      setting: setting of the run.
      loss: 'sigmoid' classifies each pair as belonging together or not, with a
        sum over all pairs that is divided by the number of images; 'softmax' is
        the mean of the cross-entropies of images and of texts.
      locked: whether the image tower does not change and is used without
        dropout. `optimizer.rules` must freeze it: `('model/.*',
        dict(frozen=True))`.
      outputs: channels of the embeddings, to which a matrix projects the
        features of images; None for the features themselves.
      temperature: initial factor of the similarities.
      bias: initial value that the sigmoid loss adds to them.
      text: config section of the text tower, see `models.text`.

    Raises:
      UserError: a value is not allowed.
    """
    check_choice('objective.loss', loss, LOSSES)
    check_range('objective.temperature', temperature, above=0)
    check_range('objective.outputs', outputs, at_least=1)
    self.setting, self.cross_entropy, self._outputs = setting, loss, outputs
    self.locked = 'model/.*' if locked else ''
    self._start = {'temperature': math.log(temperature)}
    if loss == 'sigmoid':
      self._start['bias'] = bias
    self._text = schema.construct(text_lib.Config, text)
    # Kernels are used if the model uses them.
    is_xla = getattr(setting.model, 'attention', None) == 'xla'
    self._attention = 'xla' if is_xla else 'auto'

  @property
  def results(self) -> tuple[str, ...]:
    """Results of the model, and `image` and `text`."""
    return (*super().results, 'image', 'text')

  def check(self, spec: Spec) -> None:
    """Checks images and tokens.

    Raises:
      UserError: they are missing, have another length, or the transform has
        more different tokens than the text tower; or the model has a head.
    """
    require(spec, 'image', 'tokens', who="the objective 'contrastive'")
    check_headless(self.setting, 'contrastive')
    tower, (shape, _) = self._text, spec['tokens']
    # A transform without a tokenizer (`rules`) may have any tokens.
    rules = getattr(self.setting.transform, 'rules', tower)
    if shape != (tower.length,) or rules.vocabulary > tower.vocabulary:
      raise UserError(
        f'augment makes {shape} tokens of {rules.vocabulary:,} kinds, and the '
        f'text tower has objective.text.length={tower.length} and vocabulary='
        f'{tower.vocabulary:,}: set augment.length and objective.text.length '
        'to the same number, and objective.text.vocabulary to that of the '
        'tokenizer.'
      )

  def other_passes(self, spec: Spec) -> tuple[tuple[Model, Size], ...]:
    """Returns a Vision Transformer with the layers of the text tower."""
    # There are as many tokens as an image [length, 1] has patches.
    model = ViT(0, self._text.layers(self._attention))
    return ((model, (self._text.length, 1)),)

  def init(self, key: Key[Array, ''], batch: Any) -> tuple[PyTree, PyTree]:
    """Returns initial parameters, and no extra state."""
    key, text_key, projection_key = jax.random.split(key, 3)
    model = self.setting.init_model(key)
    images = self.setting.zero_images()
    found = jax.eval_shape(self.setting.predict, model, images)
    width = found['features'].shape[-1]
    params = {'model': model, **jax.tree.map(jnp.float32, self._start)}
    if self._outputs:
      normal = jax.random.normal(projection_key, (width, self._outputs))
      params['projection'] = {'kernel': width**-0.5 * normal}
    tower = self._tower(self._outputs or width)
    tokens = jnp.zeros((1, self._text.length), jnp.int32)
    return params | {'text': tower.init(text_key, tokens)['params']}, {}

  def _tower(self, outputs: int) -> text_lib.Text:
    return text_lib.Text(self._text, outputs, self._attention)

  def _image(self, params: PyTree, features: Any) -> Embeddings:
    """Returns embeddings of images, given the features of the model."""
    if 'projection' in params:
      kernel = params['projection']['kernel']
      features = jnp.matmul(features, kernel, precision='highest')
    return unit(features, axis=-1)

  def _texts(self, params: PyTree, tokens: Int[Array, '... t']) -> Any:
    """Returns embeddings of texts, `[…, d]`."""
    tower = self._tower(params['text']['head']['kernel'].shape[-1])
    flat = tokens.reshape(-1, tokens.shape[-1])
    texts: Any = tower.apply({'params': params['text']}, flat)
    return unit(texts, axis=-1).reshape(*tokens.shape[:-1], -1)

  def embed(self, params: PyTree, inputs: Inputs) -> Pairs:
    """Computes embeddings of the images and of their texts."""
    key = None if self.locked else inputs.key
    images = normalize(inputs.batch['image'])
    found = self.setting.predict(params['model'], images, key)
    images = self._image(params, found['features'])
    return images, self._texts(params, inputs.batch['tokens'])

  def joint_loss(self, params: PyTree, embedded: Pairs) -> Loss:
    """Computes the loss over all pairs of the batch.

    Metrics: `temperature` and `bias`; and `accuracy`, the fraction of images
    that are more similar to their own text than to any other of the batch.
    """
    images, texts = embedded
    losses, is_nearest = self._row_losses(params, images, texts)
    if self.cross_entropy == 'softmax':
      of_texts, _ = self._row_losses(params, texts, images)
      losses = (losses + of_texts) / 2
    metrics = {key: params[key] for key in self._start}
    metrics['temperature'] = jnp.exp(metrics['temperature'])
    metrics['accuracy'] = is_nearest.mean()
    return losses.mean(), (metrics, {})

  def _row_losses(
    self, params: PyTree, rows: Embeddings, columns: Embeddings
  ) -> tuple[Float[Array, ' n'], Bool[Array, ' n']]:
    """Returns the loss of each row, and whether its own logit is the largest.

    Each device has all rows and its columns, but only the logits of `CHUNK`
    rows at once, which the backward pass computes again.
    """
    rows = sharding.constrain(rows, None, None)
    columns = sharding.constrain(columns, sharding.BATCH, None)
    numbers = jnp.arange(len(rows))

    @jax.checkpoint
    def row_loss(numbered: tuple[Array, Array]) -> tuple[Array, Array]:
      row, number = numbered
      logits, is_own = self._logits(params, row, columns), numbers == number
      own = jnp.where(is_own, logits, 0).sum()
      is_nearest = own > jnp.where(is_own, -jnp.inf, logits).max()
      if self.cross_entropy == 'sigmoid':
        logits = jnp.where(is_own, -logits, logits)
        return jax.nn.softplus(logits).sum(), is_nearest
      return jax.nn.logsumexp(logits) - own, is_nearest

    return jax.lax.map(row_loss, (rows, numbers), batch_size=CHUNK)

  def _logits(self, params: PyTree, images: Array, texts: Array) -> Array:
    """Returns the logits of each image, or of a single one, for all texts."""
    products = jnp.matmul(images, texts.T, precision='highest')
    return products * jnp.exp(params['temperature']) + params.get('bias', 0)

  def predict(
    self, params: PyTree, batch: Any, want: tuple[str, ...] = ()
  ) -> dict[str, Array]:
    """Computes features, and embeddings of images and texts if wanted."""
    results = {}
    if 'image' in batch:
      results = super().predict(params, batch, want)
      results['image'] = self._image(params, results['features'])
    if 'text' in batch:
      results['logits'] = self._logits(params, results['image'], batch['text'])
    if 'text' in want:
      results['text'] = self._texts(params, batch['tokens'])
    return results


def tokens_of(objective: Any, transform: Any, texts: Sequence[str]) -> Any:
  """Returns the tokens of texts, int32 `[k, length]`.

  Raises:
    UserError: the objective has no text tower, or the transform no tokenizer.
  """
  if not ('text' in objective.results and hasattr(transform, 'tokens')):
    raise UserError(
      'these weights have no text tower, or preprocess has no tokenizer: use a '
      "run with the objective 'contrastive', or CLIP's or SigLIP's weights, "
      "with preprocess.name='captions'."
    )
  return np.stack([transform.tokens(text) for text in texts])
