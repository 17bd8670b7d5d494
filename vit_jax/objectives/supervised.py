"""Supervised classification with cross-entropy."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.data.contract import Spec, require
from vit_jax.errors import UserError, check_choice, check_range
from vit_jax.objectives import contract
from vit_jax.objectives.contract import Inputs, Loss, Setting
from vit_jax.objectives.losses import LOSSES, Labels, softmax_cross_entropy

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Objective(contract.Objective):
  """Classification of images; an `objectives.contract.Objective`.

  A batch contains `image` `[n, y, x, channels]`, uint8 or uint16, and `label`,
  int32 `[n]`, or soft labels, float32 `[n, num_classes]`; or, for 'sigmoid',
  `labels` with several classes per image, zeros and ones, float32 `[n,
  num_classes]`.

  Attributes:
    setting: setting of the run.
    cross_entropy: 'softmax' or 'sigmoid', see `losses`.
    label_smoothing: α of the loss, see `losses`; in [0, 1), or in [0, .5) for
      'sigmoid', because the target of the label must be above those of other
      classes.
    multi_hot: whether all classes of a mixed example have the target 1,
      independent of the mixing weights; for 'sigmoid' only (DeiT-III).
    class_weights: factor of each class in the loss, one number ≥ 0 per class,
      or None for factors of 1; for 'softmax' only. An example of class c has
      the loss w_c · L, and the loss of a batch is the sum over its examples,
      divided by their number (torch's `CrossEntropyLoss(weight=…)` divides by
      the sum of their weights, which would depend on how a batch is divided
      over micro-batches). Soft labels have the sum of w_c · t_c · L_c.
  """

  setting: Setting
  _: dataclasses.KW_ONLY
  cross_entropy: str = 'softmax'
  label_smoothing: float = 0.0
  multi_hot: bool = False
  class_weights: tuple[float, ...] | None = None

  def __post_init__(self):
    check_choice('objective.cross_entropy', self.cross_entropy, LOSSES)
    for key, kind in (('multi_hot', 'sigmoid'), ('class_weights', 'softmax')):
      if getattr(self, key) and self.cross_entropy != kind:
        raise UserError(
          f'objective.{key} is set with objective.cross_entropy='
          f'{self.cross_entropy!r}: remove it, or set the latter to {kind!r}.'
        )
    limit = 0.5 if self.cross_entropy == 'sigmoid' else 1
    check_range(
      'objective.label_smoothing', self.label_smoothing, at_least=0, below=limit
    )
    for weight in self.class_weights or ():
      check_range('objective.class_weights', weight, at_least=0)

  def check(self, spec: Spec) -> None:
    """Checks that batches have labels, and that the model has a head.

    Raises:
      UserError: labels are missing or have another shape, or the model has no
        head.
    """
    is_sigmoid = self.cross_entropy == 'sigmoid'
    key = 'labels' if is_sigmoid and 'labels' in spec else 'label'
    require(spec, 'image', key, who=f"'supervised' ({self.cross_entropy})")
    shape, _ = spec[key]
    classes = self.setting.model.num_classes
    if shape and shape != (classes,):
      raise UserError(
        f'{key} has the shape {shape} (augment.num_classes or augment.classes)'
        f', but config.num_classes is {classes}: make them equal.'
      )
    if shape and self.multi_hot and key == 'label':
      raise UserError(
        'objective.multi_hot would give every class of a soft label the weight '
        f'1 (augment.name, label {shape}): set it to False.'
      )
    if self.class_weights is not None and len(self.class_weights) != classes:
      raise UserError(
        f'objective.class_weights has {len(self.class_weights)} numbers, but '
        f'config.num_classes is {classes}: give one number for each class.'
      )
    if not classes:
      raise UserError(
        "config.num_classes is 0, but the objective 'supervised' trains a "
        'head: set it to the number of classes.'
      )

  def loss(self, params: PyTree, inputs: Inputs) -> Loss:
    """Computes the mean loss of a batch or micro-batch."""
    # Images are also normalized to [-1, 1]. Targets are the labels or, if
    # examples are mixed, probabilities `[n, num_classes]`.
    images, targets = self.setting.mix(inputs.batch, inputs.key)
    logits = self.setting.model.apply({'params': params}, images, inputs.key)
    return self._label_loss(logits, targets).mean(), ({}, {})

  def _label_loss(
    self, logits: Float[Array, 'n k'], targets: Labels
  ) -> Float[Array, ' n']:
    """Computes the loss of each image by the config's cross-entropy."""
    if self.multi_hot and targets.ndim == logits.ndim:
      targets = (targets > 0).astype(jnp.float32)
    if self.class_weights is not None:
      weights = jnp.array(self.class_weights, jnp.float32)
      return softmax_cross_entropy(
        logits, targets, self.label_smoothing, weights
      )
    loss = LOSSES[self.cross_entropy]
    return loss(logits, targets, self.label_smoothing)
