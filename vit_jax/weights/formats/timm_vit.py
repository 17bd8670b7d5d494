"""Vision Transformers with the names of timm.

The repositories of DeiT, MAE and DINO also use these names, or older ones.
"""

import collections
import logging
import math
import re
from collections.abc import Callable, Container, Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models import vit
from vit_jax.models.layers import EPSILON
from vit_jax.weights.formats import foreign, timm_models
from vit_jax.weights.formats import naming as naming_lib
from vit_jax.weights.formats.foreign import Described
from vit_jax.weights.formats.naming import Naming, Part
from vit_jax.weights.formats.timm_models import Architecture

log = logging.getLogger('vit_jax')
_LAYER = 'encoder/layers/'
# Values of keys that are missing in the notes of older files.
UNNOTED: dict[str, Any] = {}
NAMES: dict[str, str | Part] = {
  'cls': 'cls_token',
  'position/embedding': 'pos_embed',
  'embedding': 'patch_embed.proj',
  **{
    f'{_LAYER}attention/{part}': Part('blocks.{i}.attn.qkv', index, 3)
    for index, part in enumerate(('query', 'key', 'value'))
  },
  f'{_LAYER}attention/out': 'blocks.{i}.attn.proj',
  **{
    _LAYER + here: 'blocks.{i}.' + here.replace('/', '.')
    for here in ('norm1', 'norm2', 'mlp/fc1', 'mlp/fc2')
  },
  **{
    f'{_LAYER}attention/{part}_norm': f'blocks.{{i}}.attn.{part[0]}_norm'
    for part in ('query', 'key')
  },
  f'{_LAYER}scale1': 'blocks.{i}.ls1.gamma',
  f'{_LAYER}scale2': 'blocks.{i}.ls2.gamma',
  'distillation': 'dist_token',
  'registers': 'reg_token',
  'head_distillation': 'head_dist',
  'pre_norm': 'norm_pre',
  'encoder/norm': 'norm',
  'fc_norm': 'fc_norm',
  'map/probe': 'attn_pool.latent',
  'map/attention/query': 'attn_pool.q',
  'map/attention/key': Part('attn_pool.kv', 0, 2),
  'map/attention/value': Part('attn_pool.kv', 1, 2),
  'map/attention/out': 'attn_pool.proj',
  'map/norm': 'attn_pool.norm',
  'map/mlp/fc1': 'attn_pool.mlp.fc1',
  'map/mlp/fc2': 'attn_pool.mlp.fc2',
  'head': 'head',
}
NAMING = Naming(NAMES, torch=True)
# Number of heads by width, for weights that match no architecture of timm. For
# other widths, heads have 64 channels.
_NUM_HEADS = {
  size['width']: size['num_heads'] for size in vit.SIZES.values()
} | {1152: 16}  # SigLIP's So400m
_LAYER_SCALE = 1e-4  # an initial value, which loaded weights replace
_CLIP_EPSILON = 1e-5  # PyTorch's default
_PATCH_BIAS = 'patch_embed.proj.bias'
_POOLS = {'token': 'token', 'avg': 'gap', 'map': 'map'}
# (pattern, replacement) for names in repositories whose weights timm converts.
ALIASES = (
  (r'^(module\.|backbone\.)+', ''),
  (r'^(blocks\.\d+\.)gamma_([12])$', r'\1ls\2.gamma'),
  (r'^register_tokens$', 'reg_token'),
  (r'^(blocks\.\d+\.mlp\.)w12\.', r'\1fc1.'),
  (r'^(blocks\.\d+\.mlp\.)w3\.', r'\1fc2.'),
)
# {option of the model: array that exists if the option is set}
_SHOWN_BY = {
  'distilled': 'dist_token',
  'qk_norm': 'blocks.0.attn.q_norm.weight',
  'pre_norm': 'norm_pre.weight',
  'fc_norm': 'fc_norm.weight',  # in place of `norm`
}
# {description: pattern} of arrays that an encoder does not use.
LEFT_OUT = {
  "a decoder and its mask token (MAE's)": r'decoder_|mask_token',
  "a projection head (DINO's)": r'(\w+_)?head\.(mlp|last_layer)\b',
}


def describe(
  path: str,
  arrays: Mapping[str, np.ndarray],
  config: Mapping[str, Any],
  architecture: Architecture | None = None,
) -> Described:
  """Describes the model of a file, given its arrays and settings.

  Args:
    path: path of the file, for messages.
    arrays: all arrays of the file.
    config: timm's config.json; {} if there is none.
    architecture: architecture that is specified by the config, the user or the
      name of the file.

  Raises:
    UserError: the arrays are not those of a Vision Transformer, or contradict
      the settings.
  """
  arrays = renamed(path, arrays)
  if 'norm_pre.weight' in arrays:  # CLIP's patch embedding has no bias
    width = arrays['norm_pre.weight'].shape
    arrays.setdefault(_PATCH_BIAS, np.zeros(width, np.float32))
  keys = _keys(path, arrays)
  pool = 'gap' if 'fc_norm' in keys else keys['pool']
  args = config.get('model_args', {})
  specified = args.get('global_pool') or config.get('global_pool')
  if specified is None and _fits(architecture, keys):
    assert architecture is not None
    specified = architecture.pool
  _check_pool(path, pool, specified)
  keys['num_heads'] = args.get('num_heads') or _num_heads(
    keys, arrays, architecture
  )
  if keys['width'] % keys['num_heads']:
    raise UserError(
      f'{path} has the width {keys["width"]}, which is not a multiple of '
      f'num_heads, {keys["num_heads"]}: correct the settings next to it.'
    )
  slots = arrays['pos_embed'].shape[1]
  arrays, image_size = _with_positions(path, arrays, keys, config)
  # A square of patches without positions of the other tokens can be a grid that
  # is not square, with such positions.
  others = _prefix(arrays, keys)
  is_known = 'input_size' in config.get('pretrained_cfg', {})
  is_ambiguous = not (is_known or keys.get('prefix_positions', True))
  return Described(
    arrays,
    NAMING,
    keys,
    image_size,
    epsilon=_epsilon(keys),
    position_resize='bicubic',
    other_patches=slots - others if is_ambiguous else None,
  )


def _epsilon(keys: Mapping[str, Any]) -> float:
  """Returns the epsilon of LayerNorm in published models with these keys."""
  return _CLIP_EPSILON if keys.get('pre_norm') else EPSILON


def _fits(architecture: Architecture | None, keys: Mapping[str, Any]) -> bool:
  """Returns whether a model has the width and depth of an architecture.

  A config may contain the name of an architecture with other sizes.
  """
  return architecture is not None and (
    (architecture.width, architecture.depth) == (keys['width'], keys['depth'])
  )


def _candidates(keys: Mapping[str, Any]) -> list[Architecture]:
  """Returns timm's architectures of the same sizes, pooling and epsilon."""
  pools = {ours: name for name, ours in _POOLS.items()}
  pool = 'avg' if 'fc_norm' in keys else pools[keys['pool']]
  same_sizes = timm_models.candidates(
    keys['width'], keys['depth'], keys['patch_size'], pool
  )
  return [each for each in same_sizes if each.norm_eps == _epsilon(keys)]


def _num_heads(
  keys: Mapping[str, Any],
  arrays: Mapping[str, np.ndarray],
  architecture: Architecture | None,
) -> int:
  """Derives the number of attention heads if settings do not contain it."""
  norm = arrays.get('blocks.0.attn.q_norm.weight')
  if norm is not None:  # one scale for each channel of a head
    return keys['width'] // max(norm.size, 1)
  if _fits(architecture, keys):
    assert architecture is not None
    return architecture.num_heads
  same = collections.Counter(each.num_heads for each in _candidates(keys))
  if same:
    return same.most_common(1)[0][0]
  width: int = keys['width']
  return _NUM_HEADS.get(width) or max(width // 64, 1)


def assumptions(
  found: Described,
  config: Mapping[str, Any],
  architecture: Architecture | None,
  gelu: str,
) -> list[str]:
  """Returns the values of a model that may be wrong, each with its reason.

  A value is certain if it is determined by an array, by the settings, or by a
  specified architecture of the same size, or if it is the same in all
  architectures of timm of this size.

  Args:
    found: result of `describe`.
    config: timm's config.json; {} if there is none.
    architecture: specified architecture.
    gelu: chosen kind of GELU.
  """
  keys, args = found.keys, config.get('model_args', {})
  same, uncertain = _candidates(keys), []
  size = f'width {keys["width"]} and depth {keys["depth"]}'

  def compare(key: str, chosen: Any, value: Callable[[Any], Any]) -> None:
    others = {value(each): each.name for each in same if value(each) != chosen}
    if others:
      shown = ', '.join(f'{v} in {name}' for v, name in others.items())
      uncertain.append(f'{key} {chosen} (for {size} timm also has {shown})')
    elif not same:
      uncertain.append(f'{key} {chosen} (timm has no architecture of {size})')

  shown = 'num_heads' in args or 'qk_norm' in keys
  if not shown and not _fits(architecture, keys):
    compare('num_heads', keys['num_heads'], lambda each: each.num_heads)
  specified = args.get('global_pool') or config.get('global_pool')
  if architecture is None and not specified and 'head.weight' in found.arrays:
    pool = 'gap' if 'fc_norm' in keys else keys['pool']
    same_arrays = {'token': 'avg without fc_norm or max', 'gap': 'max'}
    if pool in same_arrays:
      uncertain.append(
        f"pool {pool} (with timm's global_pool {same_arrays[pool]}, the arrays "
        'would be the same)'
      )
  if architecture is None:
    if 'act_layer' not in args and 'gated' not in keys:
      compare('gelu', gelu, lambda each: each.gelu)
    if 'layer_scale' in keys and keys['pool'] == 'token':
      rotary = [
        each.name
        for each in timm_models.table().values()
        if 'rope_ape' in each.name
        and (each.width, each.depth) == (keys['width'], keys['depth'])
      ]
      if rotary:
        uncertain.append(
          'no rotary position embeddings (the arrays may also be those of '
          f'{rotary[0]}, which is not supported)'
        )
  return uncertain


def naming(model: Any) -> Naming:
  """Returns the names of a model's parameters."""
  del model
  return NAMING


def completed(
  model: Any, arrays: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """Returns the arrays of timm's model.

  The patch embedding of CLIP has no bias in timm. Folding and unfolding the
  mean of the pixels leaves a bias that is zero up to rounding, which is
  removed.
  """
  if model.pre_norm and np.abs(arrays[_PATCH_BIAS]).max() < 1e-6:
    del arrays[_PATCH_BIAS]
  return arrays


def unshown(model: Any) -> dict[str, Any]:
  """Returns the sizes of a model that its arrays do not determine."""
  return {'num_heads': model.num_heads}


def renamed(
  path: str, arrays: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """Returns the arrays that an encoder uses, with timm's names.

  Args:
    path: path of the file, for the log.
    arrays: arrays with timm's names or older ones.
  """
  result = naming_lib.renamed(arrays, ALIASES)
  for group, pattern in LEFT_OUT.items():
    unused = [name for name in result if re.match(pattern, name)]
    if unused:
      log.info('%s: left out %s, %d arrays', path, group, len(unused))
    for name in unused:
      del result[name]
  return result


def _keys(path: str, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
  """Returns the keys of the model, except for positions and heads.

  Raises:
    UserError: an array that every Vision Transformer has is missing.
  """

  def shape(name: str, rank: int) -> tuple[int, ...]:
    kind = "a Vision Transformer with timm's names"
    return foreign.shape(path, arrays, name, rank, kind)

  width, _, patch_size, _ = shape('patch_embed.proj.weight', 4)
  shape('pos_embed', 3)
  layers = [re.match(r'blocks\.(\d+)\.', name) for name in arrays]
  units = shape('blocks.0.mlp.fc1.weight', 2)[0]
  mlp_dim = shape('blocks.0.mlp.fc2.weight', 2)[1]
  keys: dict[str, Any] = dict(
    patch_size=patch_size,
    width=width,
    depth=max((int(found[1]) + 1 for found in layers if found), default=0),
    mlp_dim=mlp_dim,
    pool='token' if 'cls_token' in arrays else 'gap',
  )
  if 'attn_pool.latent' in arrays:
    keys['pool'] = 'map'
  if units == 2 * mlp_dim:  # value and gate, joined
    keys['gated'] = True
  if 'reg_token' in arrays:
    keys['registers'] = shape('reg_token', 3)[1]
  if 'blocks.0.ls1.gamma' in arrays:
    keys['layer_scale'] = _LAYER_SCALE
  return keys | {key: True for key, name in _SHOWN_BY.items() if name in arrays}


def _with_positions(
  path: str,
  arrays: dict[str, np.ndarray],
  keys: dict[str, Any],
  config: Mapping[str, Any],
) -> tuple[dict[str, np.ndarray], tuple[int, int]]:
  """Returns the arrays with converted positions, and the image size.

  Depending on the source, there are positions for all tokens, only for the
  patches, or (in DINOv2's repository) for the patches and the class token. In
  the last case, the position of the class token is added to the token.

  Returns:
    Arrays, and (height, width) in pixels.

  Raises:
    UserError: in none of these cases does the number of positions fit a square
      of patches or the image size in the config.
  """
  slots, patch_size = arrays['pos_embed'].shape[1], keys['patch_size']
  prefix, cls = _prefix(arrays, keys), int('cls_token' in arrays)
  size = config.get('pretrained_cfg', {}).get('input_size', (3, 0, 0))[1:]
  specified = (size[0] // patch_size, size[1] // patch_size)
  for others in dict.fromkeys((prefix, 0, cls)):  # tokens other than patches
    side = math.isqrt(max(slots - others, 0))
    square = (side, side)
    grid = specified if math.prod(specified) == slots - others else square
    if side and math.prod(grid) == slots - others:
      break
  else:
    raise UserError(
      f'{path}: {slots} positions do not form a square of patches, with or '
      f'without {prefix} other tokens; other grids need the input_size in a '
      'config.json next to the file.'
    )
  if others != prefix:
    keys['prefix_positions'] = False
    if others:
      names = 'cls_token', 'pos_embed'
      arrays = foreign.without_class_position(arrays, *names)
  return arrays, (grid[0] * patch_size, grid[1] * patch_size)


def _prefix(arrays: Container[str], keys: Mapping[str, Any]) -> int:
  """Returns the number of tokens before those of the patches."""
  cls = int('cls_token' in arrays)
  return cls + keys.get('distilled', 0) + keys.get('registers', 0)


def _check_pool(path: str, pool: str, specified: str | None) -> None:
  """Checks that settings and arrays have the same kind of pooling.

  Raises:
    UserError: they differ.
  """
  if specified and _POOLS.get(specified) != pool:
    raise UserError(
      f'the settings of {path} specify the pooling {specified!r}, but its '
      f'arrays are those of {pool!r}: the model vit does not support this.'
    )
