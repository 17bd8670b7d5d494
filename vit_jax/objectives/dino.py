"""DINO: self-distillation without labels.

"Emerging Properties in Self-Supervised Vision Transformers", arXiv 2104.14294,
Algorithm 1 and section 3. A teacher, the moving average of the student, sees
two global crops of an image. For every other crop of the image, the student
learns to predict the teacher's output.
"""

import types
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from vit_jax.config import durations, plugins
from vit_jax.config.plugins import Nested, Section
from vit_jax.data.contract import Spec, require
from vit_jax.errors import UserError, check_range
from vit_jax.models.contract import Model, Size
from vit_jax.models.dino_head import unit
from vit_jax.objectives.composite import AroundModel
from vit_jax.objectives.contract import Batch, Inputs, Loss, Setting
from vit_jax.objectives.mixing import normalize

PyTree = Any
_HEAD = Nested('vit_jax.models.dino_head:Head')
_GLOBAL = 2  # crops that the teacher sees
_STREAM = 0x64696E6F  # folded into the step's key


class Objective(AroundModel):
  """Cross-entropy between teacher and student for crops of the same image.

  It implements `objectives.contract.Objective`. Parameters: `model/…`, `head/…`
  (see `models.dino_head`). Extra state: `teacher`, which has the same leaves
  and is their moving average, and `centre` `[k]`. A batch holds `global`, uint8
  `[n, 2, y, x, 3]`, and optionally `local`, uint8 `[n, crops, y', x', 3]`.

  The centre is updated with the mean of the teacher's logits over the whole
  batch, whatever the number of devices and micro-batches: `update_extra` gets
  the mean over all micro-batches, which have equal sizes. Loss and gradients
  are those of the whole batch too, since all micro-batches use the centre from
  before the step. Only the metric `feature_deviation` is computed for each
  micro-batch and averaged.
  """

  def __init__(
    self,
    setting: Setting,
    /,
    *,
    student_temperature: float = 0.1,
    teacher_temperature: float = 0.04,
    warmup_temperature: float = 0.04,
    temperature_warmup: str = '0 epochs',
    temperature_every: str = '1 epochs',
    momentum: float = 0.996,
    centre_momentum: float = 0.9,
    position_offset: float = 0.1,
    head: Annotated[Section, _HEAD] = types.MappingProxyType({}),
  ):
    """Builds the head.

    Args:
      setting: setting of the run; `model` does not have a head of its own.
      student_temperature: divisor of the student's logits, above 0.
      teacher_temperature: divisor of the teacher's logits after the warm-up;
        values above .07 are often too large.
      warmup_temperature: the teacher's temperature in the first epoch of the
        warm-up.
      temperature_warmup: duration of the warm-up; the temperature rises by
        equal steps and reaches `teacher_temperature` in its last epoch.
      temperature_every: duration for which a temperature holds.
      momentum: fraction of itself that the teacher keeps at the first update;
        it rises to 1 by half a cosine. The authors advise .9995 for batches of
        256.
      centre_momentum: fraction of itself that the centre keeps; 1 for no
        centring, which collapses (the paper's Figure 7).
      position_offset: offset of interpolated positions, see `Model.at_sizes`;
        the authors' code has .1.
      head: section of the head.

    Raises:
      UserError: a value is outside its range.
    """
    check_range('objective.momentum', momentum, at_least=0, at_most=1)
    key = 'objective.centre_momentum'
    check_range(key, centre_momentum, at_least=0, at_most=1)
    for name, value in (
      ('student_temperature', student_temperature),
      ('teacher_temperature', teacher_temperature),
      ('warmup_temperature', warmup_temperature),
    ):
      check_range(f'objective.{name}', value, above=0)
    durations.check('objective.temperature_warmup', temperature_warmup)
    durations.check('objective.temperature_every', temperature_every)
    self.setting = setting
    self.momentum, self.centre_momentum = momentum, centre_momentum
    self.student_temperature = student_temperature
    self.offset = position_offset
    self._total = max(setting.steps('100 %'), 1)
    self._every = max(setting.steps(temperature_every), 1)
    warm = round(setting.steps(temperature_warmup) / self._every)
    rising = np.linspace(warmup_temperature, teacher_temperature, warm)
    self._temperatures = np.append(rising, teacher_temperature)
    self.head: Any = plugins.build(_HEAD.constructor(''), head)

  @property
  def sharding_rules(self) -> tuple[tuple[str, int], ...]:
    """Rules of the model, the head and the centre (split as the outputs)."""
    head = ((f'head/{end}', dim) for end, dim in self.head.sharding_rules)
    return (*self.setting.model.sharding_rules, *head, ('centre', -1))

  def check(self, spec: Spec) -> None:
    """Checks the crops, and that the model accepts images of all their sizes.

    Raises:
      UserError: crops are missing, the model has a head, or it does not accept
        the local crops.
    """
    require(spec, 'global', who="the objective 'dino'")
    size, wanted = spec['global'][0], (_GLOBAL, *self.setting.image_size, 3)
    if size != wanted:
      raise UserError(
        f"the objective 'dino' expects global crops of the shape "
        f'{list(wanted)}, but the transform produces {list(size)}.'
      )
    if self.setting.model.num_classes:
      raise UserError(
        f'config.num_classes is {self.setting.model.num_classes}, but the '
        "objective 'dino' has a head of its own: set --config.num_classes=0."
      )
    if 'local' in spec:
      height, width = spec['local'][0][1:3]
      self.setting.model.check((height, width))
      self._free()

  def other_passes(self, spec: Spec) -> tuple[tuple[Model, Size], ...]:
    """Returns the pass over local crops, if there are any."""
    if 'local' not in spec:
      return ()
    height, width = spec['local'][0][1:3]
    return ((self.setting.model, (height, width)),)

  def _free(self) -> Any:
    """Returns the model for images of any size."""
    return self.setting.model.at_sizes(self.setting.image_size, self.offset)

  def init(self, key: Key[Array, ''], batch: Any) -> tuple[PyTree, PyTree]:
    """Returns initial parameters, an equal teacher, and a centre of zeros."""
    del batch
    model_key, head_key = jax.random.split(key)
    model = self.setting.init_model(model_key)
    images = jnp.zeros((1, *self.setting.image_size, 3))
    features = self._features({'model': model}, images, None)
    head = self.head.init(head_key, features)['params']
    params = {'model': model, 'head': head}
    return params, self.start_extra(params, {})

  def start_extra(self, params: PyTree, extra: PyTree) -> PyTree:
    """Returns a teacher that equals its student, and a centre of zeros."""
    del extra
    centre = jnp.zeros(self.head.config.outputs)
    return {'teacher': params, 'centre': centre}

  def loss(self, params: PyTree, inputs: Inputs) -> Loss:
    """Computes the mean cross-entropy over all pairs of different views.

    A pair is a global crop for the teacher and any other crop for the student.
    Drop path and dropout apply to the student only. Metrics:

    - `teacher_entropy`, in nats.
    - `entropy_share`: the same as a fraction of the largest possible entropy,
      ln k.
    - `teacher_kl`: divergence between teacher and student, nats.
    - `feature_deviation` of the teacher's features of global crops, scaled to
      length 1: 1 if they point in all directions, 0 if all are equal.

    If the outputs collapse to the same one for all images, `teacher_kl` tends
    to 0 and the entropy to 0 or ln k (the paper's Figure 7).
    """
    n, views = len(inputs.batch['global']), self._views(inputs.batch)
    taught = jax.lax.stop_gradient(inputs.extra['teacher'])
    features = self._features(taught, views['global'], None)
    logits = self._logits(taught, features)
    temperature = self.teacher_temperature(inputs.step)
    told = jax.nn.softmax((logits - inputs.extra['centre']) / temperature)
    key = jax.random.fold_in(inputs.key, _STREAM)
    keys = jax.random.split(key, len(views))
    seen = [
      self._features(params, images, own).reshape(n, -1, features.shape[-1])
      for images, own in zip(views.values(), keys, strict=True)
    ]
    seen = jnp.concatenate(seen, axis=1)  # [n, views, d]
    said = self._logits(params, seen.reshape(-1, seen.shape[-1]))
    said = said.reshape(*seen.shape[:2], -1) / self.student_temperature
    pairs = cross_entropies(told.reshape(n, _GLOBAL, -1), said)
    other = jnp.asarray(~np.eye(*pairs.shape[1:], dtype=bool))
    loss = jnp.sum(pairs.mean(axis=0) * other) / other.sum()
    entropy = jax.scipy.special.entr(told).sum(axis=-1).mean()
    metrics = {
      'teacher_entropy': entropy,
      'entropy_share': entropy / np.log(self.head.config.outputs),
      'teacher_kl': loss - entropy,
      'feature_deviation': _deviation(features),
    }
    return loss, (metrics, {'centre': logits.mean(axis=0)})

  def _views(self, batch: Batch) -> dict[str, Float[Array, 'm y x 3']]:
    """Returns the images of each size; the crops of an example are adjacent.

    In this order, every device keeps its own examples.
    """
    return {
      name: normalize(batch[name].reshape(-1, *batch[name].shape[2:]))
      for name in ('global', 'local')
      if name in batch
    }

  def _features(
    self,
    params: PyTree,
    images: Float[Array, 'm y x 3'],
    key: Key[Array, ''] | None,
  ) -> Float[Array, 'm d']:
    own = images.shape[1:3] == self.setting.image_size
    model = self.setting.model if own else self._free()
    variables = {'params': params['model']}
    return model.apply(variables, images, key, method='predict')['features']

  def _logits(
    self, params: PyTree, features: Float[Array, 'm d']
  ) -> Float[Array, 'm k']:
    return self.head.apply({'params': params['head']}, features)

  def teacher_temperature(self, step: Int[Array, '']) -> Float[Array, '']:
    """Returns the temperature after `step` updates; constant in each epoch."""
    last = len(self._temperatures) - 1
    table = jnp.asarray(self._temperatures, jnp.float32)
    return table[jnp.minimum(step // self._every, last)]

  def student_share(self, step: Int[Array, '']) -> Float[Array, '']:
    """Returns the weight of the student in the teacher's update, in [0, 1]."""
    done = jnp.minimum((step - 1) / self._total, 1.0)
    return 0.5 * (1 - self.momentum) * (1 + jnp.cos(jnp.pi * done))

  def update_extra(
    self, params: PyTree, extra: PyTree, carry: PyTree, step: Int[Array, '']
  ) -> PyTree:
    """Updates the moving averages: teacher (with its head) and centre."""
    share, of_batch = self.student_share(step), 1 - self.centre_momentum
    teacher = jax.tree.map(
      lambda old, new: old + share * (new - old), extra['teacher'], params
    )
    centre = extra['centre'] + of_batch * (carry['centre'] - extra['centre'])
    return {'teacher': teacher, 'centre': centre}

  def weights(self, params: PyTree, extra: PyTree) -> dict[str, PyTree]:
    """Returns the student and the teacher; the teacher is usually better."""
    return {'params': params, 'teacher': extra['teacher']}


def cross_entropies(
  told: Float[Array, 'n t k'], said: Float[Array, 'n v k']
) -> Float[Array, 'n t v']:
  """Computes −Σ p log softmax(z) of every pair of views of an example, in nats.

  Args:
    told: probabilities.
    said: logits. As probabilities sum to 1, the result is logsumexp(z) − Σ p z.
  """
  products = jnp.einsum('ntk,nvk->ntv', told, said, precision='highest')
  return jax.nn.logsumexp(said, axis=-1)[:, None] - products


def _deviation(features: Float[Array, 'm d']) -> Float[Array, '']:
  """Returns the root of the summed variances of unit features, in [0, 1]."""
  return jnp.sqrt(jnp.var(unit(features, axis=-1), axis=0).sum())
