"""Tests of JSON-lines files with damaged or foreign content."""

import pytest
from etils import epath

from vit_jax.files import jsonl

BAD = [
  b'{"step": 1, "lo\n',
  b'[]\n',
  b'3\n',
  b'null\n',
  b'\xff\xfe\x00{"step": 1}\n',
  b'{"step": 1}{"step": 2}\n',
  b'[' * 100_000 + b'\n',
  b'\x00' * 40 + b'\n',
]
GOOD = [b'{"step": 1}\n', '{"name": "a\u2028b\x85"}\n'.encode(), b'{}\r\n']


@pytest.mark.parametrize('bad', BAD)
def test_keep_moves_damaged_lines_to_another_file(tmp_path, bad):
  """Readable lines stay in order."""
  path = epath.Path(tmp_path) / 'x.jsonl'
  path.write_bytes(GOOD[0] + bad + b'\n' + GOOD[1] + GOOD[2])
  (tmp_path / 'x_set_aside.jsonl').write_bytes(b'older\n')
  jsonl.keep(path, lambda record: True)
  kept = [record for _, record in jsonl.read(path)]
  assert kept == [{'step': 1}, {'name': 'a\u2028b\x85'}, {}]
  assert (tmp_path / 'x_set_aside.jsonl').read_bytes() == b'older\n' + bad


def test_keep_adds_a_missing_newline_at_the_end(tmp_path):
  """A line that is appended later then starts on its own line."""
  path = epath.Path(tmp_path) / 'x.jsonl'
  path.write_bytes(b'{"a": 1}\n{"b": 2}')
  jsonl.keep(path, lambda record: True)
  assert path.read_bytes() == b'{"a": 1}\n{"b": 2}\n'
  assert not (tmp_path / 'x_set_aside.jsonl').exists()
