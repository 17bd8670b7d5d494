"""Features of single blocks, and patch tokens in place of one vector."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from vit_jax.errors import UserError
from vit_jax.evaluators.contract import Batch, Setting
from vit_jax.objectives.mixing import normalize
from vit_jax.weights.contract import Pretrained

PyTree = Any
Predict = Callable[[PyTree, Batch], dict[str, jax.Array]]


def parse_layers(numbers: Sequence[str]) -> list[int]:
  """Returns the indices of blocks that the flag --layers contains.

  Raises:
    UserError: a value is not an integer.
  """
  try:
    return [int(number) for number in numbers]
  except ValueError as error:
    raise UserError(
      f'--layers={",".join(numbers)} is not a list of integers: give the '
      'indices of blocks, such as --layers=-1,-4.'
    ) from error


def predictor(
  weights: Pretrained, *, layers: Sequence[int] = (), tokens: bool = False
) -> Predict:
  """Returns a function like `Objective.predict` with other features.

  The last LayerNorm is applied to the output of each block, as in DINO's
  `get_intermediate_layers` (timm's function of this name needs `norm=True`).
  With `layers`, each block has the features that the model would have if it
  ended after this block: for a class token, the normalized class token.

  Args:
    weights: the model and its parameters.
    layers: indices of blocks; 0 is the first one, -1 the last one. Their order
      is that of the result. If () is given, only the last block is used.
    tokens: whether the features are all patch tokens, row by row, without a
      class token, distillation token or registers.

  Returns:
    Function of the parameters of the objective and of a batch. `features` is
    float32 `[n, layers, d]`, or with `tokens` `[n, layers, t, d]`, and without
    `layers` `[n, t, d]`.

  Raises:
    UserError: the model does not have these results.
  """
  model, objective = weights.model(), weights.objective()
  if layers and not hasattr(model, 'last_norm'):
    raise UserError(
      f'--layers={",".join(map(str, layers))} needs a Vision Transformer or a '
      f'hybrid, but the weights are those of a {weights.about["model"]["name"]}'
      ': leave it out.'
    )

  def predict(params: PyTree, batch: Batch) -> dict[str, jax.Array]:
    variables = {'params': objective.backbone(params)}
    images = normalize(batch['image'])
    want = 'layers' if layers else 'tokens'
    outputs = model.apply(variables, images, method='predict', want=(want,))
    x = outputs[want]  # [n, depth, t, d] or [n, t, d]
    if layers:
      _check_layers(layers, x.shape[1])
      x = x[:, np.array(layers)]  # [n, layers, t, d]
      x = model.apply(variables, x, method='last_norm')
    if tokens:
      return {'features': x[..., -_patches(model, images, x) :, :]}
    read = model.apply(variables, x.reshape(-1, *x.shape[2:]), method='readout')
    return {'features': read['features'].reshape(*x.shape[:2], -1)}

  return predict


def vectors(
  setting: Setting, params: PyTree, image_size: tuple[int, int]
) -> int:
  """Returns the number of vectors per image, without computing anything.

  Args:
    setting: setting of the extraction.
    params: shapes of the parameters of the objective.
    image_size: (height, width), pixels.

  Raises:
    UserError: the model does not have the results that the features need.
  """
  images = jax.ShapeDtypeStruct((1, *image_size, 3), np.uint8)
  found = jax.eval_shape(setting.predict, params, {'image': images})
  return math.prod(found['features'].shape[1:-1])


def _check_layers(layers: Sequence[int], depth: int) -> None:
  """Checks that all indices are those of blocks.

  Raises:
    UserError: an index is out of range.
  """
  wrong = [index for index in layers if not -depth <= index < depth]
  if wrong:
    raise UserError(
      f'--layers contains {wrong[0]}, but the model has {depth} blocks: give '
      f'indices from 0 to {depth - 1}, or from -{depth} to -1.'
    )


def _patches(model: Any, images: jax.Array, tokens: jax.Array) -> int:
  """Returns the number of patch tokens, which are the last tokens."""
  if hasattr(model, 'grid'):
    return math.prod(model.grid(images.shape[1:3]))
  return tokens.shape[-2]  # every token is a position of the last map
