"""Interface between the framework and its objectives.

`AroundModel` is the base class of objectives that train more than the model.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Key

from vit_jax.arrays import tree
from vit_jax.data.contract import Spec, Transform
from vit_jax.models.contract import Model, Size, abstract_params
from vit_jax.objectives.mixing import DeviceAugment, normalize

PyTree = Any
Batch = dict[str, Array]  # arrays that the transform declares in `spec`


class Mean(NamedTuple):
  """A mean over elements whose number differs between micro-batches.

  Micro-batches add up both values before they are divided, so the mean does not
  depend on their number. A mean over nothing is 0.

  Attributes:
    total: sum over the counted elements.
    count: number of these elements, or sum of their weights; it must not depend
      on the parameters.
  """

  total: Array
  count: Array

  def value(self) -> Array:
    """Returns the quotient."""
    return self.of(self.total)

  def of(self, total: Array) -> Array:
    """Divides another sum over the same elements, such as a gradient."""
    return jnp.where(self.count > 0, total / jnp.maximum(self.count, 1e-30), 0)


Metrics = Mapping[str, Array | Mean]
# The loss, and (metrics for the log, values for `update_extra`)
Loss = tuple[Float[Array, ''] | Mean, tuple[Metrics, PyTree]]


class Frozen(NamedTuple):
  """Weights that a run uses without changing them, such as a teacher's.

  They are a separate argument of the training step: placed on the devices once,
  not donated, and not part of checkpoints, which contain only their checksum.

  Attributes:
    model: model that the weights belong to.
    image_size: (height, width) of the images that the weights are for, pixels.
    load: function that loads the parameters onto the devices of a mesh.
    class_names: names of the classes in the order of the logits; () if unknown.
    judges_labels: whether the loss uses the logits as predictions of labels.
      The classes must then be those of the training data, in the same order.
    without: path prefixes of the model's parameters that `load` does not load.
  """

  model: Model
  image_size: tuple[int, int]
  load: Callable[[Mesh], PyTree]
  class_names: tuple[str, ...] = ()
  judges_labels: bool = False
  without: tuple[str, ...] = ()

  def shapes(self) -> dict[str, Any]:
    """Returns the shapes of the parameters that `load` loads, by path."""
    params = tree.flatten(abstract_params(self.model, self.image_size))
    return {k: v for k, v in params.items() if not k.startswith(self.without)}


def _not_opened(path: str) -> Frozen:
  raise AssertionError(f'frozen weights ({path}) are only used in training')


class Setting(NamedTuple):
  """Properties of a run that its objective may use.

  Attributes:
    model: see `models.contract.Model`.
    image_size: (height, width), pixels.
    mix: mixup, cutmix and erasing of training batches, on the device.
    steps: function that converts a duration ('10 epochs') to a number of
      updates; it returns 0 outside of training.
    open_frozen: function from the path of weights, in any format, to a `Frozen`
      that is not loaded yet. It raises UserError if the path contains no
      weights. Outside of training it must not be called.
    transform: transform of the training examples; None outside of training.
  """

  model: Model
  image_size: tuple[int, int]
  mix: DeviceAugment = DeviceAugment(0)
  steps: Callable[[str], int] = lambda duration: 0
  open_frozen: Callable[[str], Frozen] = _not_opened
  transform: Transform | None = None

  def model_for(self, size: Size) -> Model:
    """Returns the model for images of another size, with the same parameters.

    Args:
      size: (height, width), pixels.

    Raises:
      UserError: the model does not support this size.
    """
    if size == self.image_size:
      return self.model
    self.model.check(size)
    return self.model.at_sizes(self.image_size)

  def predict(
    self,
    params: PyTree,
    images: Float[Array, 'n y x c'],
    key: Key[Array, ''] | None = None,
    want: tuple[str, ...] = (),
  ) -> dict[str, Array]:
    """Computes results of the model; see `predict` in `models.contract.Model`.

    Args:
      params: parameters of the model.
      images: images in [-1, 1], of any size that the model supports.
      key: random key of dropout and drop path; None for neither.
      want: names of further results.
    """
    _, height, width, _ = images.shape
    model, variables = self.model_for((height, width)), {'params': params}
    return model.apply(variables, images, key, method='predict', want=want)

  def init_model(self, key: Key[Array, '']) -> PyTree:
    """Returns initial parameters of the model.

    Args:
      key: random key of the initialization.
    """
    return self.model.init(key, self.zero_images())['params']

  def zero_images(self) -> Float[Array, '1 y x c']:
    """Returns a batch of one image of zeros, to initialize layers with."""
    return jnp.zeros((1, *self.image_size, self.model.channels))


class Inputs(NamedTuple):
  """Inputs of a loss in addition to the parameters.

  Attributes:
    extra: extra state before this step.
    batch: batch, or micro-batch, on the devices, as the input pipeline returned
      it.
    key: random key of this batch, for augmentation and dropout.
    step: number of updates completed before this step.
    frozen: parameters of the weights that `Objective.frozen` returns, by name.
  """

  extra: PyTree
  batch: Batch
  key: Key[Array, '']
  step: Int[Array, '']
  frozen: dict[str, PyTree]


class Pictures(NamedTuple):
  """Input and output of an objective that masks patches, as images to draw.

  All values are RGB from 0 to 1.

  Attributes:
    image: original images.
    seen: input of the model, with masked patches in grey.
    predicted: prediction of every patch, not only of masked ones. Visible
      patches have no loss, so their predictions look worse (as in arXiv
      2111.06377, Figure 2).
    completed: prediction for the patches that have a loss, and the image
      elsewhere.
  """

  image: Float[Array, 'n y x 3']
  seen: Float[Array, 'n y x 3']
  predicted: Float[Array, 'n y x 3']
  completed: Float[Array, 'n y x 3']


class Objective(Protocol):
  """An objective, which consists of pure functions; the base class of all.

  `vit_jax.objectives.NAME` (or any module of your own) defines
  `Objective(setting, /, *, …)`, whose keyword-only parameters are the keys of
  the config's `objective` section. The transforms declare the content of a
  batch, because not every objective needs labels.

  A subclass sets `setting` and defines `loss`, or `embed` and `joint_loss`. The
  other methods have the defaults of an objective whose parameters are those of
  the model.

  Attributes:
    setting: setting of the run.
    reconstructs: description of the predictions of `reconstruct`; '' if the
      objective does not mask patches.
    classes_key: key of the section that is the number of classes of the labels;
      '' if that is the config's `num_classes`.
    cross_entropy: loss of labels that evaluators report, and probabilities that
      the logits stand for: a key of `losses.LOSSES`; or 'squared', if `logits`
      are predicted numbers.
    joint: whether the loss depends on all examples of a batch together, so that
      it is not a mean over micro-batches; see `embed`.
    trains_model: whether the parameters of the model have gradients.
    locked: pattern of the paths of parameters that must not change; '' for
      none. A run is refused unless `optimizer.rules` freeze all of them.
  """

  setting: Setting
  joint: bool = False
  trains_model: bool = True
  locked: str = ''
  reconstructs: str = ''
  classes_key: str = ''
  cross_entropy: str = 'softmax'

  @property
  def sharding_rules(self) -> tuple[tuple[str, int], ...]:
    """Rules for all parameters; see `models.contract.Model`."""
    return self.setting.model.sharding_rules

  @property
  def unstacked(self) -> tuple[str, ...]:
    """Path suffixes among all parameters; see `models.contract.Model`."""
    return self.setting.model.unstacked

  @property
  def num_classes(self) -> int:
    """Number of logits that `predict` returns; 0 if there is no head."""
    return self.setting.model.num_classes

  @property
  def results(self) -> tuple[str, ...]:
    """Names that `want` of `predict` may contain; by default, the model's."""
    return self.setting.model.outputs

  def frozen(self) -> dict[str, Frozen]:
    """Returns the frozen weights that the loss uses, by name.

    They are needed to build a training step, but not for evaluation.

    Raises:
      UserError: the weights do not exist, or do not fit the run.
    """
    return {}

  def check(self, spec: Spec) -> None:
    """Checks that the objective can be trained on these batches.

    Args:
      spec: spec of the training transform.

    Raises:
      UserError: the batches or the model do not fit the objective.
    """

  def other_passes(self, spec: Spec) -> tuple[tuple[Model, Size], ...]:
    """Returns model and image size of each additional pass of a training step.

    Examples are a pass over local crops and a pass of a decoder. Before a run,
    the results of the kernels in each pass are compared with those of XLA; if
    any differ, the objective is built again with a model without kernels.

    Args:
      spec: spec of the training transform.
    """
    return ()

  def init(self, key: Key[Array, ''], batch: Any) -> tuple[PyTree, PyTree]:
    """Returns initial parameters and initial extra state.

    The extra state consists of arrays that training changes without gradients,
    for example a teacher; it is {} if there are none.

    Args:
      key: random key of the run.
      batch: training batch, or its shapes.
    """
    return self.setting.init_model(key), {}

  def loss(self, params: PyTree, inputs: Inputs) -> Loss:
    """Computes the mean loss of a batch, or of a micro-batch.

    Args:
      params: parameters with respect to which the gradient is computed.
      inputs: other inputs of the loss.

    Returns:
      Loss, and (scalars for the log, values for `update_extra`). All are
      averaged over micro-batches; a `Mean` is a loss or a scalar whose number
      of elements differs between them. A config may limit the scalars
      (`recovery.limits`), so they should include metrics that show a collapse.
      By default, they are those of a joint loss, see `embed`.
    """
    return self.joint_loss(params, self.embed(params, inputs))

  def embed(self, params: PyTree, inputs: Inputs) -> PyTree:
    """Computes the values of each example that a joint loss depends on.

    If `joint` is set, micro-batches are computed as in GradCache (arXiv
    2101.06983): first these values for all micro-batches, without activations
    for the backward pass; then the loss of the whole batch; then each
    micro-batch again, with its backward pass. The results are those of a single
    batch, and a training step has one more forward pass.

    Args:
      params: parameters with respect to which the gradient is computed.
      inputs: inputs of a batch, or of a micro-batch.

    Returns:
      Arrays `[n, …]` with a row for each example.
    """
    raise NotImplementedError

  def joint_loss(self, params: PyTree, embedded: PyTree) -> Loss:
    """Computes the loss of a whole batch, and what `loss` returns with it.

    Args:
      params: parameters; only those are used that `embed` does not use.
      embedded: result of `embed` for all examples of the batch. The loss is not
        a `Mean`.
    """
    raise NotImplementedError

  def update_extra(
    self, params: PyTree, extra: PyTree, carry: PyTree, step: Int[Array, '']
  ) -> PyTree:
    """Returns the extra state after a step, by default unchanged.

    Args:
      params: parameters after the update.
      extra: extra state before the step.
      carry: values that `loss` returned for this method.
      step: number of updates completed, including this one.
    """
    return extra

  def start_extra(self, params: PyTree, extra: PyTree) -> PyTree:
    """Returns the extra state of a run that starts from the given parameters.

    Fine-tuning calls this method, so that a teacher starts from the loaded
    parameters.

    Args:
      params: initial parameters of the run.
      extra: extra state that `init` returned.
    """
    return extra

  def predict(
    self, params: PyTree, batch: Batch, want: tuple[str, ...] = ()
  ) -> dict[str, Array]:
    """Computes results of a batch, float32, without randomness.

    Args:
      params: one of the values of `weights`.
      batch: evaluation batch with `image` `[n, y, x, channels]`, uint8 or
        uint16, of any size that the model supports.
      want: names of further results, see `results`.

    Returns:
      `features`, `logits` and the results named in `want`. By default, only
      those of the model are computed; a subclass adds its own.

    Raises:
      UserError: there is no result of such a name.
    """
    images = normalize(batch['image'])
    # The model refuses names that neither it nor a subclass knows.
    added = {*self.results} - {*self.setting.model.outputs}
    want = tuple(name for name in want if name not in added)
    return self.setting.predict(self.backbone(params), images, want=want)

  def backbone(self, params: PyTree) -> PyTree:
    """Returns the parameters of the model, from which fine-tuning starts."""
    return params

  def start_params(self, params: PyTree, model: PyTree) -> PyTree:
    """Returns initial parameters that contain given parameters of the model.

    Args:
      params: parameters that `init` returned.
      model: parameters of the model, see `backbone`.
    """
    return model

  def reconstruct(
    self, params: PyTree, batch: Batch, key: Key[Array, '']
  ) -> Pictures:
    """Predicts masked patches, with the masks of a step with this key.

    It is called only if `reconstructs` is not ''.

    Args:
      params: one of the values of `weights`.
      batch: evaluation batch with `image` `[n, y, x, channels]`, uint8 or
        uint16.
      key: random key of the step.
    """
    ...

  def layers_above(self, path: str) -> int | tuple[int, ...]:
    """Returns the number of layers above a parameter.

    It is that of the model, see `models.contract.Model`.

    Args:
      path: path of the parameter.
    """
    return self.setting.model.layers_above(path)

  def whole(self, params: PyTree, frozen: dict[str, PyTree]) -> PyTree:
    """Returns parameters for `weights`, with the frozen ones that they need.

    Args:
      params: parameters with respect to which the gradient is computed.
      frozen: parameters of the weights that `frozen` returns, by name.
    """
    return params

  def weights(self, params: PyTree, extra: PyTree) -> dict[str, PyTree]:
    """Returns all sets of weights to evaluate, by name.

    These are `{'params': params}`, and also `{'teacher': …}` if there is a
    teacher. The flags `--weights` take these names, and `metric_suffix` derives
    names of metrics from them. The name 'ema' is reserved for the average of
    the parameters.
    """
    return {'params': params}


class AroundModel(Objective):
  """Base class for objectives that train more than the model.

  The parameters of the model are `model/…`; others, for example those of a
  decoder or a head, are next to them. A subclass sets `setting` and defines
  `init` and `loss`.
  """

  @property
  def sharding_rules(self) -> tuple[tuple[str, int], ...]:
    """Rules of the model; a linear layer `head` is split along its outputs."""
    return (*super().sharding_rules, (r'head/(kernel|bias)', -1))

  def backbone(self, params: PyTree) -> PyTree:
    """Returns the parameters of the model."""
    return params['model']

  def start_params(self, params: PyTree, model: PyTree) -> PyTree:
    """Returns `params` with the given parameters of the model."""
    return params | {'model': model}

  def layers_above(self, path: str) -> int | tuple[int, ...]:
    """Returns 0 for parameters that are not the model's."""
    module, _, rest = path.partition('/')
    return super().layers_above(rest) if module == 'model' else 0


def metric_suffix(weights: str) -> str:
  """Returns the suffix of evaluator names in the metrics of a set of weights.

  The metrics of the evaluator `val` begin with `val/` for the parameters
  themselves and with `val_teacher/` for the weights 'teacher'.

  Args:
    weights: name of the set, see `Objective.weights`.
  """
  return '' if weights == 'params' else f'_{weights}'
