"""Determines the cores and the memory that this process may use."""

import os
import pathlib

_CGROUPS_OF_PROCESS = pathlib.Path('/proc/self/cgroup')
_CGROUPS = pathlib.Path('/sys/fs/cgroup')


def cores() -> int:
  """Returns the number of cores that this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def memory_bytes() -> int | None:
  """Returns the bytes of memory that this process may use.

  It is the machine's memory, or less if a container or a batch system limits
  the process.

  Returns:
    The number of bytes; None if the system does not report it.
  """
  if not hasattr(os, 'sysconf'):  # Windows
    return None
  total = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  return min([total, *_limits()])


def _limits() -> list[int]:
  """Returns the memory limits of the control groups and ancestors, in bytes."""
  try:
    groups = _CGROUPS_OF_PROCESS.read_text().splitlines()
  except OSError:
    return []
  found = []
  for group in groups:  # '0::/job' (version 2), '4:memory:/job' (version 1)
    _, controllers, path = group.split(':', 2)
    if not controllers:
      root, name = _CGROUPS, 'memory.max'
    elif 'memory' in controllers.split(','):
      root, name = _CGROUPS / 'memory', 'memory.limit_in_bytes'
    else:
      continue
    parts = path.strip('/').split('/')
    for depth in range(len(parts) + 1):
      try:
        text = root.joinpath(*parts[:depth], name).read_text().strip()
      except OSError:  # in a container, only its own group exists, at the root
        continue
      if text.isdecimal():  # 'max' means no limit
        found.append(int(text))
  return found
