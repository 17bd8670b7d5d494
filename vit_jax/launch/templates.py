"""Fills in the files of launch/ that are submitted to a cluster."""

import pathlib
import string

import vit_jax

_FOLDER = pathlib.Path(vit_jax.__file__).parents[1] / 'launch'


class _Template(string.Template):
  delimiter = '@'  # a dollar sign belongs to the shell or to a pattern


def fill(file: str, /, **values: object) -> str:
  """Returns the text of a file with a value for each @NAME.

  Args:
    file: name of the file in launch/.
    **values: value of each name in the file.
  """
  return _Template((_FOLDER / file).read_text()).substitute(values)
