"""Parameters whose shape depends on the size of the images."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
from jaxtyping import Array

from vit_jax.errors import UserError


def sized_parameter(
  module: nn.Module, name: str, init: Callable[..., Array], shape: Any
) -> Any:
  """Checks the shape of a parameter of a module, and returns the parameter.

  Args:
    module: module that owns the parameter.
    name: name of the parameter.
    init: initializer.
    shape: shape of the parameter for the images of this call.

  Raises:
    UserError: the parameter is for images of another size.
  """
  shape = tuple(shape)
  # Flax also compares the shapes, but its error does not mention images.
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
