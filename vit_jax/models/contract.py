"""Interface between the framework and its models."""

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from vit_jax.errors import UserError

PyTree = Any
Size = tuple[int, int]  # (height, width) of images, pixels
# (mean, std) of each channel of pixels in [0, 1]
Statistics = tuple[Sequence[float], Sequence[float]]
Leaves = dict[str, Float[np.ndarray, '...']]  # parameters by path

# Names that the argument `want` of `predict` may contain.
WANTED = ('tokens', 'patches', 'layers', 'attention', 'heads')


class Patches(NamedTuple):
  """Patch tokens of images: the grid, and which of its patches they are.

  Attributes:
    grid: rows and columns of all patches of the image.
    index: index of the patch of each token, int `[n, t]`, counted row by row
      as `embed` returns the patches; None for all patches in this order.
  """

  grid: tuple[int, int]
  index: Int[Array, 'n t'] | None = None


class Masked(NamedTuple):
  """Patches whose embeddings are replaced by a mask token.

  The token is a parameter of the objective, not of the model.

  Attributes:
    index: whether each patch is masked, bool `[n, p]`.
    token: mask token, `[1, width]`.
  """

  index: Bool[Array, 'n p']
  token: Float[Array, '1 d']


def symmetric(channels: int) -> Statistics:
  """Returns the statistics that leave pixels in [-1, 1] unchanged."""
  return (0.5,) * channels, (0.5,) * channels


def is_symmetric(statistics: Statistics) -> bool:
  """Returns whether the statistics leave pixels in [-1, 1] unchanged."""
  return all(value == 0.5 for values in statistics for value in values)


class Model(Protocol):
  """A model as pure functions of its parameters, and the base class of models.

  A subclass needs `num_classes`, `init` and `apply`; all other attributes and
  methods have the defaults that are defined here.

  `vit_jax.models.NAME` (or a module of your own) defines
  `Model(num_classes, /, *, …)`, which returns an object with this interface.
  The keyword-only parameters are the keys of the config's `model` section. With
  `num_classes=0` a model has no head, and its logits are its features.

  A Flax Linen module already has `init` and `apply`. `apply` calls the
  following methods by name (`method='predict'`), with access to the parameters:

  - `predict(images, key=None, want=())` returns `features` `[n, width]` and
    `logits` `[n, num_classes]`, float32. With a key, dropout and drop path are
    applied. `want` contains names of further results: `tokens` `[n, t, d]`
    after the last norm, `patches` `[n, rows, columns, d]`, those of the patches
    as a map, `layers` `[n, layers, t, d]` after every block,
    `attention` `[n, layers, heads, q, k]`, and `heads` `[n, heads,
    num_classes]`, the logits of each head (a distilled model has one head for
    labels and one for its teacher, and `logits` is their mean). A model raises
    UserError if it does not have one of these results.
  - `embed(images, masked=None)` returns the patch tokens, including positions
    that are added before the first layer; `masked`, a `Masked`, names patches
    that are replaced by a mask token before positions are added.
    `encode(tokens, key, patches=None)` returns all tokens after the last norm;
    `readout(tokens)` returns features and logits; `last_norm(tokens)` applies
    the last norm to the tokens of any block. Only models that process tokens
    have these four methods, which self-supervised objectives use. Tokens may be
    left out between `embed` and `encode`. Since positions may act in every
    layer, `patches` then specifies the remaining tokens:
    `Patches(model.grid(image_size), index)`. A model with such positions raises
    UserError without `patches`.
  - `grid(image_size)` returns rows and columns of patches, and `patch_pixels`
    is the side of a patch in the image. Only models that process tokens have
    them; both are used directly, not through `apply`. Patch tokens are the last
    tokens, row by row. A class token whose output is the features is the first
    token, and its parameter is `cls`.

  Images are float `[n, y, x, channels]` in [-1, 1].

  Attributes:
    init: method `init(key, images)`, which returns `{'params': initial
      parameters}` for images of this shape.
    apply: method `apply(variables, *args, method=None, **kwargs)`, which
      returns the logits of `(images, key=None)`, or the result of a method.
    num_classes: number of outputs of the head; 0 for no head.
    outputs: names that `want` of `predict` may contain.
    channels: number of channels of the images; 3 for RGB.
    normalization: mean and standard deviation of each channel of pixels in
      [0, 1], by which the model normalizes its input. Weights are converted
      between normalizations. 0.5 for all leaves pixels in [-1, 1].
    fresh: path prefixes of parameters that fine-tuning initializes from
      scratch.
    replaceable: path prefixes of parameters that fine-tuning initializes from
      scratch only if the weights do not have them.
    sized: path prefixes of parameters that depend on the image size.
    sharding_rules: pairs of a regular expression for the end of a parameter's
      path and the dimension that the mesh axis `model` splits.
    unstacked: path suffixes of stacked parameters whose gradients are best
      summed over micro-batches layer by layer.
    architecture: keys of the config's `model` section that the parameters
      determine, with their values. Fine-tuning uses these values; a config that
      sets such a key must set the same value.
    options: keys of the section that fine-tuning takes from the weights if the
      config has their default, with their values.
    initial: keys in `architecture` that, unless they are None, only initialize
      parameters, so weights may have been trained with other values.
    reference: model that computes the same function without custom kernels.
      FLOPs are counted on it, and kernels are compared with it.
    kernels: models for the comparison of kernels; None if the model uses no
      kernels of its own on the devices of the current mesh.
  """

  init: Callable[..., dict[str, PyTree]]
  apply: Callable[..., Any]
  num_classes: int
  outputs: tuple[str, ...] = ()
  channels: int = 3
  normalization: Statistics = symmetric(3)
  fresh: tuple[str, ...] = ('head/',)
  replaceable: tuple[str, ...] = ()
  sized: tuple[str, ...] = ()
  sharding_rules: tuple[tuple[str, int], ...] = ()
  unstacked: tuple[str, ...] = ()
  architecture: Mapping[str, Any] = types.MappingProxyType({})
  options: Mapping[str, Any] = types.MappingProxyType({})
  initial: tuple[str, ...] = ()
  kernels: 'Kernels | None' = None

  @property
  def reference(self) -> Any:
    """The model itself, if it has no kernels."""
    return self

  def check(self, image_size: Size) -> None:
    """Checks that images can have this size.

    Args:
      image_size: (height, width), pixels.

    Raises:
      UserError: the model does not support this size.
    """

  def adapt(
    self, leaves: Leaves, old_size: Size, new_size: Size, method: str | None
  ) -> Leaves:
    """Returns the parameters that `sized` names, for images of another size.

    Args:
      leaves: parameters by path for images of `old_size`, on the host.
      old_size: (height, width), pixels.
      new_size: (height, width), pixels.
      method: one of `positions.METHODS`; None for the method of the model.
    """
    del old_size, new_size, method
    return leaves

  def layers_above(self, path: str) -> int | tuple[int, ...]:
    """Returns the number of layers above a parameter, for `layer_decay`.

    Args:
      path: path of the parameter.

    Returns:
      0 for heads and what precedes them directly, 1 for the last block, …, and
      the number of blocks + 1 for embeddings, tokens and positions; for a stack
      of layers, a number for each of them.

    Raises:
      UserError: the model does not define it.
    """
    raise UserError(
      f'the model does not define the layer of {path!r}, which optimizer.'
      'layer_decay needs: set optimizer.layer_decay=1 or another model.name, '
      "such as 'vit' or 'swin'."
    )

  def at_sizes(self, made_for: Size, offset: float = 0.0) -> Any:
    """Returns the same model for images of any size.

    Its parameters remain those for `made_for`; they are interpolated where they
    are used, with gradients. `adapt`, in contrast, changes the parameters once.

    Args:
      made_for: (height, width) of the images that the parameters are for,
        pixels.
      offset: offset of the interpolation; see `positions.cubic`.

    Raises:
      UserError: the model does not support images of several sizes.
    """
    if self.sized:
      raise UserError(
        f'the parameters {", ".join(self.sized)} of this model fit only images '
        f'of {made_for[0]}x{made_for[1]} pixels, and this training has images '
        "of several sizes: set model.name='vit', and a model.position other "
        "than 'relative' and 'relative_bias'."
      )
    return self

  def computed_by(self, image_size: Size) -> str:
    """Describes the implementation on the devices of the current mesh.

    The log and `plan` contain the description.

    Args:
      image_size: (height, width), pixels.
    """
    return 'XLA'

  def compiler_options(
    self, platform: str, num_devices: int
  ) -> dict[str, str | int]:
    """Returns XLA options for the compilation of a step of this model.

    Args:
      platform: JAX platform, such as 'tpu'.
      num_devices: number of devices of the mesh.
    """
    return {}


class Stem(Protocol):
  """Layers of a Vision Transformer between the images and the patches.

  `vit_jax.models.NAME` (or a module of your own) defines
  `Stem(dtype, remat, unroll, /, *, …)`, which returns a Flax module with this
  interface. Its keyword-only parameters are the keys of the section
  `model.stem`; the positional ones are the values of the model.

  Attributes:
    stride: pixels per position of the map.
    section: config section of the stem: its name and the keys that determine
      the parameters.
    sharding_rules: pairs as in `Model.sharding_rules`.
  """

  stride: int
  section: dict[str, Any]
  sharding_rules: tuple[tuple[str, int], ...]

  def __call__(
    self, images: Float[Array, 'n y x c']
  ) -> Float[Array, 'n rows columns c']:
    """Computes maps of ⌈y / stride⌉ rows and ⌈x / stride⌉ columns."""
    ...


class Kernels(NamedTuple):
  """Models for the comparison of kernels with plain XLA operations.

  Attributes:
    probe: model that compiles in seconds and whose kernels have the same shapes
      and dtypes as in this model, for example its first two layers. It is
      compared with its `reference`, in training, before a run.
    plain: this model without kernels, used for the run if the comparison fails.
  """

  probe: Model
  plain: Model


def abstract_key() -> Any:
  """Returns the shape of a random key, without using a device."""
  return jax.eval_shape(lambda: jax.random.key(0))


def abstract_params(model: Model, image_size: Size) -> PyTree:
  """Returns the shapes of a model's parameters without computing anything.

  Args:
    model: model.
    image_size: (height, width), pixels.
  """
  images = jax.ShapeDtypeStruct((1, *image_size, model.channels), np.float32)
  return jax.eval_shape(model.init, abstract_key(), images)['params']
