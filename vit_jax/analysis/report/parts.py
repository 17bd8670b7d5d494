"""What needs a pass over images: predictions, mistakes, what is confused.

It is kept in WORKDIR/report.json, so that each page after it has it too.
"""

import base64
import functools
import json
import os
from collections.abc import Sequence
from typing import Any

import cv2
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jaxtyping import Float, Int, UInt8

from vit_jax.analysis.report.record import PARTS
from vit_jax.data.contract import Source, require
from vit_jax.data.images.headers import DecodeError
from vit_jax.errors import UserError
from vit_jax.evaluators.contract import Batch, Setting
from vit_jax.files import atomic

PyTree = Any
EXAMPLES = 10_000  # judged at most
_SHOWN = 24  # images of each kind
_CLASSES = 30  # a matrix of more cannot be read
_ROWS = 20  # of a table
_SIDE = 160  # pixels, of larger images
_LOSSLESS = 64  # pixels, up to which JPEG's blocks would be seen
_NAME = 60  # characters of a caption's line


class Spread:
  """Examples of a source, spread evenly over it; itself a source."""

  def __init__(self, source: Source, count: int):
    """Chooses at most `count` examples, in order."""
    places = np.linspace(0, len(source) - 1, min(count, len(source)))
    self.indices = places.round().astype(int).tolist()
    self.source = source
    self.name, self.num_classes = source.name, source.num_classes
    self.class_names = source.class_names

  def __len__(self) -> int:
    return len(self.indices)

  def __getitem__(self, index: int) -> dict[str, Any]:
    return self.source[self.indices[index]]

  def title(self, index: int) -> str:
    """The name of an example's own file, or its number."""
    number = self.indices[index]
    where = getattr(self.source, 'where', lambda _: '')
    name = os.path.basename(str(where(number)))
    if not name or ', ' in name or ' @ ' in name:  # one of a file of many
      return f'example {number}'
    return name[:_NAME]


def judge(
  setting: Setting, weights: PyTree, split: str, count: int = EXAMPLES
) -> dict[str, Any]:
  """Predictions for examples of a split, to be shown on the page.

  Args:
    setting: of an evaluator.
    weights: one of those that the objective returns.
    split: of the run's source.
    count: of examples, at most.

  Raises:
    UserError: the model has no head, or the data no labels; no example could
      be used.
  """
  if not setting.num_classes:
    raise UserError('the model has no head, so it predicts no classes')
  require(setting.transform.spec, 'image', 'label', who='the report')
  whole = setting.open_source(split)
  source = Spread(whole, count)
  function = setting.compiled(functools.partial(_of_batch, setting.predict))
  results = list(setting.sweep(weights, source, function))
  if not results:
    raise UserError(f'{source.name} is empty')
  joined = {
    name: np.concatenate([result[name] for result in results])
    for name in results[0]
  }
  kept = np.flatnonzero(joined.pop('mask'))
  if not len(kept):
    raise UserError(f'{source.name} has no example that can be used')
  seen = {name: array[kept] for name, array in joined.items()}
  wrong = seen['predicted'] != seen['label']
  order = np.argsort(-seen['confidence'], kind='stable')
  mistakes = [i for i in order.tolist() if wrong[i]][:_SHOWN]
  spread = np.linspace(0, len(kept) - 1, min(_SHOWN, len(kept)))
  examples = np.unique(spread.round().astype(int)).tolist()
  show = functools.partial(_shown, setting, source, kept, seen)
  return {
    'source': source.name,
    'count': len(kept),
    'total': len(whole),
    'accuracy': float(1 - wrong.mean()),
    'examples': show(examples),
    'mistakes': show(mistakes),
    **confusion(seen['label'], seen['predicted'], source.class_names),
  }


def _of_batch(predict: Any, weights: PyTree, batch: Batch) -> PyTree:
  """Class, its probability by soft-max, label and mask of each example."""
  shares = jax.nn.softmax(predict(weights, batch)['logits'].astype(jnp.float32))
  return {
    'predicted': shares.argmax(-1),
    'confidence': shares.max(-1),
    'label': batch['label'],
    'mask': batch['mask'],
  }


def _shown(
  setting: Setting,
  source: Spread,
  kept: Int[np.ndarray, ' n'],
  seen: dict[str, np.ndarray],
  chosen: Sequence[int],
) -> list[dict[str, Any]]:
  """Pictures of some of the examples, with what was predicted."""
  transform: Any = setting.transform
  entries = []
  for i in chosen:
    index = int(kept[i])
    try:
      pixels = transform.pixels(source[index]['image'])
    except DecodeError:
      continue  # it could be read before
    names = [
      _name(source.class_names, int(seen[key][i]))
      for key in ('predicted', 'label')
    ]
    share = f'{100 * float(seen["confidence"][i]):.1f} %'
    right = names[0] == names[1]
    caption = [f'{names[0]} {share}', 'right' if right else f'is {names[1]}']
    entries.append(picture(pixels, [*caption, source.title(index)]))
  return entries


def picture(
  pixels: UInt8[np.ndarray, 'y x 3'], caption: list[str]
) -> dict[str, Any]:
  """An image for the page: `src`, a data URI, and `caption`, lines of text."""
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
  """What is taken for what.

  Returns:
    `names` and `matrix` (rows: true classes) where there are few classes, else
    both empty; `confused`, the most frequent mistakes; `worst`, the classes of
    the lowest accuracy, where there are many.
  """
  size = 1 + int(max(labels.max(), predicted.max(), len(names) - 1))
  pairs, counts = np.unique(
    labels.astype(np.int64) * size + predicted, return_counts=True
  )
  true, taken = np.divmod(pairs, size)
  per_class = np.bincount(labels, minlength=size)
  right = np.bincount(labels[labels == predicted], minlength=size)
  order = np.argsort(-np.where(true == taken, 0, counts), kind='stable')
  confused = [
    [
      _name(names, int(true[i])),
      _name(names, int(taken[i])),
      int(counts[i]),
      f'{100 * counts[i] / per_class[true[i]]:.1f} %',
    ]
    for i in order[:_ROWS]
    if true[i] != taken[i]
  ]
  few = size <= _CLASSES
  matrix = np.zeros((size, size), int) if few else np.zeros((0, 0), int)
  if few:
    matrix[true, taken] = counts
  return {
    'names': [_name(names, i) for i in range(size)] if few else [],
    'matrix': matrix.tolist(),
    'confused': confused,
    'worst': [] if few else _worst(right, per_class, names),
  }


def _worst(
  right: Int[np.ndarray, ' k'],
  per_class: Int[np.ndarray, ' k'],
  names: Sequence[str],
) -> list[list[Any]]:
  there = np.flatnonzero(per_class)
  shares: Float[np.ndarray, ' k'] = right[there] / per_class[there]
  chosen = there[np.argsort(shares, kind='stable')[:_ROWS]]
  return [
    [
      _name(names, int(i)),
      f'{100 * right[i] / per_class[i]:.1f} %',
      int(per_class[i]),
    ]
    for i in chosen
  ]


def _name(names: Sequence[str], index: int) -> str:
  known = names[index] if index < len(names) else f'class {index}'
  return known if len(known) <= _NAME else f'{known[: _NAME - 1]}…'


def write(workdir: epath.Path, values: dict[str, Any]) -> None:
  """Keeps them for this page and the next ones.

  Args:
    workdir: of the run.
    values: `step`, `training` (pictures) and `judged`, from `judge`.

  Raises:
    OSError: they cannot be written.
  """
  atomic.write(workdir / PARTS, json.dumps(values))
