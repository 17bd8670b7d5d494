"""Memory per device: available, and used by a state or a compiled program."""

import math
import re
from typing import Any

import jax

from vit_jax.processes import machine

PyTree = Any
_UNITS = {'': 1, 'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}
_SIZE = r'(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?'


def tree_bytes(abstract: PyTree) -> int:
  """Returns the bytes per device of a tree of shapes that have shardings."""
  total = 0
  for leaf in jax.tree.leaves(abstract):
    shape = leaf.sharding.shard_shape(leaf.shape)
    total += math.prod(shape) * leaf.dtype.itemsize
  return total


def of_device(device: Any) -> int | None:
  """Returns the bytes that a local device can use; None if unknown.

  The memory of the host is divided equally among the CPU devices of a process.
  """
  if device.platform != 'cpu':
    return (device.memory_stats() or {}).get('bytes_limit')
  return machine.memory_bytes() // jax.local_device_count()


def program_bytes(compiled: jax.stages.Compiled) -> dict[str, int] | None:
  """Returns the bytes per device of a compiled program; None if unknown.

  Returns:
    Bytes of 'arguments', 'temporaries', 'new_outputs' and 'code', and their
    sum, 'peak'.
  """
  stats = compiled.memory_analysis()
  if stats is None:
    return None
  outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
  parts = {
    'arguments': stats.argument_size_in_bytes,
    'temporaries': stats.temp_size_in_bytes,
    'new_outputs': outputs,  # outputs that do not reuse memory of arguments
    'code': stats.generated_code_size_in_bytes,
  }
  return parts | {'peak': sum(parts.values())}


def needed_bytes(message: str) -> int | None:
  """Returns the bytes that a program needs, from an error message of XLA.

  Args:
    message: message of a RESOURCE_EXHAUSTED error, such as 'Used 17.21G of
      15.48G hbm' or 'the total memory required for HLO temporaries (223.59G)
      exceeds available HBM (15.48G)'.

  Returns:
    Bytes, or None if the message does not contain them.
  """
  patterns = (
    rf'Used {_SIZE} of',
    rf'total memory required for [\w ]*\({_SIZE}\)',
    rf'[Tt]otal hbm usage >= {_SIZE}',
  )
  for pattern in patterns:
    if match := re.search(pattern, message):
      return int(float(match[1]) * _UNITS[match[2]])
  return None


def text(size: float | None) -> str:
  """Formats a number of bytes as '11.02 GiB'; None as 'unknown'."""
  if size is None:
    return 'unknown'
  for unit, divisor in (('GiB', 2**30), ('MiB', 2**20), ('KiB', 2**10)):
    if size >= divisor:
      return f'{size / divisor:.2f} {unit}'
  return f'{size:.0f} B'
