"""Prints commands and runs them; a dry run only prints them."""

import os
import pathlib
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from vit_jax.errors import UserError

# Errors of gcloud that occur again when the command is repeated. Others, such
# as a lack of capacity or of a connection, may pass.
_PERMANENT = re.compile(
  r'ERROR: \(gcloud\b.*?(active account|auth login|Reauthentication|'
  r'UNAUTHENTICATED|PERMISSION_DENIED|[Pp]ermission denied|does not have '
  r'permission|INVALID_ARGUMENT|[Ii]nvalid (value|choice|location)|'
  r'unrecognized arguments|could not be parsed|[Aa]ccelerator type .* '
  r'not found|[Rr]untime version .* not found|[Uu]nknown zone|'
  r'has not been used in project|[Bb]illing|Limit: 0\b)',
  re.DOTALL,
)
_PIPE: dict[str, Any] = dict(stderr=subprocess.PIPE)
_KEPT = 4000  # bytes of an error output that are compared with _PERMANENT


def quote(words: Sequence[str]) -> str:
  """Joins words to one line that any POSIX shell splits into the same words."""
  return shlex.join(words)


class Shell:
  """Runs commands in a checkout.

  Attributes:
    root: directory of the checkout, in which the commands run.
    dry_run: whether the commands are only printed.
    echo: function that prints a line: a command in the syntax of a shell, or a
      comment.
  """

  def __init__(
    self,
    root: pathlib.Path,
    *,
    dry_run: bool,
    echo: Callable[[str], None] = print,
  ):
    self.root, self.dry_run, self.echo = root, dry_run, echo

  def note(self, text: str) -> None:
    """Prints text as a comment of the script."""
    self.echo('\n'.join(f'# {line}'.rstrip() for line in text.splitlines()))

  def run(self, *words: str, stdin: str | None = None) -> int:
    """Runs a command; returns its exit code.

    Args:
      words: program and arguments.
      stdin: path of the input file, relative to the checkout.

    Raises:
      UserError: gcloud failed for a reason that a restart does not change.
    """
    self.echo(quote(words) + (f' <{quote([stdin])}' if stdin else ''))
    if self.dry_run:
      return 0
    if stdin is None:
      # The command inherits stdin, because gcloud may ask for a passphrase.
      return _Running(words, self._start(words, **_PIPE)).wait()
    with open(self.root / stdin, 'rb') as file:
      return _Running(words, self._start(words, stdin=file, **_PIPE)).wait()

  def check(self, *words: str, stdin: str | None = None) -> None:
    """Runs a command and checks that it succeeds.

    Raises:
      UserError: the command failed.
    """
    if code := self.run(*words, stdin=stdin):
      raise UserError(
        f'`{quote(words)}` failed with exit code {code} (see its message '
        'above). Fix the cause and launch again: finished steps are skipped.'
      )

  def run_concurrently(self, commands: Sequence[Sequence[str]]) -> int:
    """Runs commands concurrently; returns the first exit code that is not 0.

    Raises:
      UserError: gcloud failed for a reason that a restart does not change.
    """
    for words in commands:
      self.echo(quote(words) + (' &' if len(commands) > 1 else ''))
    if len(commands) > 1:
      self.echo('wait')
    if self.dry_run:
      return 0
    started = [
      _Running(words, self._start(words, stdin=subprocess.DEVNULL, **_PIPE))
      for words in commands
    ]
    codes = [command.wait() for command in started]
    return next(filter(None, codes), 0)

  def query(self, *words: str, absent: str = 'NOT_FOUND') -> str | None:
    """Returns the output of a command.

    Args:
      words: program and arguments.
      absent: text in the error message of the command that means that the
        object does not exist.

    Returns:
      The output without surrounding white space; '' if the object does not
      exist, and in a dry run; None if the command failed for another reason.

    Raises:
      UserError: gcloud failed for a reason that a restart does not change.
    """
    self.echo(quote(words))
    if self.dry_run:
      return ''
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process = self._start(words, stdin=subprocess.DEVNULL, **pipes)
    out, error = (text.decode().strip() for text in process.communicate())
    if process.returncode == 0:
      return out
    if absent in error:
      return ''
    _check_restartable(words, error)
    self.note(error[-500:])
    return None

  def write(self, path: str, text: str) -> None:
    """Writes a file in the checkout, and prints it as a here-document."""
    folder = str(pathlib.PurePath(path).parent)
    self.echo(f'mkdir -p {quote([folder])}')
    end = 'END_OF_FILE'
    assert end not in text.splitlines()
    body = text if text.endswith('\n') else text + '\n'
    self.echo(f"cat >{quote([path])} <<'{end}'\n{body}{end}")
    if not self.dry_run:
      (self.root / folder).mkdir(parents=True, exist_ok=True)
      (self.root / path).write_text(body)

  def _start(self, words: Sequence[str], **streams) -> subprocess.Popen:
    try:
      return subprocess.Popen(words, cwd=self.root, **streams)
    except FileNotFoundError as error:
      raise UserError(
        f'{words[0]} is not installed; install it, or print the commands with '
        '--dry_run.'
      ) from error


class _Running:
  """A command that runs, and whose error output is printed."""

  def __init__(self, words: Sequence[str], process: subprocess.Popen):
    """Starts to copy the error output.

    Args:
      words: program and arguments.
      process: the process, with a pipe as stderr.
    """
    self._words, self._process, self._kept = words, process, bytearray()
    self._copying = threading.Thread(target=self._copy, daemon=True)
    self._copying.start()

  def _copy(self) -> None:
    assert self._process.stderr is not None
    with self._process.stderr as pipe:
      while chunk := os.read(pipe.fileno(), _KEPT):
        sys.stderr.write(chunk.decode(errors='replace'))
        sys.stderr.flush()
        self._kept.extend(chunk)
        del self._kept[:-_KEPT]

  def wait(self) -> int:
    """Waits for the process and returns its exit code.

    The code of a process that a signal ended is 128 plus the signal's number.

    Raises:
      UserError: gcloud failed for a reason that a restart does not change.
    """
    code = self._process.wait()
    # A process in the background may keep the pipe open, so that it has no end.
    self._copying.join(timeout=2)
    if code:
      _check_restartable(self._words, self._kept.decode(errors='replace'))
    return code if code >= 0 else 128 - code


def _check_restartable(words: Sequence[str], error: str) -> None:
  """Checks that a failed command may succeed when it is repeated.

  Args:
    words: program and arguments.
    error: end of the error output.

  Raises:
    UserError: gcloud failed for a reason that a restart does not change.
  """
  if found := _PERMANENT.search(error):
    text = ' '.join(error[found.start() :].split())[:500]
    raise UserError(
      f'`{quote(words[:6])} …` failed, and would fail again: {text}\nFix the '
      'cause (for example with `gcloud auth login`, or by another --zone, '
      '--project or --topology), then run the same command again.'
    )
