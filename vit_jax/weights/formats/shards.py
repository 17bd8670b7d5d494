"""Finds and reads the weight files in a directory, which may be shards.

A directory contains one file, `model.safetensors` or `pytorch_model.bin`, or
shards and an index (`model.safetensors.index.json`) of the shard of each array.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.weights.formats import settings, tensors

_FILES = ('model.safetensors', 'pytorch_model.bin')
_INDEX = '.index.json'  # after the name of a file
_NAMES = re.compile(r'.*\.safetensors|pytorch_model.*\.bin')
_RULES: settings.Rules = {
  'weight_map': settings.mapping(settings.TEXT),
  'metadata': {'total_size': settings.number(0, 2**63)},
}
_MAX_SHOWN = 5  # contradictions in one message


def directory(path: str) -> Any:
  """Returns the directory of weights, given its path or that of its file."""
  folder = paths.locate(path)
  is_file = _NAMES.fullmatch(folder.name) and not folder.is_dir()
  return folder.parent if is_file else folder


def find(path: str) -> str:
  """Returns the path of the file or the index to read.

  Args:
    path: path of a directory, of a file, or of a shard, which stands for all
      shards.

  Raises:
    UserError: the directory contains no weights.
  """
  file = paths.locate(path)
  is_folder = file.is_dir()
  folder = file if is_folder else file.parent
  for name in _FILES:
    index = folder / f'{name}{_INDEX}'
    if index.exists() and (is_folder or file.name in _files(index).values()):
      return os.fspath(index)
    if is_folder and (folder / name).exists():
      return os.fspath(folder / name)
  if is_folder:
    raise UserError(
      f'{path} contains no weights: a directory with a config.json must '
      f'contain {" or ".join(_FILES)}, or shards and their '
      f'{_FILES[0]}{_INDEX}.'
    )
  return path


def read(file: str) -> dict[str, np.ndarray]:
  """Reads all arrays of a file, or of the shards in an index; see `find`.

  Raises:
    UserError: a file cannot be read, or the index contradicts the shards.
  """
  if not file.endswith(_INDEX):
    return tensors.read(file)
  index = paths.locate(file)
  listed = _files(index)
  arrays, actual = {}, set()
  for shard in sorted(set(listed.values())):
    if shard != os.path.basename(shard):
      raise UserError(
        f'{index} lists {shard!r}; its files must be in the same directory.'
      )
    part = tensors.read(os.fspath(index.parent / shard))
    actual |= {(name, shard) for name in part}
    arrays |= part
  _check(index, listed, actual)
  total = _content(index).get('metadata', {}).get('total_size')
  nbytes = sum(array.nbytes for array in arrays.values())
  if total not in (None, nbytes):
    raise UserError(
      f'{index} specifies a total_size of {total:,} bytes, but the arrays in '
      f'its files have {nbytes:,}. Fetch all files of one version again.'
    )
  return arrays


def _content(index: Any) -> dict[str, Any]:
  return settings.validated(index, settings.read(index), _RULES)


def _files(index: Any) -> dict[str, str]:
  """Returns the shard of each array, {name: file}."""
  return _content(index).get('weight_map', {})


def _check(
  index: Any, listed: Mapping[str, str], actual: set[tuple[str, str]]
) -> None:
  """Compares an index with the arrays in its shards.

  Args:
    index: path of the index, for messages.
    listed: shard of each array according to the index.
    actual: pairs of an array and a shard that contains it.

  Raises:
    UserError: they differ; the message lists arrays and shards.
  """
  shards = {name: shard for name, shard in actual}
  wrong = [
    f'{name} is not in {shard}'
    + (f', but in {shards[name]}' if name in shards else '')
    for name, shard in sorted(set(listed.items()) - actual)
  ] + [
    f'{name} is in {shard}, but not listed'
    + (f' there (in {listed[name]})' if name in listed else '')
    for name, shard in sorted(actual - set(listed.items()))
  ]
  if wrong:
    more = f' and {len(wrong) - _MAX_SHOWN} more' if wrong[_MAX_SHOWN:] else ''
    raise UserError(
      f'{index} contradicts its files: {"; ".join(wrong[:_MAX_SHOWN])}{more}. '
      'Fetch all files of one version again.'
    )
