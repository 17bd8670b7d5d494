"""Starts commands by forking a process that has already imported JAX.

`python -m vit_jax.train` spends one to two seconds of computing time importing
packages, as much as a small run needs for its steps. Here, one process imports
them and forks for each command. The commands remain processes with their own
signals, exit codes and output, and their parent is the process that starts
them. Nothing runs before the fork but imports: no backend exists, and no
thread.

What packages read from the environment while they are imported, such as JAX's
settings, would be that of the server. Hence a command with other variables than
the server's is started as usual; only those in `_OWN` may differ.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import pathlib
import runpy
import socket
import subprocess
import sys
import threading
import time
from typing import Any

_ROOT = pathlib.Path(__file__).parent.parent
_PR_SET_CHILD_SUBREAPER = 36
# Variables that are read after imports, or that no package reads.
_OWN = ('XLA_FLAGS', 'PYTEST_CURRENT_TEST')
# What all commands import, but not the commands: they run as `__main__`.
_IMPORTED = (
  'tensorflow_datasets',
  'vit_jax.cli.process',
  'vit_jax.data.sources.synthetic',
  'vit_jax.data.sources.tfds',
  'vit_jax.evaluators.classification',
  'vit_jax.objectives.supervised',
  'vit_jax.optim.optimizers',
  'vit_jax.training.loop',
  'vit_jax.weights.transfer',
)


def _shared(env: dict[str, str]) -> dict[str, str]:
  """Returns the variables that commands and the server must have in common."""
  return {name: env[name] for name in env if name not in _OWN}


def can_fork(arguments: list[str]) -> bool:
  """Returns whether a command is a module that imports JAX as usual."""
  return (
    sys.platform == 'linux'
    and arguments[:2] == [sys.executable, '-m']
    and arguments[2].startswith(('vit_jax.', 'tests.'))
    and arguments[2] != 'vit_jax.plan'  # sets variables before it imports JAX
  )


class Server:
  """A process that forks commands.

  Args:
    env: environment of the server.
  """

  def __init__(self, env: dict[str, str]):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    self.env, self.socket = env, ours
    with theirs:
      self.process = subprocess.Popen(
        [sys.executable, '-m', 'tests.fork_server', str(theirs.fileno())],
        cwd=_ROOT,
        # OpenBLAS would start threads, which do not survive a fork.
        env=env | {'OPENBLAS_NUM_THREADS': '1'},
        stdout=subprocess.DEVNULL,  # replaced in each command
        pass_fds=[theirs.fileno()],
      )
    atexit.register(self.close)

  def fits(self, env: dict[str, str]) -> bool:
    """Returns whether a command with this environment can be forked."""
    return _shared(env) == _shared(self.env)

  def fork(
    self, arguments: list[str], env: dict[str, str], out: int, err: int
  ) -> int:
    """Starts a command as a child of this process; returns its process ID.

    The server forks a process that forks the command and ends. The command is
    then a child of the nearest "subreaper", which this process is meanwhile.
    """
    request = json.dumps({'arguments': arguments, 'env': env}).encode()
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
      socket.send_fds(self.socket, [request], [out, err])
      return int(self.socket.recv(20))
    finally:
      prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

  def close(self) -> None:
    """Ends the server; its commands go on."""
    self.socket.close()
    self.process.wait()


class Command(subprocess.Popen):
  """A command that a server forks; otherwise an ordinary child process."""

  def __init__(self, server: Server, arguments: list[str], **options: Any):
    self._server = server
    super().__init__(arguments, **options)

  def _execute_child(self, args: list[str], *rest: Any) -> None:
    env, (out, err) = rest[5], (rest[12], rest[14])
    self.pid = self._server.fork(args, env, out, err)
    self._child_created = True
    os.close(out)
    os.close(err)


def _serve(connection: socket.socket) -> dict[str, Any]:
  """Forks until the connection is closed; only commands return."""
  while True:
    request, files, _, _ = socket.recv_fds(connection, 2**20, 2)
    if not request:
      sys.exit()
    read, write = os.pipe()
    between = os.fork()
    if between:
      os.close(write)
      with open(read) as pipe:
        number = pipe.read()
      os.waitpid(between, 0)
      connection.send(number.encode())
      for file in files:
        os.close(file)
      continue
    between = os.getpid()
    if number := os.fork():
      os.write(write, str(number).encode())
      os._exit(0)
    for file in (read, write, connection.detach()):
      os.close(file)
    for file, standard in zip(files, (1, 2), strict=True):
      os.dup2(file, standard)
      os.close(file)
    while os.getppid() == between:
      time.sleep(0.001)
    return json.loads(request)


def _main() -> None:
  """Imports packages, serves, and runs a command in each forked process."""
  connection = socket.socket(fileno=int(sys.argv[1]))
  for name in _IMPORTED:
    importlib.import_module(name)
  threads = len(os.listdir('/proc/self/task'))
  assert threads == threading.active_count() == 1, f'{threads} threads'
  gc.freeze()  # commands need not search these objects for garbage
  request = _serve(connection)
  os.environ.clear()
  os.environ.update(request['env'])
  # That of the server may belong to a file, whose position it asks for.
  sys.stdout = open(1, 'w', encoding='utf-8', closefd=False)
  arguments = request['arguments']
  sys.orig_argv[:] = arguments
  sys.argv[:] = arguments[2:]

  from vit_jax.cli import help

  help.begin(arguments)
  runpy.run_module(arguments[2], run_name='__main__', alter_sys=True)


if __name__ == '__main__':
  _main()
