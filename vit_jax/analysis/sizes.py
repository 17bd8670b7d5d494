"""Results of several runs over the number of their training examples."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from vit_jax.analysis import plotting
from vit_jax.analysis.runs import Run, is_result
from vit_jax.errors import UserError

Points = Float[np.ndarray, '2 n']  # training examples, last values


def lines(runs: Sequence[Run]) -> dict[str, dict[str, Points]]:
  """Returns the points of each line by result and label, ordered by data size.

  Runs of the same model form one line; if several of them have the same data
  size, the line has several points there. A label is the model's name and, if
  names are not enough, the keys in which the models differ.

  Args:
    runs: runs; those without a model, a number of examples or results are left
      out.
  """
  complete = [run for run in runs if run.examples and run.model.get('name')]
  labels = _labels([run.model for run in complete])
  lists: dict[str, dict[str, list[Any]]] = defaultdict(
    lambda: defaultdict(list)
  )
  for run, label in zip(complete, labels, strict=True):
    for metric in filter(is_result, run.series):
      lists[metric][label].append((run.examples, run.series[metric][1][-1]))
  return {
    metric: {
      label: np.array(sorted(points), np.float64).T
      for label, points in sorted(by_label.items())
    }
    for metric, by_label in sorted(lists.items())
  }


def _labels(models: Sequence[Mapping[str, Any]]) -> list[str]:
  """Labels each model by its name and the keys that differ for this name."""
  labels = []
  for model in models:
    same_name = [other for other in models if other['name'] == model['name']]
    differing = [
      f' {key}={value.get("name", value) if isinstance(value, dict) else value}'
      for key, value in sorted(model.items())
      if value is not None and any(o.get(key) != value for o in same_name)
    ]
    labels.append(''.join([str(model['name']), *differing]))
  return labels


def compare(runs: Sequence[Run]) -> tuple[Any, dict[str, np.ndarray]]:
  """Draws one panel per result: all runs as points, lines through means.

  Returns:
    The Matplotlib figure, and its points `[2, n]` by 'label/metric'.

  Raises:
    UserError: no run has a model, a number of examples and a result.

  Reference: arXiv 2010.11929, Figures 3 and 4, which have the same form.
  """
  results = lines(runs)
  if not results:
    raise UserError(
      'no run has a model, train.num_examples and results: '
      f'{", ".join(run.name for run in runs)}; give other workdirs.'
    )
  panels = []
  for metric, by_label in results.items():
    ticks = np.unique(np.concatenate([x for x, _ in by_label.values()]))
    result = f'{metric}, last value of each run'
    panels.append(
      plotting.Panel(
        'training examples', result, by_label, ticks=ticks.tolist(), means=True
      )
    )
  arrays = {
    f'{label}/{metric}': points
    for metric, by_label in results.items()
    for label, points in by_label.items()
  }
  return plotting.draw(panels, 3), arrays
