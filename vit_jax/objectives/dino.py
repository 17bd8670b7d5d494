"""DINO: self-distillation without labels.

"Emerging Properties in Self-Supervised Vision Transformers", arXiv 2104.14294,
Algorithm 1 and section 3. A teacher, the moving average of the student, is
applied to two global crops of an image. The student learns to predict the
output of the teacher from every other crop of the image.
"""

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from vit_jax.config import durations, schema
from vit_jax.config.schema import Nested, Section
from vit_jax.data.contract import Spec, require
from vit_jax.errors import UserError, check_range
from vit_jax.models.contract import Model, Size
from vit_jax.models.dino_head import Head
from vit_jax.objectives import contract, patches
from vit_jax.objectives.health import feature_metrics
from vit_jax.objectives.mixing import normalize

PyTree = Any
_HEAD = Nested('vit_jax.models.dino_head:Head')
_GLOBAL = 2  # number of global crops, the inputs of the teacher
# Offset of the interpolation of positions in the authors' code, see
# `Model.at_sizes`.
_POSITION_OFFSET = 0.1
_STREAM = 0x64696E6F  # folded into the key of the step


@dataclasses.dataclass(eq=False)
class Objective(contract.AroundModel):
  """Cross-entropy between teacher and student for crops of the same image.

  It implements `objectives.contract.Objective`. Parameters: `model/…`, `head/…`
  (see `models.dino_head`). Extra state: `teacher`, the moving average of the
  parameters, and `centre` `[k]`, for k outputs of the head. A batch contains
  `global`, uint8 `[n, 2, y, x, 3]`, and optionally `local`, uint8 `[n, crops,
  y', x', 3]`.

  The centre is updated with the mean of the teacher's logits over the whole
  batch, for any number of devices and micro-batches: `update_extra` gets the
  mean over all micro-batches, which have equal sizes. Loss and gradients are
  also those of the whole batch, because all micro-batches use the centre from
  before the step. Only the metrics of `health` are computed for each
  micro-batch separately and then averaged.

  Attributes:
    setting: setting of the run, whose `model` has no head.
    student_temperature: divisor of the student's logits, above 0.
    teacher_temperature: divisor of the teacher's logits after the warm-up;
      values above .07 are often too large.
    warmup_temperature: divisor of the teacher's logits at the start of the
      warm-up.
    temperature_warmup: duration of the warm-up. The temperature changes by
      equal amounts once per epoch, as in the authors' code, and is
      `teacher_temperature` in the last epoch of the warm-up.
    momentum: weight of the old teacher in the first update; it rises to 1 along
      half a cosine. The authors recommend .9995 for batches of 256.
    head: config section of the head, see `models.dino_head.Config`.

  Raises:
    UserError: a value is outside its range.
  """

  # Not annotated, so that these are not fields. The subclass in `dinov2` has
  # other names, keys for the last two weights, and a second centre.
  name = 'dino'  # for messages
  transform = 'multicrop'  # the transform that makes its batches, for messages
  centre_momentum = 0.9  # weight of the old centre in an update
  momentum_end = 1.0  # weight of the old teacher in the last update
  local_weight = 1.0  # weight of the terms of local crops

  setting: contract.Setting
  _: dataclasses.KW_ONLY
  student_temperature: float = 0.1
  teacher_temperature: float = 0.04
  warmup_temperature: float = 0.04
  temperature_warmup: str = '0 epochs'
  momentum: float = 0.996
  head: Annotated[Section, _HEAD] = schema.EMPTY

  def __post_init__(self):
    check_range('objective.momentum', self.momentum, at_least=0, at_most=1)
    for temperature in ('student', 'teacher', 'warmup'):
      key = f'{temperature}_temperature'
      check_range(f'objective.{key}', getattr(self, key), above=0)
    durations.check('objective.temperature_warmup', self.temperature_warmup)
    self._total = max(self.setting.steps('100 %'), 1)
    self._epoch = max(self.setting.steps('1 epochs'), 1)
    self._warmup = self.setting.steps(self.temperature_warmup)
    self._head: Any = schema.construct(Head, self.head)

  @property
  def sharding_rules(self) -> tuple[tuple[str, int], ...]:
    """Rules of the model, the head and the centre (split like the outputs)."""
    head = ((f'head/{end}', dim) for end, dim in self._head.sharding_rules)
    return (*self.setting.model.sharding_rules, *head, ('centre', -1))

  def check(self, spec: Spec) -> None:
    """Checks that batches have crops, and that the model accepts their sizes.

    Raises:
      UserError: crops are missing or have a wrong shape, or the model has a
        head or does not accept the local crops.
    """
    size = (*self.setting.image_size, self.setting.model.channels)
    self._check_shape(spec, 'global', (_GLOBAL, *size), 'image_size')
    patches.check_headless(self.setting, self.name)
    if 'local' in spec:
      height, width = spec['local'][0][1:3]
      self.setting.model.check((height, width))
      self._any_size_model()  # raises if the model has a fixed size

  def _check_shape(
    self, spec: Spec, entry: str, expected: tuple[int, ...], advice: str
  ) -> None:
    """Checks the shape of an entry of the batches.

    Args:
      spec: spec of the training transform.
      entry: name of the entry.
      expected: expected shape of an example.
      advice: key of the config to change, or its right value.

    Raises:
      UserError: the entry is missing or has another shape.
    """
    who = f'the objective {self.name!r}'
    require(spec, entry, who=who, made_by=repr(self.transform))
    if spec[entry][0] != expected:
      raise UserError(
        f'the objective {self.name!r} expects {entry!r} of the shape '
        f'{list(expected)}, but the transform produces {list(spec[entry][0])}: '
        f'set --config.{advice}.'
      )

  def other_passes(self, spec: Spec) -> tuple[tuple[Model, Size], ...]:
    """Returns the pass over local crops, if there are any."""
    if 'local' not in spec:
      return ()
    height, width = spec['local'][0][1:3]
    return ((self.setting.model, (height, width)),)

  def _any_size_model(self) -> Any:
    """Returns the model for images of any size."""
    return self.setting.model.at_sizes(
      self.setting.image_size, _POSITION_OFFSET
    )

  def init(self, key: Key[Array, ''], batch: Any) -> tuple[PyTree, PyTree]:
    """Returns initial parameters, and the extra state of `start_extra`."""
    model_key, head_key = jax.random.split(key)
    model = self.setting.init_model(model_key)
    images = self.setting.zero_images()
    features = self._features({'model': model}, images, None)
    head = self._head.init(head_key, features)['params']
    params = {'model': model, 'head': head}
    return params, self.start_extra(params, {})

  def start_extra(self, params: PyTree, extra: PyTree) -> PyTree:
    """Returns a teacher that equals its student, and a centre of zeros."""
    centre = jnp.zeros(self._head.config.outputs)
    return {'teacher': params, 'centre': centre}

  def loss(self, params: PyTree, inputs: contract.Inputs) -> contract.Loss:
    """Computes the mean cross-entropy over all pairs of different views.

    A pair is a global crop for the teacher and any other crop for the student.
    Drop path and dropout apply to the student only. Metrics:

    - `teacher_entropy`: entropy of the teacher's probabilities, nats.
    - `entropy_share`: the same entropy as a fraction of its maximum, ln k.
    - `teacher_kl`: Kullback-Leibler divergence between teacher and student,
      nats.
    - `feature_deviation` and `effective_rank` of the teacher's features of
      global crops, see `health`.

    If the outputs collapse and are the same for all images, `teacher_kl` tends
    to 0 and the entropy to 0 or ln k (the paper's Figure 7).
    """
    views = self._views(inputs.batch)
    teacher = jax.lax.stop_gradient(inputs.extra['teacher'])
    teacher_features = self._features(teacher, views['global'], None)
    logits = self._logits(teacher, teacher_features)
    temperature = self.temperature_of_teacher(inputs.step)
    targets = jax.nn.softmax((logits - inputs.extra['centre']) / temperature)
    key = jax.random.fold_in(inputs.key, _STREAM)
    keys = jax.random.split(key, len(views))
    features = [
      self._features(params, images, view_key)
      for images, view_key in zip(views.values(), keys, strict=True)
    ]
    loss, metrics = self._crop_loss(params, features, targets)
    metrics |= feature_metrics(teacher_features)
    return loss, (metrics, {'centre': logits.mean(axis=0)})

  def _crop_loss(
    self,
    params: PyTree,
    features: list[Float[Array, '_ d']],
    targets: Float[Array, 'm k'],
  ) -> tuple[Float[Array, ''], dict[str, Array]]:
    """Computes the mean cross-entropy over all pairs, and its metrics.

    Args:
      params: parameters of the student.
      features: features of the student, of global and of local crops.
      targets: probabilities of the teacher for the global crops.
    """
    n = len(targets) // _GLOBAL
    views = [x.reshape(n, -1, x.shape[-1]) for x in features]
    x = jnp.concatenate(views, axis=1)  # [n, views, d]
    outputs = self._logits(params, x.reshape(-1, x.shape[-1]))
    outputs = outputs.reshape(*x.shape[:2], -1)  # [n, views, k]
    outputs = outputs / self.student_temperature
    pairs = cross_entropies(targets.reshape(n, _GLOBAL, -1), outputs)
    # Teacher and student are not compared on the same global crop.
    other = jnp.asarray(~np.eye(*pairs.shape[1:], dtype=bool))  # [2, views]
    terms = pairs.mean(axis=0) * other
    mean = loss = jnp.sum(terms) / other.sum()
    if self.local_weight != 1:  # the mean contains local crops once
      loss += (self.local_weight - 1) * terms[:, _GLOBAL:].sum() / other.sum()
    entropy = jax.scipy.special.entr(targets).sum(axis=-1).mean()
    return loss, {
      'teacher_entropy': entropy,
      'entropy_share': entropy / np.log(self._head.config.outputs),
      'teacher_kl': mean - entropy,
    }

  def _views(self, batch: contract.Batch) -> dict[str, Float[Array, 'm y x c']]:
    """Returns the normalized crops of each size.

    The crops of an example are adjacent, so that they are not moved to other
    devices.
    """
    return {
      name: normalize(batch[name].reshape(-1, *batch[name].shape[2:]))
      for name in ('global', 'local')
      if name in batch
    }

  def _features(
    self,
    params: PyTree,
    images: Float[Array, 'm y x c'],
    key: Key[Array, ''] | None,
  ) -> Float[Array, 'm d']:
    is_global = images.shape[1:3] == self.setting.image_size
    model = self.setting.model if is_global else self._any_size_model()
    variables = {'params': params['model']}
    return model.apply(variables, images, key, method='predict')['features']

  def _logits(
    self, params: PyTree, features: Float[Array, 'm d']
  ) -> Float[Array, 'm k']:
    return self._head.apply({'params': params['head']}, features)

  def temperature_of_teacher(self, step: Int[Array, '']) -> Float[Array, '']:
    """Returns the divisor of the teacher's logits after `step` updates."""
    epochs = round(self._warmup / self._epoch)
    rising = np.linspace(
      self.warmup_temperature, self.teacher_temperature, epochs
    )
    by_epoch = jnp.array([*rising, self.teacher_temperature], jnp.float32)
    return by_epoch[jnp.minimum(step // self._epoch, epochs)]

  def student_weight(self, step: Int[Array, '']) -> Float[Array, '']:
    """Returns the weight of the student in the teacher's update, in [0, 1].

    Args:
      step: number of updates completed, including this one.
    """
    progress = jnp.minimum((step - 1) / self._total, 1.0)
    rising = 0.5 * (self.momentum_end - self.momentum)
    rising *= 1 + jnp.cos(jnp.pi * progress)
    return 1 - self.momentum_end + rising

  def update_extra(
    self, params: PyTree, extra: PyTree, carry: PyTree, step: Int[Array, '']
  ) -> PyTree:
    """Returns the new moving averages: the teacher (with head) and the centres.

    See `objectives.contract.Objective`.
    """
    weight = self.student_weight(step)
    teacher = jax.tree.map(
      lambda old, new: old + weight * (new - old), extra['teacher'], params
    )
    weight = 1 - self.centre_momentum
    centres = {
      name: extra[name] + weight * (mean - extra[name])
      for name, mean in carry.items()
    }
    return {'teacher': teacher} | centres

  def weights(self, params: PyTree, extra: PyTree) -> dict[str, PyTree]:
    """Returns the student and the teacher; the teacher is usually better."""
    return {'params': params, 'teacher': extra['teacher']}


def cross_entropies(
  probabilities: Float[Array, 'n t k'], logits: Float[Array, 'n v k']
) -> Float[Array, 'n t v']:
  """Computes −Σ p log softmax(z) for all pairs of views of each example, nats.

  Args:
    probabilities: p, the targets of t views.
    logits: z, the predictions from v views.
  """
  # A matrix product with as few rows as there are targets, and above all its
  # gradient, would take much longer on a TPU than these sums.
  products = jnp.stack(
    [
      (probabilities[:, i, None] * logits).sum(axis=-1)
      for i in range(probabilities.shape[1])
    ],
    axis=1,
  )
  # As probabilities sum to 1, this is logsumexp(z) − Σ p z.
  return jax.nn.logsumexp(logits, axis=-1)[:, None] - products
