"""Models inside of the files of training scripts.

Nested dictionaries are read as flat names, joined by dots (`tensors`), so that
a key of a checkpoint ('state_dict') and a wrapper of a model ('module',
'_orig_mod') are both prefixes. The name of its first layer shows where a model
begins.
"""

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights.contract import Pretrained, SeveralModels

log = logging.getLogger('vit_jax')
Arrays = dict[str, np.ndarray]
# Base models of transformers, whose name precedes those of their parameters.
BASES = (
  'vit|deit|beit|data2vec_vision|dinov2|dinov2_with_registers|dinov3_vit|ijepa|'
  'swin|vision_model'
)
# First layers of the projects whose names can be read: timm, torchvision's ViT
# and Swin, open_clip (a LayerNorm, because a ResNet also has its convolution),
# transformers.
_FIRST = re.compile(
  r'(?P<prefix>(?:.*?\.)??)(?:'
  r'patch_embed\.proj|conv_proj|features\.0\.0|ln_post'
  rf'|(?:(?:{BASES})\.)*embeddings\.patch_embedding(?:s|s\.projection)?'
  r')\.weight'
)
# Wrappers of modules inside of a model: torch.compile, FSDP, checkpointing.
_WRAPPERS = re.compile(
  r'\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.'
)
# Words of a prefix that do not distinguish models.
_NEUTRAL = re.compile(r'\b(module|state_dict|model|net|backbone)\.')
_TOP = 'main'  # name of a model without a prefix, next to others
_EMA = re.compile(r'(^|[._])ema($|[._])')


def described(
  path: str,
  arrays: Mapping[str, np.ndarray],
  describe: Callable[[Arrays], Pretrained],
) -> Pretrained | SeveralModels:
  """Describes the default model of a file, and lists the others in `sets`.

  Args:
    path: path of the file, for messages.
    arrays: all arrays of the file.
    describe: function from the arrays of one model to its description.

  Raises:
    UserError: the arrays are flattened or empty, or `describe` raises it.
  """
  models = _models(path, arrays)
  default = _default(models)
  sets = {
    name: functools.partial(describe, model) for name, model in models.items()
  }
  if default is None:
    return SeveralModels(path, sets)
  if len(models) > 1:
    others = ', '.join(name for name in models if name != default)
    log.info('%s: weights are %r; --weights selects %s', path, default, others)
  sets.pop(_TOP, None)  # it is the default here, and needs no selection
  return dataclasses.replace(describe(models[default]), sets=sets)


def _default(names: Mapping[str, Any]) -> str | None:
  """Returns the model that is used unless another is selected, or None."""
  # An average is the default only if there is nothing else.
  others = [name for name in names if name != 'ema'] or ['ema']
  # The authors of DINO evaluate the teacher.
  if set(others) == {'student', 'teacher'}:
    return 'teacher'
  return others[0] if len(others) == 1 else None


def _models(path: str, arrays: Mapping[str, np.ndarray]) -> dict[str, Arrays]:
  """Returns the arrays of each model in a file, without their prefix.

  Raises:
    UserError: the arrays of several layers are flattened into one, or are
      empty.
  """
  arrays = {_WRAPPERS.sub('', name): array for name, array in arrays.items()}
  unreadable = None
  if any(name.endswith('flat_param') for name in arrays):
    unreadable = (
      'the flattened parameters of FSDP: write it again with '
      'StateDictType.FULL_STATE_DICT'
    )
  elif arrays and not any(array.size for array in arrays.values()):
    unreadable = (
      'empty arrays, because ZeRO-3 of DeepSpeed stores the weights in other '
      'files: run `python zero_to_fp32.py . OUT` in the directory above, and '
      'open OUT'
    )
  if unreadable:
    raise UserError(f'{path} contains {unreadable}.')
  matches = [_FIRST.fullmatch(name) for name in arrays]
  prefixes = sorted({match['prefix'] for match in matches if match}) or ['']

  def is_used(name: str, array: np.ndarray) -> bool:
    if array.size == 1 and not np.issubdtype(array.dtype, np.inexact):
      return False  # a counter, such as `n_averaged`
    return name.startswith((*prefixes, 'head.')) or '.head.' in name

  unused = [name for name, array in arrays.items() if not is_used(name, array)]
  if unused:
    shown = ', '.join(unused[:3])
    log.info('%s: left out %d other arrays, %s …', path, len(unused), shown)
  arrays = {k: v for k, v in arrays.items() if k not in unused}
  return {
    name: _below(prefix, arrays, prefixes)
    for prefix, name in _named(prefixes).items()
  }


def _below(
  prefix: str, arrays: Mapping[str, np.ndarray], prefixes: Sequence[str]
) -> Arrays:
  """Returns the arrays of a model, and those of a head that is next to it.

  Args:
    prefix: prefix of the model.
    arrays: arrays of all models.
    prefixes: prefixes of all models.
  """
  # A model without a prefix has the names that do not start with another one.
  others = tuple(p for p in prefixes if p) if prefix == '' else ()
  result = {
    name.removeprefix(prefix): array
    for name, array in arrays.items()
    if name.startswith(prefix) and not name.startswith(others)
  }
  # The head of 'model.backbone.' is 'model.head.'.
  above = prefix.removesuffix('.').rpartition('.')[0]
  head = f'{above}.head.' if above else 'head.'
  if prefix and not any(name.startswith('head.') for name in result):
    result |= {
      f'head.{name.removeprefix(head)}': array
      for name, array in arrays.items()
      if name.startswith(head)
    }
  return result


def _named(prefixes: list[str]) -> dict[str, str]:
  """Returns {prefix: name of the model}, with a different name for each.

  Names leave out the words of `_NEUTRAL`. If two models then had the same name,
  names are the whole prefixes.
  """
  whole = {prefix: prefix.strip('.') or _TOP for prefix in prefixes}
  short = {}
  for prefix, name in whole.items():
    if _EMA.search(name):
      short[prefix] = 'ema'
    else:
      short[prefix] = _NEUTRAL.sub('', prefix).strip('.') or name
  return short if len(set(short.values())) == len(short) else whole
