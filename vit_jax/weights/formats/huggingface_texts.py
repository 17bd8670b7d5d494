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
from vit_jax.weights.names import renamed

_TABLE = 'text_model.embeddings.token_embedding.weight'
_TEXT = re.compile(r'text_model\.(?!.*position_ids)(.*)')
_OTHERS = re.compile(r'(visual|text)_projection\.|logit_')


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
  # `Text` takes the token with the highest number for the end of a text. So
  # does the library if eos_token_id is 2, a mistake in older configs.
  if is_clip and config.get('eos_token_id') not in (2, vocabulary - 1):
    return image
  text = {match[1]: v for k, v in arrays.items() if (match := _TEXT.match(k))}
  text = renamed(text, huggingface_models.VIT_ALIASES)
  # Biases of the hidden units, one for each layer
  hidden = [v for k, v in text.items() if k.endswith('intermediate.dense.bias')]
  length = len(text[huggingface_models.POSITIONS])
  found = {k: v for k, v in image.arrays.items() if 'classifier' not in k}
  found |= {f'text_model.{name}': array for name, array in text.items()}
  # A scale or bias that is a single number gets one dimension, as in SigLIP.
  found |= {k: np.atleast_1d(v) for k, v in arrays.items() if _OTHERS.match(k)}
  objective = dict(
    name='contrastive',
    loss='softmax' if is_clip else 'sigmoid',
    outputs=len(found['visual_projection.weight']) if is_clip else None,
    text=dict(
      variant=None,
      width=width,
      depth=len(hidden),
      mlp_dim=len(hidden[0]),
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
  names = {**image.names.names, 'text/head': head}
  if is_clip:
    preset = 'clip'
  elif vocabulary == PRESETS['siglip2'].vocabulary:
    preset = 'siglip2'
  else:
    preset = 'siglip'
  folder = tensors.folder_of(path)
  files = [folder / name for name in ('spiece.model', 'tokenizer.json')]
  preprocess = dict(
    image.metadata.preprocess,
    name='captions',
    tokenizer=os.fspath(next((f for f in files if f.exists()), files[-1])),
    preset=preset,
    length=length,
    vocabulary=vocabulary,
  )
  return image._replace(
    arrays=found,
    names=image.names._replace(names=names),
    metadata=image.metadata.updated(preprocess=preprocess, class_names=()),
    objective=objective,
  )
