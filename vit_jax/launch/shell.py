"""Prints commands and runs them; a dry run only prints them."""

import pathlib
import shlex
import subprocess
from collections.abc import Callable, Sequence

from vit_jax.errors import UserError


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
    """
    self.echo(quote(words) + (f' <{quote([stdin])}' if stdin else ''))
    if self.dry_run:
      return 0
    if stdin is None:
      # The command inherits stdin, because gcloud may ask for a passphrase.
      return _wait(self._start(words))
    with open(self.root / stdin, 'rb') as file:
      return _wait(self._start(words, stdin=file))

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
    """Runs commands concurrently; returns the first exit code that is not 0."""
    for words in commands:
      self.echo(quote(words) + (' &' if len(commands) > 1 else ''))
    if len(commands) > 1:
      self.echo('wait')
    if self.dry_run:
      return 0
    started = [
      self._start(words, stdin=subprocess.DEVNULL) for words in commands
    ]
    codes = [_wait(process) for process in started]
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


def _wait(process: subprocess.Popen) -> int:
  """Waits for a process and returns its exit code.

  The code of a process that a signal ended is 128 plus the signal's number.
  """
  code = process.wait()
  return code if code >= 0 else 128 - code
