"""Text towers of CLIP and SigLIP, next to image towers in the same files."""

import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.data.tokens import PRESETS
from vit_jax.weights import metadata
from vit_jax.weights.foreign import ParsedWeights
from vit_jax.weights.formats import tensors

_LAYERS, _FOREIGN = 'text/encoder/layers/', 'text_model.encoder.layers.{i}.'
_TABLE = 'text_model.embeddings.token_embedding.weight'
_POSITIONS = 'text_model.embeddings.position_embedding.weight'
_NAMES = {
  'temperature': 'logit_scale',
  'bias': 'logit_bias',
  'projection': 'visual_projection',
  'text/embedding': _TABLE,
  'text/positions': _POSITIONS,
  'text/encoder/norm': 'text_model.final_layer_norm',
  **{
    f'{_LAYERS}{ours}': _FOREIGN + theirs
    for ours, theirs in {
      'norm1': 'layer_norm1',
      'norm2': 'layer_norm2',
      'attention/query': 'self_attn.q_proj',
      'attention/key': 'self_attn.k_proj',
      'attention/value': 'self_attn.v_proj',
      'attention/out': 'self_attn.out_proj',
      'mlp/fc1': 'mlp.fc1',
      'mlp/fc2': 'mlp.fc2',
    }.items()
  },
}
_USED = re.compile(r'(text_model|(visual|text)_projection|logit_\w+)\b')
# Defaults of the library for keys that may be missing in `text_config`
_SIGLIP = dict(
  num_attention_heads=12, hidden_act='gelu_pytorch_tanh', layer_norm_eps=1e-6
)
_CLIP = dict(
  num_attention_heads=8,
  hidden_act='quick_gelu',
  layer_norm_eps=1e-5,
  eos_token_id=49_407,
)


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
    config: content of config.json.
    image: image tower.
  """
  if _TABLE not in arrays or 'text_config' not in config:
    return image
  is_clip = 'logit_bias' not in arrays
  given = (_CLIP if is_clip else _SIGLIP) | config['text_config']
  table, (length, _) = arrays[_TABLE], arrays[_POSITIONS].shape
  vocabulary, width = table.shape
  # The library looks for the highest token if this is 2, as `Text` does.
  if is_clip and given['eos_token_id'] not in (2, vocabulary - 1):
    return image
  unused = ('position_ids', 'classifier')
  found = {k: v for k, v in arrays.items() if _USED.match(k)}
  found = {
    # A number has one dimension, as in SigLIP.
    k: np.reshape(v, (1,)) if v.ndim == 0 else v
    for k, v in (image.arrays | found).items()
    if not any(word in k for word in unused)
  }
  layers = [re.match(r'text_model\.encoder\.layers\.(\d+)', k) for k in found]
  text = dict(
    variant=None,
    width=width,
    depth=max((int(layer[1]) + 1 for layer in layers if layer), default=0),
    mlp_dim=len(arrays[f'{_FOREIGN}mlp.fc1.bias'.format(i=0)]),
    num_heads=given['num_attention_heads'],
    vocabulary=vocabulary,
    length=length,
    pool='end' if is_clip else 'last',
    causal=is_clip,
    bias=not is_clip,
    gelu=metadata.GELUS[given['hidden_act']],
    norm_eps=given['layer_norm_eps'],
    dtype='float32',
  )
  head = 'text_projection' if is_clip else 'text_model.head'
  objective = dict(
    name='contrastive',
    loss='softmax' if is_clip else 'sigmoid',
    outputs=len(arrays['visual_projection.weight']) if is_clip else None,
    text=text,
  )
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
    names=image.names._replace(
      names={**image.names.names, **_NAMES, 'text/head': head}
    ),
    metadata=image.metadata.updated(
      preprocess={**image.metadata.preprocess, **texts}, class_names=()
    ),
    objective=objective,
  )
