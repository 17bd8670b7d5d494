"""Distillation of features: a student of any weights, without labels."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from vit_jax.data.contract import Spec, require
from vit_jax.errors import UserError, check_range
from vit_jax.models.contract import Model, Size, abstract_params
from vit_jax.models.init import NORMAL
from vit_jax.models.layers import head
from vit_jax.models.positions import resized_map
from vit_jax.objectives import contract, patches
from vit_jax.objectives.health import feature_metrics
from vit_jax.objectives.mixing import normalize

PyTree = Any
_WANT = ('patches',)
_EPSILON = 1e-6  # added to the variance of a target's channels


@dataclasses.dataclass(eq=False)
class Objective(contract.AroundModel):
  """Linear layers predict a teacher's features from those of the student.

  Both models are applied to the same augmented images. The targets are the
  teacher's features (of a ViT, usually its class token) and its map of patches,
  each standardized over the channels. The loss is the sum of the two mean
  squared errors. Parameters: `model/…` and, for both, `head/…/{kernel,bias}`.

  Attributes:
    setting: setting of the run, whose `model` has no head.
    teacher: path of the teacher's weights, in any format that `load_pretrained`
      reads; they are opened for training only.
    teacher_width: channels of the teacher's features and patches, see
      `width_of`.
    teacher_scale: size of the teacher's images as a multiple of the student's;
      they are resized by bicubic interpolation. The teacher's map is resized to
      the student's grid.
    patch_weight: weight of the patches' error; that of the features is 1.

  Raises:
    UserError: a value is outside its range.
  """

  setting: contract.Setting
  _: dataclasses.KW_ONLY
  teacher: str
  teacher_width: int
  teacher_scale: float = 1.0
  patch_weight: float = 1.0

  def __post_init__(self):
    scale = self.teacher_scale
    check_range('objective.teacher_width', self.teacher_width, at_least=1)
    check_range('objective.teacher_scale', scale, above=0, at_most=16)
    check_range('objective.patch_weight', self.patch_weight, at_least=0)
    height, width = self.setting.image_size
    self._size = round(height * scale), round(width * scale)  # the teacher's
    self._weights = {'features': 1.0, 'patches': self.patch_weight}

  @functools.cached_property
  def _teacher(self) -> contract.Frozen:
    return self.setting.open_frozen(self.teacher)

  @property
  def _teacher_setting(self) -> contract.Setting:
    """Setting with the model of the teacher, for images of any size."""
    return contract.Setting(self._teacher.model, self._teacher.image_size)

  def frozen(self) -> dict[str, contract.Frozen]:
    """Returns the teacher.

    Raises:
      UserError: there are no weights, or the teacher has other channels or
        another width, does not accept the images, or has no patches.
    """
    model, expected = self._teacher.model, self.setting.model.channels
    if model.channels != expected:
      raise UserError(
        f'objective.teacher={self.teacher} is for {model.channels} channels, '
        f'and the images have {expected}: use another teacher.'
      )
    try:
      self._teacher_setting.model_for(self._size)
    except UserError as error:
      raise UserError(f'objective.teacher_scale: {error}') from error
    actual = width_of(model, self._teacher.image_size)
    if self.teacher_width != actual:
      raise UserError(
        f'objective.teacher_width is {self.teacher_width}, but that of '
        f'{self.teacher} is {actual}: set --config.objective.teacher_width='
        f'{actual}.'
      )
    return {'teacher': self._teacher}

  def check(self, spec: Spec) -> None:
    """Checks that batches have images, and that the model has no head."""
    require(spec, 'image', who="the objective 'match_features'")
    patches.check_headless(self.setting, 'match_features')

  def other_passes(self, spec: Spec) -> tuple[tuple[Model, Size], ...]:
    """Returns the pass of the teacher."""
    model = self._teacher_setting.model_for(self._size)
    return ((model, self._size),)

  def init(self, key: Key[Array, ''], batch: Any) -> tuple[PyTree, PyTree]:
    """Returns initial parameters, and no extra state."""
    model_key, head_key = jax.random.split(key)
    model, shapes = self.setting.init_model(model_key), _shapes(self.setting)
    head = {}
    keys = jax.random.split(head_key)
    for name, own_key in zip(self._weights, keys, strict=True):
      zeros = jnp.zeros(shapes[name].shape)
      head[name] = self._head.init(own_key, zeros)['params']
    return {'model': model, 'head': head}, {}

  def loss(self, params: PyTree, inputs: contract.Inputs) -> contract.Loss:
    """Computes the sum of the mean squared errors.

    Metrics: `features_error` and `patches_error`, without their weights, and
    those of `health` for the student's features.
    """
    images = teacher_images = normalize(inputs.batch['image'])
    n, height, width, c = images.shape
    if self._size != (height, width):
      size = (n, *self._size, c)
      teacher_images = jax.image.resize(images, size, 'bicubic').clip(-1, 1)
    teacher = jax.lax.stop_gradient(inputs.frozen['teacher'])
    targets = self._teacher_setting.predict(teacher, teacher_images, want=_WANT)
    found = self.setting.predict(params['model'], images, inputs.key, _WANT)
    _, rows, columns, _ = found['patches'].shape
    targets['patches'] = resized_map(targets['patches'], (rows, columns))
    errors = {}
    for name in self._weights:
      layer = {'params': params['head'][name]}
      predicted: Any = self._head.apply(layer, found[name])
      target = jax.nn.standardize(targets[name], axis=-1, epsilon=_EPSILON)
      target = target.reshape(predicted.shape)  # the map has merged patches
      errors[name] = jnp.square(predicted - target).mean()
    loss = sum(self._weights[name] * error for name, error in errors.items())
    metrics = {f'{name}_error': error for name, error in errors.items()}
    return jnp.asarray(loss), (metrics | feature_metrics(found['features']), {})

  @property
  def _head(self) -> Any:
    """A linear layer; the two differ only in the channels of their inputs."""
    return head(self.teacher_width, jnp.dtype('float32'), kernel_init=NORMAL)


def width_of(model: Any, size: Size) -> int:
  """Returns the number of channels of a model's features and patches.

  Args:
    model: model of a teacher.
    size: (height, width) of its images, pixels.

  Raises:
    UserError: the two numbers differ, or there are no patches.
  """
  found = _shapes(contract.Setting(model, size))
  widths = [found[name].shape[-1] for name in ('features', 'patches')]
  if widths[0] != widths[1]:
    raise UserError(
      f'the features of the teacher have {widths[0]} channels and its patches '
      f"{widths[1]}: use a teacher with pool='token' or 'gap'."
    )
  return widths[0]


def _shapes(setting: contract.Setting) -> dict[str, Any]:
  """Returns the shapes of a model's results, without using a device."""
  return jax.eval_shape(
    lambda params: setting.predict(params, setting.zero_images(), want=_WANT),
    abstract_params(setting.model, setting.image_size),
  )
