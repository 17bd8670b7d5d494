"""Fills in the files of launch/ that are submitted to a cluster."""

import string

from vit_jax.config import shipped


class _Template(string.Template):
  delimiter = '@'  # a dollar sign belongs to the shell or to a pattern


def fill(file: str, /, **values: object) -> str:
  """Returns the text of a file with a value for each @NAME.

  Args:
    file: name of the file in launch/.
    **values: value of each name in the file.
  """
  text = (shipped.directory('launch') / file).read_text()
  return _Template(text).substitute(values)
