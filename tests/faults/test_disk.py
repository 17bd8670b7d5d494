"""Tests of full disks, read-only workdirs, and two runs in one workdir."""

import contextlib
import pathlib
import subprocess
import time

import numpy as np
import pytest
from etils import epath

from tests import cli
from tests.faults.counts import injected
from vit_jax.errors import UserError
from vit_jax.run import lock


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


@pytest.mark.slow
def test_a_save_on_a_full_disk_is_reported(tmp_path):
  """The run continues, and later saves succeed."""
  disk = tmp_path / 'disk'
  with _tmpfs(disk, 'size=16m'):
    workdir = disk / 'run'
    flags = cli.SMALL_L16 | {
      'total': '400 steps',
      'log.every': '10 steps',
      'checkpoint.every': '100 steps',
      'evals.val.every': '400 steps',
      'batch_size': 64,
      'image_size': 64,
    }
    filler = disk / 'filler'
    process = cli.start(
      cli.command('train', *cli.flags('configs/l16_i21k.py', workdir, flags))
    )
    deadline = time.monotonic() + 200
    while not (workdir / 'checkpoints/100').exists():
      assert process.poll() is None and time.monotonic() < deadline
      time.sleep(0.02)
    injected('a disk that fills')
    with contextlib.suppress(OSError), filler.open('wb') as file:
      while True:  # to the last byte
        file.write(b'x' * 65536)
        file.flush()
    while '"save_failed"' not in (workdir / 'events.jsonl').read_text():
      if process.poll() is not None or time.monotonic() > deadline:
        break
      time.sleep(0.05)
      filler.write_bytes(b'')
    filler.unlink(missing_ok=True)
    out, err = process.communicate(timeout=200)
    if process.returncode == 0:
      assert cli.final_params(workdir)
    # Whatever happened to the run, the steps saved before are intact.
    cli.run(
      cli.command('train', *cli.flags('configs/l16_i21k.py', workdir, flags))
    )
    assert list(cli.losses(workdir))[-1] == 400
    for array in cli.final_params(workdir).values():
      assert np.isfinite(array).all()


@pytest.mark.slow
def test_a_disk_that_stays_full_ends_with_one_message(tmp_path):
  """Launchers restart the run after its exit code."""
  disk = tmp_path / 'disk'
  with _tmpfs(disk, 'size=8m'):
    flags = cli.flags(
      'configs/l16_i21k.py',
      disk / 'run',
      cli.SMALL_L16
      | {
        'total': '100000 steps',
        'evals.val.every': '100000 steps',
        'checkpoint.every': '20 steps',
        'log.tensorboard': 'true',
      },
    )
    process = cli.start(cli.command('train', *flags))
    deadline = time.monotonic() + 200
    while not (disk / 'run/checkpoints/20').exists():
      assert process.poll() is None and time.monotonic() < deadline
      time.sleep(0.02)
    injected('a disk that stays full')
    with contextlib.suppress(OSError), (disk / 'filler').open('wb') as file:
      while True:  # to the last byte
        file.write(b'x' * 65536)
        file.flush()
    _, err = cli.finish(process, code=1)
  assert 'Traceback' not in err and len(err.splitlines()) < 20_000
  (last,) = [line for line in err.splitlines() if 'storage failed: ' in line]
  assert 'No space left' in last and err.rstrip().endswith(last)


@pytest.mark.slow
def test_a_read_only_workdir_ends_with_code_2(tmp_path):
  """There is one message."""
  disk = tmp_path / 'disk'
  with _tmpfs(disk, 'size=1m,ro'):
    flags = cli.flags('configs/l16_i21k.py', disk / 'run', cli.SMALL_L16)
    injected('a read-only workdir')
    _, err = cli.run(cli.command('train', *flags), code=2)
  assert 'cannot be written' in err and 'Traceback' not in err


@pytest.mark.slow
def test_a_second_run_in_a_workdir_is_refused(tmp_path):
  """It is accepted after SIGKILL of the first."""
  flags = cli.SMALL_L16 | {
    'total': '100000 steps',
    'log.every': '1 steps',
    'checkpoint.every': '100000 steps',
    'checkpoint.best': 'None',
  }
  again = cli.command(
    'train', *cli.flags('configs/l16_i21k.py', tmp_path / 'run', flags)
  )
  first = cli.start(again)
  deadline = time.monotonic() + 120
  while not (tmp_path / 'run/metrics.jsonl').exists():
    assert first.poll() is None and time.monotonic() < deadline
    time.sleep(0.05)
  injected('two runs on one workdir')
  _, err = cli.run(again, code=2)
  assert str(tmp_path / 'run') in err and '"pid"' in err
  first.kill()
  first.communicate()
  short = [*again, '--config.total=12 steps', '--allow_config_change']
  cli.run(short)


def test_a_lease_excludes_others_until_it_expires(tmp_path):
  """Leases are used on object stores."""
  path = epath.Path(tmp_path) / 'lock.json'
  with lock._lease(path, {'pid': 1}, lease_s=1.0):
    time.sleep(1.5)  # renewed in the meantime
    with pytest.raises(UserError, match='"pid": 1'):
      with lock._lease(path, {'pid': 2}, lease_s=1.0):
        pass
  assert not path.exists()
  path.write_text('{"owner": "gone", "expires": %f}' % (time.time() + 0.5))
  with pytest.raises(UserError, match='another run'):
    with lock._lease(path, {'pid': 2}, lease_s=1.0):
      pass
  time.sleep(0.6)
  with lock._lease(path, {'pid': 2}, lease_s=1.0):
    pass
