"""Files of JSON lines with what crashes and people put into them."""

import pytest
from etils import epath

from vit_jax.errors import UserError
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
def test_damaged_lines_are_moved_aside(tmp_path, bad):
  """What can be read stays, in its order; nothing is lost."""
  path = epath.Path(tmp_path) / 'x.jsonl'
  path.write_bytes(GOOD[0] + bad + b'\n' + GOOD[1] + GOOD[2])
  (tmp_path / 'x_set_aside.jsonl').write_bytes(b'older\n')
  assert jsonl.keep(path, lambda record: True) == [bad]
  kept = [record for _, record in jsonl.read(path)]
  assert kept == [{'step': 1}, {'name': 'a\u2028b\x85'}, {}]
  assert (tmp_path / 'x_set_aside.jsonl').read_bytes() == b'older\n' + bad


def test_a_line_without_its_end_gets_one(tmp_path):
  """What is appended next begins a line of its own."""
  path = epath.Path(tmp_path) / 'x.jsonl'
  path.write_bytes(b'{"a": 1}\n{"b": 2}')
  assert jsonl.keep(path, lambda record: True) == []
  assert path.read_bytes() == b'{"a": 1}\n{"b": 2}\n'
  assert not (tmp_path / 'x_set_aside.jsonl').exists()


def test_what_is_no_file_is_a_message(tmp_path):
  """A directory of that name, say."""
  (tmp_path / 'x.jsonl').mkdir()
  with pytest.raises(UserError, match='x.jsonl cannot be read: Is a directory'):
    list(jsonl.read(epath.Path(tmp_path) / 'x.jsonl'))
  assert not list(jsonl.read(epath.Path(tmp_path) / 'absent.jsonl'))


def test_only_files_troubles_become_messages(tmp_path):
  """A mistake in the program stays a traceback."""
  with pytest.raises(ZeroDivisionError):
    with jsonl.access(epath.Path(tmp_path), 'written'):
      _ = 1 / 0
