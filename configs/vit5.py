"""ViT-5 on ImageNet-1k: --config=configs/vit5.py:model=B.

Arguments:
  model: S, B or L.
  tune: 1 for the second stage of B and L, see deit3.py.

Source: "ViT-5: Vision Transformers for The Mid-2020s" (arXiv 2602.08071) with
the authors' code: the recipe of DeiT-III (deit3.py), with RMSNorm, also on
queries and keys, no biases of queries, keys and values, rotations of queries
and keys in addition to learned positions, and four registers with rotations of
their own (wavelengths up to 100 instead of 10,000).

Expected ImageNet top-1 (the authors' figures; not reproduced here):

| model | 224 px | 384 px |
| S/16  | 82.2   |        |
| B/16  | 84.2   | 85.4   |
| L/16  | 84.9   | 86.0   |

Differences: those of deit3.py. The authors publish the command of S only; the
pixels, rates and drop paths of B and L are those of DeiT-III. Their registers
follow the patches, and a plane of a rotation is two adjacent channels; both
change only the order of parameters.
"""

from ml_collections import ConfigDict

from vit_jax.config import complete, loading, parse_arg
from vit_jax.errors import UserError, closest

MODELS = ('S', 'B', 'L')


def get_config(argument: str | None = None) -> ConfigDict:
  arg = parse_arg(argument, model='B', tune=0)
  if arg.model not in MODELS:
    raise UserError(
      f'there is no ViT-5 {arg.model}; {closest(arg.model, MODELS)}.'
    )
  recipe = f'model={arg.model},tune={arg.tune}'
  config = loading.load(f'configs/deit3.py:{recipe}')
  config.model.update(
    norm='rms',
    qk_norm=True,
    qkv_bias='none',
    registers=4,
    rope='index',
    rope_base=1e4,
    # In units of the patches of the images that the model is trained with.
    rope_grid=config.image_size[0] // 16,
    rope_registers=100.0,
  )
  return complete(config)
