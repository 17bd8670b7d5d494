"""config.json: compared, damaged, set aside."""

import json

import pytest
from etils import epath
from minimal_config import completed

from vit_jax import workdir
from vit_jax.errors import UserError

DAMAGED = [b'', b'{"seed": 0', b'[]', b'3', b'\xff\x00', b'\x00' * 100]


@pytest.mark.parametrize('content', DAMAGED)
def test_a_damaged_config_refuses_no_workdir(tmp_path, content):
  """It is set aside and written anew; the checkpoint is the other witness."""
  (tmp_path / 'config.json').write_bytes(content)
  path = workdir.check(str(tmp_path), completed(), allow_changes=False)
  assert (tmp_path / 'config.json').read_bytes() == content  # not yet locked
  workdir.record(path, completed(), {'time': 'now'})
  assert (tmp_path / 'config.json.bad').read_bytes() == content
  assert json.loads((tmp_path / 'config.json').read_text())['seed'] == 0
  assert json.loads((tmp_path / 'run.json').read_text()) == {'time': 'now'}


def test_another_config_is_refused(tmp_path):
  """With the keys that differ; changes may be allowed."""
  path = epath.Path(tmp_path)
  workdir.record(path, completed(), {})
  other = completed(seed=1, **{'source.data_dir': 'elsewhere'})
  with pytest.raises(UserError, match='seed: 0 there, 1 now') as error:
    workdir.check(str(tmp_path), other, allow_changes=False)
  assert 'data_dir' not in str(error.value)
  assert workdir.check(str(tmp_path), other, allow_changes=True) == path


def test_an_end_while_it_is_written(tmp_path, monkeypatch):
  """The config before is still there, so the next start compares with it."""
  path = epath.Path(tmp_path)
  workdir.record(path, completed(), {})
  before = (tmp_path / 'config.json').read_text()

  def fail(*_):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr('os.replace', fail)
  with pytest.raises(UserError, match='cannot be written'):
    workdir.record(path, completed(seed=1), {})
  assert (tmp_path / 'config.json').read_text() == before


def test_what_is_no_file_is_a_message(tmp_path):
  """A directory of that name."""
  (tmp_path / 'config.json').mkdir()
  with pytest.raises(UserError, match='cannot be used'):
    workdir.check(str(tmp_path), completed(), allow_changes=False)
