"""Locks a workdir, and checks that the processes of a run share it.

A second run on the workdir is refused.

On local and POSIX network file systems the kernel holds the lock, and releases
it when the process ends, even after SIGKILL. On object stores the lock is a
lease that a thread renews. If a run is killed there, the next one has to wait
until the lease expires, unless it starts on the same machine.
"""

import contextlib
import fcntl
import json
import logging
import os
import pathlib
import platform
import threading
import time
import uuid
from collections.abc import Iterator

import jax
from etils import epath

from vit_jax.errors import StorageError, UserError
from vit_jax.files import jsonl, paths
from vit_jax.processes import consensus

log = logging.getLogger('vit_jax')
FILE = '.lock'  # name of the lock in a local workdir
LEASE_S = 120.0  # time after which a lease that was not renewed has expired
# Two minutes, because clients of network file systems may keep old listings for
# one minute.
SHARED_PAUSES_S = (*paths.PAUSES_S, 32.0, 64.0)


@contextlib.contextmanager
def hold(workdir: epath.Path) -> Iterator[None]:
  """Holds the workdir's lock during a `with` statement.

  Args:
    workdir: directory of the run.

  Raises:
    UserError: another run holds the lock, or there is no permission to write
      the workdir.
    StorageError: the storage is full or does not respond.
  """
  holder = {
    'host': platform.node(),
    'pid': os.getpid(),
    'since': time.strftime('%F %T'),
    'machine': _machine(),
  }
  with contextlib.ExitStack() as stack:
    try:
      if paths.is_remote(workdir):
        stack.enter_context(_lease(workdir / 'lock.json', holder))
      else:
        stack.enter_context(_file_lock(workdir / FILE, holder))
    except (UserError, StorageError):
      raise
    except Exception as error:
      raise paths.storage_error(workdir, 'locked', error) from error
    yield


def _machine() -> str | None:
  """Returns an id of this machine's boot and PID namespace; None if unknown."""
  try:
    boot = pathlib.Path('/proc/sys/kernel/random/boot_id').read_text().strip()
    return f'{boot} {os.readlink("/proc/self/ns/pid")}'
  except OSError:
    return None


def _has_ended(holder: dict[str, object]) -> bool:
  """Returns whether the holder was a process of this machine and has ended."""
  machine, pid = _machine(), holder.get('pid')
  if machine is None or holder.get('machine') != machine:
    return False
  return isinstance(pid, int) and not pathlib.Path(f'/proc/{pid}').exists()


def _refusal(workdir: epath.Path, holder: str) -> UserError:
  """Returns the error for a workdir whose lock another run holds.

  Args:
    workdir: directory of the run.
    holder: content of the lock.
  """
  return UserError(
    f'another run uses {workdir}: {holder or "unknown"}. Wait for that run or '
    'stop it, or give another path (--workdir, --out, --data_dir).'
  )


@contextlib.contextmanager
def _file_lock(path: epath.Path, holder: dict[str, object]) -> Iterator[None]:
  """Holds the kernel's lock of a file, which contains the holder as JSON.

  Args:
    path: path of the file.
    holder: description of this process.
  """
  descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
  try:
    try:
      # Without waiting (LOCK_NB) for a process that holds the lock.
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      other = os.pread(descriptor, 1000, 0).decode(errors='replace')
      raise _refusal(path.parent, other) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(holder).encode(), 0)
    yield
  finally:
    os.close(descriptor)


@contextlib.contextmanager
def _lease(path: epath.Path, holder: dict[str, object]) -> Iterator[None]:
  """Writes a file with owner and expiry, renews it, and removes it at the end.

  Args:
    path: path of the file.
    holder: description of this process.
  """
  owner = uuid.uuid4().hex

  def renew() -> None:
    lease = {**holder, 'owner': owner, 'expires': time.time() + LEASE_S}
    paths.write(path, json.dumps(lease))

  def is_held(lease: dict[str, object]) -> bool:
    expires = lease.get('expires')
    is_current = isinstance(expires, float) and expires > time.time()
    return is_current and not _has_ended(lease)

  lease = jsonl.read_object(path)  # {} if it is missing or damaged
  if is_held(lease):
    raise _refusal(path.parent, json.dumps(lease))
  renew()
  # epath has no exclusive creation of objects, so another run may write its
  # lease at the same time. After a pause, the lease that was written last is
  # valid.
  time.sleep(min(1.0, LEASE_S / 10))
  lease = jsonl.read_object(path)
  if lease.get('owner') != owner:
    raise _refusal(path.parent, json.dumps(lease))
  ended = threading.Event()

  def renew_regularly() -> None:
    while not ended.wait(LEASE_S / 4):
      with contextlib.suppress(Exception):  # the next renewal may succeed
        renew()

  thread = threading.Thread(target=renew_regularly, daemon=True, name='lease')
  thread.start()
  try:
    yield
  finally:
    ended.set()
    thread.join()
    with contextlib.suppress(Exception):  # if this fails, the lease expires
      path.unlink()


def check_shared(workdir: epath.Path) -> None:
  """Checks that all processes see a file that the main process writes.

  All processes must call it. Their paths of the workdir may differ.

  Args:
    workdir: directory of the run.

  Raises:
    UserError: on all processes, if one of them does not see the file.
    StorageError: the file cannot be written.
  """
  if jax.process_count() == 1:
    return

  def write() -> str:
    # No client has looked for this name before.
    file = workdir / f'.vit_jax_shared_{uuid.uuid4().hex}'
    paths.save(file, 'shared')
    return file.name

  file = workdir / consensus.from_main(write)
  for pause_s in SHARED_PAUSES_S:
    if file.exists():
      break
    log.warning(
      '%s, written by process 0, is not visible. Looking again in %g s.',
      file,
      pause_s,
    )
    time.sleep(pause_s)
  seen = consensus.gather_integer(file.exists())
  if jax.process_index() == 0:
    file.unlink(missing_ok=True)
  if not all(seen):
    others = ', '.join(str(i) for i, sees in enumerate(seen) if not sees)
    raise UserError(
      f'process {others} does not see what process 0 writes to the workdir '
      f'(here {workdir}): give all processes a --workdir that they share, on a '
      'network file system or gs://BUCKET/PATH.'
    )
