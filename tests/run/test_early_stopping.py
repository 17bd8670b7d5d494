"""Tests of the plateau at which a run ends early."""

import json

import pytest
from etils import epath

from vit_jax.run import guards


def write(folder, values, name='val/accuracy'):
  """Writes metrics.jsonl with training lines between the evaluations."""
  lines = []
  for step, value in values:
    lines += [{'step': step, 'loss': 9}, {'step': step, name: value}]
  text = '\n'.join(map(json.dumps, lines))
  (folder / 'metrics.jsonl').write_text(text + '\n{"step": 99, "val/acc')
  return epath.Path(folder)


@pytest.mark.parametrize('metric, sign', [('accuracy', 1), ('loss', -1)])
@pytest.mark.parametrize(
  'values, best_step',
  [
    ([(1, 0.5), (2, 0.4), (3, 0.3)], 1),
    ([(1, 0.5), (2, 0.6), (3, 0.6), (4, 0.6)], 2),  # equal is no improvement
    ([(1, 0.5), (2, None), (3, None)], 1),  # not finite
    ([(1, None), (2, None)], 0),
    ([(1, 0.1), (2, 0.5), (3, 0.4), (2, 0.9), (4, 0.5)], 2),  # evaluated again
    ([(1, 0.5), (2, 0.4), (3, 0.6)], None),
    ([(1, 0.5), (2, 0.4)], None),
    ([(1, 0.5), (2, 0.4), (2, 0.3)], None),  # one evaluation, written twice
    ([], None),
  ],
)
def test_the_best_evaluation_is_too_old(
  tmp_path, values, best_step, metric, sign
):
  """The run ends after two evaluations that are not better than the best."""
  name = f'val/{metric}'
  signed = [(step, value and sign * value) for step, value in values]
  found = guards.plateau(write(tmp_path, signed, name), name, sign, 2)
  if best_step is None:
    assert found is None
  else:
    last = max(step for step, _ in values)
    assert found is not None
    assert (found['best_step'], found['step']) == (best_step, last)
    assert found['evaluations'] >= 2 and found['metric'] == name


def test_with_more_patience_nothing_ends(tmp_path):
  """The same holds for other metrics, and for workdirs without metrics."""
  workdir = write(tmp_path, [(1, 0.5), (2, 0.4), (3, 0.3)])
  assert guards.plateau(workdir, 'val/accuracy', 1, 2)
  assert guards.plateau(workdir, 'val/accuracy', 1, 3) is None
  assert guards.plateau(workdir, 'test/accuracy', 1, 2) is None
  assert guards.plateau(workdir / 'none', 'val/accuracy', 1, 2) is None
