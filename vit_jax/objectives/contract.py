"""What the framework asks of an objective."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Key

from vit_jax.data.contract import Spec
from vit_jax.errors import UserError
from vit_jax.models.contract import Model, Size
from vit_jax.objectives.mixing import DeviceAugment

PyTree = Any
Batch = dict[str, Array]  # what the transforms declare in `spec`
Metrics = dict[str, Array]


class Frozen(NamedTuple):
  """Weights that a training uses and does not change: a teacher, say.

  They are an argument of the training step of their own: placed on the devices
  once, not donated, and no part of checkpoints, which hold their checksum.

  Attributes:
    model: the model of the parameters.
    image_size: (height, width) that they are for, pixels.
    load: (mesh) → the model's parameters, on its devices.
    class_names: names of its classes, in the order of its logits; () if
      unknown.
    judges_labels: whether its logits are held against the run's labels: then
      its classes must have the names, and the order, of the training data's.
  """

  model: Model
  image_size: tuple[int, int]
  load: Callable[[Mesh], PyTree]
  class_names: tuple[str, ...] = ()
  judges_labels: bool = False


class Setting(NamedTuple):
  """What an objective gets of the run it belongs to.

  Attributes:
    model: see `models.contract.Model`.
    image_size: (height, width), pixels.
    mix: mixing and erasing of training batches, on the device.
    steps: a duration of this training ('10 epochs') in updates; zero where
      nothing is trained.
    open_frozen: looks at the weights at a path, in any format, without loading
      them. Raises UserError: there are none.
  """

  model: Model
  image_size: tuple[int, int]
  mix: DeviceAugment = DeviceAugment(0)
  steps: Callable[[str], int] = lambda duration: 0
  open_frozen: Callable[[str], Frozen] | None = None


class Pictures(NamedTuple):
  """What an objective that hides patches sees and makes of images.

  RGB from 0 to 1.

  Attributes:
    image: as it was.
    seen: input of the model; hidden patches are grey.
    predicted: the prediction of every patch, not only of hidden ones. Those
      that are seen have no loss, and look worse (as in arXiv 2111.06377,
      Figure 2).
    completed: predictions where the loss is, the image elsewhere.
  """

  image: Float[Array, 'n y x 3']
  seen: Float[Array, 'n y x 3']
  predicted: Float[Array, 'n y x 3']
  completed: Float[Array, 'n y x 3']


class Objective(Protocol):
  """An objective: pure functions of parameters, extra state and a batch.

  `vit_jax.objectives.NAME` (or any module of your own) defines
  `Objective(setting, /, *, …)`, whose keyword-only parameters are the keys of
  the config's `objective` section. Not every objective has labels or a head:
  the transforms declare the content of a batch.

  Attributes:
    sharding_rules: as in `models.contract.Model`, for all of its parameters.
    apart: as in `models.contract.Model`, for all of its parameters.
    num_classes: number of logits that `predict` returns; 0 if there is no head.
    reconstructs: description of the predictions of `reconstruct`, in words; ''
      if nothing is hidden, so that nothing can be reconstructed.
  """

  @property
  def num_classes(self) -> int: ...

  @property
  def sharding_rules(self) -> tuple[tuple[str, int], ...]: ...

  @property
  def apart(self) -> tuple[str, ...]: ...

  @property
  def reconstructs(self) -> str: ...

  def frozen(self) -> dict[str, Frozen]:
    """Weights that the loss needs and does not change, by name.

    Asked for where a step is built; an evaluation does without them.

    Raises:
      UserError: they are not there, or do not fit the run.
    """
    ...

  def check(self, spec: Spec) -> None:
    """Raises UserError if it cannot be trained on what batches hold.

    Args:
      spec: the spec that the training transform declares.
    """
    ...

  def other_passes(self, spec: Spec) -> tuple[tuple[Model, Size], ...]:
    """Returns further models, and sizes of images, of a training step.

    Examples are local crops and a decoder. Kernels are compared with XLA for
    each of them before a run; if one differs, the objective is built again on a
    model without kernels.

    Args:
      spec: as in `check`.
    """
    ...

  def init(self, key: Key[Array, ''], batch: Any) -> tuple[PyTree, PyTree]:
    """Fresh parameters and extra state (a teacher, a centre; {} for none).

    Args:
      key: random key of the run.
      batch: a training batch, or the shapes of one.
    """
    ...

  def loss(
    self,
    params: PyTree,
    extra: PyTree,
    batch: Batch,
    key: Key[Array, ''],
    step: Int[Array, ''],
    frozen: dict[str, PyTree],
  ) -> tuple[Float[Array, ''], tuple[Metrics, PyTree]]:
    """Computes the mean loss of a batch, or of a micro-batch.

    Args:
      params: parameters that the gradient is computed for.
      extra: extra state before this step.
      batch: batch on the devices, as the input pipeline returned it.
      key: random key of this batch; drives augmentation and dropout.
      step: number of updates completed.
      frozen: parameters of each of `frozen()`.

    Returns:
      The loss, and (scalars for the log, values that `update_extra` needs).
      Both are averaged over micro-batches. A config may set bounds to any of
      the scalars (`recovery.limits`), so metrics that show a collapse belong
      among them.
    """
    ...

  def update_extra(
    self, params: PyTree, extra: PyTree, carry: PyTree, step: Int[Array, '']
  ) -> PyTree:
    """Returns the extra state after a step.

    Args:
      params: parameters after the update.
      extra: extra state before the step.
      carry: values that `loss` returned next to the metrics.
      step: number of updates completed, this one included.
    """
    ...

  def start_extra(self, params: PyTree, extra: PyTree) -> PyTree:
    """Returns the extra state of a training that starts from given parameters.

    Fine-tuning uses it, so that a teacher starts from the loaded parameters.

    Args:
      params: parameters that the training starts from.
      extra: extra state that `init` returned.
    """
    ...

  def predict(self, params: PyTree, batch: Batch) -> dict[str, Array]:
    """`features` and `logits` of a batch's `image`, nothing random; float32.

    Args:
      params: any of those in `weights`.
      batch: batch of an evaluation: `image` uint8 `[n, y, x, 3]`.
    """
    ...

  def backbone(self, params: PyTree) -> PyTree:
    """Returns the model's own parameters, which fine-tuning uses."""
    ...

  def start_params(self, params: PyTree, model: PyTree) -> PyTree:
    """Returns parameters for a training that starts from those of a model.

    Args:
      params: parameters that `init` returned.
      model: parameters of the model, as `backbone` returns them.
    """
    ...

  def reconstruct(
    self, params: PyTree, batch: Batch, key: Key[Array, '']
  ) -> Pictures:
    """Pictures of images, hiding what a step with that key would hide.

    Asked for only where `reconstructs` says something.

    Args:
      params: any of those in `weights`.
      batch: batch of an evaluation: `image` uint8 `[n, y, x, 3]`.
      key: random key of the step.
    """
    ...

  def weights(self, params: PyTree, extra: PyTree) -> dict[str, PyTree]:
    """Returns all weights worth evaluating, by the ending of their metrics.

    `{'': params}`, and `{'_teacher': …}` if there is a teacher.
    """
    ...


class Defaults:
  """Answers for an objective that has nothing to say; a base class.

  `init`, `loss` and `predict` are yet to be defined.
  """

  sharding_rules: tuple[tuple[str, int], ...] = ()
  apart: tuple[str, ...] = ()
  reconstructs: str = ''
  setting: Setting

  @property
  def num_classes(self) -> int:
    """The outputs of the model's head."""
    return self.setting.model.num_classes

  def frozen(self) -> dict[str, Frozen]:
    """None are needed."""
    return {}

  def check(self, spec: Spec) -> None:
    """Batches may hold anything."""
    del spec

  def other_passes(self, spec: Spec) -> tuple[tuple[Model, Size], ...]:
    """There are none."""
    del spec
    return ()

  def update_extra(
    self, params: PyTree, extra: PyTree, carry: PyTree, step: Int[Array, '']
  ) -> PyTree:
    """Nothing changes."""
    del params, carry, step
    return extra

  def start_extra(self, params: PyTree, extra: PyTree) -> PyTree:
    """It does not depend on the parameters."""
    del params
    return extra

  def backbone(self, params: PyTree) -> PyTree:
    """Returns all parameters, which are the model's."""
    return params

  def start_params(self, params: PyTree, model: PyTree) -> PyTree:
    """There are no others."""
    del params
    return model

  def reconstruct(
    self, params: PyTree, batch: Batch, key: Key[Array, '']
  ) -> Pictures:
    """Nothing is hidden.

    Raises:
      UserError: always.
    """
    del params, batch, key
    raise UserError(
      f'the objective {type(self).__module__.rpartition(".")[2]!r} does '
      "not reconstruct images: use objective.name='mae' or 'masked_patch'."
    )

  def weights(self, params: PyTree, extra: PyTree) -> dict[str, PyTree]:
    """Returns the parameters only."""
    del extra
    return {'': params}
