"""Writes the table of timm's architectures from the installed timm.

Usage: python benchmarks/write_timm_table.py

Run it after an update of timm, commit vit_jax/weights/formats/timm_table.csv,
run write_weights_page.py, and correct the second table in docs/weights.md,
which test_timm_models.py compares.
"""

import pathlib
import sys

from vit_jax.weights.formats import timm_models

# The modules of timm whose array names `vit_jax.weights.formats.timm` reads.
MODULES = ('vision_transformer', 'deit', 'eva', 'swin_transformer')
GELUS = {'GELU': 'exact', 'GELUTanh': 'tanh', 'QuickGELU': 'quick'}
PIXELS = {pixels: name for name, pixels in timm_models._STATISTICS.items()}
# `rope` by the class of timm's module
ROPES = {
  'NoneType': 'none',
  'RotaryEmbeddingCat': 'index',
  'RotaryEmbeddingMixed': 'mixed',
  'RotaryEmbeddingDinoV3': 'centered',
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
      f'{block.norm1.eps} avg {model.patch_embed.img_size[0]} 1 0 0 none 0 0 0 '
      f'halves {window}'
    )
  block = model.blocks[0]
  name = type(block).__name__
  attention = getattr(block, 'attn', None)
  norm = getattr(block, 'norm1', None)
  heads = getattr(attention, 'num_heads', 0)
  if type(norm).__name__ != 'LayerNorm' and name == 'Block':
    name = type(norm).__name__ + name
  if type(attention).__name__ == 'DiffAttention':
    name = 'DiffBlock'
  # Gated units have their own sigmoid and do not use the GELU.
  mlp = getattr(block, 'mlp', None)
  activation = type(getattr(mlp, 'act', None)).__name__
  gelu = GELUS.get(activation, 'exact' if activation == 'SiLU' else 'none')
  size = 'x'.join(map(str, dict.fromkeys(model.patch_embed.img_size)))
  norms = [type(model.norm).__name__, type(model.fc_norm).__name__]
  pool = model.attn_pool
  map_heads = pool.num_heads if pool and pool.num_heads != heads else 0
  # Eva's attention pooling has no option, and includes all tokens.
  map_prefix = int(bool(pool) and getattr(model, 'pool_include_prefix', True))
  return (
    f'{name} {model.embed_dim} {len(model.blocks)} {heads} {gelu} '
    f'{getattr(norm, "eps", 0)} {model.global_pool or "none"} {size} '
    f'{int(norms != ["Identity"] * 2)} {map_heads} {map_prefix} '
    f'{rotations(getattr(model, "rope", None))} 0'
  )


def rotations(rope):
  """Returns the columns on rotations."""
  kind = ROPES[type(rope).__name__]
  if kind == 'none':
    return 'none 0 0 0 halves'
  order = {'ij': 'rows', 'xy': 'columns'}[rope.grid_indexing]
  if getattr(rope, 'rotate_half', False):
    assert order == 'rows'
    order = 'halves'
  grid = (getattr(rope, 'ref_feat_shape', None) or [0])[0]
  offset = getattr(rope, 'grid_offset', 0)
  return f'{kind} {rope.temperature:g} {grid} {offset:g} {order}'


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
  columns = ' '.join(timm_models.Architecture._fields)
  rows = [columns, *sorted(set(lines(timm, torch, step)))]
  table = '\n'.join(row.replace(' ', ',') for row in rows)
  return f'# timm {timm.__version__}\n{table}\n'


if __name__ == '__main__':
  sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
  import torch

  from benchmarks import peers

  timm_models.TABLE.write_text(text(peers.import_timm(), torch))
