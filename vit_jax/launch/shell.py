"""Prints commands and runs them; a dry run only prints them."""

import dataclasses
import pathlib
import re
import shlex
import string
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from vit_jax.config import loading
from vit_jax.errors import UserError

# Errors of gcloud that occur again when the command is repeated. Others, such
# as a lack of capacity or of a connection, may pass.
_PERMANENT = re.compile(
  r'(active account|auth login|Reauthentication|UNAUTHENTICATED|'
  r'PERMISSION_DENIED|[Pp]ermission denied|does not have permission|'
  r'INVALID_ARGUMENT|ALREADY_EXISTS|[Ii]nvalid (value|choice|location)|'
  r'unrecognized arguments|could not be parsed|[Aa]ccelerator type .* '
  r'not found|[Rr]untime version .* not found|[Uu]nknown zone|'
  r'has not been used in project|[Bb]illing|Limit: 0\b)',
  re.DOTALL,
)


class _Template(string.Template):
  delimiter = '@'  # a dollar sign belongs to the shell or to a pattern


def fill(file: str, /, **values: object) -> str:
  """Returns the text of a file with a value for each @NAME.

  Args:
    file: name of the file in launch/.
    **values: value of each name in the file.
  """
  text = (loading.directory('launch') / file).read_text()
  return _Template(text).substitute(values)


def check_curable(command: str, error: str) -> None:
  """Checks that a failure may pass, so that repeating the command can help.

  Args:
    command: command or request that failed, for the message.
    error: error message of gcloud.

  Raises:
    UserError: the command would fail again.
  """
  if _PERMANENT.search(error):
    raise UserError(
      f'{command} failed, and would fail again: {" ".join(error.split())[:500]}'
      '\nFix the cause (for example with `gcloud auth login`) and try again.'
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shell:
  """Runs commands in a checkout.

  Attributes:
    root: directory of the checkout, in which the commands run.
    dry_run: whether the commands are only printed.
    echo: function that prints a line: a command in the syntax of a shell, or a
      comment.
  """

  root: pathlib.Path
  dry_run: bool
  echo: Callable[[str], None]

  def note(self, text: str) -> None:
    """Prints text as a comment of the script."""
    self.echo('\n'.join(f'# {line}'.rstrip() for line in text.splitlines()))

  def run(self, *words: str) -> int:
    """Runs a command; returns its exit code, 128 + N after signal N."""
    code = self._execute(words).returncode
    return code if code >= 0 else 128 - code

  def check(self, *words: str) -> None:
    """Runs a command and checks that it succeeds.

    Raises:
      UserError: the command failed.
    """
    if code := self.run(*words):
      raise UserError(
        f'`{shlex.join(words)}` failed with exit code {code} (see above).'
      )

  def query(self, *words: str, absent: str | None = None) -> str | None:
    """Returns the output of a command.

    Args:
      *words: program and arguments.
      absent: text in the error message of the command that means that an object
        does not exist.

    Returns:
      The output without surrounding white space; '' if the object does not
      exist, and in a dry run; None if the command failed for another reason.

    Raises:
      UserError: gcloud failed for a reason that a restart does not change.
    """
    # Without stdin, gcloud fails instead of asking a question that is captured.
    options = dict(capture_output=True, stdin=subprocess.DEVNULL)
    done = self._execute(words, **options)
    if done.returncode == 0:
      return done.stdout.strip()
    if absent and absent in done.stderr:
      return ''
    self.note(done.stderr.strip()[-500:])
    _, is_from_gcloud, message = done.stderr.partition('ERROR: (gcloud')
    if is_from_gcloud:
      check_curable(f'`{shlex.join(words[:6])} …`', message)
    return None

  def _execute(
    self, words: Sequence[str], **options: Any
  ) -> subprocess.CompletedProcess[str]:
    self.echo(shlex.join(words))
    if self.dry_run:
      return subprocess.CompletedProcess(words, 0, stdout='', stderr='')
    options |= dict(cwd=self.root, text=True, errors='replace')
    try:
      return subprocess.run(words, **options)
    except FileNotFoundError as error:
      raise UserError(
        f'{words[0]} is not installed; --dry_run only prints the commands.'
      ) from error

  def archive(self, folder: str, commit: str) -> str:
    """Packs a commit in a folder of the checkout; returns the archive's path.

    Raises:
      UserError: git failed.
    """
    path = f'{folder}/code.tar.gz'
    self.check('mkdir', '-p', folder)
    self.check('git', 'archive', f'--output={path}', commit)
    return path

  def unpack(self, folder: str, commit: str) -> str:
    """Copies a commit to code/ in a folder of the checkout; returns its path.

    Raises:
      UserError: a command failed.
    """
    archive, code = self.archive(folder, commit), f'{folder}/code'
    self.check('rm', '-rf', code)
    self.check('mkdir', code)
    self.check('tar', '-xf', archive, '-C', code)
    return code

  def write(self, path: str, text: str) -> None:
    """Writes a file in the checkout, and prints it as a here-document."""
    end = 'END_OF_FILE'
    assert text.endswith('\n') and end not in text.splitlines()
    self.echo(f"cat >{shlex.quote(path)} <<'{end}'\n{text}{end}")
    if not self.dry_run:
      (self.root / path).write_text(text)
