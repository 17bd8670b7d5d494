"""Computes predictions for the HTML report: examples, mistakes, confusions."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from vit_jax.analysis.report import parts
from vit_jax.data.contract import require
from vit_jax.data.images import display
from vit_jax.data.images.headers import DecodeError
from vit_jax.errors import UserError
from vit_jax.evaluators import contract
from vit_jax.evaluators.contract import Batch, Setting
from vit_jax.evaluators.spread import Spread

PyTree = Any
MAX_EXAMPLES = 10_000
_SHOWN = 24  # images of each kind in the report


def predict_examples(
  setting: Setting, weights: PyTree, split: str, count: int = MAX_EXAMPLES
) -> dict[str, Any]:
  """Classifies examples of a split and selects examples for the report.

  Args:
    setting: setting of the run's evaluators.
    weights: one set of weights of the objective, see `Trainer.weights`.
    split: split of the run's source.
    count: maximum number of examples to classify.

  Returns:
    JSON-able entries of the report: counts, accuracy, pictures of examples
    spread over the split, pictures of the most confident mistakes, and the
    most confused classes.

  Raises:
    UserError: the model has no head, the data have no labels, or no example
      can be read.
  """
  if not setting.num_classes:
    raise UserError('the model has no head, so it predicts no classes')
  require(setting.transform.spec, 'image', 'label', who='the report')
  full_split = setting.open_source(split)
  source = Spread(full_split, count)
  function = setting.compiled(functools.partial(_predict, setting.predict))
  results = list(setting.sweep(weights, source, function))
  if not results:
    raise UserError(f'{source.name} is empty')
  joined = contract.joined(results)
  kept = np.flatnonzero(joined.pop('mask'))  # neither padding nor bad records
  if not len(kept):
    raise UserError(f'{source.name} has no example that can be used')
  values = {name: array[kept] for name, array in joined.items()}
  wrong = values['predicted'] != values['label']
  order = np.argsort(-values['confidence'], kind='stable')
  mistakes = [i for i in order.tolist() if wrong[i]][:_SHOWN]
  spread = np.linspace(0, len(kept) - 1, min(_SHOWN, len(kept)))
  examples = np.unique(spread.round().astype(int)).tolist()
  show = functools.partial(_pictures, setting, source, kept, values)
  return {
    'source': source.name,
    'count': len(kept),
    'total': len(full_split),
    'accuracy': float(1 - wrong.mean()),
    'examples': show(examples),
    'mistakes': show(mistakes),
    **parts.confusion(values['label'], values['predicted'], source.class_names),
  }


def _predict(predict: Any, weights: PyTree, batch: Batch) -> PyTree:
  """Computes the predicted class of each example, and its probability."""
  logits = predict(weights, batch)['logits'].astype(jnp.float32)
  probabilities = jax.nn.softmax(logits)  # [n, classes]
  return {
    'predicted': probabilities.argmax(-1),
    'confidence': probabilities.max(-1),
    'label': batch['label'],
    'mask': batch['mask'],
  }


def _pictures(
  setting: Setting,
  source: Spread,
  kept: Int[np.ndarray, ' n'],
  values: dict[str, np.ndarray],
  chosen: Sequence[int],
) -> list[dict[str, Any]]:
  """Returns pictures of the chosen examples, captioned with predictions."""
  transform: Any = setting.transform
  entries = []
  for i in chosen:
    index = int(kept[i])
    try:
      pixels = display.rgb(transform.pixels(source[index]['image']))
    except DecodeError:
      continue  # the file was changed after it was classified
    predicted, label = (
      parts.name(source.class_names, int(values[key][i]))
      for key in ('predicted', 'label')
    )
    percent = f'{100 * float(values["confidence"][i]):.1f} %'
    verdict = 'right' if predicted == label else f'is {label}'
    caption = [f'{predicted} {percent}', verdict, source.title(index)]
    entries.append(parts.picture(pixels, caption))
  return entries
