"""Tests of temporary storage errors, and of steps of other runs."""

import errno
import gc
import shutil
import types

import jax
import pytest
from etils import epath

from tests.checkpoint.states import (
  ABOUT,
  experiment,
  restore,
  same,
  save,
  state,
)
from tests.faults.counts import further
from vit_jax.checkpoint import agreement, items, steps
from vit_jax.checkpoint import restore as restore_lib
from vit_jax.errors import StorageError, UserError
from vit_jax.files import paths

READ = items.read_arrays


@pytest.fixture
def saved(tmp_path):
  """Returns a directory with the steps 1 and 2."""
  save(tmp_path / 'c', 1, 2)
  return tmp_path / 'c'


UNCHANGED = ['1', '2', 'run_id.json']


def _left(folder):
  return sorted(p.name for p in folder.iterdir())


def _failing(monkeypatch, number):
  """Makes reading fail until the returned list is emptied."""
  broken = [True]

  def read(path, abstract):
    if broken:
      raise OSError(number, 'injected', str(path))
    return READ(path, abstract)

  monkeypatch.setattr(items, 'read_arrays', read)
  return broken


def test_a_listing_is_tried_again(tmp_path, monkeypatch):
  """A run starts from step 0 only if the listing shows no checkpoint."""
  errors = [OSError(errno.EIO, 'injected'), None]

  def listing(path):
    if error := errors.pop(0):
      raise error
    return ['2.bad']

  monkeypatch.setattr(steps, 'committed', lambda root: [])
  monkeypatch.setattr(steps, 'listing', listing)
  clock = types.SimpleNamespace(sleep=lambda seconds: None)
  monkeypatch.setattr(agreement, 'time', clock)
  with pytest.raises(UserError, match=r'no checkpoint in .* \(2\.bad\)'):
    restore_lib.newest(epath.Path(tmp_path), state(0), 'id')
  assert not errors


@pytest.mark.parametrize('number', [errno.EIO, *further(errno.EACCES)])
def test_a_temporary_error_is_retried(saved, monkeypatch, number):
  """The step is read after growing pauses, and nothing is renamed."""
  broken, pauses = _failing(monkeypatch, number), []

  def sleep(seconds):
    pauses.append(seconds)
    if len(pauses) == 5:
      broken.clear()

  restored, step = restore(saved, sleep=sleep)
  assert step == 2 and same(restored, state(2))
  assert pauses == sorted(paths.PAUSES_S[:5])
  assert _left(saved) == UNCHANGED


@pytest.mark.parametrize('stale, expected', [(1, 2), (2, 1)])
def test_stale_reads(saved, monkeypatch, stale, expected):
  """A wrong checksum is read again; only the second one renames the step."""
  reads = []

  def read(path, abstract):
    arrays = READ(path, abstract)
    if path.name != 'params':
      return arrays
    reads.append(path)
    return jax.tree.map(lambda x: x + (len(reads) <= stale), arrays)

  monkeypatch.setattr(items, 'read_arrays', read)
  restored, step = restore(saved)
  assert step == expected and same(restored, state(expected))
  assert (saved / '2.bad').exists() == (expected == 1)


@pytest.mark.parametrize(
  'number, error', [(errno.EIO, StorageError), (errno.EACCES, UserError)]
)
def test_a_lasting_error_stops_the_run(saved, monkeypatch, number, error):
  """An older step would repeat hours of training that are not lost."""
  _failing(monkeypatch, number)
  with pytest.raises(error, match='Nothing was renamed') as raised:
    restore(saved)
  assert str(saved / '2') in str(raised.value)
  assert _left(saved) == UNCHANGED


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_a_real_read_error_is_retried(saved):
  """A file cannot be opened at first, so the message is TensorStore's own."""
  data = [p for p in (saved / '2/params').rglob('*') if p.is_file()]
  file = max(data, key=lambda p: p.stat().st_size)
  file.rename(saved.parent / 'kept')
  file.symlink_to(file)  # too many levels of links

  def sleep(_):
    file.unlink(missing_ok=True)
    (saved.parent / 'kept').rename(file)

  assert restore(saved, sleep=sleep)[1] == 2
  gc.collect()  # coroutines that Orbax does not await
  assert _left(saved) == UNCHANGED


def test_64_bit_types_are_a_user_error(saved):
  """JAX_ENABLE_X64=1 changes the dtypes; the step is not treated as damaged."""
  abstract = jax.tree.map(
    lambda leaf: leaf.update(dtype='int64') if leaf.dtype == 'int32' else leaf,
    experiment().abstract_state,
  )
  wide = types.SimpleNamespace(abstract_state=abstract)
  with pytest.raises(UserError, match=r'(?s)int64.*JAX_ENABLE_X64'):
    restore(saved, wide)
  assert _left(saved) == UNCHANGED


@pytest.mark.parametrize('move', [shutil.move, shutil.copytree])
def test_a_renamed_step_is_refused(saved, move):
  """Its name disagrees with the number of updates; it is left in place."""
  move(str(saved / '2'), str(saved / '5'))
  with pytest.raises(UserError, match='5 contains step 2 .*not step 5'):
    restore(saved)
  assert (saved / '5').is_dir()
  shutil.rmtree(saved / '2', ignore_errors=True)
  (saved / '5').rename(saved / '2')
  assert restore(saved)[1] == 2


def test_a_step_of_another_run_is_refused(saved, tmp_path):
  """The shapes are equal; the message contains the other run's seed."""
  other = ABOUT | {'config': {'seed': 8}}
  save(tmp_path / 'other', 3, about=other)
  shutil.copytree(tmp_path / 'other/3', saved / '3')
  with pytest.raises(UserError, match='3 contains step 3 .*seed 8'):
    restore(saved)
  assert (saved / '3').is_dir()
  # On purpose, as the message says.
  for name in ('1', '2'):
    shutil.rmtree(saved / name)
  (saved / 'run_id.json').unlink()
  assert restore(saved)[1] == 3


@pytest.mark.slow
@pytest.mark.parametrize('text', ['{', *further('{"run": "0"}')])
def test_a_damaged_run_id_is_repaired(saved, text):
  """The newest step contains the run id."""
  before = (saved / 'run_id.json').read_text()
  (saved / 'run_id.json').write_text(text)
  assert restore(saved)[1] == 2
  save(saved, 3)
  assert (saved / 'run_id.json').read_text() == before
