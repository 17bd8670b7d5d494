"""Runs real commands as a user would, and reads their workdirs."""

import atexit
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests import fork_server, xla_flags
from tests.faults.counts import injected
from vit_jax.processes.interruption import SIGNALS

ROOT = pathlib.Path(__file__).parent.parent
_CACHE = 'VIT_JAX_TEST_CACHE'

# Every step is logged, and only to metrics.jsonl.
QUIET = {
  'log.every': '1 steps',
  'log.tensorboard': 'false',
  'log.curves': 'false',
  'log.report': 'false',
}
# l16_i21k.py with a synthetic source, small sizes and float32.
SMALL_L16 = QUIET | {
  'source.name': 'synthetic',
  'source.num_examples': 256,
  'source.num_classes': 20,
  'train.num_examples': 256,
  'num_classes': 20,
  'image_size': 32,
  'batch_size': 32,
  'total': '20 steps',
  'schedule.warmup': '10 steps',
  'model.width': 64,
  'model.depth': 3,
  'model.mlp_dim': 128,
  'model.num_heads': 4,
  'model.dtype': 'float32',
  'model.unroll': 1,
  'evals.val.every': '10 steps',
  'checkpoint.every': '10 steps',
}


# A ViT on a few small images, for the configs that read files.
SMALL_FILES = QUIET | {
  'total': '6 steps',
  'batch_size': 8,
  'schedule.warmup': '1 steps',
  'model.patch_size': 8,
  'model.width': 32,
  'model.depth': 2,
  'model.mlp_dim': 48,
  'model.num_heads': 2,
  'model.unroll': 1,
  'log.report': 'true',
  'evals.val.every': '3 steps',
  'checkpoint.every': '3 steps',
}


# A run that a test ends. Tests with the same number of steps share programs.
ENDLESS = SMALL_L16 | {
  'total': '100000 steps',
  'evals.val.every': '100000 steps',
  'checkpoint.every': '100000 steps',
}


def command(module: str, *arguments: str) -> list[str]:
  """Returns the words of python -m vit_jax.<module> with arguments."""
  return [sys.executable, '-m', f'vit_jax.{module}', *arguments]


def flags(config: str, workdir: Any, overrides: dict[str, Any]) -> list[str]:
  """Returns the flags of a training command."""
  given = [f'--config.{key}={value}' for key, value in overrides.items()]
  return [f'--config={config}', f'--workdir={workdir}', *given]


def compilation_cache() -> str:
  """Returns a directory for compiled programs that all commands share.

  The first process of the tests creates and removes it; child processes find it
  in their environment. The number of steps and of devices are part of a
  program, as are the sizes of the model: tests with equal ones compile it once.
  """
  if _CACHE not in os.environ:
    os.environ[_CACHE] = tempfile.mkdtemp(prefix='vit_jax_tests_')
    atexit.register(shutil.rmtree, os.environ[_CACHE], ignore_errors=True)
  return os.environ[_CACHE]


def environment(devices: int = 1, level: int = 0) -> dict[str, str]:
  """Returns the environment of commands: the CPU with virtual devices.

  Args:
    devices: number of virtual devices.
    level: XLA's optimization level of machine code; see `xla_flags`.
  """
  return os.environ | {
    'JAX_COMPILATION_CACHE_DIR': compilation_cache(),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    'JAX_PLATFORMS': 'cpu',
    'MALLOC_ARENA_MAX': '16',  # these runs spend most of their time compiling
    'XLA_FLAGS': xla_flags.flags(devices, level),
  }


@functools.cache
def _server() -> fork_server.Server:
  return fork_server.Server(environment())


def start(
  arguments: list[str], devices: int = 1, forked: bool = True
) -> subprocess.Popen:
  """Starts a command in the repository's root.

  Args:
    arguments: words of the command.
    devices: number of virtual devices.
    forked: whether the command may be forked from a process that has imported
      JAX. If not, it also hashes strings with another seed.
  """
  env = environment(devices, 3 if 'vit_jax.plan' in arguments else 0)
  pipe = subprocess.PIPE
  options = dict(cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True)
  forked = forked and fork_server.can_fork(arguments)
  with _default_signals():
    if forked and _server().fits(env):
      return fork_server.Command(_server(), arguments, **options)
    return subprocess.Popen(arguments, **options)


@contextlib.contextmanager
def _default_signals() -> Iterator[None]:
  """Lets processes start without the ignored signals of this process.

  SIGHUP is ignored if the tests run under nohup, and SIGINT in the background
  of a script.
  """
  ignored = [n for n in SIGNALS if signal.getsignal(n) is signal.SIG_IGN]
  for number in ignored:
    signal.signal(number, signal.SIG_DFL)
  yield
  for number in ignored:
    signal.signal(number, signal.SIG_IGN)


def finish(
  process: subprocess.Popen, code: int = 0, timeout_s: float = 300
) -> tuple[str, str]:
  """Waits for a command and checks its exit code; returns (stdout, stderr)."""
  try:
    out, err = process.communicate(timeout=timeout_s)
  except subprocess.TimeoutExpired:
    process.kill()
    out, err = process.communicate()
  assert process.returncode == code, f'exit {process.returncode}\n{err[-5000:]}'
  return out, err


def run(
  arguments: list[str], devices: int = 1, code: int = 0, forked: bool = True
) -> tuple[str, str]:
  """Runs a command to its end; returns (stdout, stderr)."""
  return finish(start(arguments, devices, forked), code)


def train_command(workdir: Any, **overrides: Any) -> list[str]:
  """Returns the command of the small L/16; keys may have '__' for '.'."""
  changes = {key.replace('__', '.'): value for key, value in overrides.items()}
  config = flags('configs/l16_i21k.py', workdir, SMALL_L16 | changes)
  return command('train', *config)


def train(workdir: Any, devices: int = 1, **overrides: Any) -> None:
  """Runs the small L/16; keys of overrides may have '__' for '.'."""
  run(train_command(workdir, **overrides), devices)


def reference(devices: int = 1, **overrides: Any) -> pathlib.Path:
  """Returns the workdir of an uninterrupted run of the small L/16.

  A run is a function of its config, so each is trained once for all tests of
  all processes. A test that changes the workdir needs a copy.

  Args:
    devices: number of virtual devices.
    **overrides: arguments of `train`.
  """
  text = json.dumps([devices, overrides], sort_keys=True)
  name = hashlib.sha256(text.encode()).hexdigest()[:16]
  workdir = pathlib.Path(compilation_cache()) / 'runs' / name
  workdir.parent.mkdir(exist_ok=True)
  with workdir.with_suffix('.lock').open('a') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not workdir.with_suffix('.trained').exists():
      train(workdir, devices, **overrides)
      workdir.with_suffix('.trained').touch()
  return workdir


def start_pair(
  workdir: Any,
  overrides: dict[str, Any],
  devices: int,
  processes: int = 2,
  last: tuple[str, ...] = (),
) -> list[subprocess.Popen]:
  """Starts the small L/16 on two (or more) processes; see `start_group`."""
  arguments = flags('configs/l16_i21k.py', workdir, SMALL_L16 | overrides)
  return start_group(command('train', *arguments), processes, devices, last)


def start_group(
  arguments: list[str],
  processes: int = 2,
  devices: int = 1,
  last: tuple[str, ...] = (),
) -> list[subprocess.Popen]:
  """Starts a command on several processes of some devices each.

  The last process also gets the flags `last`. It is not forked, so that an
  order that depends on hashes differs between the processes.
  """
  group = [f'--coordinator_address=127.0.0.1:{free_port()}']
  group.append(f'--num_processes={processes}')
  started = []
  for i in range(processes):
    is_last = i == processes - 1
    words = [
      *arguments,
      *group,
      f'--process_id={i}',
      *(last if is_last else ()),
    ]
    started.append(start(words, devices, forked=not is_last))
  return started


def evaluated_by_one_and_two(workdir: Any) -> tuple[dict, dict]:
  """Returns the metrics of `evaluate` by one and by two processes.

  Both have two devices, and batches of 6.
  """
  arguments = command('evaluate', f'--checkpoint={workdir}', '--json')
  arguments.append('--batch_size=6')
  one = json.loads(run(arguments, devices=2)[0])
  first, other = start_group(arguments)
  two = json.loads(finish(first)[0].splitlines()[-1])  # after Gloo's
  finish(other)
  assert two.keys() == one.keys()
  return one, two


@contextlib.contextmanager
def running_pair(
  workdir: Any, *arguments: Any, **options: Any
) -> Iterator[list[subprocess.Popen]]:
  """Yields the processes of `start_pair` after step 8, and kills the rest."""
  processes = start_pair(workdir, *arguments, **options)
  try:
    wait_for_step(workdir, 8, processes)
    yield processes
  finally:
    for process in processes:
      process.kill()
      process.communicate()


def wait_for_step(
  workdir: Any, step: int, processes: list[subprocess.Popen]
) -> None:
  """Waits until metrics.jsonl contains the step; all processes must run."""
  path = pathlib.Path(workdir) / 'metrics.jsonl'
  wait_until(
    lambda: path.exists() and f'"step": {step},' in path.read_text(), *processes
  )


def wait_until(
  seen: Callable[[], bool], *processes: subprocess.Popen, timeout_s: float = 240
) -> None:
  """Waits until a condition holds, while all processes must run."""
  deadline = time.monotonic() + timeout_s
  while not seen():
    for process in processes:
      assert process.poll() is None, process.communicate()[1][-3000:]
    assert time.monotonic() < deadline, f'not within {timeout_s} s'
    time.sleep(0.005)


def kill_when(
  arguments: list[str],
  seen: Callable[[], bool],
  what: str,
  timeout_s: float,
  with_children: bool = True,
) -> None:
  """Starts a command; kills it and its runs when a condition holds.

  Args:
    arguments: words of the command.
    seen: function that returns whether the condition holds.
    what: name of what is killed, for the count of faults.
    timeout_s: longest time until the condition holds.
    with_children: whether the processes that it started are killed too.
  """
  process = start(arguments)
  wait_until(seen, process, timeout_s=timeout_s)
  children = pathlib.Path(f'/proc/{process.pid}/task/{process.pid}/children')
  killed = map(int, children.read_text().split() if with_children else [])
  for each in [process.pid, *killed]:
    os.kill(each, signal.SIGKILL)
  process.communicate()
  injected(f'SIGKILL of {what}')


def records(workdir: Any, name: str = 'metrics.jsonl') -> list[dict[str, Any]]:
  """Returns the lines of metrics.jsonl, or of another file."""
  text = (pathlib.Path(workdir) / name).read_text()
  return [json.loads(line) for line in text.splitlines()]


def events(workdir: Any, kind: str) -> list[dict[str, Any]]:
  """Returns the lines of events.jsonl of one kind."""
  lines = records(workdir, 'events.jsonl')
  return [event for event in lines if event['event'] == kind]


def lines(workdir: Any) -> list[dict[str, Any]]:
  """Returns the lines of metrics.jsonl without times, which differ by run."""
  return [
    {k: v for k, v in line.items() if k not in ('img_per_sec', 'data_wait')}
    for line in records(workdir)
  ]


def remove_finished_event(workdir: Any) -> None:
  """Makes a finished run look as if it had been killed just before its end."""
  path = pathlib.Path(workdir) / 'events.jsonl'
  events = path.read_text().splitlines(keepends=True)
  assert json.loads(events[-1])['event'] == 'finished'
  path.write_text(''.join(events[:-1]))


def losses(workdir: Any) -> dict[int, float]:
  """Returns {step: training loss}; each step must occur once."""
  pairs = [(r['step'], r['loss']) for r in records(workdir) if 'loss' in r]
  assert len(pairs) == len(dict(pairs)), 'a step was written twice'
  return dict(pairs)


def final_params(workdir: Any) -> dict[str, np.ndarray]:
  """Returns the parameters of the newest checkpoint by path."""
  import jax

  from vit_jax.arrays import sharding, tree
  from vit_jax.weights import pretrained

  source = pretrained.find(str(workdir))
  mesh = sharding.make_mesh(jax.devices()[:1])
  params = source.load(source.abstract_params(mesh))
  return {k: np.asarray(v) for k, v in tree.flatten(params).items()}


def assert_same_params(ours: Any, theirs: Any) -> None:
  """Checks that two runs have the same parameters, bit for bit.

  Args:
    ours: workdir, or parameters as of `final_params`.
    theirs: workdir, or parameters.
  """
  ours = ours if isinstance(ours, dict) else final_params(ours)
  theirs = theirs if isinstance(theirs, dict) else final_params(theirs)
  assert ours.keys() == theirs.keys()
  for path, array in theirs.items():
    np.testing.assert_array_equal(ours[path], array, err_msg=path)


def evaluated_independently(workdir: Any, load: str) -> tuple[float, float]:
  """Returns accuracy and loss of the small L/16 on its 256 evaluation examples.

  They are computed from a checkpoint, without the evaluator and the objective.

  Args:
    workdir: workdir of the run; its images were 48 pixels high.
    load: 'load' or 'load_average'.
  """
  import jax

  from vit_jax.arrays import sharding
  from vit_jax.data.sources import synthetic
  from vit_jax.weights import pretrained

  weights = pretrained.find(str(workdir))
  mesh = sharding.make_mesh(jax.devices()[:1])
  params = getattr(weights, load)(weights.abstract_params(mesh))
  transform, model = weights.description.transform(), weights.model()
  source = synthetic.Source(
    'train[:51200]', num_examples=256, num_classes=20, height=48
  )
  examples = [source[index] for index in range(len(source))]
  pixels = [transform.pixels(example['image']) for example in examples]
  labels = np.array([example['label'] for example in examples])
  images = np.float32(np.stack(pixels)) / 127.5 - 1
  logits = np.asarray(model.apply({'params': params}, images), np.float64)
  terms = np.logaddexp(0, logits) - logits * np.eye(20)[labels]
  correct = logits.argmax(-1) == labels
  return correct.mean(), terms.sum(-1).mean()


def free_port() -> int:
  """Returns an unused TCP port of this machine."""
  with socket.socket() as listener:
    listener.bind(('127.0.0.1', 0))
    return listener.getsockname()[1]
