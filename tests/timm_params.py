"""Converts parameters of a timm Vision Transformer to this package's names."""

import numpy as np
import tiny_vit

from vit_jax.arrays import tree
from vit_jax.weights import names
from vit_jax.weights.formats import timm


def ours(theirs, model, image_size=(12, 16)):
  """Returns {path: array} from {timm's name: array} (values or gradients).

  Args:
    theirs: NumPy arrays by timm's names.
    model: our model.
    image_size: (height, width) of the images, pixels.
  """
  arrays = names.renamed(theirs, timm._ALIASES)
  for i in range(model.depth):
    start = f'blocks.{i}.attn.'
    if f'{start}q_bias' in arrays:  # Eva's keys do not have a bias
      query, value = arrays[f'{start}q_bias'], arrays[f'{start}v_bias']
      arrays[f'{start}qkv.bias'] = np.concatenate([query, 0 * query, value])
  expected = tree.flatten(tiny_vit.abstract(model, image_size))
  shapes = {path: leaf.shape for path, leaf in expected.items()}
  return timm.NAMES.native(arrays, shapes)
