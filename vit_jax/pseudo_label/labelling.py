"""Predicts labels of images with a teacher, and selects confident ones."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jaxtyping import Int

from vit_jax.cli.output_parts import Arrays, Parts, resume
from vit_jax.data.contract import Source
from vit_jax.data.remaining import Remaining
from vit_jax.data.storage import npz
from vit_jax.errors import UserError
from vit_jax.evaluators.contract import Batch, Setting
from vit_jax.processes.consensus import from_main
from vit_jax.pseudo_label.choice import Choice, balanced

log = logging.getLogger('vit_jax')
PyTree = Any
# Keys of the description that are known only after the selection.
RESULTS = ('count', 'distinct', 'seen', 'confident', 'of_class')


def label(
  setting: Setting,
  params: PyTree,
  source: Source,
  out: epath.Path,
  about: dict[str, Any],
  size: int,
  left_out: Int[np.ndarray, ' n'],
) -> dict[str, Any]:
  """Labels images part by part, and writes the selected ones to one file.

  Parts that an interrupted command has written are not computed again.

  Args:
    setting: setting of the evaluation, whose `predict` applies the teacher.
    params: parameters of the teacher.
    source: source of the images.
    out: path of the file to write.
    about: description that is stored in the file.
    size: number of batches per part.
    left_out: indices of examples that are not labelled. The stored indices
      remain those of all examples of `source`.

  Returns:
    The description, extended by the keys in `RESULTS`.
  """
  threshold = np.float32(about['min_confidence'])

  def predict(params: PyTree, batch: Batch) -> PyTree:
    logits = setting.predict(params, batch)['logits'].astype(jnp.float32)
    return {'soft': jax.nn.softmax(logits), 'mask': batch['mask']}

  def batches(start: int) -> Iterator[Arrays]:
    function = setting.compiled(predict)
    for found in setting.sweep(params, Remaining(source, start), function):
      index = start + np.arange(len(found['mask']), dtype=np.int64)
      mask = found['mask'] & ~np.isin(index, left_out)
      yield _confident(found['soft'], mask, index, threshold)
      start += len(mask)

  parts, number = resume(out, about, size, batches)
  return from_main(lambda: _finish(parts, number, out, about) if parts else {})


def _confident(
  soft: np.ndarray, mask: np.ndarray, index: np.ndarray, threshold: np.float32
) -> Arrays:
  """Returns the confident rows of a batch and the number of its examples."""
  kept = mask & (soft.max(axis=-1) >= threshold)
  seen = np.array([mask.sum()], np.int64)
  return {'soft': soft[kept], 'index': index[kept], 'seen': seen}


def _finish(
  parts: Parts, number: int, out: epath.Path, about: dict[str, Any]
) -> dict[str, Any]:
  """Selects examples from all parts and writes them to one file.

  Raises:
    UserError: no prediction is confident enough.
  """
  summaries = [_summary(parts.read(n)) for n in range(number)]
  labels, confidence = (
    np.concatenate([part[key] for part in summaries])
    for key in ('label', 'confidence')
  )
  seen = sum(int(part['seen'].sum()) for part in summaries)
  if not len(labels):
    raise UserError(
      f'{about["data"]}: for none of the {seen} images, the teacher predicts a '
      f'class with a probability of at least {about["min_confidence"]}: reduce '
      '--min_confidence, or train the teacher for longer.'
    )
  choice = balanced(labels, confidence, about['per_class'], about['seed'])
  of_class = np.bincount(labels, minlength=len(about['class_names']))
  _warn_of_empty(about['class_names'], of_class)
  description = about | {
    'count': int(choice.copies.sum()),
    'distinct': len(choice.rows),
    'seen': seen,
    'confident': len(labels),
    'of_class': of_class.tolist(),
  }
  description = json.loads(json.dumps(description))
  _write(parts, number, choice, description)
  return description


def _summary(part: Arrays) -> Arrays:
  """Reduces a part to the values that the selection needs."""
  soft = part['soft']
  return {
    'label': soft.argmax(axis=-1),
    'confidence': soft.max(axis=-1),
    'seen': part['seen'],
  }


def _write(
  parts: Parts, number: int, choice: Choice, about: dict[str, Any]
) -> None:
  """Writes the file of the selected examples and removes the parts."""
  count, classes = len(choice.rows), len(about['class_names'])
  int64, float32 = np.dtype(np.int64), np.dtype(np.float32)
  columns = {
    'soft': npz.Column(
      (count, classes), float32, _selected_rows(parts, number, choice, 'soft')
    ),
    'index': npz.Column(
      (count,), int64, _selected_rows(parts, number, choice, 'index')
    ),
    'copies': npz.Column((count,), int64, [choice.copies]),
  }
  with parts.joining() as temporary:
    npz.write(temporary, columns, {'about': json.dumps(about)})


def _selected_rows(
  parts: Parts, number: int, choice: Choice, key: str
) -> Iterator[np.ndarray]:
  """Yields the selected rows of a column, part by part."""
  start = 0
  for n in range(number):
    column = parts.read(n)[key]
    first, last = np.searchsorted(choice.rows, [start, start + len(column)])
    yield column[choice.rows[first:last] - start]
    start += len(column)


def _warn_of_empty(class_names: list[str], of_class: np.ndarray) -> None:
  empty = [class_names[i] for i in np.flatnonzero(of_class == 0)]
  if empty:
    log.warning(
      '%d of the %d classes, for example %r, do not have any image with a '
      'confident prediction of the teacher; the student learns these classes '
      'only from labelled images',
      len(empty),
      len(class_names),
      empty[0],
    )
