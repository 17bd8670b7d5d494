"""Linear probing: training of a linear classifier on a frozen backbone.

Unlike the evaluator `linear_probe`, which computes the features once, this
objective uses new random crops in every epoch, as published linear probes do.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.data.contract import Spec, require
from vit_jax.errors import UserError, check_range
from vit_jax.objectives import contract, patches
from vit_jax.objectives.linear_head import LinearHead, linear
from vit_jax.objectives.losses import softmax_cross_entropy
from vit_jax.objectives.mixing import normalize

PyTree = Any


class Objective(LinearHead):
  """Softmax cross-entropy of a linear layer on frozen features.

  It implements `objectives.contract.Objective`. Parameters: `model/…`, which
  have no gradient and should be frozen by `optimizer.rules`, and
  `head/{kernel,bias}`. Extra state: with `batch_norm`, the running `mean` and
  `variance` of each feature; weights for evaluation contain them as
  `statistics/…`. A batch contains `image` `[n, y, x, channels]`, and `label`,
  int32 `[n]`.

  The model is used without dropout and drop path. The config's `num_classes` is
  0, because the model has no head: `convert` writes the backbone only, and
  fine-tuning starts from it. All other commands use the whole classifier.

  References: DINO, arXiv 2104.14294, appendix F.2 and eval_linear.py; MAE,
  arXiv 2111.06377, appendix A.1 and main_linprobe.py.
  """

  classes_key = 'num_classes'
  epsilon = 1e-6  # as in MAE's code
  trains_model = False

  def __init__(
    self,
    setting: contract.Setting,
    /,
    *,
    num_classes: int,
    last_blocks: int = 1,
    patch_mean: bool = False,
    batch_norm: bool = False,
  ):
    """Checks and stores the config keys.

    Args:
      setting: setting of the run; `model` does not have a head.
      num_classes: number of outputs of the linear layer.
      last_blocks: number of last blocks whose class tokens, after the last
        LayerNorm, are the features (4 for DINO's S models). With 1, and without
        `patch_mean`, the features are those of the model.
      patch_mean: whether the mean of the last block's patch tokens is appended
        to the class tokens (DINO's B models).
      batch_norm: whether features are normalized by batch normalization without
        scale and shift (MAE). In training, the statistics are computed over a
        micro-batch on all devices; PyTorch computes them on each device.

    Raises:
      UserError: a value is outside its range.
    """
    check_range('objective.num_classes', num_classes, at_least=1)
    check_range('objective.last_blocks', last_blocks, at_least=1)
    self.setting, self.classes = setting, num_classes
    self.last_blocks, self.patch_mean = last_blocks, patch_mean
    self.batch_norm = batch_norm
    used = {
      'tokens': last_blocks > 1 or patch_mean,
      'layers': last_blocks > 1,
      'patches': patch_mean,
    }
    self.needs = tuple(name for name, is_used in used.items() if is_used)

  @property
  def num_classes(self) -> int:
    """Number of outputs of the linear layer; the model has no head."""
    return self.classes

  def check(self, spec: Spec) -> None:
    """Checks the labels, and that the model provides the features.

    Raises:
      UserError: batches have no integer labels, the model has a head, or it
        lacks the class token or blocks that `last_blocks` and `patch_mean`
        need.
    """
    require(spec, 'image', 'label', who="the objective 'linear_probe'")
    shape, _ = spec['label']
    if shape:
      raise UserError(
        f'augment makes labels of the shape {shape}; linear_probe expects one '
        'class per image: set --config.augment.name=transforms.'
      )
    patches.check_headless(self.setting, 'linear_probe')
    if self.last_blocks == 1 and not self.patch_mean:
      return  # every model has these features, see `features`
    model: Any = self.setting.model
    has_token = getattr(model, 'pool', None) == 'token' and not model.fc_norm
    if not has_token or self.last_blocks > model.depth:
      raise UserError(
        f'last_blocks={self.last_blocks} and patch_mean={self.patch_mean} need '
        "a ViT of at least so many blocks with model.pool='token' and fc_norm="
        'False: use such a model, or set last_blocks=1 and patch_mean=False.'
      )

  def loss(self, params: PyTree, inputs: contract.Inputs) -> contract.Loss:
    """Computes the mean loss of a batch, and the metric `accuracy`."""
    batch = inputs.batch
    # The backbone has no backward pass, so its activations are not kept.
    model = jax.lax.stop_gradient(params['model'])
    x = self.inputs(model, normalize(batch['image']))
    carry = {}
    if self.batch_norm:
      x, carry = self.standardized(x)
    logits = linear(params['head'], x)
    loss = softmax_cross_entropy(logits, batch['label']).mean()
    accuracy = (logits.argmax(axis=-1) == batch['label']).mean()
    return loss, ({'accuracy': accuracy}, carry)

  def predict(
    self, params: PyTree, batch: contract.Batch, want: tuple[str, ...] = ()
  ) -> dict[str, Array]:
    """Returns features (before the normalization) and logits, float32."""
    found = super().predict(params, batch, (*want, *self.needs))
    x = features = self.features(params['model'], found)
    if self.batch_norm:
      x, _ = self.standardized(x, params['statistics'])
    results = {name: found[name] for name in want} | {'features': features}
    return results | {'logits': linear(params['head'], x)}

  def features(
    self, params: PyTree, found: dict[str, Array]
  ) -> Float[Array, 'n f']:
    """Computes the input of the linear layer, before its normalization."""
    model: Any = self.setting.model
    if self.last_blocks == 1 and not self.patch_mean:
      return found['features']
    tokens = found['tokens']  # [n, t, d], after the last LayerNorm
    parts = [tokens[:, 0]]
    if self.last_blocks > 1:
      # As in DINO, the last LayerNorm is also applied to earlier blocks.
      layers = found['layers'][:, -self.last_blocks : -1, 0]  # [n, k - 1, d]
      normed = model.apply({'params': params}, layers, method='last_norm')
      parts = [normed.reshape(layers.shape[0], -1), *parts]
    if self.patch_mean:
      parts.append(found['patches'].mean(axis=(1, 2)))
    return jnp.concatenate(parts, axis=-1)
