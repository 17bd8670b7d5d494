"""Tests of files metrics.jsonl with lines that vit_jax did not write."""

import pytest
from etils import epath

from vit_jax.analysis import curves
from vit_jax.run import guards, metrics

FOREIGN = """7
"text"
[1, 2]
null
{"loss": 1.0}
{"step": "1", "loss": 1.0}
{"step": true, "loss": 1.0}
{"step": 1000000000000000000000, "loss": 1.0}
{"step": 1, "loss": "a", "lr": [1], "test/accuracy": {"a": 1}, "x": true}
{"step": 2, "loss": 0.5, "test/accuracy": "b"}
{"step": 3, "loss": null, "lr": 1e999, "x": 1HUGE}
{"step": 4, "test/accuracy": 0.5}
""".replace('HUGE', '0' * 400)


@pytest.fixture
def workdir(tmp_path):
  (tmp_path / 'metrics.jsonl').write_text(FOREIGN)
  return epath.Path(tmp_path)


def test_only_numbers_are_metrics(workdir):
  """Infinity and an integer above all floats are values that are not finite."""
  assert [*metrics.read(workdir)] == [
    (1, {}),
    (2, {'loss': 0.5}),
    (3, {'loss': None, 'lr': None, 'x': None}),
    (4, {'test/accuracy': 0.5}),
  ]


def test_a_missing_file_has_no_metrics(tmp_path):
  assert not [*metrics.read(epath.Path(tmp_path))]


def test_readers_of_foreign_lines(workdir):
  """Curves, comparisons and early stopping use the numbers that remain."""
  series, nulls = curves.read_all(workdir)
  assert series == {'loss': ([2], [0.5]), 'test/accuracy': ([4], [0.5])}
  assert nulls == [(3, 'loss'), (3, 'lr'), (3, 'x')]
  curves.draw(workdir)
  assert (workdir / curves.NAME).exists()
  assert curves.read_run(workdir).series == series
  config = {'early_stop_patience': 1, 'checkpoint': {'best': 'test/accuracy'}}
  assert guards.plateau(workdir, config) is None
