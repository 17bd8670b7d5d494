"""Writes the table of timm's architectures from the installed timm.

Usage: python tests/weights/write_timm_table.py

Run it after an update of timm and commit the result,
vit_jax/weights/formats/timm_table.csv.
"""

import pathlib
import sys

from vit_jax.weights.formats.timm_models import TABLE, Architecture

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The modules of timm whose array names `vit_jax.weights.formats.timm` reads.
# Eva's are listed in order to be refused: their rotary embeddings are in no
# array.
MODULES = ('vision_transformer', 'deit', 'eva', 'swin_transformer')
GELUS = {'GELU': 'exact', 'GELUTanh': 'tanh', 'QuickGELU': 'quick'}
PIXELS = {
  ((0.5,) * 3, (0.5,) * 3): 'half',
  ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)): 'imagenet',
  (
    (0.48145466, 0.4578275, 0.40821073),
    (0.26862954, 0.26130258, 0.27577711),
  ): 'clip',
  ((0.0,) * 3, (1.0,) * 3): 'unit',
}


def evaluation(cfg):
  """Returns the columns on pixels and resizing of a set of weights."""
  pixels = PIXELS.get((tuple(cfg.mean), tuple(cfg.std)), 'other')
  return f'{pixels} {cfg.crop_pct} {cfg.interpolation} {cfg.crop_mode}'


def describe(model):
  """Returns the columns on a model, which may be on the device `meta`."""
  kind = type(model).__name__
  if kind == 'SwinTransformer':
    block = model.layers[0].blocks[0]
    window = block.window_size[0]
    depths = [len(stage.blocks) for stage in model.layers]
    heads = [stage.blocks[0].attn.num_heads for stage in model.layers]
    regular = heads == [heads[0] * 2**i for i in range(len(heads))]
    windows = {stage.blocks[0].window_size[0] for stage in model.layers[:-1]}
    name = 'Swin' if regular and len(windows) == 1 else 'SwinOfOtherSizes'
    return (
      f'{name} {model.embed_dim} {sum(depths)} {heads[0]} exact '
      f'{block.norm1.eps} avg {window}'
    )
  block = model.blocks[0]
  name = type(block).__name__
  attention = getattr(block, 'attn', None)
  norm = getattr(block, 'norm1', None)
  heads = getattr(attention, 'num_heads', 0)
  if type(norm).__name__ != 'LayerNorm' and name == 'Block':
    name = type(norm).__name__ + name
  # Gated units have their own sigmoid and do not use the GELU.
  mlp = getattr(block, 'mlp', None)
  activation = type(getattr(mlp, 'act', None)).__name__
  gelu = GELUS.get(activation, 'exact' if activation == 'SiLU' else 'none')
  return (
    f'{name} {model.embed_dim} {len(model.blocks)} {heads} {gelu} '
    f'{getattr(norm, "eps", 0)} {model.global_pool or "none"} 0'
  )


def lines(timm, torch, step=1):
  """Yields the lines of every `step`-th architecture of each module."""
  for module in MODULES:
    for name in timm.list_models(module=module)[::step]:
      with torch.device('meta'):  # shapes without memory or time
        model = timm.create_model(name)
      first = evaluation(timm.get_pretrained_cfg(name))
      yield f'{name} {describe(model)} {first}'
      for tagged in timm.list_models(f'{name}.*', pretrained=True):
        other = evaluation(timm.get_pretrained_cfg(tagged))
        if other != first:
          yield f'{tagged} {describe(model)} {other}'


def text(timm, torch, step=1):
  """Returns the table of the installed timm; see `lines`."""
  columns = ' '.join(Architecture._fields)
  rows = [columns, *sorted(set(lines(timm, torch, step)))]
  table = '\n'.join(row.replace(' ', ',') for row in rows)
  return f'# timm {timm.__version__}\n{table}\n'


if __name__ == '__main__':
  sys.path.insert(0, str(ROOT))
  import torch

  from benchmarks import peers

  TABLE.write_text(text(peers.import_timm(), torch))
