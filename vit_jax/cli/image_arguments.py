"""Finds the image files that the arguments of a command specify."""

import glob
import os
from collections.abc import Sequence

from vit_jax.data.storage import class_folders
from vit_jax.data.storage.files import IMAGES
from vit_jax.errors import UserError


def images_of(arguments: Sequence[str]) -> list[str]:
  """Returns the paths of all image files that arguments specify.

  Args:
    arguments: files, local directories, and local patterns.

  Raises:
    UserError: a directory contains no images, or a pattern matches no file.
  """
  found = []
  for argument in arguments:
    if os.path.isdir(argument):
      files = sorted(class_folders.images(argument))
    elif glob.has_magic(argument) and not os.path.exists(argument):
      files = sorted(glob.glob(argument, recursive=True))
    else:
      files = [argument]
    if not files:
      raise UserError(
        f'{argument} matches no image; give image files, a directory with '
        f'files that end in {", ".join(IMAGES)}, or a pattern.'
      )
    found += files
  return found
