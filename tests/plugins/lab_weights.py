"""A weight format outside the package: a folder with one .npy per parameter."""

import json
import pathlib

import jax
import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights.contract import Pretrained
from vit_jax.weights.description import Description


def matches(path):
  """Returns True if the name of the folder ends in '.lab', or else None."""
  return path.endswith('.lab') or None


def load(path, head):
  """Reads `about` at once, and the arrays when they are requested."""
  del head  # the format is named, so `matches` was not called
  folder = pathlib.Path(path)
  if not (folder / 'about.json').is_file():
    raise UserError(f'{path} is no folder of lab weights: no about.json in it.')
  about = json.loads((folder / 'about.json').read_text())

  def put(abstract):
    def leaf(path, shape):
      array = np.load(folder / _file_name(path))
      if array.shape != shape.shape:
        raise UserError(
          f'{folder}: {_file_name(path)} has the shape {array.shape}; the '
          f'model takes {shape.shape}.'
        )
      return jax.device_put(array, shape.sharding)

    return jax.tree_util.tree_map_with_path(leaf, abstract)

  return Pretrained(path, Description.of_json(about), put)


def save(path, params, description):
  """Writes a new folder."""
  folder = pathlib.Path(path)
  folder.mkdir()
  for place, leaf in jax.tree_util.tree_leaves_with_path(params):
    np.save(folder / _file_name(place), np.asarray(leaf))
  (folder / 'about.json').write_text(json.dumps(description.to_json()))


def _file_name(path):
  return jax.tree_util.keystr(path, simple=True, separator='.') + '.npy'
