"""Tests of config.json in a workdir."""

import json

import pytest
from etils import epath
from minimal_config import completed

from vit_jax.config import completion
from vit_jax.errors import StorageError, UserError
from vit_jax.run import resume

DAMAGED = [b'', b'{"seed": 0', b'[]', b'\xff\x00']


@pytest.mark.parametrize('content', DAMAGED)
def test_a_damaged_config_json_is_quarantined(tmp_path, content):
  """It is written again; the config is compared with the checkpoint."""
  (tmp_path / 'config.json').write_bytes(content)
  path = resume.check_workdir(str(tmp_path), completed(), allow_changes=False)
  assert (tmp_path / 'config.json').read_bytes() == content  # not yet locked
  resume.record_workdir(path, completed(), {'time': 'now'})
  assert (tmp_path / 'config.json.bad').read_bytes() == content
  assert json.loads((tmp_path / 'config.json').read_text())['seed'] == 0
  assert json.loads((tmp_path / 'run.json').read_text()) == {'time': 'now'}


def test_a_failed_write_keeps_the_previous_config(tmp_path, monkeypatch):
  """The next start compares with it."""
  path = epath.Path(tmp_path)
  resume.record_workdir(path, completed(), {})
  before = (tmp_path / 'config.json').read_text()

  def fail(*_):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr('os.replace', fail)
  with pytest.raises(StorageError, match='config.json.*No space left'):
    resume.record_workdir(path, completed(seed=1), {})
  assert (tmp_path / 'config.json').read_text() == before


def test_a_directory_named_config_json_is_refused(tmp_path):
  (tmp_path / 'config.json').mkdir()
  with pytest.raises(UserError, match='cannot be read'):
    resume.check_workdir(str(tmp_path), completed(), allow_changes=False)


@pytest.mark.parametrize(
  'config_path, expected',
  [
    ('configs/quickstart.py', 'runs/quickstart'),
    ('configs/vit.py:variant=B/16,data=i1k', 'runs/vit-variant_B16-data_i1k'),
    ('runs/x/config.json', 'runs/x'),
    ('gs://bucket/run/config.json', 'gs://bucket/run'),
    ('config.json', '.'),
    ('saved/other.json', 'runs/other'),
  ],
)
def test_default_workdir(config_path, expected):
  """The name comes from the config file, or from the run's config.json."""
  assert resume.default_workdir(config_path) == expected


def test_a_longer_total_is_refused(tmp_path):
  """The message states that a longer total changes the learning rate."""
  before = completed(total='20 steps')
  (tmp_path / 'config.json').write_text(completion.to_json(before))

  def check(allow_changes=False, **changes):
    config = completed(**changes)
    resume.check_workdir(str(tmp_path), config, allow_changes=allow_changes)

  check(total='20 step')
  with pytest.raises(UserError, match='(?s)--allow_config_.*learning rate'):
    check(total='30 steps')
  check(True, total='30 steps')
  with pytest.raises(UserError) as error:
    check(seed=5, total='20 steps')
  assert 'learning rate' not in str(error.value)


def test_a_workdir_whose_name_is_not_utf8_is_refused(tmp_path):
  """Training would start, but no checkpoint could be saved."""
  with pytest.raises(UnicodeEncodeError, match='surrogates not allowed'):
    resume.check_workdir(
      f'{tmp_path}/a\udcff', completed(), allow_changes=False
    )
