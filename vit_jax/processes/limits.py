"""Checks that the system allows the threads and the memory that a run needs.

Below these limits, libraries may wait forever for a thread that could not be
started, instead of raising an error.
"""

import contextlib
import pathlib
import resource
import signal
import threading

from vit_jax.errors import UserError

_THREADS = 64  # a small run on CPUs has about 100, some of which already exist
_ADDRESS_BYTES = 2 * 2**30  # a small run on CPUs reserves 2.4 GiB
_EXIT_S = 50  # time for the interpreter to exit


def check() -> None:
  """Checks that threads and address space are available.

  Raises:
    UserError: a limit of the system is too low.
  """
  limit = resource.getrlimit(resource.RLIMIT_AS)[0]
  if limit != resource.RLIM_INFINITY and limit < _reserved() + _ADDRESS_BYTES:
    raise UserError(
      f'the address space of this process is limited to {limit >> 20} MiB '
      f'(ulimit -v), of which {_reserved() >> 20} MiB are used; a run needs at '
      f'least {_ADDRESS_BYTES >> 20} MiB more: use `ulimit -v unlimited`.'
    )
  ended = threading.Event()
  threads = []
  try:
    for _ in range(_THREADS):
      threads.append(threading.Thread(target=ended.wait, daemon=True))
      threads[-1].start()
  except RuntimeError as error:
    raise UserError(
      f'only {len(threads) - 1} of {_THREADS} threads could be started '
      f'({error}). The limits are {_thread_limits()}: raise them (ulimit -u, '
      'or the number of processes of the container).'
    ) from error
  finally:
    ended.set()


def bound_exit() -> None:
  """Ends the process by SIGALRM if the interpreter does not exit in time.

  Threads that hang would otherwise keep the process alive, and starting another
  thread to end it may be impossible.
  """
  with contextlib.suppress(ValueError):  # not the main thread
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_EXIT_S)


def _reserved() -> int:
  """Returns the bytes of address space in use; 0 if unknown."""
  try:
    pages = pathlib.Path('/proc/self/statm').read_text().split()[0]
  except OSError:
    return 0
  return int(pages) * resource.getpagesize()


def _thread_limits() -> str:
  """Describes the limits of the user and the container for messages."""
  found = [f'ulimit -u: {resource.getrlimit(resource.RLIMIT_NPROC)[0]}']
  for path in ('/sys/fs/cgroup/pids.max', '/sys/fs/cgroup/pids/pids.max'):
    with contextlib.suppress(OSError):
      found.append(f'{path}: {pathlib.Path(path).read_text().strip()}')
  return ', '.join(found)
