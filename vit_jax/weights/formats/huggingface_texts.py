"""Text towers of CLIP and SigLIP, next to image towers in the same files."""

import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.data.tokens import PRESETS
from vit_jax.weights import metadata
from vit_jax.weights.foreign import ParsedWeights
from vit_jax.weights.formats import huggingface_models, tensors
from vit_jax.weights.names import Joined, renamed

_TABLE = 'text_model.embeddings.token_embedding.weight'
# A layer of a text tower has the names of a layer of an image tower.
_NAMES: dict[str, str | Joined] = {
  'temperature': 'logit_scale',
  'bias': 'logit_bias',
  'projection': 'visual_projection',
  'text/embedding': _TABLE,
  'text/positions': f'text_model.{huggingface_models.POSITIONS}',
  **{
    f'text/{path}': entry._replace(name=f'text_model.{entry.name}')
    for path, entry in huggingface_models.VIT_NAMES.items()
    if path.startswith('encoder/')
  },
}


def with_text(
  path: str,
  arrays: Mapping[str, np.ndarray],
  config: Mapping[str, Any],
  image: ParsedWeights,
) -> ParsedWeights:
  """Returns an image tower with the text tower in its file, if there is one.

  The objective is then `contrastive`, and CLIP's projection of images is a part
  of it, not the head of the image tower.

  Args:
    path: path of the directory or file.
    arrays: all arrays of the file.
    config: content of `text_config` in config.json, with all keys.
    image: image tower.
  """
  if _TABLE not in arrays:
    return image
  is_clip = 'logit_bias' not in arrays
  vocabulary, width = arrays[_TABLE].shape
  # The library looks for the highest token if this is 2, as `Text` does.
  if is_clip and config.get('eos_token_id') not in (2, vocabulary - 1):
    return image
  text = {
    name.removeprefix('text_model.'): array
    for name, array in arrays.items()
    if name.startswith('text_model.') and 'position_ids' not in name
  }
  text = renamed(text, huggingface_models.VIT_ALIASES)
  units = [
    len(v) for k, v in text.items() if k.endswith('intermediate.dense.bias')
  ]
  length = len(text[huggingface_models.POSITIONS])
  found = {k: v for k, v in image.arrays.items() if 'classifier' not in k}
  found |= {f'text_model.{name}': array for name, array in text.items()}
  found |= {
    name: np.atleast_1d(array)  # a number has one dimension, as in SigLIP
    for name, array in arrays.items()
    if re.match(r'(visual|text)_projection\.|logit_', name)
  }
  objective = dict(
    name='contrastive',
    loss='softmax' if is_clip else 'sigmoid',
    outputs=len(found['visual_projection.weight']) if is_clip else None,
    text=dict(
      variant=None,
      width=width,
      depth=len(units),
      mlp_dim=units[0],
      num_heads=config['num_attention_heads'],
      vocabulary=vocabulary,
      length=length,
      pool='end' if is_clip else 'last',
      causal=is_clip,
      bias=not is_clip,
      gelu=metadata.GELUS[config['hidden_act']],
      norm_eps=config['layer_norm_eps'],
      dtype='float32',
    ),
  )
  head = 'text_projection' if is_clip else 'text_model.head'
  names = {**image.names.names, **_NAMES, 'text/head': head}
  is_gemma = vocabulary == PRESETS['siglip2'].vocabulary
  siglip = 'siglip2' if is_gemma else 'siglip'
  folder = tensors.folder_of(path)
  files = [folder / name for name in ('spiece.model', 'tokenizer.json')]
  texts = dict(
    name='captions',
    tokenizer=os.fspath(next((f for f in files if f.exists()), files[-1])),
    preset='clip' if is_clip else siglip,
    length=length,
    vocabulary=vocabulary,
  )
  return image._replace(
    arrays=found,
    names=image.names._replace(names=names),
    metadata=image.metadata.updated(
      preprocess={**image.metadata.preprocess, **texts}, class_names=()
    ),
    objective=objective,
  )
