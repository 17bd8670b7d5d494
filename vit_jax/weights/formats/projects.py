"""Names of torchvision and of open_clip, replaced by those of timm.

Swins of torchvision get the names of the authors' repository, which
`formats.swin` reads. Chunks of blocks and other names of DINOv2's repository
are aliases in `formats.timm`.
"""

from collections.abc import Mapping

import numpy as np

from vit_jax.weights.names import renamed

Arrays = dict[str, np.ndarray]
_PROJECTION = 'proj'  # of open_clip: [width, outputs]
_VIT = (
  (r'^class_token$', 'cls_token'),
  (r'^conv_proj\.', 'patch_embed.proj.'),
  (r'^encoder\.pos_embedding$', 'pos_embed'),
  (r'^encoder\.layers\.encoder_layer_', 'blocks.'),
  (r'\.self_attention\.in_proj_', '.attn.qkv.'),
  (r'\.self_attention\.out_proj\.', '.attn.proj.'),
  (r'\.ln_([12])\.', r'.norm\1.'),
  (r'\.mlp\.(0|linear_1)\.', '.mlp.fc1.'),
  (r'\.mlp\.(3|linear_2)\.', '.mlp.fc2.'),
  (r'^encoder\.ln\.', 'norm.'),
  (r'^heads\.head\.', 'head.'),
)
# Stages with odd numbers are blocks, and those with even numbers mergings.
_SWIN = (
  (r'^features\.0\.0\.', 'patch_embed.proj.'),
  (r'^features\.0\.2\.', 'patch_embed.norm.'),
  (r'\.mlp\.0\.', '.mlp.fc1.'),
  (r'\.mlp\.3\.', '.mlp.fc2.'),
  *((rf'^features\.{2 * i + 1}\.', f'layers.{i}.blocks.') for i in range(4)),
  *(
    (rf'^features\.{2 * i + 2}\.', f'layers.{i}.downsample.') for i in range(3)
  ),
)
_OPEN_CLIP = (
  (r'^class_embedding$', 'cls_token'),
  (r'^positional_embedding$', 'pos_embed'),
  (r'^conv1\.', 'patch_embed.proj.'),
  (r'^ln_pre\.', 'norm_pre.'),
  (r'^ln_post\.', 'norm.'),
  (r'^transformer\.resblocks\.', 'blocks.'),
  (r'\.attn\.in_proj_', '.attn.qkv.'),
  (r'\.attn\.out_proj\.', '.attn.proj.'),
  (r'\.ln_([12])\.', r'.norm\1.'),
  (r'\.ls_([12])\.', r'.ls\1.'),
  (r'\.mlp\.c_fc\.', '.mlp.fc1.'),
  (r'\.mlp\.c_proj\.', '.mlp.fc2.'),
)
# {name of an array that only files of a project contain: names}
_PROJECTS = {
  'conv_proj.weight': _VIT,
  'features.0.0.weight': _SWIN,
  'ln_pre.weight': _OPEN_CLIP,
}


def with_timm_names(arrays: Mapping[str, np.ndarray]) -> Arrays:
  """Returns the arrays of a model with the names and shapes of timm."""
  for first, names in _PROJECTS.items():
    if first in arrays:
      result = renamed(arrays, names)
      break
  else:
    return dict(arrays)
  for name in ('cls_token', 'pos_embed'):  # fewer dimensions in open_clip
    if name in result:
      result[name] = np.array(result[name], ndmin=3)
  if _PROJECTION in result:
    result['head.weight'] = result.pop(_PROJECTION).T
    outputs = len(result['head.weight'])
    result['head.bias'] = np.zeros(outputs, np.float32)
  return result
