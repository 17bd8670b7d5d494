"""Defines the reaction to the exit code of a trainer, for all targets.

Tests compare the tables of exit codes in the documents with this module.
"""

import time
from collections.abc import Callable

from vit_jax.errors import (
  EXIT_DIVERGED,
  EXIT_PREEMPTED,
  EXIT_USER_ERROR,
)

# Exit codes after which a run is not restarted, because it would end in the
# same way, or because the user has to look at it.
STOP = {
  EXIT_USER_ERROR: 'an error that the user has to fix (see above)',
  EXIT_DIVERGED: 'diverged, and no more rollbacks are allowed',
}
# Exit code after which a run is restarted without a limit, because the state is
# saved. The number of restarts after other codes (a crash, a storage error, a
# stuck or lost process, a lost connection) is limited. A process is usually
# stuck because of the network or a host, so restarting helps.
RESUME = EXIT_PREEMPTED
PAUSE_S = 60


def restart_until_done(
  attempt: Callable[[], int],
  max_restarts: int,
  report: Callable[[str], None],
  pause: Callable[[float], None] = time.sleep,
) -> int:
  """Restarts a run until it is finished, or the user has to look at it.

  Args:
    attempt: function that starts or resumes the run, waits for its end, and
      returns its exit code.
    max_restarts: maximum number of restarts after failures; restarts after
      preemptions are not counted.
    report: function that is called with a line of text after each attempt.
    pause: function that waits for the given number of seconds.

  Returns:
    The exit code of the last attempt.
  """
  failures = 0
  while True:
    code = attempt()
    if code == 0:
      report('finished')
      return code
    if code in STOP:
      report(f'exit code {code}: {STOP[code]}; not restarted')
      return code
    if code == RESUME:
      report('preempted, state saved; restarting')
    elif failures < max_restarts:
      failures += 1
      report(f'exit code {code}; restarting ({failures} of {max_restarts})')
    else:
      report(f'exit code {code} after {failures} restarts; giving up')
      return code
    pause(PAUSE_S)
