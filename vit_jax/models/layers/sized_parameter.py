"""Parameters whose shape depends on the size of the images."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
from jaxtyping import Array

from vit_jax.errors import UserError


def sized_parameter(
  module: nn.Module, name: str, init: Callable[..., Array], shape: Any
) -> Any:
  """Returns a parameter of a module, after a check of its shape.

  Args:
    module: module that owns the parameter.
    name: name of the parameter.
    init: initializer.
    shape: shape that the images of this call need.

  Raises:
    UserError: the parameter was made for images of another size.
  """
  shape = tuple(shape)
  # Flax would compare the shapes too, but its error does not mention images.
  if module.has_variable('params', name) and not module.is_initializing():
    value: Any = module.get_variable('params', name)
    if tuple(value.shape) != shape:
      path = '/'.join((*module.path, name))
      raise UserError(
        f'the parameter {path} has the shape {list(value.shape)}, and these '
        f'images need {list(shape)}: the parameters are for images of another '
        'size. Resize the images to it, load the weights for this size '
        '(load_pretrained(path, image_size=…)), or use '
        'model.at_sizes(original_size).'
      )
  return module.param(name, init, shape)
