"""Compiles training steps for plans, and caches the results on disk.

JAX's own cache cannot be used: it restores executables, which requires the
devices. A plan uses only the text of the optimized program and its memory.
"""

import gzip
import hashlib
import importlib.metadata
import json
import logging
import os
import pathlib
import time
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from etils import epath

from vit_jax.arrays import memory
from vit_jax.files import atomic
from vit_jax.training import compiling
from vit_jax.training.experiment import Experiment

log = logging.getLogger('vit_jax')
# Packages of compilers, by the beginnings of their names; and variables that
# compilers read.
_COMPILERS = ('jax', 'libtpu', 'nvidia')
_VARIABLES = ('XLA_FLAGS', 'LIBTPU_INIT_ARGS')


class Program(NamedTuple):
  """A compiled training step.

  Attributes:
    text: optimized HLO; '' if the backend does not return it.
    bytes: see `memory.program_bytes`.
    compile_seconds: time that the compiler took.
  """

  text: str
  bytes: dict[str, int] | None
  compile_seconds: float


def default_cache() -> epath.Path:
  """Returns the directory of cached programs, which need not exist."""
  folder = os.environ.get('JAX_COMPILATION_CACHE_DIR')
  folder = folder or pathlib.Path.home() / '.cache/vit_jax/compiled'
  return epath.Path(folder) / 'plans'


def compile_step(
  experiment: Experiment,
  compiler_options: Mapping[str, Any],
  target: str,
  cache: epath.Path | None,
) -> Program:
  """Compiles the training step, unless the same step was compiled before.

  The step is the same if its traced program, the options, the devices and the
  versions of the compilers are.

  Args:
    experiment: experiment to compile.
    compiler_options: see `compiling.compile_step`.
    target: name of the devices.
    cache: directory of cached programs; None to compile in any case.
  """
  options = compiling.step_options(experiment, compiler_options)
  lowered = compiling.lower_step(experiment, options)
  path = None
  if cache is not None:
    path = cache / f'{_key(lowered.as_text(), target, options)}.json.gz'
    if (found := _read(path)) is not None:
      log.info('using the program that an earlier plan compiled: %s', path)
      return found
  log.info('compiling the training step')
  started = time.monotonic()
  compiled = lowered.compile()
  seconds = round(time.monotonic() - started, 1)
  program = Program(
    compiled.as_text() or '', memory.program_bytes(compiled), seconds
  )
  if path is not None:
    _write(path, program)
  return program


def _key(*parts: Any) -> str:
  versions = sorted(
    f'{package.name} {package.version}'
    for package in importlib.metadata.distributions()
    if (package.name or '').startswith(_COMPILERS)
  )
  variables = [os.environ.get(name) for name in _VARIABLES]
  text = json.dumps([*parts, versions, variables], sort_keys=True, default=str)
  return hashlib.sha256(text.encode()).hexdigest()


def _read(path: epath.Path) -> Program | None:
  """Returns a cached program; None if it is missing or damaged."""
  try:
    return Program(**json.loads(gzip.decompress(path.read_bytes())))
  except (OSError, EOFError, zlib.error, ValueError, TypeError):
    return None


def _write(path: epath.Path, program: Program) -> None:
  """Caches a program; a failure is logged."""
  content = gzip.compress(json.dumps(program._asdict()).encode(), 1)
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(path, content)
  except OSError as error:
    log.warning('the compiled program could not be cached: %s', error)
