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
# (pattern, replacement) for the names of all projects
_NAMES = (
  (r'^class_(token|embedding)$', 'cls_token'),
  (r'^(encoder\.pos_|positional_)embedding$', 'pos_embed'),
  (r'^(conv_proj|conv1|features\.0\.0)\.', 'patch_embed.proj.'),
  (r'^features\.0\.2\.', 'patch_embed.norm.'),
  (r'^(encoder\.layers\.encoder_layer_|transformer\.resblocks\.)', 'blocks.'),
  # Stages of a Swin with odd numbers are blocks, those with even ones mergings.
  *((rf'^features\.{2 * i + 1}\.', f'layers.{i}.blocks.') for i in range(4)),
  *(
    (rf'^features\.{2 * i + 2}\.', f'layers.{i}.downsample.') for i in range(3)
  ),
  (r'\.(self_attention|attn)\.in_proj_', '.attn.qkv.'),
  (r'\.(self_attention|attn)\.out_proj\.', '.attn.proj.'),
  (r'\.ln_([12])\.', r'.norm\1.'),
  (r'\.ls_([12])\.', r'.ls\1.'),
  (r'\.mlp\.(0|linear_1|c_fc)\.', '.mlp.fc1.'),
  (r'\.mlp\.(3|linear_2|c_proj)\.', '.mlp.fc2.'),
  (r'^ln_pre\.', 'norm_pre.'),
  (r'^(encoder\.ln|ln_post)\.', 'norm.'),
  (r'^heads\.head\.', 'head.'),
)
# Arrays that only files of torchvision's ViTs, its Swins, and open_clip contain
PROJECTS = ('conv_proj.weight', 'features.0.0.weight', 'ln_pre.weight')


def with_timm_names(arrays: Mapping[str, np.ndarray]) -> Arrays:
  """Returns the arrays of a model with the names and shapes of timm."""
  if not any(first in arrays for first in PROJECTS):
    return dict(arrays)
  result = renamed(arrays, _NAMES)
  for name in ('cls_token', 'pos_embed'):  # fewer dimensions in open_clip
    if name in result:
      result[name] = np.array(result[name], ndmin=3)
  if _PROJECTION in result:
    result['head.weight'] = result.pop(_PROJECTION).T
    outputs = len(result['head.weight'])
    result['head.bias'] = np.zeros(outputs, np.float32)
  return result
