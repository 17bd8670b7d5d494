"""Base class and base config of the backbones in this package."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from vit_jax.arrays.pixels import IMAGENET, MAX_CHANNELS, NONE
from vit_jax.config import schema
from vit_jax.errors import UserError, check_choice, check_range
from vit_jax.models import contract
from vit_jax.models.attention.attention import unsupported
from vit_jax.models.contract import Kernels, Model, Statistics
from vit_jax.models.init import ZEROS, Initializer
from vit_jax.models.layers import REMAT, head

Images = Float[Array, 'n y x c']
# Type of images that `check_images` has not checked yet. It is Any, because the
# messages of `check_images` are more helpful than a run-time type checker's.
UncheckedImages = Any
# Type of a config key for a size. It may be None if the config names a variant
# such as 'B/16'; `BackboneConfig.complete` then fills it in, so static type
# checkers see a type without None.
if TYPE_CHECKING:
  Size = int
  Sizes = tuple[int, ...]
else:
  Size = int | None
  Sizes = tuple[int, ...] | None
OF_VARIANT: Any = None  # default of such a key
DTYPES = ('bfloat16', 'float32')
# Units of the pixels that a patch embedding receives (`model.pixels`).
STATISTICS: dict[str, Statistics] = {
  'symmetric': NONE,
  'imagenet': IMAGENET,
}
MAX_SIZE = 2**31 - 1  # the largest dimension of an XLA array


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackboneConfig:
  """Config keys of every backbone; a subclass adds those of its own.

  Attributes:
    dtype: dtype of the computation, 'bfloat16' or 'float32'; parameters are
      always float32.
    remat: activations that the backward pass recomputes: 'none', 'full' (all)
      or 'dots' (all but the products of weight matrices). Attention weights
      are recomputed in any case.
    unroll: number of layers that are unrolled in each step of a scan; all
      layers if there are fewer.
    head_bias: initial value of the head's bias (-10 for a sigmoid loss).
    variant: name of a set of sizes; a config key of the backbones that have
      named sizes.
    pixels: units of the pixels, a key of `STATISTICS`; a config
      key of the backbones that support other units.
    channels: number of channels of the images, 1 to 16; 3 for RGB.
    mean: mean of each channel of pixels in [0, 1] (values divided by 255, or by
      65,535 for 16 bits), by which the model normalizes them. `check_data`
      computes it. () for the units that `pixels` names.
    std: standard deviation of each channel of the same pixels; () with `mean`.

  Raises:
    UserError: a value is not allowed.
  """

  variant: ClassVar[str | None] = None
  pixels: ClassVar[str] = 'symmetric'
  dtype: str = 'bfloat16'
  remat: str = 'none'
  unroll: int = 1
  head_bias: float = 0.0
  channels: int = 3
  mean: tuple[float, ...] = ()
  std: tuple[float, ...] = ()

  def __post_init__(self):
    self.check_choices(dtype=DTYPES, remat=REMAT)
    self.check_range('unroll', at_least=1, at_most=MAX_SIZE)
    self.check_range('head_bias')
    self.check_range('channels', at_least=1, at_most=MAX_CHANNELS)
    self._check_statistics()

  def _check_statistics(self) -> None:
    """Checks that `mean` and `std` have a number for each channel.

    Raises:
      UserError: they do not, or `pixels` names units of RGB pixels for images
        of another number of channels.
    """
    mean, std = tuple(self.mean), tuple(self.std)
    object.__setattr__(self, 'mean', mean)
    object.__setattr__(self, 'std', std)
    numbers = self.channels if mean or std else 0
    fits = len(mean) == numbers and len(std) == numbers
    fits &= all(0 <= x <= 1 for x in mean) and all(0 < x <= 1 for x in std)
    if self.pixels != 'symmetric':
      fits &= not mean and self.channels == 3
    advice = (
      'give a mean in [0, 1] and a std in (0, 1] for each channel, or neither; '
      "pixels='imagenet' is for three channels without a mean and std"
    )
    self.check_together(fits, advice, 'channels', 'mean', 'std', 'pixels')

  @property
  def normalization(self) -> Statistics:
    """Mean and std of each channel; see `models.contract.Model`."""
    if self.mean:
      return self.mean, self.std
    if self.pixels == 'symmetric':
      return contract.symmetric(self.channels)
    return STATISTICS[self.pixels]

  def check_choices(self, **choices: Iterable[str]) -> None:
    """Checks that the given keys have one of their allowed values.

    Args:
      **choices: allowed values of each key.

    Raises:
      UserError: a key has another value.
    """
    for key, allowed in choices.items():
      check_choice(f'model.{key}', getattr(self, key), allowed)

  def check_range(self, *keys: str, **limits: float) -> None:
    """Checks that the values of keys are finite and within limits.

    Args:
      *keys: names of the keys.
      **limits: limits of `errors.check_range`.

    Raises:
      UserError: a value is outside the limits.
    """
    for key in keys:
      check_range(f'model.{key}', getattr(self, key), **limits)

  def check_together(self, fits: Any, advice: str, *keys: str) -> None:
    """Checks that values of keys do not exclude each other.

    Args:
      fits: whether they do not.
      advice: what to do, the end of the message.
      *keys: names of the keys.

    Raises:
      UserError: the values exclude each other.
    """
    if not fits:
      values = [f'model.{key} is {getattr(self, key)!r}' for key in keys]
      raise UserError(f'{" and ".join(values)}: {advice}.')

  def complete(
    self, keys: Iterable[str], variants: Mapping[str, Mapping[str, Any]]
  ) -> None:
    """Replaces sizes that are None by the sizes of the variant.

    Args:
      keys: keys of all sizes.
      variants: sizes by key of each variant.

    Raises:
      UserError: the variant is unknown, or a size is neither given nor
        determined by it.
    """
    sizes: Mapping[str, Any] = {}
    if self.variant is not None:
      check_choice('model.variant', self.variant, variants)
      sizes = variants[self.variant]
    for key in keys:
      if getattr(self, key) is None:
        # The dataclass is frozen, but it is still being initialized.
        object.__setattr__(self, key, sizes.get(key))
    if missing := [key for key in keys if getattr(self, key) is None]:
      raise UserError(
        f'the model lacks {", ".join(missing)}: set these sizes, or a '
        f'model.variant such as {next(iter(variants))!r}. Fine-tuning takes '
        'them from the weights: python -m vit_jax.finetune.'
      )

  @property
  def attention_needs(self) -> list[str]:
    """Options of attention that kernels may not support; see `choose`."""
    return []

  @property
  def probe(self) -> dict[str, Any]:
    """Keys of a model with few layers, for the comparison of kernels."""
    return {}

  @property
  def compute_dtype(self) -> Any:
    """The dtype of the computation as a NumPy dtype."""
    return jnp.dtype(self.dtype)


class Backbone(nn.Module, Model):
  """Base class of the backbones; satisfies `models.contract.Model`.

  A subclass defines `_predict`, `determined` and, where the defaults do not
  fit, `outputs` and `attention_by`. The keys of its config are readable as
  attributes of the model: `model.width` is `model.config.width`.

  Attributes:
    num_classes: number of outputs of the head; 0 for a model without a head.
    config: keys of the config's `model` section, validated.
  """

  num_classes: int
  config: Any

  determined = ()  # keys of the config that the parameters determine
  adopted = ()  # keys of `options`
  outputs = ('tokens',)  # names that `want` may contain

  def __getattr__(self, name: str) -> Any:
    # Python calls this method only for names that are not found otherwise.
    config = self.__dict__.get('config')
    if name in getattr(config, '__dataclass_fields__', ()):
      return getattr(config, name)
    parent: Any = super()
    return parent.__getattr__(name)

  def __call__(
    self, images: UncheckedImages, key: Key[Array, ''] | None = None
  ) -> Float[Array, 'n k']:
    """Computes the logits of images, float32.

    Args:
      images: float images in [-1, 1], `[n, height, width, channels]`.
      key: random key of dropout and drop path; None for evaluation.
    """
    return self.predict(images, key)['logits']

  def predict(
    self,
    images: UncheckedImages,
    key: Key[Array, ''] | None = None,
    want: tuple[str, ...] = (),
  ) -> dict[str, Float[Array, 'n ...']]:
    """Computes features, logits and, on request, intermediate results.

    Args:
      images: float images in [-1, 1], `[n, height, width, channels]`.
      key: random key of dropout and drop path; None for evaluation.
      want: names of further results, from `models.contract.WANTED`.

    Returns:
      `features` `[n, width]`, `logits` `[n, num_classes]` (equal to the
      features if `num_classes` is 0) and the results named in `want`; float32.

    Raises:
      UserError: the images have a wrong dtype, shape or size, or the model
        does not have a result named in `want`.
    """
    if missing := [name for name in want if name not in self.outputs]:
      raise UserError(
        f'the model {type(self).__name__} has no {" or ".join(missing)}; '
        f'allowed in want: {", ".join(self.outputs)}.'
      )
    outputs = self._predict(self._input(images), key, want)
    return {
      name: outputs[name].astype(jnp.float32)
      for name in ('features', 'logits', *want)
    }

  @nn.nowrap
  def _input(self, images: UncheckedImages) -> Images:
    """Returns images in the units and dtype of the first layer.

    Raises:
      UserError: the images have a wrong dtype or shape.
    """
    check_images(images, self.channels)
    pixels = scaled(jnp.asarray(images), self.normalization)
    return pixels.astype(self.config.compute_dtype)

  def _predict(
    self, images: Images, key: Key[Array, ''] | None, want: tuple[str, ...]
  ) -> dict[str, Any]:
    """Computes the results of `predict`, in any dtype."""
    raise NotImplementedError

  @nn.nowrap
  def _new_head(self, kernel_init: Initializer = ZEROS) -> Any:
    """Returns a head, to be assigned in `setup`; None for a model without one.

    Args:
      kernel_init: initializer of the matrix.
    """
    if not self.num_classes:
      return None
    return head(
      self.num_classes,
      self.config.compute_dtype,
      bias=self.config.head_bias,
      kernel_init=kernel_init,
    )

  def _logits(self, features: Float[Array, 'n d']) -> Float[Array, 'n k']:
    """Computes the logits, which are the features if there is no head."""
    return self.head(features) if self.num_classes else features

  def _results(
    self, features: Float[Array, 'n d'], tokens: Float[Array, 'n t d']
  ) -> dict[str, Array]:
    """Returns features, logits and tokens in a dict, as `_predict` does."""
    logits = self._logits(features)
    return {'features': features, 'logits': logits, 'tokens': tokens}

  @property
  def channels(self) -> int:
    """Number of channels of the images."""
    return self.config.channels

  @property
  def normalization(self) -> Statistics:
    """Mean and std by which the model normalizes pixels in [0, 1]."""
    return self.config.normalization

  @property
  def architecture(self) -> dict[str, Any]:
    """Keys of the config that the parameters determine, with their values."""
    return {key: getattr(self.config, key) for key in self.determined}

  @property
  def options(self) -> dict[str, Any]:
    """Keys that fine-tuning takes from the weights unless they are set."""
    return {key: getattr(self.config, key) for key in self.adopted}

  @nn.nowrap
  def replace(self, **options: Any) -> Any:
    """Returns the same model with other values of some config keys."""
    return self.clone(config=dataclasses.replace(self.config, **options))

  @nn.nowrap
  def attention_by(
    self, image_size: tuple[int, int] | None = None
  ) -> dict[str, str]:
    """Returns the implementation of attention, see `attention.choose`.

    Args:
      image_size: (height, width), pixels; None for the smallest number of
        tokens.

    Returns:
      The implementation for each stage; {} without attention.
    """
    return {}

  @nn.nowrap
  def computed_by(self, image_size: tuple[int, int]) -> str:
    """Describes how attention is computed, and which options exclude kernels.

    Args:
      image_size: (height, width), pixels.
    """
    by = self.attention_by(image_size)
    if by and (missing := unsupported(self.config.attention_needs)):
      return f'attention by XLA: kernels do not support {" and ".join(missing)}'
    used = ' and '.join(sorted({*by.values()}))
    return f'attention by {used}' if by else 'XLA'

  @property
  def reference(self) -> Any:
    """The same model without kernels, rematerialization or unrolling."""
    kernels = {'attention': 'xla'} if hasattr(self.config, 'attention') else {}
    return self.replace(remat='none', unroll=1, **kernels)

  @property
  def kernels(self) -> Kernels | None:
    """The models for the comparison of kernels; None if XLA is used."""
    if {*self.attention_by().values()} <= {'XLA'}:
      return None
    probe = self.replace(unroll=1, **self.config.probe)
    return Kernels(probe, self.replace(attention='xla'))


def constructor(
  model: type[Backbone], config: type[BackboneConfig]
) -> Callable[..., Any]:
  """Returns the function `Model`, which builds a backbone from config keys.

  Args:
    model: class of the backbone.
    config: class of its config, whose fields are the keywords of the function.
  """

  @schema.keyed_by(config)
  def Model(num_classes: int, /, **keys: Any) -> Backbone:  # noqa: N802
    """Builds the model; see its config for the keys and their errors.

    Args:
      num_classes: number of outputs of the head; 0 for a model without a head.
      **keys: fields of the config.
    """
    return model(num_classes, config(**keys))

  return Model


def whole_patches(
  image_size: tuple[int, int],
  side: int,
  stride: int = 1,
  drop: bool | None = None,
) -> tuple[int, int]:
  """Returns rows and columns of patches of an image.

  Args:
    image_size: (height, width), pixels.
    side: side of a patch, in positions of the map that is cut into patches.
    stride: pixels per position of this map, whose sides are rounded up.
    drop: whether positions after the last whole patch are dropped; None if the
      model has no such option.

  Raises:
    UserError: the side does not divide the map, or is larger.
  """
  rows, columns = (-(-pixels // stride) for pixels in image_size)
  fits = drop or (rows % side == 0 and columns % side == 0)
  has_a_patch = min(rows, columns) >= side
  if not (fits and has_a_patch):
    height, width = image_size
    can_drop = drop is False and has_a_patch
    hint = ", or set model.remainder='drop'" if can_drop else ''
    raise UserError(
      f'an image of {height}x{width} pixels does not consist of patches of '
      f'{side * stride} pixels: use multiples of {side * stride} pixels{hint}.'
    )
  return rows // side, columns // side


def check_images(images: Any, channels: int) -> None:
  """Checks dtype and shape of images while a model is traced.

  Args:
    images: images, or their shape and dtype.
    channels: number of channels that the images must have.

  Raises:
    UserError: the images are not floating-point numbers `[n, y, x, channels]`.
  """
  shape, dtype = tuple(np.shape(images)), jnp.result_type(images)
  fits = len(shape) == 4 and shape[-1] == channels
  if not fits or not jnp.issubdtype(dtype, jnp.floating):
    raise UserError(
      f'the images have the dtype {dtype} and the shape {list(shape)}; a model '
      'takes floating-point images in [-1, 1] of the shape [n, height, width, '
      f'{channels}], with the channels last. Convert pixels from 0 to 255 by '
      'images / 127.5 - 1, or as the preprocessing of the weights specifies, '
      'and add the batch dimension of a single image by images[None].'
    )


def scaled(
  images: Float[Array, 'n y x c'], statistics: Statistics
) -> Float[Array, 'n y x c']:
  """Returns images in the units of a patch embedding.

  Args:
    images: images in [-1, 1].
    statistics: mean and std of each channel of pixels in [0, 1], by which the
      images are normalized.
  """
  if contract.is_symmetric(statistics):
    return images
  mean, std = (np.asarray(values, np.float32) for values in statistics)
  # Computed in float32; only the embedding rounds the result to bfloat16.
  return ((images.astype(jnp.float32) + 1) / 2 - mean) / std
