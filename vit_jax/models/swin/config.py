"""Config of the Swin Transformer."""

import dataclasses

from vit_jax.config import schema
from vit_jax.errors import UserError
from vit_jax.models import backbone
from vit_jax.models.attention.multi_head import IMPLEMENTATIONS
from vit_jax.models.backbone import BackboneConfig
from vit_jax.models.layers.pixels import STATISTICS
from vit_jax.models.swin import sizes, windows


@schema.operational('remat', 'unroll', 'attention')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(BackboneConfig):
  """Keys of the config's `model` section for a Swin Transformer.

  `unroll` applies to pairs of blocks.

  Attributes:
    variant: 'T', 'S', 'B' or 'L' (section 3.3). Sizes that are set explicitly
      take precedence.
    width: channels of the first stage; they double from stage to stage.
    depths: number of blocks of each stage, even numbers: blocks with plain and
      with shifted windows alternate.
    num_heads: attention heads of the first stage; they double from stage to
      stage.
    window_size: side of a window in tokens; reduced to the shorter side of a
      map that is smaller.
    window_rule: treatment of maps that windows do not fill. 'authors': the map
      is padded and then shifted, and is not shifted at all if one of its sides
      is at most `window_size` (the authors' detection code, Hugging Face).
      'timm': the map is shifted and then padded, and it is shifted along each
      side that is larger than `window_size`. Weights need the rule that they
      were trained with.
    pixels: units of the pixels that are cut into patches, 'symmetric' or
      'imagenet', see `vit.Config`.
    attention: implementation of attention within windows: 'auto' (kernels on
      TPUs, if windows have at most 384 tokens), 'kernel' (the same on every
      device; interpreted on a CPU, for tests) or 'xla'.
    drop_path: drop-path rate of the last block; it grows linearly from 0 at the
      first block.

  Raises:
    UserError: a variant or choice is unknown, a size is missing, or a number is
      out of range.
  """

  variant: str | None = None
  width: backbone.Size = backbone.OF_VARIANT
  depths: backbone.Sizes = backbone.OF_VARIANT
  num_heads: backbone.Size = backbone.OF_VARIANT
  window_size: int = 7
  window_rule: str = 'authors'
  pixels: str = 'symmetric'
  attention: str = 'auto'
  drop_path: float = 0.0

  def __post_init__(self):
    super().__post_init__()
    self.complete(sizes.NAMES, sizes.of_variant(self.variant), 'T')
    object.__setattr__(self, 'depths', tuple(self.depths))
    self.check_sizes('width', 'num_heads', 'window_size')
    self.check_choices(
      window_rule=windows.RULES, pixels=STATISTICS, attention=IMPLEMENTATIONS
    )
    self.check_range('drop_path', at_least=0, below=1)
    self.check_heads(self.width, self.num_heads)
    if not self.depths or any(d < 2 or d % 2 for d in self.depths):
      raise UserError(
        f'model.depths is {self.depths}; each stage needs an even number of '
        'blocks, 2 or more: half of them have plain windows and half shifted '
        'ones.'
      )
