"""Tests of metrics.jsonl after restarts, damage and full disks."""

import shutil

import pytest
from etils import epath

from tests import cli
from vit_jax.analysis import curves
from vit_jax.errors import StorageError, UserError
from vit_jax.run import guards, metrics


def _writer(folder):
  return metrics.Writer(epath.Path(folder), True)


def _written(folder, steps):
  writer = _writer(folder)
  for step in steps:
    writer.write(step, {'loss': 1.0})
  writer.flush()
  return writer


def test_rewind_moves_damaged_lines(tmp_path, caplog):
  """Damaged lines are moved and logged; training lines stay."""
  _written(tmp_path, [1, 2, 3]).close()
  path = tmp_path / 'metrics.jsonl'
  foreign = ['[]', '{"loss": 1}', '{"step": "2"}', '{"step": true}', '{"st']
  path.write_text('\n'.join(foreign) + '\n' + path.read_text() + 'tail')
  writer = _writer(tmp_path)
  writer.rewind(2)
  writer.write(3, {'loss': 2.0})
  writer.close()
  assert [line['step'] for line in cli.records(tmp_path)] == [1, 2, 3]
  aside = (tmp_path / 'metrics_set_aside.jsonl').read_text().splitlines()
  assert aside == [*foreign, '{"step": 3, "loss": 1.0}', 'tail']
  assert '6 damaged or foreign line(s)' in caplog.text


def test_a_full_disk_is_reported(tmp_path):
  """The error names file and cause; closing does not hide it."""
  (tmp_path / 'metrics.jsonl').symlink_to('/dev/full')
  writer = _writer(tmp_path)
  with pytest.raises(StorageError, match='jsonl .*No space left') as error:
    for step in range(1000):
      writer.write(step, {'loss': 1.0})
      writer.flush()
  assert 'run the same command again' in str(error.value)
  writer.write(1000, {'loss': 1.0})
  writer.close()


@pytest.mark.parametrize('moved', [False, True])
def test_a_removed_or_replaced_workdir_is_reported(tmp_path, moved):
  """The next line is not written into the file of another run."""
  folder = tmp_path / 'run'
  folder.mkdir()
  writer = _written(folder, [1])
  if moved:
    folder.rename(tmp_path / 'elsewhere')
    folder.mkdir()
    (folder / 'metrics.jsonl').touch()  # a file of another run
  else:
    shutil.rmtree(folder)
  with pytest.raises(UserError, match='metrics.jsonl.*the directory was moved'):
    writer.write(2, {'loss': 1.0})
  assert not moved or not (folder / 'metrics.jsonl').read_text()
  writer.close()


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


def test_only_numbers_are_metrics(tmp_path):
  """Infinity and an integer above all floats are values that are not finite.

  Curves and early stopping use the numbers that remain.
  """
  (tmp_path / 'metrics.jsonl').write_text(FOREIGN)
  workdir = epath.Path(tmp_path)
  assert [*metrics.read(workdir)] == [
    (1, {}),
    (2, {'loss': 0.5}),
    (3, {'loss': None, 'lr': None, 'x': None}),
    (4, {'test/accuracy': 0.5}),
  ]
  series, nulls = curves.read_all(workdir)
  assert series == {'loss': ([2], [0.5]), 'test/accuracy': ([4], [0.5])}
  assert nulls == [(3, 'loss'), (3, 'lr'), (3, 'x')]
  curves.draw(workdir)
  assert (workdir / curves.NAME).exists()
  assert guards.plateau(workdir, 'test/accuracy', 1, 1) is None
