"""Connects the processes of a run, and sets JAX up in each of them."""

import logging
import math
import os
import pathlib
import re
from typing import Any

import jax
from etils import epath

from vit_jax.errors import UserError, check_range
from vit_jax.processes import consensus, machine, peers
from vit_jax.processes.interruption import HANDLER

log = logging.getLogger('vit_jax')

# Settings of JAX that change dtypes, or that compiled steps do not allow, with
# the only values that commands support. None, the default of the guards, is the
# same as 'allow'.
_SETTINGS = {
  'jax_enable_x64': False,
  'jax_disable_jit': False,
  'jax_numpy_rank_promotion': 'allow',
  'jax_numpy_dtype_promotion': 'standard',
  'jax_no_tracing': False,
  'jax_no_execution': False,
  'jax_transfer_guard': 'allow',
  'jax_random_seed_offset': 0,
}


def start_distributed(
  coordinator_address: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
  timeout_s: int = 300,
) -> bool:
  """Connects the processes of a run, and starts polling their messages.

  The arguments specify the processes. Without arguments, JAX finds them under
  SLURM with several tasks and on Cloud TPU; otherwise this is the only process.

  Args:
    coordinator_address: 'HOST:PORT' of process 0.
    num_processes: number of processes.
    process_id: index of this process.
    timeout_s: time for the other processes to start.

  Returns:
    Whether there are other processes.

  Raises:
    UserError: the flags are inconsistent, or differ between the processes.
    ConnectionError: not all processes have started in time.
  """
  _check_processes(coordinator_address, num_processes, process_id)
  if coordinator_address is None and not _found_by_jax():
    return False
  try:
    with peers.handle_lost_peers():
      jax.distributed.initialize(
        coordinator_address,
        num_processes,
        process_id,
        initialization_timeout=timeout_s,
        heartbeat_timeout_seconds=peers.HEARTBEAT_S,
      )
  # JAX replaces the cause by an error about its conversion to Python.
  except RuntimeError as error:
    raise ConnectionError(
      f'the {consensus.num_processes()} processes did not connect within '
      f'{timeout_s} s. Start all of them, with the same --coordinator_address '
      'and --num_processes'
    ) from error
  several = peers.client() is not None
  if HANDLER.installed or several:
    HANDLER.install()  # JAX has replaced the handler of SIGTERM
    HANDLER.react = peers.exit_interrupted
  peers.LISTENER.start()
  if several:
    consensus.check_num_processes()
    log.info('process %d of %d', peers.index(), consensus.num_processes())
  return several


def _check_processes(
  coordinator_address: str | None,
  num_processes: int | None,
  process_id: int | None,
) -> None:
  """Refuses flags that JAX would ignore, or reject with an obscure error."""
  check_range('--num_processes', num_processes, at_least=1)
  last = math.inf if num_processes is None else num_processes - 1
  check_range('--process_id', process_id, at_least=0, at_most=last)
  if coordinator_address is None:
    # The flags of an only process, 1 and 0, are allowed.
    is_valid = num_processes in (None, 1) and process_id in (None, 0)
  else:
    is_complete = None not in (num_processes, process_id) or _found_by_jax()
    has_port = re.fullmatch(r'.+:\d+', coordinator_address) is not None
    is_valid = is_complete and has_port
  if not is_valid:
    raise UserError(
      f'got --coordinator_address={coordinator_address}, --num_processes='
      f'{num_processes} and --process_id={process_id}: give all three, with '
      'the HOST:PORT of process 0 and a --process_id from 0 to N - 1, or none.'
    )


def _found_by_jax() -> bool:
  """Returns whether JAX finds the processes of this run by itself."""
  return int(os.environ.get('SLURM_NTASKS', '1')) > 1 or machine.on_tpu()


def is_main() -> bool:
  """Returns whether this is process 0, which writes the run's files."""
  return jax.process_index() == 0


def process_file(path: epath.Path) -> epath.Path:
  """Returns this process's path for a file that each process writes separately.

  Args:
    path: path for the main process.

  Returns:
    The path; on other processes, the path with their index before the suffix.
  """
  if is_main():
    return path
  return path.with_suffix(f'.{jax.process_index()}{path.suffix}')


def cache_compilations() -> None:
  """Enables JAX's compilation cache, so that a restart compiles nothing.

  The cache is $JAX_COMPILATION_CACHE_DIR, or ~/.cache/vit_jax/compiled.
  Programs for CPUs are cached only with the variable, because they use the
  instructions of one type of machine. JAX_ENABLE_COMPILATION_CACHE=false
  disables the cache.
  """
  config: Any = jax.config
  if jax.default_backend() != 'cpu' and not config.jax_compilation_cache_dir:
    folder = pathlib.Path.home() / '.cache/vit_jax/compiled'
    jax.config.update('jax_compilation_cache_dir', str(folder))


def reset_settings() -> None:
  """Resets settings of JAX that commands do not support, with a warning.

  Users set them in their environment for other programs.
  """
  for name, supported in _SETTINGS.items():
    value = getattr(jax.config, name)
    if value not in (None, supported):
      jax.config.update(name, supported)
      log.warning(
        '%s=%s is ignored: this program supports only %s',
        name.upper(),
        value,
        supported,
      )
