"""Predictions for the page of a run: examples, mistakes, what is confused."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from vit_jax.analysis.report import parts
from vit_jax.data.contract import require
from vit_jax.data.images.headers import DecodeError
from vit_jax.errors import UserError
from vit_jax.evaluators.contract import Batch, Setting
from vit_jax.evaluators.spread import Spread

PyTree = Any
EXAMPLES = 10_000  # judged at most
_SHOWN = 24  # images of each kind


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
    **parts.confusion(seen['label'], seen['predicted'], source.class_names),
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
      parts.name(source.class_names, int(seen[key][i]))
      for key in ('predicted', 'label')
    ]
    share = f'{100 * float(seen["confidence"][i]):.1f} %'
    right = names[0] == names[1]
    caption = [f'{names[0]} {share}', 'right' if right else f'is {names[1]}']
    entries.append(parts.picture(pixels, [*caption, source.title(index)]))
  return entries
