"""The Vision Transformer as the framework knows it."""

from typing import Any

import numpy as np

from vit_jax.arrays import sharding
from vit_jax.errors import UserError
from vit_jax.models.attention import multi_head
from vit_jax.models.contract import Kernels
from vit_jax.models.layers.positions import resize_leaf
from vit_jax.models.vit import compiling, sizes
from vit_jax.models.vit.module import Network

_ARCHITECTURE = (
  *(*sizes.NAMES, 'pool', 'gelu', 'gated', 'norm_eps', 'qk_norm'),
  *('pre_norm', 'layer_scale', 'registers', 'distilled'),
  *('position', 'position_at', 'prefix_positions'),
)
_MATRICES = ('mlp/fc1', *(f'attention/{n}' for n in ('query', 'key', 'value')))


class ViT(Network):
  """A Vision Transformer; build it with `Model`, which knows the sizes.

  It keeps `models.contract.Model`.
  """

  sized = ('position/', 'encoder/layers/position/')
  _sharding_rules = (
    (r'attention/(query|key|value)/kernel', -2),
    (r'attention/(query|key|value)/bias', -2),
    (r'attention/out/kernel', -3),
    (r'mlp/fc1/(kernel|bias)', -1),
    (r'mlp/fc2/kernel', -2),
    (r'head(_distillation)?/(kernel|bias)', -1),
  )

  @property
  def fresh(self) -> tuple[str, ...]:
    """Heads; where the mean is normalised, the norm of the tokens too."""
    heads = ('head/', 'pre_logits/', 'head_distillation/')
    norms = ('encoder/norm/', 'fc_norm/') if self.fc_norm else ()
    return (*heads, *norms)

  @property
  def sharding_rules(self) -> tuple[tuple[str, int], ...]:
    """The layers', and the stem's."""
    stem = () if self.stem is None else self.stem.sharding_rules
    return (*self._sharding_rules, *stem)

  def check(self, image_size: tuple[int, int]) -> None:
    """Raises UserError if images cannot have that size; see `grid`."""
    self.grid(image_size)

  def adapt(
    self,
    leaves: dict[str, np.ndarray],
    old_size: tuple[int, int],
    new_size: tuple[int, int],
    method: str,
  ) -> dict[str, np.ndarray]:
    """Interpolates what positions have learnt; see `positions.resize_leaf`."""
    grids = self.grid(old_size), self.grid(new_size)
    return {
      path: resize_leaf(path.rpartition('/')[2], leaf, *grids, method)
      for path, leaf in leaves.items()
    }

  def at_sizes(self, made_for: tuple[int, int], offset: float = 0.0) -> 'ViT':
    """For images of any size; see `models.contract.Model.at_sizes`.

    Learned positions are interpolated; those without parameters are computed
    for the images' grid.

    Raises:
      UserError: relative positions, which are numbered along the sequence.
    """
    if self.position == 'relative':
      raise UserError(
        "positions of the kind 'relative' are offsets in the sequence of one "
        f'grid, that of {made_for[0]}x{made_for[1]} pixels, and images of '
        'several sizes are to go through the model: set model.position to '
        "'learned', '2d', 'sincos2d', 'sincos2d_mae', 'rope2d' or 'none'."
      )
    self.check(made_for)
    return self.clone(made_for=tuple(made_for), position_offset=offset)

  @property
  def patch_pixels(self) -> int:
    """Side of a patch in the image, pixels."""
    return self.patch_size * (1 if self.stem is None else self.stem.stride)

  @property
  def apart(self) -> tuple[str, ...]:
    """The layers' matrices, where no layer is scanned.

    Not fc2's: its gradient is a product with activations that are recomputed
    (dropout and GELU), and XLA recomputes them more often when it fuses the sum
    over micro-batches into that product.
    """
    if self.unroll < self.depth:
      return ()
    return tuple(f'layers/{n}/kernel' for n in (*_MATRICES, 'attention/out'))

  @property
  def architecture(self) -> dict[str, Any]:
    """Sizes, options, stem, and what no shape shows: ε, the kind of GELU."""
    stem = None if self.stem is None else self.stem.section
    names = {name: getattr(self, name) for name in _ARCHITECTURE}
    return names | {'stem': stem}

  @property
  def reference(self) -> 'ViT':
    """Without kernels, rematerialisation or unrolling."""
    stem: Any = self.stem and self.stem.reference
    return self.clone(attention='xla', remat='none', unroll=1, stem=stem)

  @property
  def kernels(self) -> Kernels | None:
    """Those of attention, where they may be used."""
    accelerated = sharding.on_tpu() or sharding.on_gpu()
    if self.attention != 'kernel' and not (
      self.attention == 'auto' and accelerated
    ):
      return None
    if self.beyond_kernels:
      return None
    channels = self.width // self.num_heads
    if sharding.on_gpu() and not multi_head.takes_cudnn(
      self.attention, channels, self.dtype
    ):
      return None
    # The second layer lets the first one's results for every token count.
    probe: Any = self.clone(depth=min(self.depth, 2), unroll=1)
    plain: Any = self.clone(attention='xla')
    return Kernels(probe, plain)

  def computed_by(self, image_size: tuple[int, int]) -> str:
    """Whether attention is computed by kernels, and if not why."""
    rows, columns = self.grid(image_size)
    if self.beyond_kernels:
      options = ' and '.join(self.beyond_kernels)
      return f'attention by XLA: kernels know nothing of {options}'
    if sharding.on_gpu():
      channels = self.width // self.num_heads
      by_cudnn = multi_head.takes_cudnn(self.attention, channels, self.dtype)
      return f'attention by {"cuDNN" if by_cudnn else "XLA"}'
    tokens = self.scheme.prefix + rows * columns
    sizes = tokens, self.width, self.num_heads
    kernels = multi_head.takes_kernels(self.attention, *sizes)
    return f'attention by {"kernels" if kernels else "XLA"}'

  @property
  def beyond_kernels(self) -> tuple[str, ...]:
    """Options that change attention, which its kernels do not have."""
    in_attention = self.scheme.in_attention
    if sharding.on_gpu():  # cuDNN gets normalized and rotated queries and keys
      relative = self.position == 'relative'
      return ("position='relative'",) if relative else ()
    options = {
      'qk_norm': self.qk_norm,
      f'position={self.position!r}': in_attention,
    }
    return tuple(name for name, used in options.items() if used)

  def compiler_options(
    self, platform: str, num_devices: int
  ) -> dict[str, str | int]:
    """See `compiling.options`."""
    return compiling.options(self.unroll, platform, num_devices)
