"""Tests of full disks, read-only workdirs, and two runs in one workdir."""

import contextlib
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from etils import epath

from tests import cli, tiny_vit
from tests.faults.counts import further, injected
from vit_jax import load_pretrained
from vit_jax.errors import StorageError, UserError
from vit_jax.run import lock
from vit_jax.weights import pretrained


@contextlib.contextmanager
def _tmpfs(path: pathlib.Path, options: str):
  path.mkdir()
  mounted = subprocess.run(
    ['mount', '-t', 'tmpfs', '-o', options, 'tmpfs', str(path)],
    capture_output=True,
  )
  if mounted.returncode:
    pytest.skip('mounting needs root')
  try:
    yield
  finally:
    subprocess.run(['umount', '-l', str(path)], check=True)


def _fill(file: pathlib.Path) -> None:
  """Fills a disk to the last byte."""
  with contextlib.suppress(OSError), file.open('wb') as opened:
    while True:
      opened.write(b'x' * 4096)
      opened.flush()


SAVES = """
import sys
import jax, jax.numpy as jnp
from vit_jax.checkpoint.manager import Checkpointer
from vit_jax.processes import console

console.start_logging()
with jax.set_mesh(jax.make_mesh((1,), ('data',))):
  checkpoints = Checkpointer(sys.argv[1], {})
  small = {f'a{i}': jnp.ones((40,)) for i in range(40)}
  state = {'params': small, 'step': jnp.ones(())}
  assert checkpoints.save(1, state, {}) and checkpoints.wait()
  noise = jax.random.normal(jax.random.key(0), (9999,))
  large = {'params': dict.fromkeys(small, noise), 'step': jnp.ones(())}
  assert checkpoints.save(2, large, {}) and not checkpoints.wait()
  print('newest', checkpoints.latest_step())
  assert checkpoints.save(3, state, {}) and checkpoints.wait()
checkpoints.close()
"""


@pytest.mark.slow
def test_a_failed_save_is_one_line(tmp_path):
  """TensorStore's many callbacks fail after it; a later save succeeds."""
  disk = tmp_path / 'disk'
  with _tmpfs(disk, 'size=900k'):
    injected('a disk that is too small for the second step')
    arguments = [sys.executable, '-c', SAVES, str(disk / 'steps')]
    out, err = cli.run(arguments)
    assert 'newest 1' in out
  (line,) = err.splitlines()
  assert 'SAVING STEP 2 FAILED (1 failure(s) so far): ' in line
  assert f'the disk of {disk / "steps"} is full' in line


@pytest.mark.slow
def test_a_disk_that_stays_full_ends_with_one_message(tmp_path):
  """Launchers restart the run after its exit code."""
  disk = tmp_path / 'disk'
  with _tmpfs(disk, 'size=8m'):
    changes = {'checkpoint.every': '20 steps', 'log.tensorboard': 'true'}
    process = cli.start(
      cli.train_command(disk / 'run', **cli.ENDLESS | changes)
    )
    cli.wait_until((disk / 'run/checkpoints/20').exists, process)
    injected('a disk that stays full')
    _fill(disk / 'filler')
    _, err = cli.finish(process, code=1)
  assert 'Traceback' not in err and len(err.splitlines()) < 20_000
  (last,) = [line for line in err.splitlines() if 'storage failed: ' in line]
  assert 'No space left' in last and err.rstrip().endswith(last)


@pytest.mark.slow
def test_a_read_only_workdir_ends_with_code_2(tmp_path):
  """There is one message."""
  disk = tmp_path / 'disk'
  with _tmpfs(disk, 'size=1m,ro'):
    injected('a read-only workdir')
    _, err = cli.run(cli.train_command(disk / 'run'), code=2)
  assert 'cannot be written' in err and 'Traceback' not in err


@pytest.mark.slow
def test_a_second_run_in_a_workdir_is_refused(tmp_path):
  """The message names the process of the first."""
  changes = {'checkpoint.best': 'None'}
  again = cli.train_command(tmp_path / 'run', **cli.ENDLESS | changes)
  first = cli.start(again)
  cli.wait_until((tmp_path / 'run/metrics.jsonl').exists, first)
  injected('two runs on one workdir')
  _, err = cli.run(again, code=2)
  assert str(tmp_path / 'run') in err and '"pid"' in err
  first.kill()
  first.communicate()


def test_a_lease_excludes_others_until_it_expires(tmp_path, monkeypatch):
  """Leases are used on object stores."""
  monkeypatch.setattr(lock, 'LEASE_S', 1.0)
  path = epath.Path(tmp_path) / 'lock.json'
  with lock._lease(path, {'pid': 1}):
    time.sleep(1.5)  # renewed in the meantime
    with pytest.raises(UserError, match='"pid": 1'):
      with lock._lease(path, {'pid': 2}):
        pass
  assert not path.exists()
  path.write_text('{"owner": "gone", "expires": %f}' % (time.time() + 0.5))
  with pytest.raises(UserError, match='another run'):
    with lock._lease(path, {'pid': 2}):
      pass
  time.sleep(0.6)
  with lock._lease(path, {'pid': 2}):
    pass


@pytest.fixture
def save(tmp_path):
  """Returns a function that writes weights, also in another format."""
  path = str(tmp_path / 'first.npz')
  tiny_vit.save_classifier(path)
  loaded, found = load_pretrained(path), pretrained.find(path)
  return lambda target: pretrained.save(
    target, loaded.params, found.description
  )


def _contents(folder: pathlib.Path):
  files = (path for path in sorted(folder.rglob('*')) if path.is_file())
  return {str(path.relative_to(folder)): path.read_bytes() for path in files}


TARGETS = ['{}/w.npz', *further('huggingface:{}/d')]


@pytest.mark.slow
@pytest.mark.parametrize('target', TARGETS)
def test_converted_weights_on_a_full_disk_replace_nothing(
  tmp_path, save, target
):
  """An old file stays as it was, and no part of a new one remains."""
  disk = tmp_path / 'disk'
  path = target.format(disk)
  with _tmpfs(disk, 'size=1m'):
    if path.endswith('npz'):
      save(path)
    before = _contents(disk)
    _fill(disk / 'filler')
    filled = _contents(disk)
    injected('a full disk while weights are converted')
    with pytest.raises((UserError, StorageError), match='[Nn]o space left'):
      save(path)
    assert _contents(disk) == filled
    (disk / 'filler').unlink()
    assert _contents(disk) == before
    save(path)
    assert _contents(disk)


KILLED = """
import os, signal, sys
from vit_jax import convert
from vit_jax.files import paths
# The process ends when the content is written but not yet renamed.
ending = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
paths.os.replace = paths.os.rename = ending
convert.run(sys.argv[1], sys.argv[2], overwrite=True)
"""


@pytest.mark.slow
@pytest.mark.usefixtures('save')
@pytest.mark.parametrize('target', TARGETS)
def test_a_killed_conversion_leaves_the_old_weights(tmp_path, target):
  folder = tmp_path / 'out'
  folder.mkdir()
  (folder / 'w.npz').write_bytes(b'old')
  injected('SIGKILL while weights are converted')
  source, path = str(tmp_path / 'first.npz'), target.format(folder)
  command = [sys.executable, '-c', KILLED, source, path]
  cli.run(command, code=-signal.SIGKILL, forked=False)
  assert (folder / 'w.npz').read_bytes() == b'old'
  assert not (folder / 'd').exists()
