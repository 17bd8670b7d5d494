"""Distillation: classification with labels and the outputs of a teacher."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from vit_jax.errors import UserError, check_choice, check_range
from vit_jax.objectives import supervised
from vit_jax.objectives.contract import Frozen, Inputs, Loss
from vit_jax.objectives.losses import softmax_cross_entropy

PyTree = Any
KINDS = ('hard', 'soft')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective(supervised.Objective):
  """Classification with a loss for the labels and a loss for a teacher.

  The loss is (1 − λ) · L(labels) + λ · D(teacher). With 'hard', D is the
  cross-entropy with the teacher's most likely class; with 'soft', it is τ²
  times the Kullback-Leibler divergence of the two softmax outputs at
  temperature τ. The teacher is applied to the same augmented images as the
  student, resized if the teacher was trained at another image size. In a model
  with a distillation token (`model.distilled`), the head of the class token
  learns the labels, and the head of the distillation token learns the teacher's
  outputs. In any other model, the only head learns both.

  Attributes:
    teacher: path of the teacher's weights, in any format that `load_pretrained`
      reads. They are not part of checkpoints, and evaluation does not need
      them.
    kind: 'hard' or 'soft'.
    teacher_weight: λ, in (0, 1]; with 1, labels are not used.
    temperature: τ of 'soft', above 0.

  Reference: DeiT, Touvron et al., arXiv 2012.12877, equations 2 (soft) and 3
  (hard). Its public code also divides the soft divergence by the number of
  classes; here, as in the paper, it is summed over classes.
  """

  teacher: str
  kind: str = 'hard'
  teacher_weight: float = 0.5
  temperature: float = 1.0

  def __post_init__(self):
    super().__post_init__()
    check_choice('objective.kind', self.kind, KINDS)
    check_range(
      'objective.teacher_weight', self.teacher_weight, above=0, at_most=1
    )
    check_range('objective.temperature', self.temperature, above=0)

  @functools.cached_property
  def _teacher(self) -> Frozen:
    teacher = self.setting.open_frozen(self.teacher)
    return teacher._replace(judges_labels=True)

  def frozen(self) -> dict[str, Frozen]:
    """Returns the teacher.

    Raises:
      UserError: there are no weights, or they have another number of classes
        or channels than the run.
    """
    teacher, student = self._teacher.model, self.setting.model
    for key in ('num_classes', 'channels'):
      value, expected = getattr(teacher, key), getattr(student, key)
      if value != expected:
        raise UserError(
          f'objective.teacher: {key} of {self.teacher} is {value}, but that of '
          f'this run is {expected}: use a teacher with the same value.'
        )
    return {'teacher': self._teacher}

  def loss(self, params: PyTree, inputs: Inputs) -> Loss:
    """Computes the mean loss.

    Metrics: `label_loss` and `teacher_loss`, without their weights, and
    `agreement`, the fraction of images for which student and teacher predict
    the same class (the student with the head that learns from the teacher).
    """
    images, targets = self.setting.mix(inputs.batch, inputs.key)
    label_logits, logits = self._logits(params, images, inputs.key)
    teacher_logits = self._teacher_logits(inputs.frozen['teacher'], images)
    teacher_logits = jax.lax.stop_gradient(teacher_logits)
    label_loss = self._label_loss(label_logits, targets).mean()
    teacher_loss = self._teacher_loss(logits, teacher_logits).mean()
    agree = logits.argmax(-1) == teacher_logits.argmax(-1)
    metrics = {
      'label_loss': label_loss,
      'teacher_loss': teacher_loss,
      'agreement': agree.mean(),
    }
    weight = self.teacher_weight
    loss = (1 - weight) * label_loss + weight * teacher_loss
    return loss, (metrics, {})

  def _logits(
    self, params: PyTree, images: Float[Array, 'n y x c'], key: Key[Array, '']
  ) -> tuple[Float[Array, 'n k'], Float[Array, 'n k']]:
    """Returns the logits for the label loss, and those for the teacher loss.

    They are equal for models without a distillation token.
    """
    model = self.setting.model
    if not model.architecture.get('distilled'):
      logits = model.apply({'params': params}, images, key)
      return logits, logits
    outputs = model.apply(
      {'params': params}, images, key, method='predict', want=('heads',)
    )
    heads = outputs['heads']
    return heads[:, 0], heads[:, 1]

  def _teacher_logits(
    self, teacher: PyTree, images: Float[Array, 'n y x c']
  ) -> Float[Array, 'n k']:
    """Computes the logits of the teacher, without fused kernels."""
    size = (*self._teacher.image_size, images.shape[-1])
    if images.shape[1:] != size:
      images = jax.image.resize(images, (len(images), *size), 'bilinear')
    model = self._teacher.model.reference
    return model.apply({'params': teacher}, images, method='predict')['logits']

  def _teacher_loss(
    self, logits: Float[Array, 'n k'], teacher_logits: Float[Array, 'n k']
  ) -> Float[Array, ' n']:
    """Computes the distillation loss of each image."""
    if self.kind == 'hard':
      return softmax_cross_entropy(logits, teacher_logits.argmax(-1))
    log_q = jax.nn.log_softmax(logits.astype(jnp.float32) / self.temperature)
    log_p = jax.nn.log_softmax(teacher_logits / self.temperature)
    divergence = (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
    return self.temperature**2 * divergence
