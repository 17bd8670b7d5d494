"""Classes of pixels from the patch tokens of a model (semantic segmentation).

With a frozen model, this is the linear evaluation of dense features of DINOv2
and DINOv3; otherwise, it is fine-tuning.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from vit_jax.data.augment.maps import IGNORED
from vit_jax.data.contract import Spec, require
from vit_jax.errors import UserError, check_range
from vit_jax.objectives import contract, patches
from vit_jax.objectives.linear_head import LinearHead, linear
from vit_jax.objectives.mixing import normalize

PyTree = Any


class Objective(LinearHead):
  """Batch norm and a linear layer on patch tokens; cross-entropy of pixels.

  It implements `objectives.contract.Objective`. Parameters: `model/…`,
  `norm/{scale,bias}` and `head/{kernel,bias}`. Extra state: the running `mean`
  and `variance` of each feature; weights for evaluation contain them as
  `statistics/…`. A batch contains `image` `[n, y, x, channels]`, and
  `segments`, integers `[n, y, x]`, in which `maps.IGNORED` marks pixels without
  a class. `predict` has the further result `classes`, logits
  `[n, rows, columns, classes]`. The loss is that of the logits interpolated to
  the size of `segments`.

  References: DINOv2, arXiv 2304.07193, section 7.4; DINOv3, arXiv 2508.10104,
  section D.1.
  """

  epsilon = 1e-5  # as in PyTorch

  def __init__(
    self,
    setting: contract.Setting,
    /,
    *,
    classes: int,
    last_blocks: int = 1,
    frozen: bool = True,
    dropout: float = 0.0,
    count_ignored: bool = False,
  ):
    """Checks and stores the config keys.

    Args:
      setting: setting of the run; `model` does not have a head.
      classes: number of classes of the pixels; that of `augment.classes`.
      last_blocks: number of last blocks whose patch tokens, each after the last
        LayerNorm, are concatenated.
      frozen: whether the model is not trained, and used without dropout and
        drop path. `optimizer.rules` should then freeze `model/.*`.
      dropout: probability with which a feature is 0 in all patches of an image.
      count_ignored: whether the sum of the losses is divided by the number of
        all pixels, as in the code of DINOv2 and DINOv3; by default, by that of
        the pixels that are not ignored.

    Raises:
      UserError: a value is outside its range.
    """
    check_range('objective.classes', classes, at_least=2)
    check_range('objective.last_blocks', last_blocks, at_least=1)
    check_range('objective.dropout', dropout, at_least=0, below=1)
    self.setting, self.classes, self._frozen = setting, classes, frozen
    self.trains_model = not frozen
    self._last_blocks, self._dropout = last_blocks, dropout
    self._count_ignored = count_ignored
    self.needs = ('patches', 'layers') if last_blocks > 1 else ('patches',)

  def check(self, spec: Spec) -> None:
    """Checks the masks, and that the model provides the features.

    Raises:
      UserError: batches have no masks, or masks of other classes; the model has
        a head, or does not have enough blocks.
    """
    require(spec, 'image', 'segments', who="the objective 'segment'")
    patches.check_headless(self.setting, 'segment')
    given = getattr(self.setting.transform, 'classes', self.classes)
    if given != self.classes:
      raise UserError(
        f'objective.classes is {self.classes}, but augment.classes is {given}: '
        'set both to the number of classes of the masks.'
      )
    available = self.setting.model.outputs
    depth = getattr(self.setting.model, 'depth', 1)
    if not {*self.needs} <= {*available} or self._last_blocks > depth:
      raise UserError(
        f'objective.last_blocks={self._last_blocks} needs {self.needs} of a '
        f'model with as many blocks, but config.model has {depth} and the '
        f'results {available}: lower it, or use another model.'
      )

  def init(self, key: Key[Array, ''], batch: Any) -> tuple[PyTree, PyTree]:
    """Returns initial parameters and running statistics."""
    params, extra = super().init(key, batch)
    ones = jnp.ones_like(extra['mean'])
    return params | {'norm': {'scale': ones, 'bias': 0 * ones}}, extra

  def loss(self, params: PyTree, inputs: contract.Inputs) -> contract.Loss:
    """Computes the loss of a batch, and the metric `pixel_accuracy`."""
    batch, model, key = inputs.batch, params['model'], inputs.key
    if self._frozen:
      # The backbone has no backward pass, so its activations are not kept.
      model, key = jax.lax.stop_gradient(model), None
    x = self.inputs(model, normalize(batch['image']), key)
    if self._dropout:
      shape = (len(x), 1, 1, x.shape[-1])
      key = jax.random.fold_in(inputs.key, 1)
      kept = jax.random.bernoulli(key, 1 - self._dropout, shape)
      x = x * kept / (1 - self._dropout)
    x, carry = self.standardized(x)
    logits = _logits(params, x)
    target = batch['segments'].astype(jnp.int32)
    logits = jax.image.resize(logits, (*target.shape, self.classes), 'linear')
    counted = target != IGNORED
    # Not `take_along_axis`, whose gradient is a scatter.
    is_target = jax.nn.one_hot(target, self.classes)
    losses = jax.nn.logsumexp(logits, axis=-1) - (logits * is_target).sum(-1)
    total = jnp.where(counted, losses, 0).sum()
    count = counted.sum(dtype=jnp.float32)
    correct = (counted & (logits.argmax(-1) == target)).sum(dtype=jnp.float32)
    metrics = {'pixel_accuracy': contract.Mean(correct, count)}
    divisor = jnp.float32(counted.size) if self._count_ignored else count
    return contract.Mean(total, divisor), (metrics, carry)

  @property
  def results(self) -> tuple[str, ...]:
    """Results of the model, and `classes`."""
    return (*super().results, 'classes')

  def predict(
    self, params: PyTree, batch: contract.Batch, want: tuple[str, ...] = ()
  ) -> dict[str, Array]:
    """Returns features and logits of the model, and the results in `want`."""
    if 'classes' not in want:
      return super().predict(params, batch, want)
    found = super().predict(params, batch, (*want, *self.needs))
    x = self.features(params['model'], found)
    x, _ = self.standardized(x, params['statistics'])
    found['classes'] = _logits(params, x)
    return {name: found[name] for name in ('features', 'logits', *want)}

  def features(
    self, params: PyTree, found: dict[str, Array]
  ) -> Float[Array, 'n rows columns d']:
    """Concatenates the patch tokens of the last blocks."""
    grid = found['patches']
    if self._last_blocks == 1:
      return grid
    n, rows, columns, width = grid.shape
    tokens = found['layers'][:, -self._last_blocks :, -rows * columns :]
    # As in DINOv2, the last LayerNorm is also applied to earlier blocks.
    model: Any = self.setting.model
    tokens = model.apply({'params': params}, tokens, method='last_norm')
    tokens = tokens.reshape(n, -1, rows, columns, width)
    return jnp.moveaxis(tokens, 1, 3).reshape(n, rows, columns, -1)


def _logits(
  params: PyTree, x: Float[Array, 'n rows columns d']
) -> Float[Array, 'n rows columns k']:
  """Applies scale and shift of the batch norm, and the linear layer."""
  norm = params['norm']
  return linear(params['head'], x * norm['scale'] + norm['bias'])
