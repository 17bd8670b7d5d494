"""Parts of an HTML report that require images: pictures and confusion matrix.

They are stored in WORKDIR/report.json, so that reports that are written later
contain them as well.
"""

import base64
import json
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
from etils import epath
from jaxtyping import Float, Int, UInt8

from vit_jax.analysis.report.record import PARTS
from vit_jax.files import atomic

_CLASSES = 30  # maximum number of classes of a readable confusion matrix
_ROWS = 20  # maximum number of rows of a table
_SIDE = 160  # larger images are shrunk to this side length, pixels
_LOSSLESS = 64  # up to this side length JPEG blocks would be visible, pixels
_NAME = 60  # maximum number of characters of a line of a caption


def picture(
  pixels: UInt8[np.ndarray, 'y x 3'], caption: list[str]
) -> dict[str, Any]:
  """Encodes an image for the page: `src` (a data URI) and `caption` (lines)."""
  scale = _SIDE / max(pixels.shape[:2])
  if scale < 1:
    size = [max(1, round(side * scale)) for side in pixels.shape[1::-1]]
    pixels = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
  kind = 'png' if max(pixels.shape) <= _LOSSLESS else 'jpeg'
  done, data = cv2.imencode(f'.{kind}', pixels[..., ::-1])
  assert done
  text = base64.b64encode(data.tobytes()).decode()
  return {'src': f'data:image/{kind};base64,{text}', 'caption': caption}


def confusion(
  labels: Int[np.ndarray, ' n'],
  predicted: Int[np.ndarray, ' n'],
  names: Sequence[str],
) -> dict[str, Any]:
  """Counts how often each class is predicted as another class.

  Returns:
    `names` and `matrix` (rows: true classes), which are empty if there are more
    than 30 classes; `confused`, the most frequent errors; and `worst`, the
    classes with the lowest accuracy, which is empty if there are at most 30.
  """
  size = 1 + int(max(labels.max(), predicted.max(), len(names) - 1))
  pairs, counts = np.unique(
    labels.astype(np.int64) * size + predicted, return_counts=True
  )
  true, guessed = np.divmod(pairs, size)
  per_class = np.bincount(labels, minlength=size)
  correct = np.bincount(labels[labels == predicted], minlength=size)
  order = np.argsort(-np.where(true == guessed, 0, counts), kind='stable')
  confused = [
    [
      name(names, int(true[i])),
      name(names, int(guessed[i])),
      int(counts[i]),
      f'{100 * counts[i] / per_class[true[i]]:.1f} %',
    ]
    for i in order[:_ROWS]
    if true[i] != guessed[i]
  ]
  few = size <= _CLASSES
  matrix = np.zeros((size, size), int) if few else np.zeros((0, 0), int)
  if few:
    matrix[true, guessed] = counts
  return {
    'names': [name(names, i) for i in range(size)] if few else [],
    'matrix': matrix.tolist(),
    'confused': confused,
    'worst': [] if few else _worst(correct, per_class, names),
  }


def _worst(
  correct: Int[np.ndarray, ' k'],
  per_class: Int[np.ndarray, ' k'],
  names: Sequence[str],
) -> list[list[Any]]:
  """Returns name, accuracy and size of the classes with lowest accuracy."""
  present = np.flatnonzero(per_class)
  accuracy: Float[np.ndarray, ' k'] = correct[present] / per_class[present]
  chosen = present[np.argsort(accuracy, kind='stable')[:_ROWS]]
  return [
    [
      name(names, int(i)),
      f'{100 * correct[i] / per_class[i]:.1f} %',
      int(per_class[i]),
    ]
    for i in chosen
  ]


def name(names: Sequence[str], index: int) -> str:
  """Returns the name of a class, shortened if it is long."""
  full = names[index] if index < len(names) else f'class {index}'
  return full if len(full) <= _NAME else f'{full[: _NAME - 1]}…'


def write(workdir: epath.Path, values: dict[str, Any]) -> None:
  """Writes the values to WORKDIR/report.json.

  Args:
    workdir: directory of the run.
    values: `step`, `training` (pictures) and `judged`, from
      `training.predictions.predict_examples`.

  Raises:
    OSError: the file cannot be written.
  """
  atomic.write(workdir / PARTS, json.dumps(values))
