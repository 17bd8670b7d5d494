"""Computes the features of a source's examples, part by part."""

import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from etils import epath

from vit_jax.cli.output_parts import Arrays, Parts, resume
from vit_jax.config.completion import Config
from vit_jax.data import fingerprint
from vit_jax.data.contract import Source
from vit_jax.data.remaining import Remaining
from vit_jax.data.storage.classes import UNLABELLED
from vit_jax.errors import UserError
from vit_jax.evaluators.features import Extractor
from vit_jax.features import image_files, writing
from vit_jax.processes.consensus import from_main

PyTree = Any


def describe_data(config: Config, source: Source) -> dict[str, Any]:
  """Returns a description of the data, without reading examples.

  Args:
    config: config with the completed sections source and reader.
    source: source of the examples.
  """
  if isinstance(source, image_files.Images):
    text = b'\n'.join(map(os.fsencode, source.paths))
    identity: dict[str, Any] = {'paths': hashlib.sha256(text).hexdigest()[:16]}
    name = f'{len(source)} images'
  else:
    identity = {'source': config.source.to_dict()}
    identity['fingerprint'] = fingerprint.of(source)
    name = source.name
  return {
    'data': name,
    'examples': len(source),
    **identity,
    'on_bad_record': config.reader.on_bad_record,
    'class_names': list(source.class_names) if _has_labels(source) else [],
  }


def extract(
  extractor: Extractor,
  params: PyTree,
  source: Source,
  out: epath.Path,
  about: dict[str, Any],
  size: int,
) -> dict[str, Any]:
  """Computes features part by part, and joins the parts into one file.

  Parts that an interrupted command has written are not computed again.

  Args:
    extractor: extractor of the features.
    params: parameters of the model.
    source: source of the examples.
    out: path of the file to write.
    about: description that is stored in the file.
    size: number of batches per part.

  Returns:
    The description, extended by `count`, the number of examples, `shape`, the
    shape of the features, and `width`, the last number of the shape.
  """

  def batches(start: int) -> Iterator[Arrays]:
    remaining = Remaining(source, start)
    for found, mask in extractor.batches(params, remaining):
      index = start + np.arange(len(mask), dtype=np.int64)
      yield _columns(source, found, index, mask)
      start += len(mask)

  parts, number = resume(out, about, size, batches)
  return from_main(lambda: _join(parts, number, out, about) if parts else {})


def _has_labels(source: Source) -> bool:
  return list(source.class_names) not in ([], [UNLABELLED])


def _columns(
  source: Source, found: Any, index: np.ndarray, mask: np.ndarray
) -> dict[str, np.ndarray]:
  """Returns the columns of a batch.

  Args:
    source: source of the examples.
    found: features and labels of the batch.
    index: index of each example in the source.
    mask: False for padding and for examples that cannot be used, which are left
      out.
  """
  index = index[mask]
  columns = {'features': found.features[mask], 'index': index}
  if _has_labels(source):
    columns['label'] = found.labels[mask]
  if isinstance(source, image_files.Images):
    columns['path'] = np.array([source.paths[i] for i in index], np.str_)
  return columns


def _join(
  parts: Parts, number: int, out: epath.Path, about: dict[str, Any]
) -> dict[str, Any]:
  """Joins all parts into one file and removes them; returns its description.

  Raises:
    UserError: all examples are bad records.
  """
  count = sum(len(parts.read(n, ['index'])['index']) for n in range(number))
  shape = parts.read(0, ['features'])['features'].shape[1:]
  description = about | {
    'count': count,
    'shape': [count, *shape],
    'width': shape[-1],
  }
  if not description['count']:
    raise UserError(
      f'{about["data"]}: none of the {about["examples"]} examples could be '
      'used. The log lists the reason for each of them.'
    )
  with parts.joining() as temporary:
    writing.FORMATS[out.suffix](
      temporary, parts, number, json.loads(json.dumps(description))
    )
  return description
