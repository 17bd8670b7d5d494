"""Masked autoencoders: masked patches are predicted from visible ones.

"Masked Autoencoders Are Scalable Vision Learners", arXiv 2111.06377. The
encoder, which is the model, processes only the visible patches and its class
token, without mask tokens. A small decoder receives the encoded tokens, and a
learned mask token for each masked patch, all with position embeddings.
"""

import dataclasses
import math
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from vit_jax.arrays.pixels import IMAGENET
from vit_jax.config import schema
from vit_jax.config.schema import Nested, Section
from vit_jax.data.contract import Spec, require
from vit_jax.models.contract import Model, Patches, Size, is_symmetric
from vit_jax.models.mae_decoder import Decoder
from vit_jax.objectives import contract, patches
from vit_jax.objectives.health import token_metrics
from vit_jax.objectives.mixing import largest, normalize

PyTree = Any
_DECODER = Nested('vit_jax.models.mae_decoder:Decoder')
_EPSILON = 1e-6  # added to the variance of a patch
_STREAM = 0x6D6165  # folded into the step's key, which dropout also uses


@dataclasses.dataclass(eq=False)
class Objective(contract.AroundModel):
  """Mean squared error of masked patches.

  It implements `objectives.contract.Objective`. Parameters: `model/…`,
  `decoder/…` (see `models.mae_decoder`). A batch contains `image` `[n, y, x,
  channels]`, uint8 or uint16.

  The target consists of pixels normalized by the statistics of ImageNet,
  (value / 255 − mean) / std of each channel, as in the authors' code. The input
  of the encoder is in [-1, 1], as for all models here. The two differ by a
  linear map, which the patch embedding can learn. If the model normalizes its
  input otherwise, or images are not RGB, the target is normalized as the input
  is.

  Attributes:
    setting: setting of the run.
    mask_ratio: fraction of the patches that is masked, in (0, 1). Of p patches,
      ⌊p · (1 − mask_ratio)⌋ are visible, computed in floating point as in the
      authors' code (39 of 400 for .9); at least one patch must be visible and
      one masked.
    norm_pixels: whether the mean of each target patch is subtracted, and the
      result divided by √(variance + 1e-6). The variance is unbiased; both
      statistics are taken over all pixels and channels of the patch.
    decoder: config section of the decoder, see `models.mae_decoder`.

  Raises:
    UserError: the model cannot leave out tokens, or a value is out of range.
  """

  setting: contract.Setting
  _: dataclasses.KW_ONLY
  mask_ratio: float = 0.75
  norm_pixels: bool = True
  decoder: Annotated[Section, _DECODER] = schema.EMPTY

  def __post_init__(self):
    model, (height, width) = self.setting.model, self.setting.image_size
    self.grid = patches.grid_of(self.setting, 'mae')
    count = math.prod(self.grid)
    self.num_visible = int(count * (1 - self.mask_ratio))
    hidden = count - self.num_visible
    patches.check_hidden('mask_ratio', self.mask_ratio, hidden, count)
    outputs = height * width * model.channels // count
    self._plain_decoder = schema.construct(Decoder, self.decoder, outputs)
    self._statistics = model.normalization
    if model.channels == 3 and is_symmetric(self._statistics):
      self._statistics = IMAGENET

  @property
  def sharding_rules(self) -> tuple[tuple[str, int], ...]:
    """Rules of the model and of the decoder."""
    return (
      *self.setting.model.sharding_rules,
      *self._plain_decoder.sharding_rules,
    )

  def check(self, spec: Spec) -> None:
    """Checks that batches have images, and that the model has no head."""
    require(spec, 'image', who="the objective 'mae'")
    patches.check_headless(self.setting, 'mae')

  def other_passes(self, spec: Spec) -> tuple[tuple[Model, Size], ...]:
    """Returns the passes of the encoder on visible patches, and of the decoder.

    The image size for the encoder is a single row of as many patches as are
    visible. A Vision Transformer with the same layers stands for the decoder.
    """
    model: Any = self.setting.model  # has patches, see `patches.grid_of`
    side = model.patch_pixels
    visible = (side, side * self.num_visible)
    return (model, visible), (self._decoder().like, self.grid)

  def init(self, key: Key[Array, ''], batch: Any) -> tuple[PyTree, PyTree]:
    """Returns initial parameters of model and decoder, and no extra state."""
    model_key, decoder_key = jax.random.split(key)
    model = self.setting.init_model(model_key)
    order = jnp.arange(math.prod(self.grid))[None]
    images = self.setting.zero_images()
    shape = jax.eval_shape(lambda: self._encode(model, images, order, key=None))
    decoder = self._decoder().init(
      decoder_key,
      jnp.zeros(shape.shape, shape.dtype),
      order,
      self.grid,
      self.num_visible,
    )
    return {'model': model, 'decoder': decoder['params']}, {}

  def loss(self, params: PyTree, inputs: contract.Inputs) -> contract.Loss:
    """Computes the mean error over the pixels of all masked patches.

    Metrics are `feature_deviation` and `effective_rank` of the means of the
    visible patches' tokens, see `health`.
    """
    images, order = inputs.batch['image'], self._order(inputs.batch, inputs.key)
    pixels = normalize(images)
    tokens = self._encode(params['model'], pixels, order, inputs.key)
    predicted = self._decode(params['decoder'], tokens, order)
    target, _ = self._target(images)
    errors = jnp.square(predicted - target).mean(axis=-1)
    hidden = self._is_hidden(order)
    metrics = token_metrics(tokens[:, -self.num_visible :])  # of patches only
    return jnp.where(hidden, errors, 0).sum() / hidden.sum(), (metrics, {})

  @property
  def reconstructs(self) -> str:
    """Description of the predictions, which may be normalized by patch."""
    if self.norm_pixels:
      return (
        'the model predicts pixels that are normalized within each patch; '
        'they are drawn with the mean and standard deviation of the patch in '
        'the image'
      )
    return 'the model predicts pixels, which are drawn unchanged'

  def reconstruct(
    self, params: PyTree, batch: contract.Batch, key: Key[Array, '']
  ) -> contract.Pictures:
    """Predicts masked patches, with the masks of a step with this key.

    With `norm_pixels`, each patch is drawn with the mean and standard deviation
    of the patch in the image, because the prediction does not contain them.
    """
    images, order = batch['image'], self._order(batch, key)
    tokens = self._encode(params['model'], normalize(images), order, None)
    predicted = self._decode(params['decoder'], tokens, order)
    _, (mean, std) = self._target(images)
    predicted = patches.join(
      predicted * std + mean, self.grid, self.setting.image_size
    )
    channel_mean, channel_std = map(jnp.array, self._statistics)
    predicted = self._drawn(predicted * channel_std + channel_mean, images)
    shown = self._drawn(_in_unit_range(images), images)
    hidden = self._hidden_pixels(order)
    return contract.Pictures(
      shown,
      jnp.where(hidden, 0.5, shown),
      predicted,
      jnp.where(hidden, predicted, shown),
    )

  def _drawn(self, pixels: Any, images: Any) -> Float[Array, 'n y x 3']:
    """Returns pixels in [0, 1] as RGB pictures.

    Of images that are not RGB with 8 bits, the first three channels are drawn,
    or the first one in grey; two standard deviations below and above the mean
    of a channel are black and white.

    Args:
      pixels: pixels, `[n, y, x, channels]`.
      images: images of the batch, which determine the number of bits.
    """
    if pixels.shape[-1] != 3 or images.dtype != jnp.uint8:
      mean, std = map(jnp.array, self._statistics)
      pixels = (pixels - mean) / (4 * std) + 0.5
      pixels = pixels[..., :3] if pixels.shape[-1] >= 3 else pixels[..., :1]
    shape = (*pixels.shape[:-1], 3)
    return jnp.broadcast_to(jnp.clip(pixels, 0, 1), shape)

  def _order(
    self, batch: contract.Batch, key: Key[Array, '']
  ) -> Int[Array, 'n p']:
    """Returns the order of the patches of each image, visible ones first."""
    key = jax.random.fold_in(key, _STREAM)
    return patches.shuffled(key, len(batch['image']), self.grid)

  def _is_hidden(self, order: Int[Array, 'n p']) -> Bool[Array, 'n p']:
    rank = jnp.argsort(order, axis=1)  # position of each patch in the order
    return rank >= self.num_visible

  def _hidden_pixels(self, order: Int[Array, 'n p']) -> Bool[Array, 'n y x 1']:
    hidden = self._is_hidden(order)
    return patches.spread(hidden, self.grid, self.setting.image_size)

  def _encode(
    self,
    params: PyTree,
    images: Float[Array, 'n y x i'],
    order: Int[Array, 'n p'],
    key: Key[Array, ''] | None,
  ) -> Float[Array, 'n s d']:
    """Returns the encoded tokens: prefix tokens, then those of visible patches.

    Masked pixels are set to 0 first. This makes no difference for a linear
    patch embedding, but the convolutions of a stem overlap with neighbouring
    patches.
    """
    model, variables = self.setting.model, {'params': params}
    images = jnp.where(self._hidden_pixels(order), 0, images)
    kept = order[:, : self.num_visible]
    tokens = patches.take(model.apply(variables, images, method='embed'), kept)
    patches_kept = Patches(self.grid, kept)
    return model.apply(variables, tokens, key, patches_kept, method='encode')

  def _decoder(self) -> Any:
    """Returns the decoder, with kernels if the model uses them."""
    if self.setting.model.kernels is None:
      return self._plain_decoder.replace(attention='xla')
    return self._plain_decoder

  def _decode(
    self,
    params: PyTree,
    tokens: Float[Array, 'n s width'],
    order: Int[Array, 'n p'],
  ) -> Float[Array, 'n p d']:
    """Returns the predictions for all patches, in the units of the target."""
    return self._decoder().apply(
      {'params': params}, tokens, order, self.grid, self.num_visible
    )

  def _target(self, images: Any) -> tuple[Any, tuple[Any, Any]]:
    """Computes the targets of all patches.

    Returns:
      Targets, and (mean, standard deviation) by which the targets were
      normalized.
    """
    mean, std = map(jnp.array, self._statistics)
    pixels = patches.cut((_in_unit_range(images) - mean) / std, self.grid)
    if not self.norm_pixels:
      return pixels, (jnp.zeros(()), jnp.ones(()))
    mean = pixels.mean(axis=-1, keepdims=True)
    variance = pixels.var(axis=-1, keepdims=True, ddof=1)
    std = jnp.sqrt(variance + _EPSILON)
    return (pixels - mean) / std, (mean, std)


def _in_unit_range(images: Any) -> Float[Array, 'n y x c']:
  """Returns pixels of 8 or 16 bits divided by their largest value."""
  return images.astype(jnp.float32) / largest(images.dtype)
